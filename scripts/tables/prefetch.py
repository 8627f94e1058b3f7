"""What `prefetch=True` changes of steps with other options, compiled for a target topology: rows of a Markdown table.

    python scripts/tables/prefetch.py h100:8             # 5 CPU minutes
    python scripts/tables/prefetch.py v5p:2x2x2 "" "accumulate=2" "hpZ"    # 15; names of rows choose some

GPT-2 of 8 rematerialised layers of width 768 with 4 sequences of 512 tokens on each device, on TPUs of 4 layers of
width 512 with 16, in bf16 at stage 3. Prints the share of the bytes that are sent asynchronously and beside a matrix
product, and temporaries, without and with it; each step is verified.
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import optax

import zero_jax
from models import gpt2
from zero_jax.xla.devices import target_devices

INT8 = zero_jax.Communication(weights="int8", gradients="int8", block=64)
INSIDE = zero_jax.Communication(weights="int8", gradients=("int8", "fp4"), block=64)
ROWS: dict[str, dict[str, Any]] = {
    "": {}, "accumulate=2": {"accumulate": 2}, "gather=forward": {"accumulate": 2, "gather": "forward"},
    "hpZ": {"hpz_axes": "data_1"}, "int8": {"communication": INT8},
    "int8, hpZ": {"communication": INSIDE, "hpz_axes": "data_1"}}


def measure(target: str, options: dict[str, Any], *, prefetch: bool) -> tuple[str, str]:
    """(The share beside a product, MiB of temporaries) of one device."""
    sizes: Any = {"data": (2, 4)} if "hpz_axes" in options else {}
    mesh = zero_jax.make_mesh(devices=target_devices(target), **sizes)
    tpu = not target.startswith("h100")
    layers, width, heads, rows = (4, 512, 4, 16) if tpu else (8, 768, 12, 4)
    config = gpt2.Config(layers, width, heads, vocab_size=512, max_length=512, remat=True)
    step = zero_jax.make_zero_train_step(gpt2.build(config), 3, mesh=mesh, precision="bf16",
                                         optimizer=optax.adamw(1e-3), prefetch=prefetch, **options)
    tokens = jax.ShapeDtypeStruct((rows * mesh.size * options.get("accumulate", 1), 512), jnp.int32)
    program = step.compiled_step({"inputs": tokens, "targets": tokens})
    program.verify()
    sent = [(each.communication_bytes * each.count, each) for each in program.collectives]
    beside = sum(size for size, each in sent if each.asynchronous and each.overlapped_flops)
    return f"{beside / sum(size for size, _ in sent):.1%}", f"{program.memory.temp_size_in_bytes / 2**20:.1f}"


if __name__ == "__main__":
    print("| options | beside a product, without and with | temporaries, MiB |\n| --- | --- | --- |")
    for name in sys.argv[2:] or ROWS:
        pairs = zip(*(measure(sys.argv[1], ROWS[name], prefetch=prefetch) for prefetch in (False, True)), strict=True)
        print(f"| {' | '.join([name or 'stage 3', *map(', '.join, pairs)])} |", flush=True)
