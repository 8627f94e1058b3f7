"""The blocks of an NNX model: stacked parameters that a scan runs over, or a list."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx


def make_blocks(make: Callable[[nnx.Rngs], nnx.Module], config: Any, rngs: nnx.Rngs) -> Any:
    """`config.num_layers` of what `make` returns: one module with stacked parameters, or an `nnx.List` of them."""
    if not config.scan_layers:
        return nnx.List([make(rngs) for _ in range(config.num_layers)])

    @nnx.split_rngs(splits=config.num_layers)
    @nnx.vmap
    def stack(rngs: nnx.Rngs) -> nnx.Module:
        return make(rngs)

    return stack(rngs)


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
