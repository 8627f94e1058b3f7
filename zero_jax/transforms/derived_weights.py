"""A pass on the backward program: gradients of parameters from which a model computes the weights that it uses.

Such are weights under weight or spectral norm, standardised, masked and reparametrised ones, and sums with others.
"""

import collections
import functools
import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from zero_jax.jaxpr.equations import (
    Jaxpr,
    JaxprEqn,
    eqn_of,
    is_literal,
    primitive_of,
    producers,
    run_eqns,
    scope_of,
    shape_of,
    variable_like,
    variables,
)
from zero_jax.jaxpr.primitives import CONV, DOT, SCATTER_ADD, bind_unsharded, checkpoint_names, out_shardings
from zero_jax.sharding.gather import GATHERED, names_of
from zero_jax.sharding.mesh_axes import MeshAxes
from zero_jax.sharding.quantized.policy import Hop
from zero_jax.sharding.reduce_scatter import reduce_parts
from zero_jax.sharding.slices import on_one_slice
from zero_jax.transforms.explicit_scatter import PartialGradient, as_stored
from zero_jax.transforms.scatter_calls import MOVES, SUMS, inlined, is_of_whole, is_plain_call, is_quantized, is_scatter

_SUMS = (*SUMS, "sub", "select_n")
"""Primitives that are linear in their operands together; the first of a `select_n` says which."""
_OF_FIRST = (*MOVES, "neg", "expand_dims", "div", "reduce_sum", "broadcast_in_dim", "slice", "pad")
"""Primitives that are linear in their first operand."""
_OF_EITHER = ("mul", DOT)
"""Primitives that are linear in each of their operands."""
_IN_PLACE = (*MOVES, *_SUMS, "neg", "expand_dims", "div", "mul")
"""Those of them whose result has the size of their operand."""


def scatter_derived_gradients(jaxpr: Jaxpr, *, batch_size: int, axes: MeshAxes, hops: Sequence[Hop] = ()) -> Jaxpr:
    """Takes each device's part of a weight's gradient through the derivative of what made the weight, and then sums.

    Why: the partitioner sums a product over the devices before anything is computed from it, and all-reduces it whole.
    That derivative is linear, so that the sum may come last: what has a parameter's size is reduced and scattered, and
    what is small (the gradient of a norm) is all-reduced.
    Cost without: 5.68 instead of 4.81 bytes sent per parameter (two convolutions under `nn.WeightNorm` between an
    embedding and a product, stage 3, bf16, `h100:8`).
    Order: after `inline_calls`, which uncovers products, and `compute_grads_in_reduce_dtype`, which widens them; before
    `scatter_partial_gradients`, which is for gradients that are products themselves.

    Args:
      jaxpr: the program.
      batch_size: of the global batch; as of `scatter_partial_gradients`.
      axes: the mesh. Where `tensor` splits parameters, nothing changes.
      hops: of the gradients that are sent as codes.
    """
    if axes.tensor_enabled:
        return jaxpr
    program = _Program(jaxpr)
    for scatter in [eqn for eqn in jaxpr.eqns if is_scatter(eqn) and names_of(out_shardings(eqn)[0].spec)]:
        if program.makers.get(scatter.outvars[0]) is scatter:  # it was not edited with one before
            program = _summed_last(program, scatter, batch_size, axes, hops)
    return program.jaxpr


class _Program:
    """A jaxpr, the equation that makes each of its variables, and those that use it."""

    def __init__(self, jaxpr: Jaxpr):
        self.jaxpr, self.makers = jaxpr, producers(jaxpr)
        self.users: dict[Any, list[JaxprEqn]] = collections.defaultdict(list)
        for eqn in jaxpr.eqns:
            for atom in set(variables(eqn.invars)):
                self.users[atom].append(eqn)

    def with_eqns(self, gone: Sequence[JaxprEqn], edit: Callable[[JaxprEqn], Iterable[JaxprEqn]]) -> "_Program | None":
        """With what `edit` returns in the place of each of `gone`; None if some equations wait for each other."""
        numbers = set(map(id, gone))
        eqns = _ordered([new for eqn in self.jaxpr.eqns for new in (edit(eqn) if id(eqn) in numbers else [eqn])])
        return None if eqns is None else _Program(self.jaxpr.replace(eqns=eqns))


def _summed_last(program: _Program, scatter: JaxprEqn, batch_size: int, axes: MeshAxes, hops: Sequence[Hop]
                 ) -> _Program:
    """`program` with the products that `scatter` reduces summed after all that is linear in them."""
    derivative = _Derivative(program, batch_size, axes, hops)
    while calls := derivative.follow(scatter):
        program = program.with_eqns(calls, inlined) or program
        derivative = _Derivative(program, batch_size, axes, hops)
    if not derivative.has_others or not derivative.add_linear():
        return program
    gone = [*derivative.eqns, *derivative.scatters]
    last = next(eqn for eqn in reversed(program.jaxpr.eqns) if any(eqn is other for other in gone))
    return program.with_eqns(gone, lambda eqn: derivative.edited() if eqn is last else ()) or program


class _Derivative:
    """Products that are summed over the devices, and all that is linear in them.

    Each of its variables is a sum of the devices' parts, and of a `rest` that is the same on all, if it has one.

    eqns: its equations, in order. scatters: the reductions of what they make. sums: those of its variables that
    anything else uses. has_others: whether anything but scatters uses a product, moved or not.
    """

    def __init__(self, program: _Program, batch_size: int, axes: MeshAxes, hops: Sequence[Hop]):
        self.jaxpr, self.makers, self.users = program.jaxpr, program.makers, program.users
        self.axes, self.hops = axes, hops
        self.products = PartialGradient(self.makers, batch_size, axes)
        self.eqns: list[JaxprEqn] = []
        self.scatters: list[JaxprEqn] = []
        self.sums: list[Any] = []
        self.rests: dict[Any, Any] = {}
        self.of_rests: list[JaxprEqn] = []
        self.has_others = False

    def follow(self, scatter: JaxprEqn) -> list[JaxprEqn]:
        """Finds the products that `scatter` comes from in equations of its size; returns calls to be inlined first."""
        atoms: list[Any] = [scatter.invars[0]]
        size, calls = _size(atoms[0]), list[JaxprEqn]()
        while atoms:
            eqn = self.makers.get(atoms.pop())
            if eqn is None or GATHERED in checkpoint_names(eqn):
                continue
            primitive = primitive_of(eqn)
            if primitive in (DOT, CONV, SCATTER_ADD):
                self.products.add_product(eqn)
            elif is_plain_call(eqn):
                calls.append(eqn)
            elif primitive in _IN_PLACE:
                atoms += [atom for atom in variables(eqn.invars) if _size(atom) == size]
            else:
                continue
            self.has_others |= primitive not in (*MOVES, *SUMS, DOT, CONV, SCATTER_ADD) or any(
                len(self.users[var]) > 1 for var in eqn.outvars)
        return calls

    def add_linear(self) -> bool:
        """Adds what is linear in the products; whether the sums of it are smaller than those of the products."""
        parts = {eqn.outvars[0] for eqn in self.products.eqns}
        whole = min(map(_size, parts), default=0)
        sums: dict[Any, None] = {}
        for eqn in self.jaxpr.eqns:
            taken = [not is_literal(atom) and atom in parts for atom in eqn.invars]
            if any(eqn is product for product in self.products.eqns):
                self.eqns.append(eqn)
            elif any(taken) and is_scatter(eqn):
                self.scatters.append(eqn)
            elif any(taken) and _is_linear(eqn, taken) and not any(
                    atom in self.products.splits for atom in variables(eqn.invars)):  # of which each device has rows
                self.eqns.append(eqn)
                self._add_rest(eqn, taken)
                (out,) = eqn.outvars
                if primitive_of(eqn) in ("reduce_sum", DOT) and 2 * _size(out) <= whole and not self._is_scattered(out):
                    sums[out] = None
                else:
                    parts.add(out)
            elif any(taken):
                sums.update(dict.fromkeys(atom for atom, part in zip(eqn.invars, taken, strict=True) if part))
        sums.update(dict.fromkeys(atom for atom in variables(self.jaxpr.outvars) if atom in parts))
        self.sums = list(sums)
        return bool(parts) and all(2 * _size(atom) <= whole for atom in self.sums)

    def _add_rest(self, eqn: JaxprEqn, taken: Sequence[bool]) -> None:
        """Adds the rest of what `eqn` returns, if there is one."""
        adds = primitive_of(eqn) in _SUMS
        if not any(atom in self.rests if part else adds and not self.products.is_zero(atom)
                   for atom, part in zip(eqn.invars[_first(eqn):], taken[_first(eqn):], strict=True)):
            return
        invars: list[Any] = list(eqn.invars)
        for i, (atom, part) in enumerate(zip(eqn.invars, taken, strict=True)):
            if part and atom not in self.rests:
                invars[i] = variable_like(atom)
                self.of_rests.append(eqn_of(jax.jit(functools.partial(_zeros, atom)), [], [invars[i]]))
            elif part:
                invars[i] = self.rests[atom]
        self.rests[eqn.outvars[0]] = variable_like(eqn.outvars[0])
        self.of_rests.append(eqn.replace(invars=invars, outvars=[self.rests[eqn.outvars[0]]]))

    def _is_scattered(self, atom: Any) -> bool:
        """Whether `atom` is only moved and scattered."""
        return atom not in self.jaxpr.outvars and all(
            is_scatter(eqn) or primitive_of(eqn) in MOVES and self._is_scattered(eqn.outvars[0])
            for eqn in self.users[atom])

    def edited(self) -> list[JaxprEqn]:
        """The equations in the place of `eqns` and `scatters`, in any order."""
        outs: list[Any] = [*(eqn.outvars[0] for eqn in self.scatters), *self.sums]
        atoms = [*(eqn.invars[0] for eqn in self.scatters), *self.sums]
        eqns = list(self.of_rests)
        for i, (atom, out) in enumerate(zip(atoms, outs, strict=True)):
            if atom in self.rests:
                outs[i], rest = variable_like(out), self.rests[atom]
                if i < len(self.scatters):
                    eqns.append(self.scatters[i].replace(invars=[rest], outvars=[variable_like(out)]))
                    rest = eqns[-1].outvars[0]
                eqns.append(eqn_of(jax.lax.add, [outs[i], rest], [out]))
        return [self._summed(outs), *eqns]

    def _summed(self, outs: Sequence[Any]) -> JaxprEqn:
        """One equation that makes `outs` of the devices' parts: what `scatters` return, then `sums`."""
        made = {var for eqn in self.eqns for var in eqn.outvars}
        used = [(atom, primitive_of(eqn) not in _SUMS or i < _first(eqn)) for eqn in self.eqns
                for i, atom in enumerate(eqn.invars) if not is_literal(atom) and atom not in made]
        inputs = list(dict.fromkeys(atom for atom, is_input in used if is_input))
        rest = {atom for atom, is_input in used if not is_input}
        specs = [out_shardings(eqn)[0].spec for eqn in self.scatters]
        scope = scope_of(self.eqns[0])

        def part(*values: jax.Array) -> tuple[jax.Array, ...]:
            env: dict[Any, Any] = {atom: _zeros(atom) for atom in rest} | dict(zip(inputs, values, strict=True))
            run_eqns(self.eqns, env, self._bind)
            scattered = [
                reduce_parts(as_stored(eqn, env[eqn.invars[0]]), self.axes, spec,
                             self.hops if is_quantized(eqn) else (), in_tiles=is_of_whole(eqn))
                for eqn, spec in zip(self.scatters, specs, strict=True)]
            return *scattered, *(_all_reduced(env[atom], self.axes) for atom in self.sums)

        summed = jax.shard_map(
            on_one_slice(part, self.axes), mesh=self.axes.mesh, check_vma=False,
            in_specs=tuple(self.products.in_spec(atom) for atom in inputs),
            out_specs=(*specs, *[P()] * len(self.sums)))

        def zero_scatter_derived(*values: jax.Array) -> tuple[jax.Array, ...]:
            with jax.named_scope(scope):
                return summed(*values)

        return eqn_of(jax.jit(zero_scatter_derived), inputs, outs)

    def _bind(self, eqn: JaxprEqn, args: list[Any]) -> Sequence[Any]:
        """A device's part of `eqn`: without what it adds to parts and is none itself, which is in the rest."""
        if any(eqn is product for product in self.products.eqns):
            return self.products.bind(eqn, args)
        if primitive_of(eqn) in _SUMS:
            made = {var for each in self.eqns for var in each.outvars}
            args = args[:_first(eqn)] + [
                arg if not is_literal(atom) and atom in made else jnp.zeros_like(arg)
                for atom, arg in zip(eqn.invars[_first(eqn):], args[_first(eqn):], strict=True)]
        return bind_unsharded(eqn, args)


def _first(eqn: JaxprEqn) -> int:
    """The number of the first operand in which `eqn`, one of `_SUMS`, is linear."""
    return int(primitive_of(eqn) == "select_n")


def _is_linear(eqn: JaxprEqn, taken: Sequence[bool]) -> bool:
    """Whether `eqn` is linear in those of its operands that are `taken`, together."""
    primitive = primitive_of(eqn)
    if any(not jnp.issubdtype(shape_of(var).dtype, jnp.inexact) for var in eqn.outvars):
        return False
    if primitive in _SUMS:
        return primitive != "select_n" or not taken[0]
    if primitive == "pad":
        padding: Any = eqn.invars[1]
        return not any(taken[1:]) and is_literal(padding) and not padding.val
    return primitive in _OF_FIRST and not any(taken[1:]) or primitive in _OF_EITHER and sum(taken) == 1


def _zeros(atom: Any) -> jax.Array:
    return jnp.zeros(shape_of(atom).shape, shape_of(atom).dtype)


def _size(atom: Any) -> int:
    return math.prod(shape_of(atom).shape)


def _all_reduced(value: jax.Array, axes: MeshAxes) -> jax.Array:
    wide = value.astype(jnp.promote_types(value.dtype, jnp.float32))
    return jax.lax.psum(wide, axes.step_names).astype(value.dtype)


def _ordered(eqns: Sequence[JaxprEqn]) -> list[JaxprEqn] | None:
    """`eqns` with each behind those that make its operands, and else as they are; None if some wait for each other."""
    makers = {var: i for i, eqn in enumerate(eqns) for var in eqn.outvars}
    waits = [{makers[atom] for atom in variables(eqn.invars) if atom in makers} for eqn in eqns]
    waiting: dict[int, list[int]] = collections.defaultdict(list)
    for i, makes in enumerate(waits):
        for maker in makes:
            waiting[maker].append(i)
    ready = [i for i, makes in enumerate(waits) if not makes]  # sorted, which is a heap
    ordered: list[JaxprEqn] = []
    while ready:
        i = heapq.heappop(ready)
        ordered.append(eqns[i])
        for user in waiting[i]:
            waits[user].discard(i)
            if not waits[user]:
                heapq.heappush(ready, user)
    return ordered if len(ordered) == len(eqns) else None
