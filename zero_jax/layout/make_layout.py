"""Makes a layout: a pure function of shapes, stage, precision and mesh."""

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zero_jax import combinations
from zero_jax.errors import UsageError
from zero_jax.gather.gather import ParamUse, compute_spec
from zero_jax.gather.quantized.leaves import Leaf, quantized_leaves, with_products
from zero_jax.gather.quantized.policy import Codes
from zero_jax.gather.quantized.products import ProductUse, product_names
from zero_jax.layout.layout import Layout
from zero_jax.layout.stored_optimizer import StoredPlacement, needs_shape
from zero_jax.precision import Precision
from zero_jax.sharding.mesh_axes import MeshAxes
from zero_jax.sharding.param_access import ParamAccess, Tiles
from zero_jax.sharding.partition import (
    BLOCK_SCALES,
    OWNED,
    SMALL_LEAF,
    SMALL_SHARE,
    Split,
    choose_spec,
    choose_stored_shape,
    parts_of,
)
from zero_jax.sharding.stored_shape import StoredShape, identity_shape
from zero_jax.stages import Stage
from zero_jax.state import ZeroState
from zero_jax.tree import ending, leaf_bytes, map_named, merge, named_leaves
from zero_jax.typing import AxisNames, Pytree, Spec


def partition_state(params: Any, optimizer: Any, sizes: Mapping[str, int],
                    reads: Mapping[str, ParamAccess], *, tiled: bool, splits: Mapping[str, Split]
                    ) -> tuple[Any, Any, Any, Any]:
    """How parameters and optimizer state are sharded: stored shapes and specs of the one, then of the other.

    splits: what tensor parallelism splits, by parameter. Dims are merged only where all that the optimizer does with
    the leaf is elementwise.
    """
    state, axes = jax.eval_shape(optimizer.init, params), tuple(sizes)
    shapes = {name: leaf.shape for name, leaf in named_leaves(params)}
    blocked = {ending(name, shapes) for name, _ in named_leaves(state) if BLOCK_SCALES in name.split("/")}
    for name in blocked & splits.keys():
        if splits[name].dim == len(shapes[name]) - 1:
            raise UsageError(f"The parameter {name} has moments with a scale for each block of its last dim, which "
                             f"{splits[name].axis!r} splits: give narrow_moments(optimizer, 16) instead of 8.")
    reads = {**reads, **{name: dataclasses.replace(read, stacked=(*read.stacked, len(shapes[name]) - 1))
                         for name in blocked for read in (reads.get(name, ParamAccess()),)}}
    small = _small(params, sizes, reads, tiled, splits)

    def choose(name: str, leaf: Any) -> tuple[StoredShape, P]:
        read, split = reads.get(name), splits.get(name)
        if name in small:
            return identity_shape(leaf.shape), choose_spec(leaf.shape, sizes, read, tiled=tiled, split=split)
        stored_shape, spec = choose_stored_shape(leaf.shape, sizes, read, tiled=tiled, split=split)
        if stored_shape in unmergeable:
            return choose_stored_shape(leaf.shape, sizes, read, tiled=tiled, merge=False, split=split)
        return stored_shape, spec

    def place(name: str, leaf: Any) -> tuple[StoredShape, P]:
        """A moment as the parameter whose name ends its own, also where many are stacked; others by their own shape."""
        if OWNED in name.split("/"):
            return identity_shape(leaf.shape), P(axes)
        owner = ending(name, shapes)
        if not owner or not jnp.issubdtype(leaf.dtype, jnp.number):
            return identity_shape(leaf.shape), choose_spec(leaf.shape, sizes, tiled=tiled)
        if BLOCK_SCALES in name.split("/"):  # sharded as the parameter, whose last dim it has a few numbers for
            (param_shape, spec), number = chosen_by_name[owner], leaf.shape[-1]
            return (StoredShape((*param_shape.dims[:-1], (number,)), (*param_shape.stored[:-1], number)),
                    P(*spec[:-1]))
        extra = len(leaf.shape) - len(shapes[owner])
        if extra < 0 or leaf.shape[extra:] != shapes[owner]:
            return choose_stored_shape(leaf.shape, sizes, tiled=tiled, merge=False)  # adafactor's factors, say
        (param_shape, spec), stack = chosen_by_name[owner], leaf.shape[:extra]
        return StoredShape((*((size,) for size in stack), *param_shape.dims),
                           (*stack, *param_shape.stored)), P(*[None] * extra, *spec)

    def update(grads: Any, state: Any, params: Any, value: Any) -> Any:
        return optimizer.init(params), optimizer.update(grads, state, params, value=value)

    def unzipped(tree: Any, chosen: Iterable[tuple[StoredShape, P]]) -> tuple[Any, Any]:
        pairs, structure = list(chosen), jax.tree.structure(tree)
        return (jax.tree.unflatten(structure, [stored_shape for stored_shape, _ in pairs]),
                jax.tree.unflatten(structure, [spec for _, spec in pairs]))

    unmergeable: set[StoredShape] = set()
    while True:
        chosen_by_name = {name: choose(name, leaf) for name, leaf in named_leaves(params)}
        param_shapes, specs = unzipped(params, chosen_by_name.values())
        state_shapes, state_specs = unzipped(state, [place(name, leaf) for name, leaf in named_leaves(state)])
        if not any(stored_shape.merges for stored_shape in jax.tree.leaves(param_shapes)):
            return param_shapes, specs, state_shapes, state_specs

        placements, state_placements = (
            jax.tree.map(StoredPlacement, param_shapes), jax.tree.map(StoredPlacement, state_shapes))
        scalar = jax.ShapeDtypeStruct((), jnp.float32)

        def stored(leaf: Any, stored_shape: StoredShape) -> Any:
            return leaf.update(shape=stored_shape.stored)

        like = jax.tree.map(stored, params, param_shapes)
        needing_shape = needs_shape(
            update, (placements, state_placements, placements, StoredPlacement(identity_shape(()))),
            (state_placements, (placements, state_placements)),
            like, jax.tree.map(stored, state, state_shapes), like, scalar)
        if not (merged := {stored_shape for stored_shape in needing_shape if stored_shape.merges}):
            return param_shapes, specs, state_shapes, state_specs
        unmergeable |= merged


def _small(params: Any, sizes: Mapping[str, int], reads: Mapping[str, ParamAccess], tiled: bool,
           splits: Mapping[str, Split]) -> set[str]:
    """Names of the parameters that do not divide and stay replicated: the smallest, all of one size or none."""
    num_shards, leaves = math.prod(sizes.values()), named_leaves(params)
    bytes_left = SMALL_SHARE * sum(leaf_bytes(leaf.shape, leaf.dtype) for _, leaf in leaves) / num_shards
    by_size: dict[int, list[str]] = {}
    for name, leaf in leaves:
        spec = choose_spec(leaf.shape, sizes, reads.get(name), tiled=tiled, split=splits.get(name))
        if parts_of(spec, sizes) < num_shards:
            by_size.setdefault(leaf_bytes(leaf.shape, leaf.dtype), []).append(name)
    small: set[str] = set()
    for size, names in sorted(by_size.items()):
        bytes_left -= size * len(names)
        if size > SMALL_LEAF or bytes_left < 0:
            break
        small.update(names)
    return small


@dataclasses.dataclass(frozen=True)
class LayoutPolicy:
    """What decides a layout beside shapes and mesh.

    Attributes:
        stage: what is sharded.
        precision: in which dtype the model reads parameters, and gradients are reduced.
        reduce_at_use: whether backward reduces a gradient where the parameter is read; False: the sum of the
            microbatches is reduced after the last of them.
        hpz_axes: ZeRO axes among which backward gathers what forward gathered over the others (ZeRO++'s hpZ).
        codes: in which formats weights and gradients are sent; None: as they are.
        compute_shards: whether stage 3, too, stores a copy in the dtype of computation, sharded as the master weights.
    """

    stage: Stage
    precision: Precision = Precision()
    reduce_at_use: bool = True
    hpz_axes: AxisNames = ()
    codes: Codes | None = None
    compute_shards: bool = False


def make_layout(state: ZeroState, axes: MeshAxes, policy: LayoutPolicy, *,
                optimizer: optax.GradientTransformationExtraArgs, reads: Mapping[str, ParamAccess],
                tensor_specs: Mapping[str, Spec] | None = None) -> Layout:
    """The layout in which `state` is stored.

    Args:
      state: `jax.ShapeDtypeStruct`s of true shapes, parameters in the dtype in which they are stored. `weights` and
        `opt_state` are not read: they follow from the parameters. `ema`: of the same shapes, or None for no average.
      axes: the mesh.
      policy: stage, precision and so on.
      optimizer: whose state is stored too.
      reads: how the model reads each parameter, by name.
      tensor_specs: specs of the parameters that tensor parallelism splits, by name.
    """
    mesh, stage, precision, tensor_specs = axes.mesh, policy.stage, policy.precision, tensor_specs or {}
    # The hpZ axes are the major ones: what the others gather is then one block of each of theirs.
    sizes = {name: axes.size(name) for name in sorted(axes.zero, key=lambda name: name not in policy.hpz_axes)}
    splits = {name: Split(tuple(spec).index(axes.tensor), axes.tensor_size, axes.tensor)
              for name, spec in tensor_specs.items()}

    def put(leaf: jax.ShapeDtypeStruct, spec: Spec, stored_shape: StoredShape) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(stored_shape.stored, leaf.dtype, sharding=NamedSharding(mesh, spec))

    def replicated(tree: Pytree) -> Pytree:
        return jax.tree.map(lambda leaf: put(leaf, P(), identity_shape(leaf.shape)), tree)

    def identity_shapes(tree: Pytree) -> Pytree:
        return jax.tree.map(lambda leaf: identity_shape(leaf.shape), tree)

    def as_read(name: str, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return leaf.update(dtype=precision.read_dtype(name, leaf.dtype))

    # First, the parameters and the optimizer's state.
    params = state.params
    param_shapes, sharded_specs, opt_shapes, opt_specs = partition_state(
        params, optimizer, sizes if stage.shards_optimizer else {}, reads, tiled=axes.is_tpu, splits=splits)
    has_weights = (policy.compute_shards or not stage.shards_params) and any(
        leaf.dtype != as_read(name, leaf).dtype for name, leaf in named_leaves(params))
    unsharded_specs = jax.tree.map(lambda spec: compute_spec(spec, axes), sharded_specs)
    shards_master = stage.shards_params or has_weights and stage.shards_optimizer
    param_specs = sharded_specs if shards_master else unsharded_specs
    weights = jax.tree.map(put, map_named(as_read, params), sharded_specs if stage.shards_params else unsharded_specs,
                           param_shapes) if has_weights else None

    # Second, the frozen parameters: an optimizer of nothing, since all that is done with them is to read them.
    frozen = map_named(as_read, state.frozen or {})
    frozen_shapes, frozen_specs, _, _ = partition_state(
        frozen, optax.with_extra_args_support(optax.identity()), sizes if stage.shards_params else {}, reads,
        tiled=axes.is_tpu, splits=splits)

    # Third, what of either is sent as codes.
    def leaf(name: str, leaf: jax.ShapeDtypeStruct, spec: Spec, stored_shape: StoredShape, trained: bool) -> Leaf:
        return Leaf(stored_shape, spec, as_read(name, leaf).dtype, reads[name],
                    gathered=trained or stage.shards_params, trained=trained)

    quantized = None
    leaves = dict(named_leaves(merge(
        map_named(functools.partial(leaf, trained=True), params, sharded_specs, param_shapes),
        map_named(functools.partial(leaf, trained=False), frozen, frozen_specs, frozen_shapes))))
    if policy.codes is not None:
        combinations.check({"communication.weights": policy.codes.weights, "stage": stage.number,
                            "copy": has_weights})
        quantized = quantized_leaves(policy.codes, leaves, axes, policy.hpz_axes)
    products = product_names(precision.fp8, reads, dict(named_leaves(merge(params, frozen))))
    # In what stages 1 and 2 gather without a copy rounding would add up.
    quantized = with_products(quantized, products, leaves, axes, policy.hpz_axes,
                              encoded=stage.shards_params or has_weights)
    at_use = quantized.gathers if quantized is not None and stage.shards_params else {}

    # Fourth, how the model reads them.
    def tiles_of(name: str, stored_shape: StoredShape) -> Tiles | None:
        tiles = reads[name].tiles if name in reads else None
        if tiles is None:
            return None
        dim = stored_shape.identity_dim([tiles.dim])
        assert dim is not None, f"{name}: the dim of the tiles is stored as it is"
        return Tiles(name, dim, tiles.count)

    def product_of(name: str) -> ProductUse | None:
        encoded = quantized is not None and name in quantized.gathers
        return ProductUse(name, encoded) if name in products else None

    def use(name: str, leaf: jax.ShapeDtypeStruct, stored: Spec, stored_shape: StoredShape,
            reduced: Spec | None = None) -> ParamUse | None:
        """reduced: the spec of the gradient; None of a frozen parameter."""
        dtype = precision.read_dtype(name, leaf.dtype)
        reduce = dtype if reduced is None else precision.reduce_dtype(name, leaf.dtype)
        is_sharded = stage.shards_params if reduced is None else stage.shards_optimizer
        if not is_sharded and reduce == dtype and name not in tensor_specs and name not in products:
            return None  # the partitioner all-reduces by itself
        return ParamUse(axes, stored if stage.shards_params else compute_spec(stored, axes),
                        reduced if policy.reduce_at_use else None, dtype, reduce, stored_shape,
                        policy.hpz_axes if stage.shards_params else (), at_use.get(name),
                        quantized is not None and name in quantized.gradients, tiles_of(name, stored_shape),
                        fp8=product_of(name))

    has_ema = state.ema is not None
    return Layout(
        axes=axes, stage=stage, reads=reads,
        state=ZeroState(
            step=replicated(state.step), params=jax.tree.map(put, params, param_specs, param_shapes), weights=weights,
            frozen=jax.tree.map(put, frozen, frozen_specs, frozen_shapes),
            opt_state=jax.tree.map(put, jax.eval_shape(optimizer.init, params), opt_specs, opt_shapes),
            variables=replicated(state.variables),
            ema=jax.tree.map(put, state.ema, sharded_specs, param_shapes) if has_ema else None,
            guard=replicated(state.guard), rng=replicated(state.rng)),
        stored_shapes=ZeroState(
            step=identity_shapes(state.step), params=param_shapes, weights=param_shapes if has_weights else None,
            frozen=frozen_shapes, opt_state=opt_shapes, variables=identity_shapes(state.variables),
            ema=param_shapes if has_ema else None, guard=identity_shapes(state.guard),
            rng=identity_shapes(state.rng)),
        gradients=jax.tree.map(lambda spec: NamedSharding(mesh, spec), sharded_specs),
        uses=merge(map_named(use, params, param_specs, param_shapes, sharded_specs),
                   map_named(use, frozen, frozen_specs, frozen_shapes)),
        quantized=quantized)
