"""Where every leaf of the state lies: a pure function of shapes, stage and mesh."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zero_jax.gather import Use
from zero_jax.mesh import fills_tiles, on_torus
from zero_jax.precision import Precision
from zero_jax.reads import Read
from zero_jax.stages import Stage
from zero_jax.state import ZeroState
from zero_jax.tree import ending, leaf_bytes, map_named, merge, named_leaves

OWNED = "owned"
"""In the names of optimizer states whose first dim is spread over the devices, whatever their shape."""


@dataclasses.dataclass(frozen=True)
class Placement:
    """One leaf of the state: what it is, where it lies, and what it costs each device."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    spec: P
    bytes: int
    device_bytes: int
    note: str


@dataclasses.dataclass(frozen=True)
class Layout:
    """The storage layout of a train step's state.

    state: a `ZeroState` of `jax.ShapeDtypeStruct`s, each with its sharding. gradients: a `NamedSharding` for
    each parameter's gradient as the optimizer takes it. uses: for each parameter how the model reads it, a
    `gather.Use` or None (as it is). reads: what tracing the model told of each parameter.
    """

    mesh: Mesh
    axes: tuple[str, ...]
    stage: Stage
    state: ZeroState
    gradients: Any
    uses: Any
    reads: Mapping[str, Read]

    @property
    def shardings(self) -> ZeroState:
        """The state's tree of `NamedSharding`s."""
        return jax.tree.map(lambda leaf: leaf.sharding, self.state)

    @property
    def device_bytes(self) -> int:
        """Bytes of state that each device holds."""
        return sum(placement.device_bytes for placement in self.placements())

    def placements(self) -> list[Placement]:
        """Every leaf of the state, in tree order."""
        rows = []
        for name, leaf in named_leaves(self.state):
            shard = leaf.sharding.shard_shape(leaf.shape)
            rows.append(Placement(
                name, leaf.shape, str(leaf.dtype), leaf.sharding.spec, leaf_bytes(leaf.shape, leaf.dtype),
                leaf_bytes(shard, leaf.dtype), self._note(name, leaf)))
        return rows

    def replicated(self) -> list[Placement]:
        """The leaves that this stage should shard over the ZeRO axes but cannot; scalars are not counted."""
        return [placement for placement in self.placements() if placement.note.startswith("replicated")]

    def describe(self) -> str:
        """The layout as text: a line for each leaf, then what stays whole and what is gathered on entry."""
        rows = self.placements()
        total, held = sum(row.bytes for row in rows), self.device_bytes
        lines = [
            f"stage {self.stage.number} ({self.stage.name}) on {dict(self.mesh.shape)}: "
            f"{total:,} bytes of state, {held:,} on each device"]
        for row in rows:
            where = " x ".join(map(str, row.shape)) or "scalar"
            lines.append(f"  {row.name}: {row.dtype} {where}, {row.spec}: {row.device_bytes:,} of {row.bytes:,} bytes"
                         + (f" [{row.note}]" if row.note else ""))
        whole = self.replicated()
        lines.append(
            f"{len(whole)} leaves ({sum(row.bytes for row in whole):,} bytes) stay replicated though stage "
            f"{self.stage.number} shards their kind: " + (", ".join(row.name for row in whole) or "none"))
        entry = [name for name, read in self.reads.items() if read.on_entry]
        lines.append("gathered when the model is entered: " + (", ".join(entry) or "none"))
        unread = [name for name, read in self.reads.items() if not read.count]
        lines.append("never read by the loss: " + (", ".join(unread) or "none"))
        return "\n".join(lines)

    def _note(self, name: str, leaf: Any) -> str:
        kind = name.split("/")[0]
        wanted = {"params": self.stage.shards_params or self.state.weights is not None and self.stage.shards_optimizer,
                  "opt_state": self.stage.shards_optimizer, "ema": self.stage.shards_optimizer,
                  "frozen": self.stage.shards_params, "variables": self.stage.shards_params}.get(kind, False)
        if not wanted or math.prod(leaf.shape) <= 1:
            return ""
        parts = math.prod(leaf.shape) // max(1, math.prod(leaf.sharding.shard_shape(leaf.shape)))
        if parts == self.num_shards:
            return ""
        if kind == "variables":
            return "replicated: no parameter"
        copies = f" {self.num_shards // parts} times" if parts > 1 else ""
        return f"replicated{copies}: no dims of {leaf.shape} that no loop runs over divide by {self.num_shards}"

    @property
    def num_shards(self) -> int:
        """Over how many devices ZeRO shards each leaf: the product of the sizes of its axes."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes)


def choose_spec(shape: tuple[int, ...], sizes: Mapping[str, int], read: Read | None = None, *,
                tiled: bool = False) -> P:
    """The storage spec of a leaf over mesh axes of `sizes`: in as many parts as its dims allow.

    Never a dim over which a loop of the model's runs: each slice would lie on one device. Then the fewest dims; on a
    TPU (`tiled`) shards that fill tiles, since others are padded to be scattered, and a dim for each axis.
    """
    stacked = () if read is None else read.stacked
    entries = _choose_dims(shape, tuple(item for item in sizes.items() if item[1] > 1), stacked, tiled)
    return P(*[None if not entry else entry[0] if len(entry) == 1 else entry for entry in entries])


@functools.cache
def _choose_dims(shape: tuple[int, ...], sizes: tuple[tuple[str, int], ...], stacked: tuple[int, ...],
                 tiled: bool) -> tuple[tuple[str, ...], ...]:
    """For each dim the axes that split it."""
    dims = [dim for dim, size in enumerate(shape) if size and dim not in stacked]

    def parts(choice: tuple[int | None, ...], dim: int) -> int:
        return math.prod(size for (_, size), chosen in zip(sizes, choice, strict=True) if chosen == dim)

    def rank(choice: tuple[int | None, ...]) -> tuple[Any, ...]:
        used = sorted({dim for dim in choice if dim is not None})
        ways = {dim: parts(choice, dim) for dim in used}
        ragged = sum(not fills_tiles(shape[dim] // way) if tiled
                     else shape[dim] // way % 16 != 0 for dim, way in ways.items())
        shards = math.prod(parts(choice, dim) for dim in used)
        cost = (ragged, -len(used)) if tiled else (len(used), ragged)
        return -shards, *cost, [-1 if dim is None else dim for dim in choice]

    fitting = (choice for choice in itertools.product([None, *dims], repeat=len(sizes))
               if all(shape[dim] % parts(choice, dim) == 0 for dim in dims))
    best = min(fitting, key=rank)
    return tuple(tuple(name for (name, _), chosen in zip(sizes, best, strict=True) if chosen == dim)
                 for dim in range(len(shape)))


def plan_layout(*, params: Any, frozen: Any, variables: Any, guard: Any, rng: Any,
                optimizer: optax.GradientTransformation, stage: Stage, mesh: Mesh, axes: tuple[str, ...],
                precision: Precision, reads: Mapping[str, Read], ema: bool, reduce_at_use: bool) -> Layout:
    """The layout of a state from the abstract `params` (in their stored dtype), `frozen` ones, `variables` and so on.

    reduce_at_use: whether reading a parameter reduces its gradient, as against after the last microbatch.
    """
    sizes, tiled = {axis: mesh.shape[axis] for axis in axes}, on_torus(mesh)

    def choose(leaf: Any, read: Read | None = None) -> P:
        return choose_spec(leaf.shape, sizes, read, tiled=tiled)

    def put(leaf: Any, spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    def whole(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: put(leaf, P()), tree)

    def spread(tree: Any) -> Any:
        return map_named(lambda name, leaf: choose(leaf, reads.get(name)), tree)

    def unspread(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: P(*[None] * leaf.ndim), tree)

    def as_read(name: str, leaf: Any) -> jax.ShapeDtypeStruct:
        return leaf.update(dtype=precision.read_dtype(name, leaf.dtype))

    sharded, unsharded = spread(params), unspread(params)
    copied = not stage.shards_params and any(
        leaf.dtype != as_read(name, leaf).dtype for name, leaf in named_leaves(params))
    stored = sharded if stage.shards_params or (copied and stage.shards_optimizer) else unsharded
    weights = map_named(lambda name, leaf: put(as_read(name, leaf), P(*[None] * leaf.ndim)), params) if copied else None
    reduced = sharded if stage.shards_optimizer else unsharded
    frozen = map_named(as_read, frozen)
    kept = spread(frozen) if stage.shards_params else unspread(frozen)

    owners = dict(named_leaves(jax.tree.map(put, params, sharded)))

    def place_moment(name: str, leaf: Any) -> Any:
        """As the parameter whose name ends the moment's, also where many are stacked; by its own shape elsewhere."""
        if not stage.shards_optimizer:
            return put(leaf, P(*[None] * leaf.ndim))
        if OWNED in name.split("/"):
            return put(leaf, P(axes))
        owner = owners.get(ending(name, owners))
        if owner is None or leaf.shape[max(0, extra := leaf.ndim - owner.ndim):] != owner.shape:
            return put(leaf, choose(leaf))
        return put(leaf, P(*[None] * extra, *owner.sharding.spec))

    opt_state = map_named(place_moment, jax.eval_shape(optimizer.init, params))

    def use(name: str, leaf: Any, stored: P, reduced: P | None) -> Use | None:
        dtype = precision.read_dtype(name, leaf.dtype)
        if not stage.shards_optimizer and precision.reduce in (None, dtype):
            return None  # the partitioner all-reduces by itself
        return Use(mesh, stored if stage.shards_params else P(*[None] * leaf.ndim),
                   reduced if reduce_at_use else None, dtype, precision.reduce or dtype)

    def use_frozen(leaf: Any, stored: P) -> Use | None:
        return Use(mesh, stored, None, leaf.dtype, leaf.dtype) if stage.shards_params else None

    return Layout(
        mesh=mesh, axes=axes, stage=stage, reads=reads,
        state=ZeroState(
            step=put(jax.ShapeDtypeStruct((), jnp.int32), P()), params=jax.tree.map(put, params, stored),
            weights=weights, frozen=jax.tree.map(put, frozen, kept), opt_state=opt_state, variables=whole(variables),
            ema=jax.tree.map(put, params, reduced) if ema else None, guard=whole(guard), rng=put(rng, P())),
        gradients=jax.tree.map(lambda spec: NamedSharding(mesh, spec), reduced,
                               is_leaf=lambda leaf: isinstance(leaf, P)),
        uses=merge(map_named(use, params, stored, reduced), jax.tree.map(use_frozen, frozen, kept)))
