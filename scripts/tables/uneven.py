"""State bytes per device over the ideal 1/N for uneven shapes: four models at seven N, as a Markdown table.

    python scripts/tables/uneven.py                     # half a minute; shapes alone, nothing is compiled
    python scripts/tables/uneven.py --optimizer muon    # an optimizer of whole matrices: no dims are merged

State is the paper's: parameters and the optimizer's state, at stage 3 in float32. The ideal is their unpadded bytes
over N. A batch norm's statistics are not counted: they are replicated.
Each cell is that ratio, then the share of padding and the share of what is replicated.
"""

import argparse
import dataclasses
import time
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import zero_jax
from models import gpt2, resnet
from zero_jax.layout.make_layout import LayoutPolicy, make_layout
from zero_jax.sharding.mesh_axes import MeshAxes
from zero_jax.stages import stage_of
from zero_jax.xla import devices as xla_devices

NUM_SHARDS = (3, 8, 25, 64, 100, 400, 1024)
TARGET = "h100:128x8"  # its devices make the meshes


class BertLayer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        x = nn.LayerNorm()(x + nn.MultiHeadDotProductAttention(16)(x))
        return nn.LayerNorm()(x + nn.Dense(1024)(nn.gelu(nn.Dense(4096)(x)))), None


class BertLarge(nn.Module):
    """arXiv 1810.04805 with both heads of its pretraining, the masked one tied to the embedding."""

    @nn.compact
    def __call__(self, tokens):
        words = nn.Embed(30522, 1024)
        x = words(tokens) + nn.Embed(512, 1024)(jnp.arange(tokens.shape[1])[None])
        x = nn.LayerNorm()(x + nn.Embed(2, 1024)(jnp.zeros_like(tokens)))
        x, _ = nn.scan(BertLayer, variable_axes={"params": 0}, split_rngs={"params": True}, length=24)()(x, None)
        follows = nn.Dense(2)(nn.tanh(nn.Dense(1024)(x[:, 0])))
        bias = self.param("bias", nn.initializers.zeros, (30522,))
        return words.attend(nn.LayerNorm()(nn.gelu(nn.Dense(1024)(x)))) + bias[None, None] + follows.sum()


MODELS = {
    "GPT-2 1.5B": gpt2.build(gpt2.PRESETS["1.5b"]),
    "BERT-Large": BertLarge(),
    "Turing-NLG": gpt2.build(gpt2.PRESETS["17b"]),
    "ResNet-50": resnet.build(resnet.PRESETS["resnet50"]),
}
OPTIMIZERS = {
    "adamw": optax.adamw(1e-3), "sgd": optax.sgd(0.1, momentum=0.9), "muon": optax.contrib.muon(1e-3),
    "adafactor": optax.adafactor(1e-3), "lamb": optax.lamb(1e-3)}


def classify(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["inputs"]), batch["targets"]).mean()


def batch_of(name, size):
    images = name == "ResNet-50"
    inputs = jax.ShapeDtypeStruct((size, 64, 64, 3) if images else (size, 16), jnp.float32 if images else jnp.int32)
    targets = jax.ShapeDtypeStruct((size,) if images else (size, 16), jnp.int32)
    return {"inputs": inputs, "targets": targets}


@dataclasses.dataclass(frozen=True)
class Cell:
    """A model at one N, in bytes of state: of all leaves, of their padding, per device, and of replicated leaves."""

    true: int
    padding: int
    per_device: int
    replicated: int
    num_shards: int

    @property
    def ratio(self):
        """Bytes on each device over the ideal."""
        return self.per_device / (self.true / self.num_shards)

    def __str__(self):
        return f"{self.ratio:.4f} ({self.padding / self.true:.3%}, {self.replicated / self.true:.3%})"


def layouts(name, optimizer, sizes):
    """The layout of a model at each N of `sizes`; the model is traced once, since N changes none of its reads."""
    devices = xla_devices.target_devices(TARGET)
    meshes = {num_shards: zero_jax.make_mesh(num_shards, devices=devices) for num_shards in sizes}
    step = zero_jax.make_zero_train_step(
        MODELS[name], 3, mesh=next(iter(meshes.values())), optimizer=optimizer, loss=classify, precision="fp32")
    first = step.layout(batch_of(name, next(iter(sizes))))
    state = jax.tree.map(lambda stored_shape, leaf: jax.ShapeDtypeStruct(stored_shape.shape, leaf.dtype),
                         first.stored_shapes, first.state)
    return {num_shards: make_layout(state, MeshAxes.of(mesh), LayoutPolicy(stage_of(3)), reads=first.reads,
                                    optimizer=optax.with_extra_args_support(optimizer))
            for num_shards, mesh in meshes.items()}


def measure(layout):
    rows = [row for row in layout.placements() if row.name.startswith(("params/", "opt_state/"))]
    num_shards = layout.num_shards
    replicated = sum(row.bytes for row in rows
                     if row.device_bytes * num_shards > 1.5 * (row.bytes + row.padding))
    return Cell(sum(row.bytes for row in rows), sum(row.padding for row in rows),
                sum(row.device_bytes for row in rows), replicated, num_shards)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--num-shards", nargs="+", type=int, default=NUM_SHARDS)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, help="default: adamw, and sgd for the ResNet")
    parser.add_argument("--out", type=Path, help="a Markdown file")
    args = parser.parse_args()
    start = time.monotonic()
    lines = [f"| model | {' | '.join(f'N = {size}' for size in args.num_shards)} |",
             "| --- " * (len(args.num_shards) + 1) + "|"]
    worst = 0.0
    for name in args.models:
        optimizer = OPTIMIZERS[args.optimizer or ("sgd" if name == "ResNet-50" else "adamw")]
        by_size = layouts(name, optimizer, args.num_shards)
        cells = [measure(layout) for layout in by_size.values()]
        lines.append(f"| {name}, {by_size[args.num_shards[0]].num_params:,} | {' | '.join(map(str, cells))} |")
        worst = max([worst, *(cell.ratio for cell in cells)])
        print(lines[-1], flush=True)
    lines += ["", f"The worst is {worst:.4f}; {time.monotonic() - start:.0f} s, jax {jax.__version__}."]
    print(lines[-1])
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
