"""From a stored parameter to the one that the model reads: cast on the shard, gather; transposed, reduce-scatter."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zero_jax.gather.quantized.gather import GatherCodes
from zero_jax.gather.quantized.products import ProductUse
from zero_jax.gather.reduce_scatter import mesh_ordered_runs
from zero_jax.jaxpr.equations import JaxprEqn, primitive_of
from zero_jax.jaxpr.named_call import named_call, set_read
from zero_jax.jaxpr.primitives import jit_name, out_shardings, own_use
from zero_jax.sharding.host_arrays import carrier_of, fetch, is_on_host
from zero_jax.sharding.mesh import major_first
from zero_jax.sharding.mesh_axes import MeshAxes
from zero_jax.sharding.param_access import Tiles
from zero_jax.sharding.partition import axes_by_dim, names_of
from zero_jax.sharding.stored_shape import StoredShape

GATHERED = "zero_gathered"
"""The `checkpoint_name` of gathered parameters, and of what is computed from them alone."""
KEPT = "zero_kept"
"""The `checkpoint_name`, beside `GATHERED`, of gathered parameters that backward takes from forward."""
SECONDARY = "zero_secondary"
"""The `checkpoint_name` of what is gathered over all but the secondary axes, from which backward gathers (hpZ)."""
REDUCED = "zero_reduced"
"""The `checkpoint_name` of gradients that are to be reduced."""
SCATTER = "zero_scatter"
"""The name of the jitted call that reduces and scatters a gradient."""
SCATTER_QUANTIZED = "zero_scatter_quantized"
"""The same, of a gradient sent as codes (`quantized.reduce`)."""
GATHER_SCOPE = "zero_gather"
"""In the op_name of every collective that gathers parameters, and the name of the primitive that does."""
SECONDARY_GATHER, TANGENT = "zero_gather_secondary", "zero_read_tangent"
"""The names of the primitives that gather over all but the secondary axes, and what the carrier's tangent becomes."""
READS = ("zero_read", "zero_last_read")
"""The names of the primitives that read a parameter; the second has one derivative, of which nothing is left."""
HOST_READ_SCOPE = "zero_host_read"
"""In the op_name of every read of a parameter's shard from host memory."""


class Encoded(NamedTuple):
    """What carries the gradient of a stored parameter, and what is gathered; loops of a model slice both alike.

    Of a parameter that is sent as codes: the stored array, and the messages of its shards. Made inside of a loop, a
    message is ready only when its iteration begins: half of the gathers then block (H100). Of a parameter in host
    memory: zeros in device memory, which nothing reads, so that its gradient is there, and the array itself.
    """

    stored: Any
    message: Any


@dataclasses.dataclass(frozen=True)
class HostParam:
    """A parameter in host memory, and what carries its gradient: one leaf of a tree of parameters."""

    carrier: jax.Array
    stored: jax.Array

    @property
    def ndim(self) -> int:
        """The number of its dims."""
        return self.stored.ndim


@dataclasses.dataclass(frozen=True)
class ParamUse:
    """How one parameter gets from its storage layout into the model, and its gradient back.

    stored: spec of the parameter as it is stored; reduced: spec of its gradient, None where a read does not reduce it.
    Entries are None, an axis name or a tuple of axis names (major first). dtype: that in which the model reads it;
    reduce: that in which the gradient is reduced. stored_shape: how it and its gradient are padded or merged.
    secondary: mesh axes over which backward gathers once more, from a copy that the others gathered (hpZ).
    codes: how it is quantised to be gathered, None: it is sent in `dtype`. quantize_gradient: whether its gradient is.
    tiles: parts of a stored dim in which `tiled_products` uses it, None: whole. keep: what is gathered, for backward.
    fp8: that `fp8_products` is to find its product.
    """

    axes: MeshAxes
    stored: P
    reduced: P | None
    dtype: Any
    reduce: Any
    stored_shape: StoredShape
    secondary: tuple[str, ...] = ()
    codes: GatherCodes | None = None
    quantize_gradient: bool = False
    tiles: Tiles | None = None
    keep: bool = False
    fp8: ProductUse | None = None

    @property
    def mesh(self) -> Mesh:
        """The devices."""
        return self.axes.mesh

    def drop_dim(self, index: int) -> "ParamUse":
        """This use inside a loop or map over dim `index`, where the array has one dim less."""
        return self._edit(lambda spec: P(*spec[:index], *spec[index + 1:]), self.stored_shape.drop_dim(index),
                          self.codes and self.codes.drop_dim(index), self.tiles and self.tiles.drop_dim(index))

    def add_dim(self, index: int) -> "ParamUse":
        """The inverse of `drop_dim`."""
        return self._edit(lambda spec: P(*spec[:index], None, *spec[index:]), self.stored_shape.add_dim(index),
                          self.codes and self.codes.add_dim(index), self.tiles and self.tiles.add_dim(index))

    def _edit(self, edit: Any, stored_shape: StoredShape, codes: GatherCodes | None, tiles: Tiles | None
              ) -> "ParamUse":
        return dataclasses.replace(self, stored=edit(self.stored), stored_shape=stored_shape, codes=codes, tiles=tiles,
                                   reduced=None if self.reduced is None else edit(self.reduced))

    def encoded(self, value: jax.Array, stacked: Sequence[int]) -> Any:
        """The stored array, or `Encoded` if it is sent as codes or on the host; stacked: dims of a model's loops."""
        if isinstance(value, HostParam):
            return Encoded(value.carrier, value.stored)
        if is_on_host(value):
            return Encoded(carrier_of(value), value)
        if self.codes is None or self.tiles or not all(self.codes.loops[dim] for dim in stacked):
            return value  # each tile is encoded by itself
        return Encoded(value, self.codes.encode(value))

    def gather(self, value: Any, *, is_copy: bool = False) -> tuple[jax.Array, jax.Array]:
        """Of what `encoded` returned, the arguments of `read`: a carrier of gradients, and the array as it is read.

        The second is cast or encoded on the shard, or of the hpZ copy that `value` is, if `is_copy`, then gathered, and
        has no derivative. Gradients of several reads are added at the carrier, in the dtype of their reduction.
        """
        value = self.encoded(value, ()) if not isinstance(value, Encoded) else value
        stored, message = value if isinstance(value, Encoded) else (value, value)
        carrier: Any = stored if stored.dtype == self.reduce else _carrier(stored, self)
        shard: Any = jax.lax.stop_gradient(message)
        shard = _GATHER_SECONDARY.bind(shard, use=self, names=(SECONDARY,)) if self.copies and not is_copy else shard
        return carrier, _GATHER.bind(shard, use=self, names=(GATHERED, KEPT) if self.keep else (GATHERED,))

    @property
    def copies(self) -> bool:
        """Whether forward makes an hpZ copy, over the secondary axes, from which backward gathers."""
        return bool(self.secondary) and secondary_spec(self.sent, self.axes, self.secondary) != self.sent

    @property
    def sent(self) -> P:
        """The spec of what is gathered: of the stored array, or of its messages."""
        return self.stored if self.codes is None else self.codes.sent

    def cast(self, value: jax.Array) -> jax.Array:
        """A stored array as it is sent: in `dtype`; messages stay what they are."""
        return value.astype(self.dtype) if self.codes is None else value

    def on_device(self, value: jax.Array) -> jax.Array:
        """What is gathered, sharded, in device memory."""
        with jax.named_scope(HOST_READ_SCOPE):
            return fetch(value)

    def read(self, carrier: jax.Array, gathered: jax.Array) -> jax.Array:
        """`gathered`, as a function of `carrier`: its transpose reduces and scatters the gradient of this read."""
        return _READ.bind(carrier, gathered, use=self, names=(GATHERED,))


def is_scatter(eqn: JaxprEqn) -> bool:
    """Whether `eqn` is the reduction of a gradient that `ParamUse` asks for.

    Its derivatives have its name where a loss differentiates by parameters, and not its sharding.
    """
    return jit_name(eqn) in (SCATTER, SCATTER_QUANTIZED) and len(eqn.outvars) == 1 and isinstance(
        out_shardings(eqn)[0], NamedSharding)


def use_of_read(eqn: JaxprEqn) -> ParamUse | None:
    """How `eqn` reads a parameter, if it reads one."""
    return own_use(eqn) if primitive_of(eqn) in READS else None


def differentiated_last(eqn: JaxprEqn) -> JaxprEqn:
    """`eqn`; a read as one of which nothing is left once it is differentiated, as none of what backward saves."""
    return eqn.replace(primitive=_LAST_READ) if primitive_of(eqn) == _READ.name else eqn


def split_dim(eqn: JaxprEqn) -> int | None:
    """The dim that `tensor` splits of the parameter that `eqn` reads; None where it reads none, or one not split."""
    use = use_of_read(eqn)
    entries = compute_spec(use.stored, use.axes) if use else ()
    return next((dim for dim, entry in enumerate(entries) if entry is not None), None)


def gather_sequence(spec: P, axes: MeshAxes, last: Sequence[str] = ()) -> list[P]:
    """The specs from `spec` to `compute_spec(spec, axes)`, each with fewer mesh axes; those of `last` go last.

    A TPU gathers along one axis of its torus after another, `major_first` backwards. Elsewhere all axes of a dim go at
    once, and of dims that are split over different axes the one over the major axis first, which is between hosts: when
    the others are gathered, a device would send as much over it as a whole host has to (3.61 instead of 0.93 bytes per
    parameter in a step, a GPT-2 of width 512 on h100:128x8).
    """
    specs, names, entries = [spec], axes.mesh.axis_names, axes_by_dim(spec)
    for axis in sorted(major_first(entries, names)[::-1] if axes.is_tpu else names, key=lambda axis: axis in last):
        dim = next((dim for dim, entry in enumerate(entries) if axis in entry), None)
        if axis != axes.tensor and dim is not None:
            gone = {axis} if axes.is_tpu else {
                name for name in entries[dim] if name != axes.tensor and (name in last) == (axis in last)}
            entries[dim] = tuple(name for name in entries[dim] if name not in gone)
            specs.append(P(*entries))
    return specs


def compute_spec(spec: P, axes: MeshAxes) -> P:
    """The spec with which the model reads a parameter that is stored with `spec`: split over `tensor` alone."""
    return P(*[axes.tensor if axes.tensor in names else None for names in axes_by_dim(spec)])


def gathered(shard: jax.Array, axes: MeshAxes, spec: P, kept: Sequence[str] = ()) -> jax.Array:
    """A device's shard of what `spec` splits, gathered over all axes but `tensor` and those that are `kept`.

    For `jax.shard_map`. In the order of `gather_sequence`, and of the axes of one dim always the minor ones first: what
    is gathered is then one block of each device that is left.
    """
    left = [[name for name in names if name != axes.tensor] for names in axes_by_dim(spec)]
    steps = [axes_by_dim(step) for step in gather_sequence(spec, axes, kept) if {*kept} <= {*names_of(step)}]
    with jax.named_scope(GATHER_SCOPE):
        for before, after in itertools.pairwise(steps):
            dim = next(dim for dim, (names, rest) in enumerate(zip(before, after, strict=True)) if names != rest)
            count = len(before[dim]) - len(after[dim])
            left[dim], names = left[dim][:-count], left[dim][-count:]
            for run in reversed(mesh_ordered_runs(names, axes.mesh)):
                shard = jax.lax.all_gather(shard, run, axis=dim, tiled=True)
    return shard


def secondary_spec(spec: P, axes: MeshAxes, secondary: Sequence[str]) -> P:
    """The spec of what is gathered from `spec` over all axes but the secondary ones and `tensor`."""
    kept = (axes.tensor, *secondary)
    return P(*[tuple(name for name in names if name in kept) for names in axes_by_dim(spec)])


def _gathered(value: jax.Array, use: ParamUse) -> jax.Array:
    if use.codes is None:
        return use.stored_shape.load(use.cast(use.on_device(value)))
    value = use.codes.encode(value) if use.tiles else value
    return use.stored_shape.load(use.codes.decode(value, use.dtype))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _carrier(value: jax.Array, use: ParamUse) -> jax.Array:
    return checkpoint_name(value.astype(use.reduce), GATHERED)  # so that backward does not save it; nothing reads it


_carrier.defvjp(
    lambda value, use: (_carrier(value, use), jnp.zeros((0,), value.dtype)),
    lambda use, like, gradient: (gradient.astype(like.dtype),))


def _reduce(gradient: jax.Array, use: ParamUse) -> jax.Array:
    reduced = checkpoint_name(gradient.astype(use.reduce), REDUCED)
    return use.stored_shape.store(reduced) if use.reduced is None else _scatter(use)(reduced)


@functools.lru_cache(maxsize=4096)
def _scatter(use: ParamUse) -> Callable[[jax.Array], jax.Array]:
    """From a gradient to what is stored: a call, found by its name by `transforms` and `views.local`, which reduces."""
    spec: Any = use.reduced

    def zero_scatter(value: jax.Array) -> jax.Array:
        return use.stored_shape.store(value)

    zero_scatter.__name__ = SCATTER_QUANTIZED if use.quantize_gradient else SCATTER
    return jax.jit(zero_scatter, out_shardings=NamedSharding(use.mesh, spec))


# What these compute, as one device does; how many do it together says `views.local`.
_GATHER, _GATHER_SECONDARY, _READ, _LAST_READ, _TANGENT = (
    named_call(name, fun, add_dim=lambda use: use.add_dim(0)) for name, fun in (
        (GATHER_SCOPE, _gathered), (SECONDARY_GATHER, lambda value, use: use.cast(use.on_device(value))),
        *((name, lambda carrier, gathered, use: gathered) for name in READS),
        # What a read is to its carrier: the cast of that, gathered.
        (TANGENT, lambda value, use: _gathered(value, dataclasses.replace(use, codes=None)))))
set_read(_READ, _TANGENT, _reduce, last=False)
set_read(_LAST_READ, _TANGENT, _reduce, last=True)
