"""An NNX model whose layers are stacked, with parameters large enough to be offloaded."""

import flax.nnx as nnx


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(64, 256, rngs=rngs), nnx.Linear(256, 64, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(x)))


class NnxStacked(nnx.Module):
    def __init__(self, *, rngs):
        self.embed = nnx.Embed(96, 64, rngs=rngs)
        self.blocks = nnx.split_rngs(splits=3)(nnx.vmap(NnxBlock, in_axes=0, out_axes=0))(rngs)
        self.out = nnx.Linear(64, 96, rngs=rngs)

    def __call__(self, x):
        x = nnx.scan(lambda block, x: block(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(
            self.blocks, self.embed(x))
        return self.out(x)
