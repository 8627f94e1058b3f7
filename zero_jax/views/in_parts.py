"""The gradient, or any program of global arrays, as one `jax.shard_map`, by a `LocalView`."""

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from zero_jax.gather.quantized.policy import Hop
from zero_jax.jaxpr.equations import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    closed_jaxpr,
    eqn_of,
    inner_jaxprs,
    is_literal,
    is_on_host_atom,
    primitive_of,
    shape_of,
    trace,
    type_of,
    variable_like,
    variables,
)
from zero_jax.jaxpr.passes import applied, with_jaxpr_passes
from zero_jax.jaxpr.primitives import COND, SCAN
from zero_jax.layout.batch_layout import BatchLayout
from zero_jax.layout.layout import Layout
from zero_jax.layout.slices import on_one_slice
from zero_jax.sharding.mesh_axes import MeshAxes
from zero_jax.tree import map_named, merge, named_leaves
from zero_jax.typing import Batch, Gradients, Params
from zero_jax.views.local import LocalView
from zero_jax.views.spread import ndim_at, spread_of, whole


def local_view(closed: ClosedJaxpr, axes: MeshAxes, specs: Sequence[P], out_specs: Sequence[P | None],
               hops: Sequence[Hop] = ()) -> ClosedJaxpr:
    """`closed`, a program of global arrays, as one `jax.shard_map` over the mesh.

    specs: how each input is sharded. out_specs: how each result is to be; None: as it is computed, where that is a
    sharding, else whole.
    """
    view, jaxpr = LocalView(axes, hops), closed.jaxpr
    ins = [spread_of(spec, ndim_at(var), axes) for spec, var in zip(specs, jaxpr.invars, strict=True)]
    outs = []
    for found, spec, var in zip(view.spreads(closed, ins), out_specs, jaxpr.outvars, strict=True):
        free = found.without_sum if found.is_plain else whole(ndim_at(var))
        outs.append(free if spec is None else spread_of(spec, ndim_at(var), axes))
    function = on_one_slice(view.function(closed, ins, outs), axes)

    def on_device(*args: Any) -> list[Any]:
        results = function(*(spread.joined(arg) for spread, arg in zip(ins, args, strict=True)))
        return [spread.blocks(result) for spread, result in zip(outs, results, strict=True)]

    manual = {name for name in axes.mesh.axis_names if name != axes.tensor or not axes.tensor_enabled}
    mapped = jax.shard_map(on_device, mesh=axes.mesh, in_specs=tuple(each.spec for each in ins),
                           out_specs=[each.spec for each in outs], axis_names=manual, check_vma=False)

    def run(*args: Any) -> list[Any]:
        results = mapped(*(spread.blocks(arg) for spread, arg in zip(ins, args, strict=True)))
        return [spread.joined(result) for spread, result in zip(outs, results, strict=True)]

    local = trace(run, *map(type_of, jaxpr.invars))
    if view.whole:
        warnings.warn("Every device computes the whole of " + ", ".join(sorted(view.whole))
                      + ": no rule is known by which each computes its part.", stacklevel=2)
    return one_by_one(local) if axes.platform == "cpu" else local


def in_parts(fun: Callable[..., Any], layout: Layout, batches: BatchLayout, gradients: Gradients = None
             ) -> Callable[..., Any]:
    """`fun(weights, inputs, batch, *others)` in the local view.

    Weights and frozen parameters are as the state stores them, examples as `batches` says, all of them on every device
    where they do not divide; everything else is whole. gradients: the shardings of the first leaves that it returns;
    others are as they are computed.
    """
    state = layout.state
    stored = dict(named_leaves(merge(state.params if state.weights is None else state.weights, state.frozen)))
    first_specs = [sharding.spec for sharding in jax.tree.leaves(gradients)]

    def of_params(tree: Params) -> Any:
        return map_named(lambda name, _: stored[name].sharding.spec, tree)

    def everywhere(tree: Any) -> Any:
        return jax.tree.map(lambda _: P(), tree)

    def run(weights: Params, inputs: Any, batch: Batch, *others: Any) -> Any:
        of_batch = everywhere(batch) if batches.is_ragged(batch) else map_named(batches.spec, batch)
        specs = jax.tree.leaves((of_params(weights), everywhere(inputs)._replace(frozen=of_params(inputs.frozen)),
                                 of_batch, everywhere(others)))

        def local(closed: ClosedJaxpr) -> ClosedJaxpr:
            rest = [None] * (len(closed.jaxpr.outvars) - len(first_specs))
            hops = () if layout.quantized is None else layout.quantized.hops
            return local_view(closed, layout.axes, specs, [*first_specs, *rest], hops)

        return with_jaxpr_passes(fun, last=local, as_call="gradient" if gradients is not None else "evaluation")(
            weights, inputs, batch, *others)

    return run


_COLLECTIVES = ("all_gather", "all_gather_invariant", "all_to_all", "pbroadcast", "pmax", "pmin", "ppermute", "psum",
                "psum_invariant", "ragged_all_to_all", "reduce_scatter")
_LOOPS = (COND, SCAN, "while")


def one_by_one(closed: ClosedJaxpr) -> ClosedJaxpr:
    """`closed` with data that every loop that sends, and everything sent behind one, waits for."""
    return applied(_in_order, closed)


def _in_order(jaxpr: Jaxpr) -> Jaxpr:
    eqns: list[JaxprEqn] = []
    sent: list[Any] = []  # of the last loop, and what was sent since
    behind_loop = False
    for eqn in jaxpr.eqns:
        sends, loops = _sends(eqn)
        operands = [var for var in variables(eqn.invars) if _is_number(var)]
        if loops:
            waiting = sorted(operands, key=lambda var: math.prod(shape_of(var).shape))[:1] if sent else []
        else:
            waiting = operands if sends and behind_loop else []
        behind = sent if loops else sent[:1]
        later: dict[Any, Any] = {var: variable_like(var) for var in waiting}
        eqns += [eqn_of(jax.jit(_wait), [var, *behind], [other]) for var, other in later.items()]
        eqns.append(eqn.replace(invars=[atom if is_literal(atom) else later.get(atom, atom) for atom in eqn.invars]))
        made = [var for var in eqn.outvars if _is_number(var)]
        if loops:
            sent, behind_loop = made[:1], True
        elif sends:
            sent += made[:1]
    return jaxpr.replace(eqns=eqns) if behind_loop else jaxpr


def _sends(eqn: JaxprEqn) -> tuple[bool, bool]:
    """Whether an equation is or holds a collective, and whether it is or holds a loop that does."""
    inner = [_sends(each) for jaxpr in inner_jaxprs(eqn) for each in closed_jaxpr(jaxpr).jaxpr.eqns]
    sends = primitive_of(eqn) in _COLLECTIVES or any(sends for sends, _ in inner)
    return sends, sends and primitive_of(eqn) in _LOOPS or any(loops for _, loops in inner)


def _is_number(var: Any) -> bool:
    """Whether a variable is an array with elements in device memory, other than of keys."""
    return (math.prod(shape_of(var).shape) > 0 and not jnp.issubdtype(shape_of(var).dtype, jax.dtypes.extended)
            and not is_on_host_atom(var))


def _wait(value: jax.Array, *sent: jax.Array) -> jax.Array:
    """`value`, by way of `sent`: on CPUs XLA keeps no barrier, but does not know that no square is below -1."""
    firsts = [jnp.real(each[(0,) * each.ndim]).astype(jnp.float32) for each in sent]
    never = functools.reduce(jnp.logical_or, [first * first < -1 for first in firsts])
    return jnp.where(never, ~value if value.dtype == bool else value + jnp.ones_like(value), value)
