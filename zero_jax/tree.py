"""Pytrees by path: names of leaves and their bytes."""

import math
from collections.abc import Callable, Container
from typing import Any

import jax
import jax.numpy as jnp

from zero_jax.errors import UsageError


def path_name(path: tuple[Any, ...]) -> str:
    """A key path as `blocks/attention/kernel`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def map_named(fun: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """`jax.tree.map` whose function takes the leaf's name first."""
    return jax.tree_util.tree_map_with_path(lambda path, *leaves: fun(path_name(path), *leaves), tree, *rest)


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """The leaves of `tree` with their names, in tree order."""
    return [(path_name(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def check_are_dicts(params: Any) -> None:
    """Raises ValueError for a parameter that is a list, a tuple or another pytree than dicts of arrays."""
    for path, _ in jax.tree_util.tree_leaves_with_path(params):
        at = next((i for i, entry in enumerate(path) if not isinstance(entry, jax.tree_util.DictKey)), None)
        if at is not None:
            raise UsageError(f"The parameter {path_name(path[:at])} is a list, a tuple or a dataclass: make it an "
                             "array, or a dict of arrays.")


def split_named(tree: dict[Any, Any], chosen: Callable[[str, Any], bool]) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """Two dict trees: the leaves of `tree` for which `chosen(name, leaf)`, and the others; `merge` is the inverse."""
    halves: tuple[dict[Any, Any], dict[Any, Any]] = ({}, {})
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        half = halves[0] if chosen(path_name(path), leaf) else halves[1]
        for entry in path[:-1]:
            half = half.setdefault(entry.key, {})
        half[path[-1].key] = leaf
    return halves


def merge(left: dict[Any, Any], right: dict[Any, Any]) -> dict[Any, Any]:
    """One dict tree with the leaves of both, which share none."""
    both = left.keys() & right.keys()
    return {**left, **right, **{key: merge(left[key], right[key]) for key in both}}


def ending(name: str, known: Container[str]) -> str:
    """The longest end of `name` that is in `known`: of an optimizer's moment, the parameter. Empty if there is none.

    >>> ending("opt_state/0/mu/dense/kernel", {"kernel", "dense/kernel"})
    'dense/kernel'
    """
    parts = name.split("/")
    return next((end for start in range(len(parts)) if (end := "/".join(parts[start:])) in known), "")


def leaf_bytes(shape: tuple[int, ...], dtype: Any) -> int:
    """Bytes of an array of `shape` and `dtype`; a PRNG key counts its words."""
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        words = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), dtype))
        return math.prod(shape) * words.size * words.dtype.itemsize
    return math.prod(shape) * jnp.dtype(dtype).itemsize


def cast_floating(tree: Any, dtype: Any) -> Any:
    """`tree` with its floating leaves as `dtype`; None leaves every leaf as it is."""
    if dtype is None:
        return tree
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, tree)


def with_dtypes_of(new: Any, old: Any) -> Any:
    """`new` with the dtypes of `old`: a state keeps its dtypes from step to step, whatever a step computes in."""
    return jax.tree.map(lambda leaf, like: leaf if is_key(like) else leaf.astype(like.dtype), new, old)


def is_key(leaf: Any) -> bool:
    """Whether an array, abstract or not, is of typed PRNG keys."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def as_numbers(leaf: Any) -> Any:
    """An array as it is; of typed keys their words."""
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def key_impl(key: jax.ShapeDtypeStruct) -> Any:
    """The implementation of an abstract typed key, as `jax.random.wrap_key_data` takes it."""
    implementations: list[Any] = []

    def trace(key: jax.Array) -> jax.Array:
        implementations.append(jax.random.key_impl(key))
        return key

    jax.eval_shape(trace, key)
    return implementations[0]
