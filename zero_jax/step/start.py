"""A state from what a user has: parameters, variables and optimizer states, each leaf put where it is stored."""

import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.lax import with_sharding_constraint as constrain

from zero_jax.errors import UsageError, few
from zero_jax.layout.compute_params import gather_compute_params
from zero_jax.layout.layout import Layout
from zero_jax.layout.stored_optimizer import init_stored
from zero_jax.offload.offload import as_placed
from zero_jax.sharding.auto_axes import on_auto_axes
from zero_jax.sharding.host_arrays import fetch, in_groups
from zero_jax.sharding.shard_reader import UnreadLeaf
from zero_jax.sharding.stored_shape import StoredShape
from zero_jax.state import ZeroState
from zero_jax.step.guard import GuardLogic
from zero_jax.tree import is_key, map_named, merge, named_leaves
from zero_jax.typing import OptState, Params, PRNGKey, Pytree, Variables


def initial_state(
    params: Params, frozen: Params, variables: Variables, *, rng: PRNGKey,
    optimizer: optax.GradientTransformationExtraArgs, layout: Layout, guard: GuardLogic
) -> ZeroState:
    """The state from a model's values, in their true shapes and in whatever dtype the model made them; traceable."""

    def put(stored_shape: StoredShape, leaf: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
        return constrain(stored_shape.store(leaf.astype(like.dtype)), like.sharding)

    params, frozen = strong(jax.tree.map(
        put, (layout.stored_shapes.params, layout.stored_shapes.frozen), (params, frozen),
        (layout.state.params, layout.state.frozen)))
    return ZeroState(
        step=jnp.zeros((), jnp.int32), params=params, weights=gather_compute_params(params, layout), frozen=frozen,
        opt_state=strong(init_stored(layout, optimizer, params)), variables=strong(variables),
        ema=average_of(params, layout), guard=guard.init(), rng=rng)


def with_new_params(
    state: ZeroState, params: Params, *, optimizer: optax.GradientTransformationExtraArgs, layout: Layout, **fields: Any
) -> ZeroState:
    """`state` before its first step, but from `params`, stored as its own, and with other `fields`.

    Its copies of the parameters, their average and the optimizer's state are deleted and made anew.
    """
    jax.tree.map(lambda leaf: leaf.delete(), (state.weights, state.opt_state, state.ema))

    def derive(params: Params) -> tuple[Params | None, OptState, Params | None]:
        opt_state = strong(init_stored(layout, optimizer, fetch(params)))
        derived = {"opt_state": opt_state, "ema": average_of(fetch(params), layout),
                   "weights": gather_compute_params(fetch(params), layout)}
        derived = as_placed(derived, layout)
        return derived["weights"], derived["opt_state"], derived["ema"]

    like = layout.state.weights, layout.state.opt_state, layout.state.ema
    if layout.host:
        weights, opt_state, ema = in_groups(derive, like)(params)
    else:
        weights, opt_state, ema = jax.jit(derive, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, like))(params)
    return dataclasses.replace(state, params=params, weights=weights, opt_state=opt_state, ema=ema, **fields)


def average_of(params: Params, layout: Layout) -> Params | None:
    """The moving average before the first step; None where the layout has none."""
    like = layout.state.ema
    return None if like is None else jax.tree.map(lambda param, to: jnp.copy(param).astype(to.dtype), params, like)


def strong(tree: Pytree) -> Pytree:
    """`tree` without weak types: a weakly typed leaf would compile the step twice."""
    return jax.tree.map(lambda leaf: jax.lax.convert_element_type(leaf, jnp.asarray(leaf).dtype), tree)


LOG = logging.getLogger("zero_jax")

_FIELDS = ("params", "frozen", "variables")
"""Of a state, what a user may give."""


def with_values(state: ZeroState, given: Mapping[str, Any], *, layout: Layout,
                optimizer: optax.GradientTransformationExtraArgs,
                derive: Callable[..., ZeroState] = with_new_params) -> ZeroState:
    """`state` from `given`: a value for each parameter, and for any of the variables, in their true shapes, by name.

    Names of Linen's collections may begin with `params/`. The copy that the model reads, the average and the
    optimizer's state are made anew; `state`, whose parameters may be abstract, is deleted once everything was checked
    and placed. derive: makes the result, as `with_new_params`.
    """
    short = checked_values(given, layout)
    trees = {field: _put(short, field, layout, state) for field in _FIELDS}
    old = jax.tree.leaves((state.params, state.frozen, state.variables))
    new = {id(leaf) for leaf in jax.tree.leaves(trees)}
    result = derive(
        state, trees["params"], optimizer=optimizer, layout=layout, frozen=trees["frozen"],
        variables=trees["variables"])
    for leaf in old:
        if isinstance(leaf, jax.Array) and id(leaf) not in new:
            leaf.delete()
    return result


def checked_values(given: Mapping[str, Any], layout: Layout) -> dict[str, Any]:
    """`given` by the names that the layout's parameters and variables have; raises ValueError as `with_values`."""
    params, variables = merge(layout.stored_shapes.params, layout.stored_shapes.frozen), layout.stored_shapes.variables
    known = {name for name, _ in [*named_leaves(params), *named_leaves(variables)]}
    short = {name if name in known else name.removeprefix("params/"): value for name, value in given.items()}
    _check_names("params", short, wanted=[name for name, _ in named_leaves(params)], known=known)
    for field in _FIELDS:
        _check_leaves(short, field, layout)
    if missing := [name for name in names_without_streams(layout.state.variables) if name not in short]:
        LOG.warning("What is given has no values for %s, which keep those of the state (in init the model's initial "
                    "ones): give an NNX module or nnx.state(module), or Linen's collections with params.", few(missing))
    return short


def names_without_streams(variables: Pytree) -> list[str]:
    """The names of `variables` that are no part of a random stream of NNX: a key, and a count beside it."""
    leaves = named_leaves(variables)
    keys = {name for name, leaf in leaves if is_key(leaf)}
    return [name for name, _ in leaves if name not in keys and f"{name.removesuffix('count')}key" not in keys]


def with_optimizer_state(state: ZeroState, opt_state: Pytree, number: Any, layout: Layout) -> ZeroState:
    """`state` after `number` steps with the optimizer's `opt_state`, a tree of the same leaves in their true shapes."""
    wanted = [name for name, _ in named_leaves(layout.state.opt_state)]
    given = dict(named_leaves(opt_state))
    _check_names("opt_state", given, wanted=wanted, known={*wanted})
    new = _put(given, "opt_state", layout, state)
    jax.tree.map(lambda leaf: leaf.delete(), state.opt_state)
    step = jax.device_put(jnp.asarray(number, jnp.int32), layout.shardings.step)
    return dataclasses.replace(state, opt_state=new, step=step)


def check_train_state(train_state: Any) -> None:
    """Raises ValueError for what has not the attributes of a Flax `TrainState`."""
    if not all(hasattr(train_state, name) for name in ("step", "params", "opt_state", "replace")):
        raise UsageError(f"train_state is a {type(train_state).__name__}: give a flax.training.train_state.TrainState.")


def as_train_state(state: ZeroState, train_state: Any, layout: Layout) -> Any:
    """`train_state` (a Flax `TrainState`) with the values of `state` in their true shapes."""
    loaded = layout.load(state)
    params = dict(named_leaves(merge(loaded.params, loaded.frozen)))
    moments = dict(named_leaves(loaded.opt_state))
    _check_names("train_state.params", dict(named_leaves(train_state.params)), wanted=[*params], known={*params})
    _check_names("train_state.opt_state", dict(named_leaves(train_state.opt_state)), wanted=[*moments],
                 known={*moments})

    def fill(like: Pytree, found: Mapping[str, Any]) -> Pytree:
        return map_named(lambda name, _: jnp.copy(found[name]), like)

    lasting = dict(named_leaves(loaded.variables))
    others = {}
    for field, tree in vars(train_state).items():
        if isinstance(tree, Mapping) and field not in ("params", "opt_state"):
            of_field = {**lasting, **{name.removeprefix(f"{field}/"): leaf for name, leaf in lasting.items()}}
            others[field] = map_named(lambda name, leaf, found=of_field: jnp.copy(found[name]) if (
                name := name.removesuffix("/value")) in found else leaf, tree)
    return train_state.replace(
        step=jnp.copy(loaded.step), params=fill(train_state.params, params),
        opt_state=fill(train_state.opt_state, moments), **others)


def _put(given: Mapping[str, Any], field: str, layout: Layout, state: ZeroState) -> Pytree:
    """A field of the state with the given leaves where there are some; all shapes are checked before any is placed."""
    _check_leaves(given, field, layout)
    shapes, likes, old = (getattr(tree, field) for tree in (layout.stored_shapes, layout.state, state))
    return map_named(lambda name, stored_shape, like, leaf: leaf if name not in given or _is_kept(field, like) else (
        place(given[name], stored_shape, like)), shapes, likes, old)


def _check_leaves(given: Mapping[str, Any], field: str, layout: Layout) -> None:
    """Raises ValueError for a shape or kind of dtype that is not the field's, and for arrays that were deleted."""
    def check(name: str, stored_shape: StoredShape, like: jax.ShapeDtypeStruct) -> None:
        if name not in given or _is_kept(field, like):
            return
        value = given[name]
        dtype = value.dtype if hasattr(value, "dtype") else np.result_type(value)
        if np.shape(value) != stored_shape.shape:
            raise UsageError(f"{field}: {name} has shape {np.shape(value)}, and the model's has {stored_shape.shape}: "
                             "give the values of a model of these sizes.")
        if dtype != like.dtype and not _convertible(dtype, like.dtype):
            raise UsageError(f"{field}: {name} has dtype {dtype}, and the model's has {like.dtype}: only floating "
                             "dtypes are converted to each other.")
        if isinstance(value, jax.Array) and value.is_deleted():
            raise UsageError(f"{field}: {name} was donated or deleted: give values that are alive.")

    map_named(check, *(getattr(tree, field) for tree in (layout.stored_shapes, layout.state)))


def place(value: Any, stored_shape: StoredShape, like: jax.ShapeDtypeStruct) -> jax.Array:
    """A copy of `value`, of true shape, as it is stored; each device receives its shard alone.

    value: an array, or an `UnreadLeaf`, of which each shard is read by itself.
    """
    if isinstance(value, UnreadLeaf):
        return value.stored(stored_shape, like)
    sharding: Any = like.sharding
    value = on_auto_axes(value, sharding.mesh)
    if isinstance(value, jax.Array) and stored_shape.is_identity:
        # A copy first: device_put with may_alias=False shares memory where a device has what it needs (jax 0.10.2), and
        # the step, to which the state is donated, would delete the user's array.
        value = jnp.copy(value)
        return jax.device_put(value if value.dtype == like.dtype else value.astype(like.dtype), sharding)
    if isinstance(value, jax.Array) and value.sharding.device_set == sharding.device_set:
        store = jax.jit(lambda leaf: stored_shape.store(leaf.astype(like.dtype)), out_shardings=sharding)
        return store(value)
    whole = np.asarray(value)
    if not stored_shape.is_identity:
        # Padding and merging on the host, of one leaf at a time: no device has more than its shard.
        flat = whole.reshape([int(np.prod(group)) for group in stored_shape.dims])
        whole = np.pad(flat, [(0, size - now) for now, size in zip(flat.shape, stored_shape.stored, strict=True)])
    # Copies, since JAX on CPU would share the memory of the user's array, and the step would write to it.
    return jax.make_array_from_callback(
        like.shape, sharding, lambda index: np.array(whole[index], like.dtype, copy=True))


def _check_names(what: str, given: Mapping[str, Any], *, wanted: list[str], known: set[str]) -> None:
    missing, extra = [name for name in wanted if name not in given], [name for name in given if name not in known]
    if missing or extra:
        parts = [f"{how} {len(names)} ({few(names, 4)})"
                 for how, names in (("lacks", missing), ("has in addition", extra)) if names]
        raise UsageError(f"{what} {' and '.join(parts)} of the {len(wanted)} leaves that this step has: give the "
                         "values of a model of this kind, with its names.")


def _convertible(given: Any, stored: Any) -> bool:
    kinds = [jnp.issubdtype(dtype, jnp.floating) for dtype in (given, stored)]
    if any(kinds):
        return all(kinds)
    return jnp.issubdtype(given, jnp.integer) and jnp.issubdtype(stored, jnp.integer)


def _is_kept(field: str, like: jax.ShapeDtypeStruct) -> bool:
    """Whether the state keeps its own leaf: a key that a model draws from, and none of an optimizer's."""
    return field != "opt_state" and is_key(like)
