"""A program of global arrays, computed by many devices, each of which computes its examples.

`in_parts.local_view` evaluates it inside of one `jax.shard_map` over the mesh, whose axis `tensor` is left to XLA's
partitioner and to the constraints of the program. `LocalView` follows how the devices hold each value
(`spread.Spread`), by the table of primitives in `rules`. A batch is split by its examples; parameters and gradients as
the layout stores them. What a sum over examples leaves on each device is summed over the devices where something needs
the sum, and scattered where a gradient is stored. Where no rule holds, operands are gathered over the axes in its way,
along which every device computes the same: right for any program, and named in a warning.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from zero_jax.errors import UsageError
from zero_jax.gather.gather import (
    GATHER_SCOPE,
    READS,
    SCATTER,
    SCATTER_QUANTIZED,
    SECONDARY_GATHER,
    TANGENT,
    ParamUse,
    gathered,
    secondary_spec,
)
from zero_jax.gather.quantized.policy import Hop
from zero_jax.gather.reduce_scatter import reduce_parts
from zero_jax.jaxpr.equations import (
    ClosedJaxpr,
    JaxprEqn,
    Var,
    all_eqns,
    bind_eqn,
    closed_jaxpr,
    inner_jaxprs,
    is_literal,
    primitive_of,
    run_jaxpr,
    scope_of,
    trace,
    type_of,
)
from zero_jax.jaxpr.named_call import computed_by
from zero_jax.jaxpr.primitives import (
    BROADCAST,
    CALLS,
    COND,
    CONSTRAINT,
    IOTA,
    RAGGED_DOT,
    RANDOM_BITS,
    REMAT,
    RESHAPE,
    SCAN,
    SHARD_MAP,
    Scan,
    bind_unsharded,
    branches,
    call_jaxpr,
    draws_by_key,
    head_dims,
    in_specs,
    iota_dim,
    jit_name,
    newly_manual,
    out_shardings,
    own_use,
)
from zero_jax.jaxpr.random_keys import bits_at
from zero_jax.sharding.mesh_axes import MeshAxes
from zero_jax.sharding.partition import names_of
from zero_jax.transforms.tiled_products import TILED_PRODUCT
from zero_jax.views.rules import ELEMENTWISE, plan_back, plan_of, plan_whole
from zero_jax.views.spread import (
    Plan,
    Split,
    Spread,
    combined,
    group_sizes,
    local_shape,
    moved,
    ndim_at,
    on_tensor,
    positions,
    shape_at,
    spread_of,
    summed_axes,
    whole,
)

_SCATTERS = (SCATTER, SCATTER_QUANTIZED)
_CALLBACKS = "debug_print", "debug_callback", "io_callback", "pure_callback"
_MADE_IN_PARTS = frozenset({*ELEMENTWISE, BROADCAST, RESHAPE, IOTA, RANDOM_BITS})
"""Primitives of whole operands of which a device may compute just the part that it needs, once that is known."""


@dataclasses.dataclass(eq=False)
class _Value:
    """A value of the program: a device's part of it, how it is spread, and from what a whole one was made."""

    array: Any
    spread: Spread
    shape: tuple[int, ...]
    eqn: JaxprEqn | None = None
    operands: tuple["_Value", ...] = ()
    parts: dict[Spread, Any] = dataclasses.field(default_factory=dict)

    def in_another_trace(self) -> "_Value":
        """The same value, whose parts are made where it is then used: in a loop, say, that closes over it."""
        return dataclasses.replace(self, parts={}, operands=tuple(each.in_another_trace() for each in self.operands))


@dataclasses.dataclass
class LocalView:
    """Evaluates programs in parts.

    hops: in which formats gradients are reduced that are sent as codes. whole: what every device computed whole, by
    scope and primitive.
    """

    axes: MeshAxes
    hops: Sequence[Hop] = ()
    whole: dict[str, int] = dataclasses.field(default_factory=dict)

    def ways(self, names: Sequence[str]) -> int:
        """The number of devices along mesh axes."""
        return self.axes.size(*names)

    # How values are spread, without computing them -------------------------------------------------------------------

    def spreads(self, closed: ClosedJaxpr, inputs: Sequence[Spread]) -> list[Spread]:
        """How the results of `closed` are spread, of inputs that are spread as `inputs`."""
        jaxpr = closed.jaxpr
        env: dict[Var, Spread] = {var: whole(ndim_at(var)) for var in jaxpr.constvars}
        env.update(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: Any) -> Spread:
            return whole(ndim_at(atom)) if is_literal(atom) else env[atom]

        for eqn in jaxpr.eqns:
            env.update(zip(eqn.outvars, self._outs(eqn, [read(atom) for atom in eqn.invars]), strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _outs(self, eqn: JaxprEqn, ins: Sequence[Spread]) -> Sequence[Spread]:
        name = primitive_of(eqn)
        if not eqn.outvars:  # what JAX leaves of a call of which nothing is read
            return []
        if name in READS:
            return [ins[1]]
        if name in (GATHER_SCOPE, TANGENT):
            return [whole(ndim_at(eqn.outvars[0]))]
        if name == SECONDARY_GATHER:
            return [spread_of(self._copy_spec(own_use(eqn)), ndim_at(eqn.outvars[0]), self.axes)]
        if name in (CONSTRAINT, "reshard"):
            return ins
        if name == SHARD_MAP:
            return [spread_of(spec, ndim_at(var), self.axes)
                    for spec, var in zip(eqn.params["out_specs"], eqn.outvars, strict=True)]
        if _scatters(eqn):
            return [self._scattered(eqn)]
        if all(spread.is_whole for spread in ins) and not _holds_own(eqn):
            return plan_whole(eqn).outs
        if name in CALLS:
            return self.spreads(call_jaxpr(eqn), ins)
        if name == TILED_PRODUCT:
            return self.spreads(computed_by(eqn), ins)
        if name == SCAN:
            return self._scan_spreads(eqn, ins)[1]
        if name == COND:
            return self._cond_spreads(eqn, ins)[1]
        if name == "while":
            return self._while_spreads(eqn, ins)
        return plan_of(eqn, ins, self.ways).outs

    def _scattered(self, eqn: JaxprEqn) -> Spread:
        return spread_of(_scatter_spec(eqn), ndim_at(eqn.outvars[0]), self.axes)

    def _scan_spreads(self, eqn: JaxprEqn, ins: Sequence[Spread]) -> tuple[list[Spread], list[Spread]]:
        """(Of the operands, of the results): the carry is spread as one iteration leaves it to the next."""
        scan, body = Scan.of(eqn), call_jaxpr(eqn)
        consts, carry, xs = map(list, scan.parts(ins))
        xs = list(map(_unstacked, xs))

        def step(carry: Sequence[Spread]) -> list[Spread]:
            return self.spreads(body, [*consts, *carry, *xs])

        carry = _settled(lambda carry: step(carry)[:scan.num_carry], carry)
        ys = [Spread((None, *each.dims), each.partial) for each in step(carry)[scan.num_carry:]]
        return [*consts, *carry, *(Spread((None, *each.dims), each.partial) for each in xs)], [*carry, *ys]

    def _cond_spreads(self, eqn: JaxprEqn, ins: Sequence[Spread]) -> tuple[list[Spread], list[Spread]]:
        outs = [self.spreads(branch, ins[1:]) for branch in branches(eqn)]
        return [whole(0), *ins[1:]], [functools.reduce(_join, each) for each in zip(*outs, strict=True)]

    def _while_parts(self, eqn: JaxprEqn) -> tuple[Any, Any, int, int]:
        params = eqn.params
        return params["cond_jaxpr"], params["body_jaxpr"], params["cond_nconsts"], params["body_nconsts"]

    def _while_spreads(self, eqn: JaxprEqn, ins: Sequence[Spread]) -> list[Spread]:
        condition, body, first, second = self._while_parts(eqn)
        carry = _settled(lambda carry: self.spreads(body, [*ins[first:first + second], *carry]),
                         list(ins[first + second:]))
        (test,) = self.spreads(condition, [*ins[:first], *carry])
        return carry if test.is_whole or test.partial else [whole(len(each.dims)) for each in carry]

    # Computing them ---------------------------------------------------------------------------------------------------

    def evaluate(self, closed: ClosedJaxpr, inputs: Sequence[_Value]) -> list[_Value]:
        """The results of `closed` on `inputs`."""
        jaxpr = closed.jaxpr
        env: dict[Var, _Value] = {var: _constant(value) for var, value in zip(
            jaxpr.constvars, closed.consts, strict=True)}
        env.update(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: Any) -> _Value:
            return _constant(atom.val) if is_literal(atom) else env[atom]

        for eqn in jaxpr.eqns:
            operands = [read(atom) for atom in eqn.invars]
            with jax.named_scope(scope_of(eqn)):
                env.update(zip(eqn.outvars, self._results(eqn, operands), strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def to(self, value: _Value, want: Spread) -> Any:
        """A device's part of `value`, spread as `want`."""
        if value.spread == want:
            return value.array
        if want not in value.parts:
            made = self._made_in_parts(value, want) if value.spread.is_whole and not want.partial else None
            value.parts[want] = moved(value.array, value.spread, want, self.axes) if made is None else made
        return value.parts[want]

    def _made_in_parts(self, value: _Value, want: Spread) -> Any:
        """The part of a whole value that `want` says, from the parts of what it was made of; None: it is to be cut."""
        eqn = value.eqn
        if eqn is None:
            return None
        name = primitive_of(eqn)
        splits = [(dim, split) for dim, split in enumerate(want.dims) if split]
        if name == IOTA:
            (array,) = bind_unsharded(eqn.replace(params={
                **eqn.params, "shape": local_shape(value.shape, want, self.ways)}), [])
            if (split := want.dims[iota_dim(eqn)]) is None:
                return array
            here = positions(value.shape[iota_dim(eqn)], split, self.axes).astype(array.dtype)
            return jnp.broadcast_to(jnp.expand_dims(here, [i for i in range(array.ndim) if i != iota_dim(eqn)]),
                                    array.shape)
        if name == RANDOM_BITS:
            counted = (eqn.params["bit_width"] == 32 and tuple(eqn.params["shape"]) == value.shape
                       and math.prod(value.shape) < 2**32 and draws_by_key(eqn.invars[0])
                       and jax.config.jax_threefry_partitionable)  # type: ignore[attr-defined]
            if not counted:
                return None
            return _bits_at(value.operands[0].array, value.shape, dict(splits), self.axes)
        plan = plan_back(eqn, want, self.ways)
        if plan is None:
            return None
        return self._bound(eqn, plan, value.operands)[0].array

    def _results(self, eqn: JaxprEqn, operands: Sequence[_Value]) -> Sequence[_Value]:
        name, ins = primitive_of(eqn), [operand.spread for operand in operands]
        if not (eqn.outvars or eqn.effects):
            return []
        if name in READS:
            return [operands[1]]
        if name == GATHER_SCOPE:
            return [self._gathered(own_use(eqn), operands[0])]
        if name == TANGENT:  # of what is stored: no codes, and no copy
            return [self._gathered(dataclasses.replace(own_use(eqn), codes=None, secondary=()), operands[0])]
        if name == SECONDARY_GATHER:
            return [self._copied(own_use(eqn), operands[0])]
        if name in (CONSTRAINT, "reshard"):
            return [self._constrained(eqn, operands[0])]
        if name == SHARD_MAP:
            return self._mapped(eqn, operands)
        if _scatters(eqn):
            return [self._reduced(eqn, operands[0])]
        if name in _CALLBACKS and not self.axes.tensor_enabled:
            return self._called_back(eqn, operands)
        if eqn.effects and name not in (*CALLS, SCAN, COND, "while"):
            raise UsageError(f"The loss calls back to the host ({name}), which every device would do in a mesh "
                             f"{self.axes.sizes}: leave the call out.")
        is_whole = all(spread.is_whole for spread in ins) and not eqn.effects
        if name in CALLS and not (name == REMAT and eqn.params["differentiated"]):
            return self.evaluate(call_jaxpr(eqn), operands)
        if is_whole and not _holds_own(eqn):
            results = self._bind(eqn, [operand.array for operand in operands])
            keep = (eqn, tuple(operands)) if name in _MADE_IN_PARTS else (None, ())
            return [_Value(array, whole(ndim_at(var)), shape_at(var), *keep)
                    for array, var in zip(results, eqn.outvars, strict=True)]
        if name == TILED_PRODUCT:
            return self.evaluate(computed_by(eqn), operands)
        if name == REMAT:
            return self._checkpointed(eqn, operands)
        if name == SCAN:
            return self._scanned(eqn, operands)
        if name == COND:
            return self._branched(eqn, operands)
        if name == "while":
            return self._looped(eqn, operands)
        plan = plan_of(eqn, ins, self.ways)
        if plan.repeats and name not in ("slice", "dynamic_update_slice"):  # that compute nothing
            self._note(eqn, plan.repeats)
        return self._bound(eqn, plan, operands)

    def _called_back(self, eqn: JaxprEqn, operands: Sequence[_Value]) -> list[_Value]:
        """A call to the host with the whole values, by the first device, whose results all devices get."""
        args = [self.to(operand, whole(len(operand.shape))) for operand in operands]
        names = self.axes.mesh.axis_names
        is_first = functools.reduce(jnp.logical_and, [jax.lax.axis_index(name) == 0 for name in names])
        results = jax.lax.cond(
            is_first, lambda *args: tuple(bind_unsharded(eqn, args)),
            lambda *_: tuple(jnp.zeros(shape_at(var), type_of(var).dtype) for var in eqn.outvars), *args)
        return [_Value(combined(jax.lax.psum, result, names, self.axes), whole(result.ndim), result.shape)
                for result in results]

    def _note(self, eqn: JaxprEqn, axes: Sequence[str]) -> None:
        where = "/".join(filter(None, (scope_of(eqn), primitive_of(eqn)))) + f" over {', '.join(axes)}"
        self.whole[where] = self.whole.get(where, 0) + 1

    def _bound(self, eqn: JaxprEqn, plan: Plan, operands: Sequence[_Value]) -> list[_Value]:
        args = [self.to(operand, want) for operand, want in zip(operands, plan.ins, strict=True)]
        if primitive_of(eqn) == RAGGED_DOT:
            (rows,) = eqn.params["ragged_dot_dimension_numbers"].lhs_ragged_dimensions
            if split := plan.ins[0].dims[rows]:
                args[2] = group_sizes(args[2], operands[0].shape[rows], split, self.axes)
        results = self._bind(eqn.replace(params={**eqn.params, **dict(plan.shapes)}), args)
        if plan.combine:
            combine = jax.lax.pmax if plan.combine == "max" else jax.lax.pmin
            results = [combined(combine, result, plan.over, self.axes) for result in results]
        return [_Value(array, spread, shape_at(var))
                for array, spread, var in zip(results, plan.outs, eqn.outvars, strict=True)]

    def _bind(self, eqn: JaxprEqn, args: Sequence[Any]) -> Sequence[Any]:
        """The results of `eqn` on a device's parts; of a kernel that JAX cannot partition in here, on its heads."""
        if (heads := head_dims(eqn)) is None:
            return bind_unsharded(eqn, args)
        size, tensor = self.axes.tensor_size, self.axes.tensor
        divide = all(shape_at(atom)[heads[ndim_at(atom)]] % size == 0 for atom in eqn.invars if ndim_at(atom) in heads)

        def specs(atoms: Sequence[Any]) -> list[P]:
            return [P(*[None] * heads[ndim_at(atom)], tensor) if divide and ndim_at(atom) in heads else P()
                    for atom in atoms]

        return on_tensor(lambda *parts: bind_unsharded(eqn, parts), specs(eqn.invars), specs(eqn.outvars), self.axes
                         )(*args)

    def _constrained(self, eqn: JaxprEqn, value: _Value) -> _Value:
        """What a constraint says of `tensor`, which the partitioner splits over; the other axes are this view's."""
        spec, tensor = getattr(eqn.params.get("sharding"), "spec", None), self.axes.tensor
        if spec is None or not self.axes.tensor_enabled:
            return value
        spec = P(*[entry if entry is P.UNCONSTRAINED else tensor if tensor in names_of(P(entry)) else None
                   for entry in spec])
        return dataclasses.replace(value, array=jax.lax.with_sharding_constraint(value.array, spec))

    # Parameters and their gradients -----------------------------------------------------------------------------------

    def _copy_spec(self, use: ParamUse) -> P:
        """The spec of what is gathered over all but the secondary axes (hpZ)."""
        return secondary_spec(use.sent, self.axes, use.secondary)

    def _copied(self, use: ParamUse, stored: _Value) -> _Value:
        """What forward keeps for backward, from which that gathers over the secondary axes alone."""
        ndim = len(stored.shape)
        shard = use.cast(use.on_device(self.to(stored, spread_of(use.sent, ndim, self.axes))))
        spec = self._copy_spec(use)
        copy = on_tensor(lambda shard: gathered(shard, self.axes, use.sent, use.secondary), [use.sent], spec, self.axes)
        return _Value(copy(shard), spread_of(spec, ndim, self.axes), stored.shape)

    def _gathered(self, use: ParamUse, stored: _Value) -> _Value:
        if use.codes is not None and use.tiles:  # and no product takes its tiles, each of which is encoded by itself
            shard = self.to(stored, spread_of(use.stored, len(stored.shape), self.axes))
            message = on_tensor(use.codes.encode_shard, [use.stored], use.sent, self.axes)(shard)
            stored = _Value(message, spread_of(use.sent, message.ndim, self.axes), message.shape)
        spec = self._copy_spec(use) if use.secondary else use.sent
        shard = use.cast(use.on_device(self.to(stored, spread_of(spec, len(stored.shape), self.axes))))

        def from_all(shard: jax.Array) -> jax.Array:
            array = gathered(shard, self.axes, spec)
            return array if use.codes is None else use.codes.decode(array, use.dtype, split=(self.axes.tensor,))

        value = use.stored_shape.load(on_tensor(from_all, [spec], use.stored, self.axes)(shard))
        return _Value(value, whole(value.ndim), value.shape)

    def _reduced(self, eqn: JaxprEqn, gradient: _Value) -> _Value:
        """A gradient as it is stored: padded or merged on each device, then reduced and scattered."""
        unsummed = () if gradient.spread.is_whole else tuple(summed_axes(self.axes))
        partial = Spread((None,) * len(gradient.shape), unsummed)
        here = _Value(self.to(gradient, partial), whole(len(gradient.shape)), gradient.shape)
        (stored,) = self.evaluate(call_jaxpr(eqn), [here])
        value = _Value(stored.array, Spread(stored.spread.dims, partial.partial), stored.shape)
        with jax.named_scope(SCATTER):
            return self._stored(value, _scatter_spec(eqn), self.hops if jit_name(eqn) == SCATTER_QUANTIZED else ())

    def _stored(self, value: _Value, spec: P, hops: Sequence[Hop] = ()) -> _Value:
        """`value` as it is stored by `spec`, reduced as `hops` say."""
        have, want = value.spread, spread_of(spec, len(value.shape), self.axes)
        if not have.partial or any(have.dims):
            return _Value(self.to(value, want), want, value.shape)
        own = Spread(tuple(split and Split(split.axes) for split in want.dims))  # of a device's part along `tensor`

        def reduced(array: jax.Array) -> jax.Array:
            return reduce_parts(array, self.axes, spec, hops) if hops else moved(array, have, own, self.axes)

        return _Value(on_tensor(reduced, [spec], spec, self.axes)(value.array), want, value.shape)

    # Loops, branches, calls -------------------------------------------------------------------------------------------

    def function(self, closed: ClosedJaxpr, ins: Sequence[Spread], outs: Sequence[Spread],
                 first: Sequence[_Value] = ()) -> Callable[..., list[Any]]:
        """`closed` as a function of flat parts to flat parts.

        first: what the first inputs are; of whole ones the function may then make a part, as `to` does.
        """
        def fun(*args: Any) -> list[Any]:
            inputs = [_Value(arg, spread, shape_at(var)) for arg, spread, var in zip(
                args, ins, closed.jaxpr.invars, strict=True)]
            made = [value.in_another_trace() if value.eqn and spread.is_whole else own
                    for value, spread, own in zip(first, ins, inputs, strict=False)]
            inputs[:len(made)] = made
            return [self.to(value, want) for value, want in zip(self.evaluate(closed, inputs), outs, strict=True)]

        return fun

    def _values(self, eqn: JaxprEqn, arrays: Sequence[Any], spreads: Sequence[Spread]) -> list[_Value]:
        return [_Value(array, spread, shape_at(var))
                for array, spread, var in zip(arrays, spreads, eqn.outvars, strict=True)]

    def _scanned(self, eqn: JaxprEqn, operands: Sequence[_Value]) -> list[_Value]:
        scan, body = Scan.of(eqn), call_jaxpr(eqn)
        ins, outs = self._scan_spreads(eqn, [operand.spread for operand in operands])
        args = [self.to(operand, want) for operand, want in zip(operands, ins, strict=True)]
        consts, carry, xs = scan.parts(ins)
        run = self.function(body, [*consts, *carry, *map(_unstacked, xs)],
                            [*outs[:scan.num_carry], *map(_unstacked, outs[scan.num_carry:])],
                            operands[:scan.num_consts])
        return self._values(eqn, scan.run(run, args), outs)

    def _branched(self, eqn: JaxprEqn, operands: Sequence[_Value]) -> list[_Value]:
        ins, outs = self._cond_spreads(eqn, [operand.spread for operand in operands])
        index, *args = [self.to(operand, want) for operand, want in zip(operands, ins, strict=True)]
        runs = [self.function(branch, ins[1:], outs) for branch in branches(eqn)]
        return self._values(eqn, jax.lax.switch(index, runs, *args), outs)

    def _looped(self, eqn: JaxprEqn, operands: Sequence[_Value]) -> list[_Value]:
        condition, body, first, second = self._while_parts(eqn)
        outs = self._while_spreads(eqn, [operand.spread for operand in operands])
        in_parts = not all(each.is_whole for each in outs)
        consts = [operand.spread if in_parts else whole(len(operand.shape)) for operand in operands[:first + second]]
        args = [self.to(operand, want) for operand, want in zip(operands, [*consts, *outs], strict=True)]
        test = self.function(condition, [*consts[:first], *outs], [whole(0)])
        run = self.function(body, [*consts[first:], *outs], outs)
        carry = jax.lax.while_loop(lambda carry: test(*args[:first], *carry)[0],
                                   lambda carry: run(*args[first:first + second], *carry), args[first + second:])
        return self._values(eqn, carry, outs)

    def _checkpointed(self, eqn: JaxprEqn, operands: Sequence[_Value]) -> list[_Value]:
        body, ins = call_jaxpr(eqn), [operand.spread for operand in operands]
        outs = self.spreads(body, ins)
        args = [operand.array for operand in operands]
        inner = trace(self.function(body, ins, outs), *map(jax.typeof, args))
        jaxpr = inner.jaxpr
        if inner.consts:
            jaxpr = jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])
        params = dict(eqn.params)
        if isinstance(params.get("prevent_cse"), tuple):
            params["prevent_cse"] = (True,) * len(inner.consts) + params["prevent_cse"]
        results = bind_eqn(eqn, [*inner.consts, *args], **{**params, "jaxpr": jaxpr})
        return self._values(eqn, results, outs)

    def _mapped(self, eqn: JaxprEqn, operands: Sequence[_Value]) -> list[_Value]:
        """A `jax.shard_map` of the model's or of an attention kernel's: this is one already.

        Raises UsageError for one over slices that train by themselves: it would compute with examples of others.
        """
        if self.axes.slices and _names(eqn, self.axes.slices):
            raise UsageError(f"A jax.shard_map of the model or its loss names the axis {self.axes.slices!r} of the "
                             "slices, between which nothing is sent: let it name axes of one slice, as "
                             "attention(mesh).of_slices() does.")
        wants = [spread_of(spec, len(operand.shape), self.axes)
                 for spec, operand in zip(in_specs(eqn), operands, strict=True)]
        args = [self.to(operand, want) for operand, want in zip(operands, wants, strict=True)]
        run: Any = functools.partial(_run_manual, call_jaxpr(eqn))
        if self.axes.tensor in newly_manual(eqn):
            run = on_tensor(run, in_specs(eqn), [*eqn.params["out_specs"]], self.axes)
        return self._values(eqn, run(*args), self._outs(eqn, wants))


def _scatters(eqn: JaxprEqn) -> bool:
    """Whether `eqn` reduces a gradient. Derivatives in a loss have its name, too: those may have other operands."""
    return jit_name(eqn) in _SCATTERS and len(eqn.invars) == len(eqn.outvars) == 1


def _scatter_spec(eqn: JaxprEqn) -> P:
    """How a gradient is stored; as it is where a loss itself differentiates."""
    return getattr(out_shardings(eqn)[0], "spec", P())


def _constant(value: Any) -> _Value:
    return _Value(value, whole(np.ndim(value)), np.shape(value))


def _unstacked(spread: Spread) -> Spread:
    return Spread(spread.dims[1:], spread.partial)


def _join(one: Spread, other: Spread) -> Spread:
    """How a value is spread that is now as `one` and now as `other`: whole where they contradict each other."""
    dims = tuple(split or own for split, own in zip(one.dims, other.dims, strict=True))
    joined = Spread(dims, tuple({*one.partial, *other.partial}))
    names = [*joined.partial, *(name for split in dims if split for name in split.axes)]
    alike = all(split in (own, None) or own is None for split, own in zip(one.dims, other.dims, strict=True))
    return joined if alike and len({*names}) == len(names) else whole(len(dims))


def _settled(step: Callable[[list[Spread]], Sequence[Spread]], carry: list[Spread]) -> list[Spread]:
    """How the carry of a loop is spread in every iteration, from how it begins and what an iteration makes of it.

    What two iterations leave in different ways is whole from then on, so that this ends.
    """
    pinned: set[int] = set()
    while True:
        after = []
        for at, (one, other) in enumerate(zip(carry, step(carry), strict=True)):
            joined = _join(one, other)
            if joined.is_whole and not (one.is_whole and other.is_whole):
                pinned.add(at)
            after.append(whole(len(one.dims)) if at in pinned else joined)
        if after == carry:
            return carry
        carry = after


def _names(eqn: JaxprEqn, axis: str) -> bool:
    """Whether a `jax.shard_map` splits over `axis` or sends along it."""
    specs = [name for spec in (*in_specs(eqn), *eqn.params["out_specs"]) for name in names_of(spec)]
    sent = [each.params.get(name) for each in all_eqns(call_jaxpr(eqn).jaxpr) for name in ("axes", "axis_name")]
    return axis in specs or any(axis in each if isinstance(each, (tuple, list, frozenset)) else axis == each
                                for each in sent)


def _run_manual(closed: ClosedJaxpr, *args: Any) -> list[Any]:
    """The body of a shard_map, where JAX does not check which values differ between devices."""
    def bind(eqn: JaxprEqn, args: list[Any]) -> Sequence[Any]:
        if primitive_of(eqn) in ("pvary", "pcast"):
            return args
        if primitive_of(eqn) == "psum_invariant":
            return jax.lax.psum(args, eqn.params["axes"])
        with jax.named_scope(scope_of(eqn)):  # by which the plan knows kernels of Pallas
            return _run_manual(call_jaxpr(eqn), *args) if primitive_of(eqn) in CALLS else bind_eqn(eqn, args)

    return run_jaxpr(closed, args, bind)


def _holds_own(eqn: JaxprEqn) -> bool:
    """Whether a loop, branch or call holds a read or a gradient of a parameter."""
    return any(primitive_of(inner).startswith("zero_") or _scatters(inner) or _holds_own(inner)
               for jaxpr in inner_jaxprs(eqn) for inner in closed_jaxpr(jaxpr).jaxpr.eqns)


def _bits_at(key: jax.Array, shape: Sequence[int], splits: Mapping[int, Split], axes: MeshAxes) -> jax.Array:
    """uint32: a device's part of what `jax.random.bits` draws for the global `shape`: Threefry counts by position."""
    part = [size if dim not in splits else size // axes.size(*splits[dim].axes) for dim, size in enumerate(shape)]
    position, stride = jnp.zeros(part, jnp.uint32), 1
    for dim in reversed(range(len(shape))):
        here = positions(shape[dim], splits[dim], axes) if dim in splits else jax.lax.iota(jnp.int32, shape[dim])
        here = here.astype(jnp.uint32).reshape([-1 if at == dim else 1 for at in range(len(shape))])
        position, stride = position + here * jnp.uint32(stride), stride * shape[dim]
    return bits_at(key, position)
