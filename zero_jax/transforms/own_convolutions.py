"""A pass on the program of one device's microbatch, which is mapped over the devices: gradients of convolutions."""

from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from zero_jax.jaxpr.equations import Jaxpr, JaxprEqn, bind_eqn, eqn_of, in_scope_of, primitive_of
from zero_jax.jaxpr.primitives import CONV
from zero_jax.sharding.mesh_axes import MeshAxes


def convolve_on_own_device(jaxpr: Jaxpr, axes: MeshAxes) -> Jaxpr:
    """Computes convolutions whose kernel differs by device inside of a `shard_map`, each on its own device.

    Why: mapped over devices, the gradient of a kernel is a convolution with a group for each device, which XLA's
    partitioner computes wrongly, without an error, where a device has one row or the kernel is 1 x 1 (jax 0.10.2).
    Order: last before the map over devices, since derivatives are taken by then.
    """
    if not any(primitive_of(eqn) == CONV for eqn in jaxpr.eqns):
        return jaxpr
    return jaxpr.replace(eqns=[_on_own_device(eqn, axes) if primitive_of(eqn) == CONV else eqn for eqn in jaxpr.eqns])


def _on_own_device(conv: JaxprEqn, axes: MeshAxes) -> JaxprEqn:
    def fun(*operands: jax.Array) -> Any:
        return bind_eqn(conv, operands)[0]

    def mapped(axis_size: int, in_batched: list[bool], *operands: jax.Array) -> tuple[Any, bool]:
        if not in_batched[1]:  # a forward convolution: rows of all devices are one batch
            in_axes = [0 if batched else None for batched in in_batched]
            return jax.vmap(fun, in_axes, axis_size=axis_size, spmd_axis_name=axes.batch)(*operands), True

        def on_device(*operands: jax.Array) -> jax.Array:
            own = (each[0] if batched else each for each, batched in zip(operands, in_batched, strict=True))
            return fun(*own)[None]

        return jax.shard_map(on_device, mesh=axes.mesh, axis_names=set(axes.batch), out_specs=P(axes.batch),
                             in_specs=tuple(P(axes.batch) if batched else P() for batched in in_batched),
                             check_vma=False)(*operands), True

    each = jax.custom_batching.custom_vmap(fun)
    each.def_vmap(mapped)
    return in_scope_of(eqn_of(jax.jit(each), conv.invars, conv.outvars), conv)
