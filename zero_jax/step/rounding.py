"""Stochastic rounding to bfloat16: up or down at random, so that the mean of many roundings is the value.

With round-to-nearest, an update below half a unit in the last place (2^-9 of the parameter) is lost at every step.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from zero_jax.tree import ending, map_named, named_leaves


def widened(tree: Any) -> Any:
    """`tree` with its bfloat16 leaves as float32."""
    def widen(leaf: Any) -> Any:  # which is a number where an optimizer's init makes one
        return leaf.astype(jnp.float32) if getattr(leaf, "dtype", None) == jnp.bfloat16 else leaf

    return jax.tree.map(widen, tree)


def with_wide_numbers(optimizer: optax.GradientTransformationExtraArgs) -> optax.GradientTransformationExtraArgs:
    """`optimizer` whose init narrows the moments of bfloat16 parameters alone: what has a parameter's name, and dims.

    optax.inject_hyperparams makes its numbers in the dtype of the parameters: a b2 of 0.999 is 1 in bfloat16.
    """
    def init(params: Any) -> Any:
        names = dict(named_leaves(params))
        narrow = dict(named_leaves(jax.eval_shape(optimizer.init, params)))
        return map_named(lambda name, leaf: leaf.astype(narrow[name].dtype) if jnp.ndim(leaf) and ending(name, names)
                         else leaf, optimizer.init(widened(params)))

    return optax.GradientTransformationExtraArgs(init, optimizer.update)


def round_stochastically(tree: Any, like: Any, key: jax.Array) -> Any:
    """The float32 leaves of `tree` that are bfloat16 in `like`, rounded at random by `key`; others as they are."""
    leaves, treedef = jax.tree.flatten(tree)
    return jax.tree.unflatten(treedef, [
        _rounded(leaf, jax.random.fold_in(key, i)) if known.dtype == jnp.bfloat16 else leaf.astype(known.dtype)
        for i, (leaf, known) in enumerate(zip(leaves, jax.tree.leaves(like), strict=True))])


def _rounded(value: jax.Array, key: jax.Array) -> jax.Array:
    # A bfloat16 is the upper half of a float32. What is added to the lower half carries over with the probability of
    # the fraction that it holds; the cut leaves a bfloat16 exactly. Infinities and NaNs are cast as they are.
    bits = jax.lax.bitcast_convert_type(value.astype(jnp.float32), jnp.uint32)
    noise = jax.random.bits(key, value.shape, jnp.uint16).astype(jnp.uint32)
    cut = jax.lax.bitcast_convert_type((bits + noise) & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isfinite(value), cut, value).astype(jnp.bfloat16)
