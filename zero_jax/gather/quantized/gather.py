"""Quantised gathers of one parameter: the message that each device makes of its shard, and the weights from all."""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from zero_jax.gather.quantized.messages import BlockFormat, as_words, from_words, num_words
from zero_jax.gather.quantized.products import MatrixFormat
from zero_jax.sharding.mesh import constrain
from zero_jax.sharding.mesh_axes import MeshAxes
from zero_jax.sharding.partition import axes_by_dim
from zero_jax.typing import AxisNames, DType, Shape


@dataclasses.dataclass(frozen=True)
class GatherCodes:
    """How a stored parameter becomes messages, and messages the parameter.

    A message has as many dims as the stored array, so that loops of a model slice both alike: its `loops` dims, and in
    the last of the others the bytes of a device's shard of a layer, on TPUs in words; the remaining dims have
    size 1. All axes that shard the parameter split that one dim, so that uneven shapes need no rule: whatever a shard
    is, it is a row of bytes.

    Attributes:
        format: of the codes.
        axes: the mesh.
        spec: of the stored array.
        local: the size of each dim of a shard; of loops any.
        loops: for each dim whether loops of the model may slice it. No axis shards these.
        order: the axes of `spec`, major first in the message: those that are gathered last.
    """

    format: BlockFormat | MatrixFormat
    axes: MeshAxes
    spec: P
    local: Shape
    loops: tuple[bool, ...]
    order: AxisNames

    @property
    def sent(self) -> P:
        """The spec of the messages of all devices."""
        return P(*[self.order if dim == self._flat else None for dim in range(len(self.local))])

    @property
    def num_values(self) -> int:
        """Values in a message, of each layer."""
        return math.prod(size for size, is_loop in zip(self.local, self.loops, strict=True) if not is_loop)

    @property
    def message_size(self) -> int:
        """Elements of a message, of each layer: bytes, on TPUs words."""
        own = self.format.message_bytes(self.num_values)
        return num_words(own) if self.axes.is_tpu else own

    @property
    def message_bytes(self) -> int:
        """Bytes of a message, of each layer."""
        return self.message_size * (4 if self.axes.is_tpu else 1)

    def drop_dim(self, index: int) -> "GatherCodes":
        """As `ParamUse.drop_dim`."""
        spec, local, loops = ((*values[:index], *values[index + 1:]) for values in (self.spec, self.local, self.loops))
        return dataclasses.replace(self, spec=P(*spec), local=local, loops=loops)

    def tile(self, dim: int, count: int) -> "GatherCodes":
        """Of one of `count` equal parts along the dim `dim`, which no axis shards."""
        local = (*self.local[:dim], self.local[dim] // count, *self.local[dim + 1:])
        return dataclasses.replace(self, local=local)

    def add_dim(self, index: int) -> "GatherCodes":
        """As `ParamUse.add_dim`: a dim of a loop."""
        spec, local, loops = P(*self.spec[:index], None, *self.spec[index:]), self.local, self.loops
        return dataclasses.replace(self, spec=spec, local=(*local[:index], 1, *local[index:]),
                                   loops=(*loops[:index], True, *loops[index:]))

    def encode(self, stored: jax.Array) -> jax.Array:
        """The messages of all devices, each made of its own shard; under jit. Floats in, uint8 or uint32 out."""
        stored = constrain(jax.lax.stop_gradient(stored), self.axes.mesh, self.spec)
        return constrain(self._messages(stored, self.order), self.axes.mesh, self.sent)

    def encode_shard(self, shard: jax.Array) -> jax.Array:
        """One device's message of its shard."""
        return self._messages(shard, (), self.order)

    def decode(self, messages: jax.Array, dtype: DType, *, split: Sequence[str] = ()) -> jax.Array:
        """The stored array, whole, from the messages of all devices.

        split: axes whose messages are not among them, so that it is one part of the array.
        """
        order = tuple(axis for axis in self.order if axis not in split)
        loops, others = self._dims
        sizes, parts = [messages.shape[dim] for dim in loops], [self.axes.size(axis) for axis in order]
        rows = jnp.moveaxis(messages, self._flat, -1).reshape(*sizes, *parts, self.message_size)
        rows = from_words(rows, self.format.message_bytes(self.num_values)) if self.axes.is_tpu else rows
        values = self.format.decode(rows, self.num_values, dtype, shared=len(order)).reshape(
            *sizes, *parts, *(self.local[dim] for dim in others))
        shape, permutation = self._expanded([messages.shape[dim] if is_loop else size for dim, (size, is_loop) in
                                             enumerate(zip(self.local, self.loops, strict=True))], order)
        merged = [math.prod(size for size, place in shape if place == dim) for dim in range(len(self.local))]
        return jnp.transpose(values, [permutation.index(at) for at in range(len(permutation))]).reshape(merged)

    def _messages(self, stored: jax.Array, order: AxisNames, axes: AxisNames = ()) -> jax.Array:
        """The messages of a stored array, or of the part of it that no axis of `order` shards.

        axes: of the `shard_map` that this is in, over which the rest of the stored array is.
        """
        loops, _ = self._dims
        shape, permutation = self._expanded(
            [size if is_loop else local for size, local, is_loop in zip(stored.shape, self.local, self.loops,
                                                                       strict=True)], order)
        rows = jnp.transpose(stored.reshape([size for size, _ in shape]), permutation)
        kept = len(loops) + len(order)
        rows = rows.reshape(*rows.shape[:kept], -1)
        message = self.format.encode(rows, shared=len(order), axes=axes)
        message = as_words(message) if self.axes.is_tpu else message
        whole = [stored.shape[dim] if is_loop else 1 for dim, is_loop in enumerate(self.loops)]
        whole[self._flat] = math.prod(message.shape[len(loops):])
        flat = message.reshape(*message.shape[:len(loops)], -1)
        return jnp.moveaxis(flat, -1, sum(dim < self._flat for dim in loops)).reshape(whole)

    def _expanded(self, local: Sequence[int], order: AxisNames) -> tuple[list[tuple[int, int]], list[int]]:
        """The stored array with a dim for each axis, before what a device has of the dim that it shards.

        Returns the size of each such dim with the dim of the stored array that it is part of, and the permutation that
        puts the dims of loops first, then the axes in `order`, then the others.
        """
        shape: list[tuple[int, int]] = []
        axes: dict[str, int] = {}
        own: list[int] = []
        for dim, entry in enumerate(axes_by_dim(self.spec, len(self.local))):
            for axis in entry:
                if axis in order:
                    axes[axis] = len(shape)
                    shape.append((self.axes.size(axis), dim))
            own.append(len(shape))
            shape.append((local[dim], dim))
        loops, others = self._dims
        return shape, [*(own[dim] for dim in loops), *(axes[axis] for axis in order), *(own[dim] for dim in others)]

    @property
    def _flat(self) -> int:
        """The dim that holds the bytes."""
        return self._dims[1][-1]

    @property
    def _dims(self) -> tuple[list[int], list[int]]:
        """The dims that loops may slice, and the others."""
        return ([dim for dim, is_loop in enumerate(self.loops) if is_loop],
                [dim for dim, is_loop in enumerate(self.loops) if not is_loop])
