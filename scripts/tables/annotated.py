"""Communication and temporaries of plain jit with annotated arrays beside stage 3, as a Markdown table.

    python scripts/tables/annotated.py                                # minutes on 2 cores; no accelerator
    python scripts/tables/annotated.py --targets v5e:2x4 --widths 512

Both steps have the same model, batch and sharding of every array of the state (that of stage 3's layout), in float32
with AdamW, and are compiled by the target's own compiler. "Annotated" is what hand-written FSDP in JAX usually is:
`jax.jit` with `NamedSharding` for parameters and optimizer states, the batch split, and XLA's partitioner to choose the
collectives. "Over ideal": bytes that each device sends in a step over the paper's three elements per parameter. The
blocks are rematerialised, stacked or, with `unrolled`, one after the other.
"""

import argparse
import math
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import zero_jax
from models import gpt2
from zero_jax.sharding.layout import choose_spec
from zero_jax.xla.devices import compiled_for, target_devices
from zero_jax.xla.hlo import collectives

sys.path.append(str(Path(__file__).parents[1] / "bench"))
from plain_step import plain_step  # noqa: E402

HEADER = """| target | width, blocks, tokens of a device | way | sent over ideal | all-gather | reduce-scatter \
| all-reduce | other | temporaries MiB |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |"""
KINDS = "all-gather", "reduce-scatter", "all-reduce"


WAYS = ("annotated", "stage 3")


def annotated(model, mesh, batch):
    """Plain jit's step with the state sharded as stage 3 shards it, lowered."""
    optimizer = optax.adamw(3e-4)
    params = jax.eval_shape(model.init, jax.random.key(0), batch["inputs"])["params"]
    state = params, jax.eval_shape(optimizer.init, params)
    shardings = jax.tree.map(lambda leaf: NamedSharding(mesh, choose_spec(leaf.shape, dict(mesh.shape))), state)
    jitted = jax.jit(plain_step(model, optimizer), donate_argnums=0,
                     in_shardings=(shardings, NamedSharding(mesh, P("data"))),
                     out_shardings=(shardings, NamedSharding(mesh, P())))
    return jitted.lower(state, batch)


def stage_3(model, mesh, batch):
    return zero_jax.make_zero_train_step(model, 3, mesh=mesh, overlap=False).lower(batch)


def rows(target, config, rows_of_device):
    """The lines of both ways, each with the bytes that a device sends in a step, by kind, over the ideal."""
    mesh = zero_jax.make_mesh(devices=target_devices(target))
    model = gpt2.build(config)
    tokens = jax.ShapeDtypeStruct((rows_of_device * mesh.size, config.max_length), jnp.int32)
    batch = {"inputs": tokens, "targets": tokens}
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]
    ideal = 3 * 4 * sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params)) * (mesh.size - 1) / mesh.size
    for way, lower in zip(WAYS, (annotated, stage_3), strict=True):
        compiled = compiled_for(lower(model, mesh, batch), mesh.devices.flat[0], {})
        sent = dict.fromkeys([*KINDS, "other"], 0.0)
        for each in collectives(compiled.as_text()):
            sent[each.kind if each.kind in KINDS else "other"] += each.count * each.communication_bytes / ideal
        blocks = f"{config.num_layers}{'' if config.scan_layers else ' unrolled'}"
        cells = (target, f"{config.width}, {blocks}, {rows_of_device * config.max_length:,}", way,
                 f"{sum(sent.values()):.3f}", *(f"{share:.3f}" for share in sent.values()),
                 f"{compiled.memory_analysis().temp_size_in_bytes / 2**20:,.0f}")
        yield f"| {' | '.join(cells)} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", nargs="+", default=["h100:8", "v5e:2x4"])
    parser.add_argument("--widths", nargs="+", type=int, default=[512, 2048])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=4, help="sequences of 512 tokens on each device")
    args = parser.parse_args()
    print(HEADER)
    for target in args.targets:
        for width in args.widths:
            for scan in (True, False):
                config = gpt2.Config(args.layers, width, width // 64, vocab_size=8192, max_length=512,
                                     scan_layers=scan, remat=True)
                for line in rows(target, config, args.rows):
                    print(line, flush=True)


if __name__ == "__main__":
    main()
