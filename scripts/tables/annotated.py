"""Communication and temporaries of plain jit with annotated arrays beside stage 3, as a Markdown table.

    python scripts/tables/annotated.py                                # minutes on 2 cores; no accelerator
    python scripts/tables/annotated.py --targets v5e:2x4 --widths 512

All steps have the same model, batch and sharding of every array of the state (that of stage 3's layout), AdamW, and are
compiled by the target's own compiler, in float32 or, with `--half`, with parameters cast where the model begins.
"Annotated" is what hand-written FSDP in JAX usually is: `jax.jit` with `NamedSharding` for parameters and optimizer
states, the batch split, and XLA's partitioner to choose the collectives. "Constrained" is the same with what careful
models have: a sharding constraint on what each block returns. "Over ideal": bytes that each device sends in a step over
the paper's three elements per parameter. Times are predicted from the compiled schedule: the whole step, and of it what
waits for links. The blocks are rematerialised, stacked or, with `unrolled`, one after the other.
"""

import argparse
import functools
import math
import sys
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import zero_jax
from models import gpt2
from zero_jax.layout.layout import choose_spec
from zero_jax.xla import timing
from zero_jax.xla.devices import compiled_for, coords, target_devices
from zero_jax.xla.hlo import collectives
from zero_jax.xla.schedule import schedule
from zero_jax.xla.targets import target_of

sys.path.append(str(Path(__file__).parents[1] / "bench"))
from plain_step import plain_step  # noqa: E402

HEADER = """| target | width, blocks, tokens of a device | way | sent over ideal | all-gather | reduce-scatter \
| all-reduce | other | temporaries MiB | step, ms | waits, ms |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"""
KINDS = "all-gather", "reduce-scatter", "all-reduce"


def annotated(model, mesh, batch, bf16):
    """Plain jit's step with the state sharded as stage 3 shards it, compiled."""
    optimizer = optax.adamw(3e-4)
    params = jax.eval_shape(model.init, jax.random.key(0), batch["inputs"])["params"]
    state = params, jax.eval_shape(optimizer.init, params)
    shardings = jax.tree.map(lambda leaf: NamedSharding(mesh, choose_spec(leaf.shape, dict(mesh.shape))), state)
    jitted = jax.jit(plain_step(model, optimizer, jnp.bfloat16 if bf16 else None), donate_argnums=0,
                     in_shardings=(shardings, NamedSharding(mesh, P("data"))),
                     out_shardings=(shardings, NamedSharding(mesh, P())))
    return compiled_for(jitted.lower(state, batch), mesh.devices.flat[0], {})


def constrained(model, mesh, batch, bf16):
    """As `annotated`, with what each block returns split by its examples."""
    def by_examples(block, args, kwargs, context):
        result = block(*args, **kwargs)
        if not (isinstance(context.module, gpt2.Block) and context.method_name == "__call__"):
            return result
        split = NamedSharding(mesh, P("data"))
        return jax.tree.map(lambda leaf: jax.lax.with_sharding_constraint(leaf, split), result)

    with nn.intercept_methods(by_examples):
        return annotated(model, mesh, batch, bf16)


def stage_3(model, mesh, batch, bf16, **options):
    return zero_jax.make_zero_train_step(model, 3, mesh=mesh, precision="bf16" if bf16 else "fp32", **options
                                         ).compile(batch)


WAYS = {"annotated": annotated, "constrained": constrained, "stage 3": stage_3,
        "without overlap": functools.partial(stage_3, communication=zero_jax.Communication(overlap=False))}


def rows(target, config, rows_of_device, ways, bf16):
    """The lines of these ways, each with the bytes that a device sends in a step, by kind, over the ideal."""
    mesh = zero_jax.make_mesh(devices=target_devices(target))
    model = gpt2.build(config)
    tokens = jax.ShapeDtypeStruct((rows_of_device * mesh.size, config.max_length), jnp.int32)
    batch = {"inputs": tokens, "targets": tokens}
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]
    elements = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
    ideal = 3 * (2 if bf16 else 4) * elements * (mesh.size - 1) / mesh.size
    for way in ways:
        compiled = WAYS[way](model, mesh, batch, bf16)
        predicted = timing.predict(schedule(compiled.as_text()), target_of(target),
                                   [coords(each) for each in mesh.devices.flat], tokens=1, model_flops=1)
        sent = dict.fromkeys([*KINDS, "other"], 0.0)
        for each in collectives(compiled.as_text()):
            sent[each.kind if each.kind in KINDS else "other"] += each.count * each.communication_bytes / ideal
        blocks = f"{config.num_layers}{'' if config.scan_layers else ' unrolled'}"
        cells = (target, f"{config.width}, {blocks}, {rows_of_device * config.max_length:,}", way,
                 f"{sum(sent.values()):.3f}", *(f"{share:.3f}" for share in sent.values()),
                 f"{compiled.memory_analysis().temp_size_in_bytes / 2**20:,.0f}", f"{predicted.seconds * 1e3:.2f}",
                 f"{sum(predicted.exposed_seconds.values()) * 1e3:.2f}")
        yield f"| {' | '.join(cells)} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", nargs="+", default=["h100:8", "v5e:2x4"])
    parser.add_argument("--widths", nargs="+", type=int, default=[512, 2048])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=4, help="sequences on each device")
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence")
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--half", action="store_true", help="compute in bfloat16")
    parser.add_argument("--ways", nargs="+", default=list(WAYS)[:4], choices=WAYS)
    parser.add_argument("--stacked", action="store_true", help="stacked blocks alone")
    args = parser.parse_args()
    print(HEADER)
    for target in args.targets:
        for width in args.widths:
            for scan in (True,) if args.stacked else (True, False):
                config = gpt2.Config(args.layers, width, width // 64, vocab_size=args.vocab, max_length=args.length,
                                     scan_layers=scan, remat=True)
                for line in rows(target, config, args.rows, args.ways, args.half):
                    print(line, flush=True)


if __name__ == "__main__":
    main()
