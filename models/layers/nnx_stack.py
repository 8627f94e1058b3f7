"""The blocks of an NNX model: stacked parameters that a scan runs over, or a list; its tables and dropout."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .kv_cache import Cache


def make_blocks(make: Callable[[nnx.Rngs], nnx.Module], config: Any, rngs: nnx.Rngs) -> Any:
    """`config.num_layers` of what `make` returns: one module with stacked parameters, or an `nnx.List` of them."""
    if not config.scan_layers:
        return nnx.List([make(rngs) for _ in range(config.num_layers)])

    @nnx.split_rngs(splits=config.num_layers)
    @nnx.vmap
    def stack(rngs: nnx.Rngs) -> nnx.Module:
        return make(rngs)

    return stack(rngs)


def embedding(rows: int, config: Any, init: Any, rngs: nnx.Rngs) -> nnx.Embed:
    """A table of so many rows in the dtype of the computation."""
    embed = nnx.Embed(rows, config.width, embedding_init=init, rngs=rngs)
    embed.dtype = config.dtype  # Embed replaces None by float32, which would not follow bf16 parameters
    return embed


def dropout(config: Any, rngs: nnx.Rngs) -> nnx.Dropout:
    """It owns RNG state only where the config has a share of dropout."""
    return nnx.Dropout(config.dropout, rngs=rngs if config.dropout else None)


def run_blocks(blocks: Any, config: Any, x: jax.Array, *others: Any) -> jax.Array:
    """`x` after all blocks, each called as `block(x, *others)`; checkpointed with `config.remat`."""

    def run(x: jax.Array, block: Any, *others: Any) -> jax.Array:
        return block(x, *others)

    if config.remat:
        run = nnx.remat(run, prevent_cse=not config.scan_layers)
    if config.scan_layers:
        return nnx.scan(run, in_axes=(nnx.Carry, 0, *[None] * len(others)), out_axes=nnx.Carry)(x, blocks, *others)
    for block in blocks:
        x = run(x, block, *others)
    return x


def run_cached(blocks: Any, config: Any, x: jax.Array, cache: Any, *others: Any) -> tuple[jax.Array, Any]:
    """(`x` after all blocks, the cache with its tokens), each called as `block(x, *others, cache=...)`.

    cache: a `Cache` whose arrays have a leading dim of the layers where they are stacked, else a list of caches.
    """
    def run(x: jax.Array, block: Any, cache: Any, *others: Any) -> Any:
        return block(x, *others, cache=cache)

    if config.scan_layers:
        return nnx.scan(run, in_axes=(nnx.Carry, 0, 0, *[None] * len(others)), out_axes=(nnx.Carry, 0))(
            x, blocks, cache, *others)
    caches = []
    for block, each in zip(blocks, cache, strict=True):
        x, each = run(x, block, each, *others)
        caches.append(each)
    return x, caches


class Decoder:
    """How an NNX model generates, called as a Linen model with the collections `params` and `cache` is.

    `params` is the module itself, which has `decode(tokens, cache)`, (logits, cache with the tokens).
    """

    def __init__(self, config: Any, *, length: int, num_heads: int, head_dim: int):
        """length: of prompt and new tokens. num_heads, head_dim: of keys and values."""
        self._config, self._shape = config, (length, num_heads, head_dim)

    def apply(self, variables: Any, tokens: jax.Array, *, mutable: Any) -> tuple[jax.Array, Any]:
        """(logits, {"cache": with `tokens`}); without a cache among `variables` from an empty one."""
        module = nnx.clone(variables["params"])  # of this trace, which may be that of a loop
        cache = variables["cache"] if "cache" in variables else self._empty(tokens.shape[0], module)
        logits, cache = module.decode(tokens, cache)
        return logits, {"cache": cache}

    def _empty(self, batch_size: int, module: Any) -> Any:
        dtype = self._config.dtype or module.wte.embedding[...].dtype
        one, layers = Cache.empty((batch_size, *self._shape), dtype), self._config.num_layers
        if not self._config.scan_layers:
            return [one] * layers
        return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (layers, *leaf.shape)), one)


def next_positions(config: Any, cache: Any, tokens: jax.Array) -> jax.Array:
    """The positions of `tokens`, int (1, new), after those in `cache`."""
    length = cache.length[0] if config.scan_layers else cache[0].length
    return length + jnp.arange(tokens.shape[-1])[None]
