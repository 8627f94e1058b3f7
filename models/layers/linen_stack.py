"""The blocks of a Linen model: one scan over stacked parameters, or one after another."""

from typing import Any

import flax.linen as nn
import jax


def run_blocks(block: Any, fields: tuple[Any, ...], x: jax.Array, *others: Any, remat: bool) -> jax.Array:
    """`x` after all blocks: modules `block(*fields)`, called as `block(x, *others)`, which return (x, None).

    fields: the first is the config, which says how many there are. remat: only each block's input is saved.
    """
    config = fields[0]
    block = nn.remat(block, prevent_cse=not config.scan_layers) if remat else block
    if config.scan_layers:
        stack = nn.scan(block, variable_axes={"params": 0, "cache": 0}, length=config.num_layers,
                        in_axes=nn.broadcast,  # pyright: ignore[reportArgumentType]
                        split_rngs={"params": True, "dropout": True})
        return stack(*fields, name="blocks")(x, *others)[0]
    for layer in range(config.num_layers):
        x, _ = block(*fields, name=f"blocks_{layer}")(x, *others)
    return x
