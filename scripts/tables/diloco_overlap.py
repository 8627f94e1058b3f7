"""What runs beside a fragment that slices send with `overlap=True`, compiled for target topologies: a Markdown table.

    python scripts/tables/diloco_overlap.py h100:2x8:2 h100:16x8:16 v5p:2x2x2:2    # 7 CPU minutes

Each argument is a target and a number of slices. A row is the program that sends the first of two fragments of GPT-2 of
4 rematerialised layers of width 512, at stage 3 in bf16 with 4 sequences of 512 tokens on each device: in parts, and as
the control in one. Of the bytes between slices it prints the share that has a matrix product between start and end,
and of the step's FLOPs the share that runs while they are sent.
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp

import zero_jax
from models import gpt2
from zero_jax.xla.devices import target_devices
from zero_jax.xla.events import totals
from zero_jax.xla.schedule import schedule

CONFIG = gpt2.Config(4, 512, 8, vocab_size=1024, max_length=512, remat=True)

HEADER = """| target, slices | all-reduces between slices | MB | beside a product | of the step's FLOPs beside them \
| temporaries, MiB |
| --- | --- | --- | --- | --- | --- |"""


def measure(target: str, slices: int, *, in_parts: bool) -> str:
    """A row of the table."""
    mesh = zero_jax.make_mesh(devices=target_devices(target), replica=slices)
    step = zero_jax.make_zero_train_step(gpt2.build(CONFIG), 3, mesh=mesh, precision="bf16")
    diloco: Any = zero_jax.make_diloco_step(step, every=8, fragments=2, overlap=True)
    if not in_parts:
        diloco.functions.num_parts = lambda fragment, batch=None: 1
    tokens = jax.ShapeDtypeStruct((4 * mesh.size, CONFIG.max_length), jnp.int32)
    program = diloco.compiled_step({"inputs": tokens, "targets": tokens}, 0)
    sent = next(result for result in program.verify().results if result.budget.key == "slices")
    beside = [each for each in sent.collectives if each.asynchronous and each.overlapped_flops]
    flops = sum(totals(schedule(program.text)).flops.values())
    cells = (f"{target}, {slices}", str(sum(each.count for each in sent.collectives)),
             f"{sent.communication_bytes / 1e6:.2f}",
             f"{sum(each.communication_bytes * each.count for each in beside) / sent.communication_bytes:.0%}",
             f"{sum(each.overlapped_flops * each.count for each in beside) / flops:.0%}",
             f"{program.memory.temp_size_in_bytes / 2**20:.1f}")
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print(HEADER)
    for text in sys.argv[1:]:
        name, _, number = text.rpartition(":")
        for in_parts in (False, True):
            print(measure(name, int(number), in_parts=in_parts), flush=True)
