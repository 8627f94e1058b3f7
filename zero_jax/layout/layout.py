"""The storage layout of a train step's state as data: for every leaf its stored shape, sharding and bytes."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zero_jax.gather.quantized.leaves import QuantizedLeaves
from zero_jax.sharding.auto_axes import computing_on, on_auto_axes
from zero_jax.sharding.mesh_axes import MeshAxes
from zero_jax.sharding.param_access import ParamAccess, Tiles
from zero_jax.sharding.partition import choose_spec, parts_of
from zero_jax.sharding.stored_shape import StoredShape, padding_note
from zero_jax.sharding.tiling import tile_lines
from zero_jax.stages import Stage
from zero_jax.state import ZeroState
from zero_jax.tree import leaf_bytes, merge, named_leaves
from zero_jax.typing import Pytree, Shape, Spec


@dataclasses.dataclass(frozen=True)
class Placement:
    """One leaf of the state: what it is, how it is stored, and what it costs each device.

    Attributes:
        name: its path in the state, such as `params/blocks/attention/kernel`.
        shape: of the leaf itself.
        stored: its shape with dims merged or padded, which `spec` divides.
        dtype: as NumPy names it.
        spec: how it is sharded.
        bytes: of the leaf itself, over all devices that hold one copy together.
        padding: bytes of padding, over those devices.
        device_bytes: on each device, or in the host's memory for each device; padding included.
        note: why it is padded or replicated; empty where it is neither.
        memory: "device", "host" or "disk".
    """

    name: str
    shape: Shape
    stored: Shape
    dtype: str
    spec: Spec
    bytes: int
    padding: int
    device_bytes: int
    note: str
    memory: str = "device"

    @property
    def stored_bytes(self) -> int:
        """Bytes of the leaf with its padding."""
        return self.bytes + self.padding


@dataclasses.dataclass(frozen=True)
class Layout:
    """The storage layout of a train step's state: pure data, made by `make_layout`.

    Attributes:
        axes: the mesh and the roles of its axes.
        stage: the row of the stage table.
        state: a `ZeroState` of `jax.ShapeDtypeStruct`s as they are stored, each with its sharding.
        stored_shapes: a `StoredShape` for each leaf of `state`, which knows the true shape.
        gradients: a `NamedSharding` for each trainable parameter's gradient as the optimizer takes it.
        uses: for each parameter how the model reads it, a `gather.ParamUse`, or None (as it is stored).
        reads: by the name of a parameter, how the model accesses it, from its trace.
        replicated_batch: names of the leaves of a batch that are whole on every device.
        step_weights: the copy of all parameters that a step gathers once for its microbatches, as
            `jax.ShapeDtypeStruct`s with shardings; None: they are gathered where they are read.
        kept_bytes: on each device, of the gathered parameters that backward takes from forward; 0: it gathers again.
        gather_note: how often parameters are gathered and why, where `gather=` was given.
        quantized: which parameters are sent as codes; None: none.
        host: names of the leaves of `state` that are stored in host memory (`offload.offload.with_offload`).
        host_gradients: for each parameter whose gradient backward stacks in host memory, layer by layer, the bytes of
            that on each device.
        microbatches: over how many a step sums gradients.
        disk: names of those that are in files between steps (`offload.disk_leaves`).
        overlap_note: XLA's options by which collectives run beside compute, where the step has some.
        gathers_in_chunks: whether whole weights are gathered in chunks into the old ones (`gather_chunks`).
        not_tiled: parameters above the size that `tiling` was given, with the reason why they have no tiles.
        one_slice: the layout of one of several slices, whose states are stacked in `state`; None where there is one.
    """

    axes: MeshAxes
    stage: Stage
    state: ZeroState
    stored_shapes: ZeroState
    gradients: Pytree
    uses: Pytree
    reads: Mapping[str, ParamAccess]
    replicated_batch: tuple[str, ...] = ()
    step_weights: Pytree | None = None
    kept_bytes: int = 0
    gather_note: str = ""
    quantized: QuantizedLeaves | None = None
    host: frozenset[str] = frozenset()
    host_gradients: Mapping[str, int] = dataclasses.field(default_factory=dict)
    microbatches: int = 1
    disk: frozenset[str] = frozenset()
    overlap_note: str = ""
    gathers_in_chunks: bool = False
    not_tiled: tuple[str, ...] = ()
    one_slice: "Layout | None" = None

    @property
    def mesh(self) -> Mesh:
        """The devices."""
        return self.axes.mesh

    @property
    def read_itemsize(self) -> int:
        """Bytes of an element of the parameters, as the model reads them."""
        read = jax.tree.leaves(self.state.weights) or jax.tree.leaves(self.uses) or jax.tree.leaves(self.state.params)
        return max((leaf.dtype.itemsize for leaf in read), default=4)

    @property
    def num_shards(self) -> int:
        """N: over how many devices ZeRO shards each leaf."""
        return self.axes.zero_size

    @property
    def tensor_size(self) -> int:
        """Over how many devices tensor parallelism splits the model."""
        return self.axes.tensor_size

    @property
    def gathers_at_use(self) -> bool:
        """Whether the model gathers parameters where it reads them: at stage 3, unless from copies that are whole."""
        if self.host_params:
            return True
        if not self.stage.shards_params or self.num_shards == 1:
            return False
        copies, sizes = jax.tree.leaves(self.state.weights), self.axes.zero_sizes
        return not copies or any(parts_of(leaf.sharding.spec, sizes) > 1 for leaf in copies)

    @property
    def host_weights(self) -> frozenset[str]:
        """Names of the trainable parameters whose array that the model reads is in host memory."""
        return self._host_names(self._read_field)

    @property
    def host_params(self) -> frozenset[str]:
        """Names of all parameters that the model reads from host memory, frozen ones as well."""
        return self._host_names(self._read_field, "frozen")

    @property
    def _read_field(self) -> str:
        """The field of the state that the model reads trainable parameters from."""
        return "params" if self.state.weights is None else "weights"

    def _host_names(self, *fields: str) -> frozenset[str]:
        parts = [name.partition("/") for name in self.host]
        return frozenset(name for field, _, name in parts if field in fields)

    @property
    def tiles(self) -> tuple[Tiles, ...]:
        """The parts in which large weights are gathered and multiplied, of each that is."""
        return tuple(access.tiles for access in self.reads.values() if access.tiles is not None)

    @property
    def fp8(self) -> frozenset[str]:
        """Names of the parameters whose products are in float8."""
        return frozenset() if self.quantized is None else self.quantized.products

    @property
    def num_params(self) -> int:
        """Elements of all trainable parameters, without padding; of several slices those of one."""
        if self.one_slice is not None:
            return self.one_slice.num_params
        return sum(math.prod(stored_shape.shape) for stored_shape in jax.tree.leaves(self.stored_shapes.params))

    @property
    def shardings(self) -> ZeroState:
        """The state's tree of `NamedSharding`s."""
        return jax.tree.map(lambda leaf: leaf.sharding, self.state)

    @property
    def device_bytes(self) -> int:
        """Bytes of state in the memory of each device."""
        return self._bytes_in("device")

    @property
    def host_bytes(self) -> int:
        """Bytes of state in host memory for each device."""
        return self._bytes_in("host")

    @property
    def host_param_bytes(self) -> int:
        """Those of them that the model reads, forward and once more backward."""
        return sum(row.device_bytes for row in self.placements() if row.memory == "host"
                   and row.name.partition("/")[0] in (self._read_field, "frozen"))

    @property
    def host_gradient_bytes(self) -> int:
        """Bytes of gradients in host memory for each device, from backward to the update."""
        return sum(self.host_gradients.values())

    @property
    def disk_bytes(self) -> int:
        """Bytes of state in files for each device; a step reads and writes each of them once."""
        return self._bytes_in("disk")

    def _bytes_in(self, memory: str) -> int:
        return sum(row.device_bytes for row in self.placements() if row.memory == memory)

    def placements(self) -> list[Placement]:
        """Every leaf of the state, in tree order."""
        rows = []
        for (name, leaf), stored_shape in zip(named_leaves(self.state), jax.tree.leaves(self.stored_shapes),
                                              strict=True):
            shard, size = leaf.sharding.shard_shape(leaf.shape), leaf_bytes(stored_shape.shape, leaf.dtype)
            rows.append(Placement(
                name, stored_shape.shape, leaf.shape, str(leaf.dtype), leaf.sharding.spec, size,
                leaf_bytes(leaf.shape, leaf.dtype) - size, leaf_bytes(shard, leaf.dtype),
                self._note(name, leaf, stored_shape),
                "host" if name in self.host else "disk" if name in self.disk else "device"))
        return rows

    def replicated(self) -> list[Placement]:
        """The leaves that this stage should shard over the ZeRO axes but cannot; scalars are not counted."""
        return [placement for placement in self.placements() if placement.note.startswith("replicated")]

    def shards(self, name: str) -> bool:
        """Whether the stage shards what the state's leaf `name` is one of (`params`, `opt_state`, ...)."""
        stage = self.stage
        return {
            "params": stage.shards_params or self.state.weights is not None and stage.shards_optimizer,
            "weights": stage.shards_params, "opt_state": stage.shards_optimizer, "ema": stage.shards_optimizer,
            "frozen": stage.shards_params, "variables": stage.shards_params}.get(name.split("/")[0], False)

    def describe(self) -> str:
        """The layout as text: a line for each leaf, then what is replicated, gathered up front, and unused."""
        rows, device_bytes = self.placements(), self.device_bytes
        total, padding = sum(row.bytes for row in rows), sum(row.padding for row in rows)
        lines = [
            f"stage {self.stage.number} ({self.stage.name}) on {self.axes.sizes}: {total:,} bytes of state, "
            f"{device_bytes:,} on each device"
            + (f", {self.host_bytes:,} in host memory for each" if self.host else "")
            + (f", {self.disk_bytes:,} on disk for each" if self.disk else "")
            + (f"; {padding:,} bytes of padding, {padding / total:.3%}" if padding else "")]
        for row in rows:
            shape = " x ".join(map(str, row.shape)) or "scalar"
            memory = {"host": ", host memory", "disk": ", on disk"}.get(row.memory, "")
            lines.append(f"  {row.name}: {row.dtype} {shape}, {row.spec}: {row.device_bytes:,} of {row.bytes:,} bytes"
                         + memory + (f" [{row.note}]" if row.note else ""))
        replicated = self.replicated()
        lines.append(
            f"replicated (could not be sharded): {_listed(f'{row.name} ({row.bytes:,} bytes)' for row in replicated)}")
        shapes = dict(named_leaves(merge(self.stored_shapes.params, self.stored_shapes.frozen)))
        up_front = [name for name, access in self.reads.items()
                    if access.on_entry or access.on_entry_if_padded and not shapes[name].is_identity]
        lines.append(f"gathered up front: {_listed(up_front)}")
        lines.append(f"unused parameters: {_listed(name for name, access in self.reads.items() if not access.count)}")
        if self.gather_note:
            lines.append(f"parameters are gathered {self.gather_note}")
        lines += tile_lines(self.reads, shapes, dict(named_leaves(self.uses)), self.not_tiled)
        if self.host:
            lines += self._host_lines(rows)
        if self.disk:
            lines.append(f"read from and written to disk by each step: {self.disk_bytes:,} bytes each way for each "
                         "device, and a copy of the parameters that are in memory is written; two generations")
        if self.overlap_note:
            lines.append(f"collectives run beside compute by XLA's options: {self.overlap_note}")
        if self.replicated_batch:
            lines.append("leaves of the batch that are whole on every device: " + ", ".join(self.replicated_batch))
        lines += [] if self.quantized is None else self.quantized.describe()
        return "\n".join(lines)

    def _host_lines(self, rows: Sequence[Placement]) -> list[str]:
        """What the update, the model and backward move from and to host memory, and what is too small for it."""
        vectors = ", or stacks of vectors, whose layers are parts of a TPU's tiles" * self.axes.is_tpu
        read, written = update_bytes_of(rows)
        lines = [f"read from and written to host memory by the update: {read:,} and {written:,} bytes for each device"]
        if params := self.host_params:
            by_layer = sorted(name for name in params if self.reads[name].stacked)
            lines += [
                f"parameters read from host memory by each microbatch: {self.host_param_bytes:,} bytes forward and "
                f"as many backward for each device; layer by layer: {_listed(by_layer)}; whole: "
                f"{_listed(sorted(params.difference(by_layer)))}",
                f"parameters in device memory, since their shards are small{vectors}: "
                f"{_listed(sorted(self.reads.keys() - params))}"]
        if self.host_gradients:
            size, count = self.host_gradient_bytes, self.microbatches
            moved = f"{size:,} bytes for each device" if count == 1 else (
                f"sums over microbatches, of which each of {count} reads and writes {size:,} bytes for each "
                f"device, {count * size:,} each way in a step")
            lines += [
                f"gradients written to host memory by backward, layer by layer: {moved}, which the update reads, and "
                f"once more where a global norm scales them: {_listed(sorted(self.host_gradients))}",
                f"gradients in device memory, of no stacked layers or with small shards{vectors}: "
                f"{_listed(sorted(self.reads.keys() - self.host_gradients.keys()))}"]
        return lines

    def _note(self, name: str, leaf: jax.ShapeDtypeStruct, stored_shape: StoredShape) -> str:
        if not stored_shape.is_identity:
            return padding_note(stored_shape)
        num_slices = 1 if self.one_slice is None else self.state.rng.size
        if not self.shards(name) or math.prod(leaf.shape) <= num_slices:
            return ""
        sharding: NamedSharding = leaf.sharding  # type: ignore[assignment]
        parts = parts_of(sharding.spec, self.axes.zero_sizes)
        if parts == self.num_shards:
            return ""
        if name.split("/")[0] == "variables":
            return "replicated: no parameter"
        copies = f" {self.num_shards // parts} times" if parts > 1 else ""
        return (f"replicated{copies}: no dims of {leaf.shape} that no loop runs over divide by {self.num_shards}, and "
                "padding them would not pay off")

    def load(self, state: ZeroState) -> ZeroState:
        """`state` in its true shapes, each leaf in as many parts as its dims allow; `store` is the inverse."""
        with computing_on(self.mesh):
            return jax.tree.map(self.load_leaf, self.stored_shapes, self.state, state)

    def load_leaf(self, stored_shape: StoredShape, like: jax.ShapeDtypeStruct, leaf: jax.Array) -> jax.Array:
        """A leaf of `load`; a number that a user put there is one of the leaf's dtype."""
        if not isinstance(leaf, jax.Array):
            return jax.device_put(jax.numpy.asarray(leaf, like.dtype), like.sharding)
        leaf = jax.device_put(leaf, jax.memory.Space.Device) if leaf.sharding.memory_kind == "pinned_host" else leaf
        if stored_shape.is_identity:
            return leaf
        return _loading(stored_shape, self.true_sharding(stored_shape, like))(leaf)

    def true_sharding(self, stored_shape: StoredShape, like: jax.ShapeDtypeStruct) -> NamedSharding:
        """How a leaf that is stored as `like` is sharded in its true shape: in as many parts as that allows.

        The states of several slices stay apart.
        """
        over = tuple(like.sharding.spec[:1]) if self.axes.slices and like.sharding.spec[:1] == (
            self.axes.slices,) else ()
        spec = choose_spec(stored_shape.shape[len(over):], self.axes.zero_sizes)
        return NamedSharding(self.mesh, P(*over, *spec))

    def store(self, state: ZeroState) -> ZeroState:
        """`state`, of true shapes, as a step takes it."""
        def put(stored_shape: StoredShape, like: jax.ShapeDtypeStruct, leaf: jax.Array) -> jax.Array:
            return _storing(stored_shape, like.sharding)(leaf)

        with computing_on(self.mesh):
            return jax.tree.map(put, self.stored_shapes, self.state, on_auto_axes(state, self.mesh))


def update_bytes_of(rows: Iterable[Placement]) -> tuple[int, int]:
    """Bytes for each device that the update reads from host memory, and that it writes there."""
    fields = [(row.name.partition("/")[0], row.device_bytes) for row in rows if row.memory == "host"]
    read = sum(size for field, size in fields if field not in ("weights", "frozen"))
    return read, sum(size for field, size in fields if field != "frozen")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"


@functools.lru_cache(maxsize=4096)
def _loading(stored_shape: StoredShape, sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    """`stored_shape.load`, compiled once for leaves of a shape: jax.jit forgets a bound method after each call."""
    return jax.jit(stored_shape.load, out_shardings=sharding)


@functools.lru_cache(maxsize=4096)
def _storing(stored_shape: StoredShape, sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    """`stored_shape.store`, likewise."""
    return jax.jit(stored_shape.store, out_shardings=sharding)
