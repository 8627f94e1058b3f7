"""A pass on the program of one device's microbatch, or of one slice, which is mapped over them: convolutions."""

from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from zero_jax.errors import UsageError
from zero_jax.jaxpr.equations import Jaxpr, JaxprEqn, bind_eqn, eqn_of, in_scope_of, primitive_of
from zero_jax.jaxpr.primitives import CONV
from zero_jax.sharding.mesh_axes import MeshAxes


def convolve_on_own_device(jaxpr: Jaxpr, *, axes: MeshAxes, once: bool) -> Jaxpr:
    """Computes convolutions whose kernel differs by device, or by slice, inside of a `shard_map`, each on its own.

    Why: mapped over devices, the gradient of a kernel is a convolution with a group for each device, which XLA's
    partitioner computes wrongly, without an error, where a device has one row or the kernel is 1 x 1 (jax 0.10.2).
    Slices (DiLoCo) have kernels of their own, so that there forward is such a convolution, too.
    Order: last before the map, since derivatives are taken by then.

    once: whether the program is mapped over the devices of the batch (`reduce="once"`); over the slices of `axes` it
    always is. Raises UsageError for both.
    """
    if not any(primitive_of(eqn) == CONV for eqn in jaxpr.eqns):
        return jaxpr
    if once and axes.slices:
        raise UsageError('reduce="once" in the slices of DiLoCo with a model that convolves: XLA\'s partitioner '
                         'computes such convolutions wrongly. Give reduce="every".')
    over = axes.batch if once else (axes.slices,)
    return jaxpr.replace(eqns=[
        _on_own_device(eqn, axes.mesh, over) if primitive_of(eqn) == CONV else eqn for eqn in jaxpr.eqns])


def _on_own_device(conv: JaxprEqn, mesh: jax.sharding.Mesh, over: tuple[str, ...]) -> JaxprEqn:
    def fun(*operands: jax.Array) -> Any:
        return bind_eqn(conv, operands)[0]

    def mapped(axis_size: int, in_batched: list[bool], *operands: jax.Array) -> tuple[Any, bool]:
        if not in_batched[1]:  # a forward convolution: rows of all devices are one batch
            in_axes = [0 if batched else None for batched in in_batched]
            return jax.vmap(fun, in_axes, axis_size=axis_size, spmd_axis_name=over)(*operands), True

        def on_device(*operands: jax.Array) -> jax.Array:
            own = (each[0] if batched else each for each, batched in zip(operands, in_batched, strict=True))
            return fun(*own)[None]

        return jax.shard_map(on_device, mesh=mesh, axis_names=set(over), out_specs=P(over),
                             in_specs=tuple(P(over) if batched else P() for batched in in_batched),
                             check_vma=False)(*operands), True

    each = jax.custom_batching.custom_vmap(fun)
    each.def_vmap(mapped)
    return in_scope_of(eqn_of(jax.jit(each), conv.invars, conv.outvars), conv)
