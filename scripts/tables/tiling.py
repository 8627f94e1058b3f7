"""Memory of each device for products in tiles, compiled for target topologies, as Markdown tables.

    python scripts/tables/tiling.py                     # one product of 64k x 64k: three minutes on a busy machine
    python scripts/tables/tiling.py --width 16384 --tiles 1 16 --target h100:1 --offload parameters
    python scripts/tables/tiling.py --width 16384 --tiles 1 16 --tensor 2 --split rows columns
    python scripts/tables/tiling.py --hidden 65536 81920 --tiles 1 16 --offload parameters

The first is a norm and one product whose gathered weight is `gathered`; `tile` is what of it is gathered at a time, and
`gradient shard` what a device keeps of its gradient until the update. With `--hidden` it is one block of a transformer
(head dim 128, feed-forward width 4 x hidden) of that width, on one sequence of 1024 tokens per device, each of whose
four matrices is in as many tiles; `fits` is whether a device has the memory.
"""

import argparse

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import zero_jax
from zero_jax.xla.devices import target_devices
from zero_jax.xla.targets import target_of

MIB, GIB = 2**20, 2**30
SPLITS = {"none": (), "rows": [("wide/kernel", P("tensor", None))], "columns": [("wide/kernel", P(None, "tensor"))]}


class Product(nn.Module):
    """A norm, whose scale is trained, and one product."""

    width: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.width, use_bias=False, name="wide")(nn.LayerNorm(name="norm")(x))


class Block(nn.Module):
    """A block of a transformer without embeddings."""

    width: int

    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm(name="norm_1")(x)
        qkv = nn.Dense(3 * self.width, use_bias=False, name="qkv")(y)
        q, k, v = jnp.split(qkv.reshape(*qkv.shape[:2], 3, -1, 128), 3, axis=2)
        y = jax.nn.dot_product_attention(q[:, :, 0], k[:, :, 0], v[:, :, 0], is_causal=True).reshape(x.shape)
        x = x + nn.Dense(self.width, use_bias=False, name="out")(y)
        y = nn.gelu(nn.Dense(4 * self.width, use_bias=False, name="up")(nn.LayerNorm(name="norm_2")(x)))
        return x + nn.Dense(self.width, use_bias=False, name="down")(y)


def squared(model, batch):
    """A loss that needs no labels."""
    return jnp.square(model(batch["x"]).astype(jnp.float32)).mean()


def compiled_step(model, batch, target, tiles, offload, *, tensor=1, split="none"):
    """The compiled step."""
    mesh = zero_jax.make_mesh(tensor=tensor, devices=target_devices(target))
    step = zero_jax.make_zero_train_step(model, 3, loss=squared, mesh=mesh, precision="bf16", offload=offload,
                                         tiling={"kernel": tiles} if tiles > 1 else None,
                                         parallelism=zero_jax.Parallelism(tensor_rules=SPLITS[split]))
    return step.compiled_step({"x": jax.ShapeDtypeStruct((batch[0] * mesh.size, *batch[1:]), jnp.bfloat16)})


def product_row(target, width, tiles, offload, tensor, split):
    """A line of the first table."""
    compiled = compiled_step(Product(width), (16, width), target, tiles, offload, tensor=tensor, split=split)
    memory, whole = compiled.memory, 2 * width**2 // tensor
    shards = compiled.layout.num_shards
    return [target, f"{width:,}", *[split] * (tensor > 1), offload or "none", str(tiles),
            f"{whole / MIB:,.0f}", f"{whole / tiles / MIB:,.0f}",
            f"{whole / shards / MIB:,.0f}", f"{memory.temp_size_in_bytes / MIB:,.0f}",
            f"{(memory.temp_size_in_bytes - whole / shards) / whole:.3f}",
            f"{memory.host_temp_size_in_bytes / MIB:,.0f}",
            "kept" if not compiled.report.violations else "broken: " + "; ".join(compiled.report.violations)[:90]]


def hidden_row(target, width, tiles, offload):
    """A line of the second table."""
    compiled = compiled_step(Block(width), (1, 1024, width), target, tiles, offload)
    capacity = target_of(target).chip.memory_bytes
    return [target, f"{width:,}", offload or "none", str(tiles), f"{8 * width**2 / tiles / MIB:,.0f}",
            f"{compiled.memory.temp_size_in_bytes / GIB:,.1f}", f"{compiled.device_bytes / GIB:,.1f}",
            f"{compiled.host_bytes / GIB:,.1f}", "yes" if compiled.device_bytes <= capacity else "no",
            "kept" if not compiled.report.violations else "broken"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", nargs="+", default=["h100:8"])
    parser.add_argument("--hidden", type=int, nargs="+")
    parser.add_argument("--width", type=int, default=65536)
    parser.add_argument("--tiles", type=int, nargs="+", default=[1, 16, 32])
    parser.add_argument("--offload", choices=("optimizer", "parameters"))
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--split", choices=[*SPLITS], nargs="+", default=["none"])
    arguments = parser.parse_args()
    if (arguments.tensor > 1) == ("none" in arguments.split) or arguments.tensor > 1 and arguments.hidden:
        parser.error("--tensor and --split rows or columns go together, and not with --hidden")
    columns = ["target", "hidden", "offload", "tiles", "tile MiB", "temporaries GiB", "device GiB", "host GiB", "fits",
               "contract"] if arguments.hidden else [
                   "target", "width", *["split"] * (arguments.tensor > 1), "offload", "tiles", "gathered MiB",
                   "tile MiB", "gradient shard MiB", "temporaries MiB", "without that shard / gathered",
                   "host temporaries MiB", "contract"]
    print("| " + " | ".join(columns) + " |\n" + "| --- " * len(columns) + "|")
    for target in arguments.target:
        for width in arguments.hidden or [arguments.width]:
            for tiles in arguments.tiles:
                rows = (hidden_row(target, width, tiles, arguments.offload),) if arguments.hidden else (
                    product_row(target, width, tiles, arguments.offload, arguments.tensor, split)
                    for split in arguments.split)
                for row in rows:
                    print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
