"""Where every leaf of the state lies: a pure function of shapes, stage and mesh."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zero_jax.choose import Split, choose_spec, parts_of
from zero_jax.divide import divide
from zero_jax.elementwise import Home, on_stored
from zero_jax.gather import Use, used
from zero_jax.mesh import TENSOR, on_torus
from zero_jax.precision import Precision
from zero_jax.reads import Read
from zero_jax.stages import Stage
from zero_jax.state import ZeroState
from zero_jax.transform import takes_value
from zero_jax.tree import leaf_bytes, map_named, merge, named_leaves
from zero_jax.view import View, natural

UPDATE_SCOPE = "zero_update"
"""In the op_name of all that the optimizer computes."""


@dataclasses.dataclass(frozen=True)
class Placement:
    """One leaf of the state: what it is, where it lies, and what it costs each device.

    shape and bytes: of the leaf itself. stored: its shape with dims merged or padded, which `spec` divides. padding:
    bytes of that, on all devices that hold one copy together.
    """

    name: str
    shape: tuple[int, ...]
    stored: tuple[int, ...]
    dtype: str
    spec: P
    bytes: int
    padding: int
    device_bytes: int
    note: str

    @property
    def stored_bytes(self) -> int:
        """Bytes of the leaf with its padding."""
        return self.bytes + self.padding


@dataclasses.dataclass(frozen=True)
class Layout:
    """The storage layout of a train step's state.

    state: a `ZeroState` of `jax.ShapeDtypeStruct`s as they are stored, each with its sharding. views: a `View` for each
    of its leaves, which knows the true shape. gradients: a `NamedSharding` for each parameter's gradient as the
    optimizer takes it. uses: for each parameter how the model reads it, a `gather.Use` or None (as it is). reads: what
    tracing the model told of each parameter.
    """

    mesh: Mesh
    axes: tuple[str, ...]
    stage: Stage
    state: ZeroState
    views: ZeroState
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
        for (name, leaf), view in zip(named_leaves(self.state), jax.tree.leaves(self.views), strict=True):
            shard, size = leaf.sharding.shard_shape(leaf.shape), leaf_bytes(view.shape, leaf.dtype)
            rows.append(Placement(
                name, view.shape, leaf.shape, str(leaf.dtype), leaf.sharding.spec, size,
                leaf_bytes(leaf.shape, leaf.dtype) - size, leaf_bytes(shard, leaf.dtype),
                self._note(name, leaf, view)))
        return rows

    def replicated(self) -> list[Placement]:
        """The leaves that this stage should shard over the ZeRO axes but cannot; scalars are not counted."""
        return [placement for placement in self.placements() if placement.note.startswith("replicated")]

    def describe(self) -> str:
        """The layout as text: a line for each leaf, then what stays whole and what is gathered on entry."""
        rows = self.placements()
        total, held = sum(row.bytes for row in rows), self.device_bytes
        padding = sum(row.padding for row in rows)
        lines = [
            f"stage {self.stage.number} ({self.stage.name}) on {dict(self.mesh.shape)}: {total:,} bytes of state, "
            f"{held:,} on each device" + (f"; {padding:,} bytes of padding, {padding / total:.3%}" if padding else "")]
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

    def _note(self, name: str, leaf: Any, view: View) -> str:
        kind = name.split("/")[0]
        wanted = {"params": self.stage.shards_params or self.state.weights is not None and self.stage.shards_optimizer,
                  "opt_state": self.stage.shards_optimizer, "ema": self.stage.shards_optimizer,
                  "frozen": self.stage.shards_params, "variables": self.stage.shards_params}.get(kind, False)
        if not view.natural:
            return _padded_note(view)
        if not wanted or math.prod(leaf.shape) <= 1:
            return ""
        parts = parts_of(leaf.sharding.spec, {axis: self.mesh.shape[axis] for axis in self.axes})
        if parts == self.num_shards:
            return ""
        if kind == "variables":
            return "replicated: no parameter"
        copies = f" {self.num_shards // parts} times" if parts > 1 else ""
        return (f"replicated{copies}: no dims of {leaf.shape} that no loop runs over divide by {self.num_shards}, and "
                "padding them is not worth its while")

    def load(self, state: ZeroState) -> ZeroState:
        """`state` in its true shapes, each leaf in as many parts as its dims allow; `store` is the inverse."""
        return jax.tree.map(self._load, self.views, state)

    def _load(self, view: View, leaf: Any) -> Any:
        if view.natural:
            return leaf
        spec = choose_spec(view.shape, {axis: self.mesh.shape[axis] for axis in self.axes})
        return jax.jit(view.load, out_shardings=NamedSharding(self.mesh, spec))(leaf)

    def store(self, state: ZeroState) -> ZeroState:
        """`state`, of true shapes, as a step takes it."""
        def put(view: View, like: Any, leaf: Any) -> Any:
            return jax.jit(view.store, out_shardings=like.sharding)(leaf)

        return jax.tree.map(put, self.views, self.state, state)

    def init(self, optimizer: Any, params: Any) -> Any:
        """`optimizer.init(params)`, of parameters as they are stored; traceable."""
        homes = self._homes()
        if homes is None:
            return optimizer.init(params)
        param_homes, state_homes = homes
        return on_stored(optimizer.init, (param_homes,), state_homes)(params)

    @jax.named_scope(UPDATE_SCOPE)
    def update(self, optimizer: Any, grads: Any, opt_state: Any, params: Any, **extra: Any) -> tuple[Any, Any]:
        """`optimizer.update(grads, opt_state, params, **extra)`, of trees as they are stored; traceable."""
        homes = self._homes()
        if homes is None:
            return optimizer.update(grads, opt_state, params, **extra)
        param_homes, state_homes = homes
        whole = jax.tree.map(lambda value: Home(natural(jnp.shape(value))), extra)

        def update(grads: Any, opt_state: Any, params: Any, extra: Any) -> tuple[Any, Any]:
            return optimizer.update(grads, opt_state, params, **extra)

        return on_stored(update, (param_homes, state_homes, param_homes, whole), (param_homes, state_homes))(
            grads, opt_state, params, extra)

    def _homes(self) -> tuple[Any, Any] | None:
        """Homes of the gradients and of the optimizer's state; None where all is stored as it is."""
        views = self.views
        if all(view.natural for view in jax.tree.leaves((views.params, views.opt_state))):
            return None
        return (jax.tree.map(Home, views.params, self.gradients),
                jax.tree.map(lambda view, leaf: Home(view, leaf.sharding), views.opt_state, self.state.opt_state))

    @property
    def num_params(self) -> int:
        """Elements of all parameters, without padding."""
        return sum(math.prod(view.shape) for view in jax.tree.leaves(self.views.params))

    @property
    def model_ways(self) -> int:
        """Over how many devices tensor parallelism splits the model."""
        return self.mesh.shape.get(TENSOR, 1)

    @property
    def num_shards(self) -> int:
        """Over how many devices ZeRO shards each leaf: the product of the sizes of its axes."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes)


def plan_layout(*, params: Any, variables: Any, rng: Any, optimizer: optax.GradientTransformation, stage: Stage,
                mesh: Mesh, axes: tuple[str, ...], precision: Precision, reads: Mapping[str, Read],
                frozen: Any = None, guard: Any = None, ema: bool = False, reduce_at_use: bool = True,
                tensor: Mapping[str, P] | None = None, secondary: tuple[str, ...] = ()) -> Layout:
    """The layout of a state from the abstract `params` (in their stored dtype), `variables` and key.

    frozen: abstract parameters that are not trained. guard: an abstract `GuardState`. reduce_at_use: whether reading a
    parameter reduces its gradient, as against after the last microbatch. tensor: specs of the parameters that tensor
    parallelism splits, by name. secondary: axes among which backward gathers what forward gathered over the others.
    """
    # The secondary axes are the major ones: what the others gather is then one block of each of theirs.
    sizes = {axis: mesh.shape[axis] for axis in sorted(axes, key=lambda axis: axis not in secondary)}
    tiled, tensor = on_torus(mesh), tensor or {}
    splits = {name: Split(tuple(spec).index(TENSOR), mesh.shape[TENSOR]) for name, spec in tensor.items()}

    def put(leaf: Any, spec: P, view: View) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(view.stored, leaf.dtype, sharding=NamedSharding(mesh, spec))

    def whole(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: put(leaf, P(), natural(leaf.shape)), tree)

    def as_is(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: natural(leaf.shape), tree)

    def unspread(specs: Any) -> Any:
        return jax.tree.map(used, specs, is_leaf=lambda leaf: isinstance(leaf, P))

    def as_read(name: str, leaf: Any) -> jax.ShapeDtypeStruct:
        return leaf.update(dtype=precision.read_dtype(name, leaf.dtype))

    opt_state = jax.eval_shape(optimizer.init, params)
    held = sizes if stage.shards_optimizer else {}
    views, sharded, state_views, state_specs = divide(params, optimizer, held, reads, tiled=tiled, splits=splits)
    copied = not stage.shards_params and any(
        leaf.dtype != as_read(name, leaf).dtype for name, leaf in named_leaves(params))
    stored = sharded if stage.shards_params or (copied and stage.shards_optimizer) else unspread(sharded)
    weights = jax.tree.map(put, map_named(as_read, params), unspread(sharded), views) if copied else None

    frozen = map_named(as_read, frozen or {})
    # An optimizer of nothing: all that is done with them is to read them.
    kept_views, kept, _, _ = divide(frozen, takes_value(optax.identity()), sizes if stage.shards_params else {}, reads,
                                    tiled=tiled, splits=splits)

    def use(name: str, leaf: Any, stored: P, reduced: P, view: View) -> Use | None:
        dtype = precision.read_dtype(name, leaf.dtype)
        if not stage.shards_optimizer and precision.reduce in (None, dtype) and name not in tensor:
            return None  # the partitioner all-reduces by itself
        return Use(mesh, stored if stage.shards_params else used(stored),
                   reduced if reduce_at_use else None, dtype, precision.reduce or dtype, view,
                   secondary if stage.shards_params else ())

    def use_frozen(name: str, leaf: Any, stored: P, view: View) -> Use | None:
        needed = stage.shards_params or name in tensor
        return Use(mesh, stored, None, leaf.dtype, leaf.dtype, view, secondary) if needed else None

    step = jax.ShapeDtypeStruct((), jnp.int32)
    return Layout(
        mesh=mesh, axes=axes, stage=stage, reads=reads,
        state=ZeroState(
            step=whole(step), params=jax.tree.map(put, params, stored, views), weights=weights,
            frozen=jax.tree.map(put, frozen, kept, kept_views),
            opt_state=jax.tree.map(put, opt_state, state_specs, state_views), variables=whole(variables),
            ema=jax.tree.map(put, params, sharded, views) if ema else None, guard=whole(guard), rng=whole(rng)),
        views=ZeroState(
            step=as_is(step), params=views, weights=views if copied else None, frozen=kept_views,
            opt_state=state_views, variables=as_is(variables), ema=views if ema else None, guard=as_is(guard),
            rng=as_is(rng)),
        gradients=jax.tree.map(lambda spec: NamedSharding(mesh, spec), sharded,
                               is_leaf=lambda leaf: isinstance(leaf, P)),
        uses=merge(map_named(use, params, stored, sharded, views),
                   map_named(use_frozen, frozen, kept, kept_views)))


def _padded_note(view: View) -> str:
    """What is merged and padded of a leaf, and what that costs."""
    told = []
    for dim, (group, size) in enumerate(zip(view.dims, view.stored, strict=True)):
        if len(group) != 1:
            told.append(" x ".join(map(str, group)) + " merged")
        if math.prod(group) != size:
            told.append(f"dim {dim} padded: {math.prod(group)} to {size}")
    return ", ".join(told) + (f", {view.padding / math.prod(view.shape):.2%}" if view.padding else "")
