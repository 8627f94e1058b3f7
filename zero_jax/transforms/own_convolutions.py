"""A pass on the program of one slice, which is mapped over the slices: convolutions."""

from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from zero_jax.jaxpr.equations import Jaxpr, JaxprEqn, bind_eqn, eqn_of, in_scope_of, primitive_of
from zero_jax.jaxpr.primitives import CONV
from zero_jax.sharding.mesh_axes import MeshAxes


def convolve_on_own_slice(jaxpr: Jaxpr, *, axes: MeshAxes) -> Jaxpr:
    """Computes convolutions inside of a `shard_map` over the slices, whose kernels differ, each on its own.

    Why: mapped over slices (DiLoCo), a convolution has a group for each of them, which XLA's partitioner computes
    wrongly, without an error, where a device has one row or the kernel is 1 x 1 (jax 0.10.2).
    Order: last before the map, since derivatives are taken by then.
    """
    if not any(primitive_of(eqn) == CONV for eqn in jaxpr.eqns):
        return jaxpr
    return jaxpr.replace(eqns=[
        _on_own_slice(eqn, axes.mesh, axes.slices) if primitive_of(eqn) == CONV else eqn for eqn in jaxpr.eqns])


def _on_own_slice(conv: JaxprEqn, mesh: jax.sharding.Mesh, axis: str) -> JaxprEqn:
    def fun(*operands: jax.Array) -> Any:
        return bind_eqn(conv, operands)[0]

    def mapped(axis_size: int, in_batched: list[bool], *operands: jax.Array) -> tuple[Any, bool]:
        if not in_batched[1]:  # a forward convolution with one kernel: rows of all slices are one batch
            in_axes = [0 if batched else None for batched in in_batched]
            return jax.vmap(fun, in_axes, axis_size=axis_size, spmd_axis_name=axis)(*operands), True

        def on_slice(*operands: jax.Array) -> jax.Array:
            own = (each[0] if batched else each for each, batched in zip(operands, in_batched, strict=True))
            return fun(*own)[None]

        return jax.shard_map(on_slice, mesh=mesh, axis_names={axis}, out_specs=P(axis),
                             in_specs=tuple(P(axis) if batched else P() for batched in in_batched),
                             check_vma=False)(*operands), True

    each = jax.custom_batching.custom_vmap(fun)
    each.def_vmap(mapped)
    return in_scope_of(eqn_of(jax.jit(each), conv.invars, conv.outvars), conv)
