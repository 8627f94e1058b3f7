"""What microbatches send and hold at stage 3, by `gather` and `reduce`, as a Markdown table.

    python scripts/tables/microbatches.py    # a minute on 2 cores; no accelerator

Steps of 8 microbatches of a GPT-2 of 2 layers and width 256 in bf16, compiled for eight H100s. Bytes are those that
each device sends in a step, over the parameters and over the ring's share 7/8; temporaries are of one device.
"""

import itertools

import jax
import jax.numpy as jnp

import zero_jax
from models import gpt2
from zero_jax.xla.devices import target_devices

MICROBATCHES = 8


def measure(gather: str, reduce: str) -> tuple[float, float]:
    """Bytes sent, and bytes of temporaries, per parameter."""
    mesh = zero_jax.make_mesh(devices=target_devices("h100:8"))
    step = zero_jax.make_zero_train_step(
        gpt2.build(gpt2.Config(2, 256, 4, vocab_size=2048, max_length=32)), 3, mesh=mesh, precision="bf16",
        accumulate=MICROBATCHES, communication=zero_jax.Communication(gather=gather, reduce=reduce))
    tokens = jax.ShapeDtypeStruct((MICROBATCHES * mesh.size, 32), jnp.int32)
    compiled = step.compiled_step({"inputs": tokens, "targets": tokens})
    params = compiled.layout.num_params
    return (compiled.verify().communication_bytes / params / (1 - 1 / mesh.size),
            compiled.memory.temp_size_in_bytes / params)


if __name__ == "__main__":
    print("| `gather` | `reduce` | bytes sent | temporaries, more bytes |\n| --- | --- | --- | --- |")
    first = None
    for gather, reduce in itertools.product(("use", "step"), ("every", "once")):
        sent, temporaries = measure(gather, reduce)
        first = temporaries if first is None else first
        print(f"| \"{gather}\" | \"{reduce}\" | {sent:.1f} | {temporaries - first:.1f} |", flush=True)
