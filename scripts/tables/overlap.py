"""What overlap and prefetch bring to a step and cost it, compiled for a target topology, as rows of a Markdown table.

    python scripts/tables/overlap.py v5p:2x2x2 3 1.5b '{"overlap": false}' '{}'    # 10 minutes on 2 idle cores
    python scripts/tables/overlap.py h100:8 3 1.5b '{"overlap": false}' '{}'       # 3 minutes

Each argument behind target, stage and model is a set of arguments of `make_zero_train_step` and of its `Communication`,
as JSON; what it has under "xla" are options of XLA, under "clip" the norm of all gradients that AdamW clips by, so that
no update begins before the last of them; with "attention": true attention runs the kernel of the devices (cuDNN's where
`zero-jax[cudnn]` is installed, or splash). Of each it prints the shares of the bytes of gathers and reductions that are
sent asynchronously and, of these, beside a matrix product; temporaries, and as predicted from the schedule the seconds
in which nothing but communication runs, those of a step, and MFU. Blocks are rematerialised; the batch is `MODELS`', or
that behind "@": `1.5b@1` has one sequence on each device.
"""

import dataclasses
import json
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax

from models import gpt2
from zero_jax import Communication, attention, make_mesh, make_zero_train_step
from zero_jax.planning.plan import examine
from zero_jax.xla.devices import target_devices
from zero_jax.xla.targets import target_of

MODELS = {name: (gpt2.PRESETS[name], 4) for name in ("124m", "1.5b", "6.7b")} | {
    **{f"{layers}x512": (gpt2.Config(layers, 512, 8, vocab_size=8192, max_length=256), 1) for layers in (2, 4)},
    "16x512": (gpt2.Config(16, 512, 8, vocab_size=8192, max_length=512), 4),
    "12x2048": (gpt2.Config(12, 2048, 16, vocab_size=8192, max_length=1024), 4),
    "24x2048": (gpt2.Config(24, 2048, 16, vocab_size=50304, max_length=1024), 4),
    "2x2048": (gpt2.Config(2, 2048, 16, vocab_size=8192, max_length=1024), 4),
    "4x1024-8k": (gpt2.Config(4, 1024, 8, vocab_size=8192, max_length=512), 4),
    "8x1024": (gpt2.Config(8, 1024, 16, max_length=1024), 4),
    "4x1024": (gpt2.Config(4, 1024, 8), 1), "4x1024-unrolled": (gpt2.Config(4, 1024, 8, scan_layers=False), 1)}
"""A configuration, and the sequences of each device."""

HEADER = """| target, stage, model | arguments | asynchronous | beside a product | temporaries, GB | exposed, ms \
| step, ms | MFU | compile, s |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |"""


def measure(target: str, stage: int, model: str, arguments: dict[str, Any]) -> str:
    """A row of the table."""
    name, _, sequences = model.partition("@")
    config, batch = MODELS[name]
    batch = int(sequences or batch)
    mesh = make_mesh(devices=target_devices(target))
    options = {name: value for name, value in arguments.items() if name not in ("xla", "clip", "attention")}
    if arguments.get("attention"):
        config = dataclasses.replace(config, attention=attention(mesh))
    if "clip" in arguments:
        options["optimizer"] = optax.chain(optax.clip_by_global_norm(arguments["clip"]), optax.adamw(1e-3))
    sent = {name: options.pop(name) for name in list(options) if hasattr(Communication, name)}
    step = make_zero_train_step(gpt2.build(dataclasses.replace(config, remat=True)), stage, mesh=mesh,
                                precision="bf16", communication=Communication(**sent), **options)
    tokens = jax.ShapeDtypeStruct((batch * mesh.size, config.max_length), jnp.int32)
    step.layout({"inputs": tokens, "targets": tokens})  # by which XLA's options are known
    step.programs.compiler_options |= arguments.get("xla", {})
    began = time.perf_counter()
    plan = examine(step, {"inputs": tokens, "targets": tokens}, target_of(target), compare=False)
    seconds = time.perf_counter() - began
    if plan.communication is None or plan.timing is None or plan.communication.violations:
        return f"| {target}, {stage}, {model} | {arguments} | {plan.refused or 'breaks its contract'} |"
    sent = [each for result in plan.communication.results for each in result.collectives]
    total = sum(each.communication_bytes * each.count for each in sent)
    asynchronous = [each for each in sent if each.asynchronous]
    share, beside = (sum(each.communication_bytes * each.count for each in some) / total for some in (
        asynchronous, [each for each in asynchronous if each.overlapped_flops]))
    timing = plan.timing
    cells = (f"{target}, {stage}, {model}", json.dumps(arguments), f"{share:.1%}", f"{beside:.1%}",
             f"{(plan.needed_bytes - plan.layout.device_bytes) / 1e9:.3f}",
             f"{sum(timing.exposed_seconds.values()) * 1e3:.3g}", f"{timing.seconds * 1e3:.4g}", f"{timing.mfu:.1%}",
             f"{seconds:.0f}")
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print(HEADER)
    for text in sys.argv[4:]:
        print(measure(sys.argv[1], int(sys.argv[2]), sys.argv[3], json.loads(text)), flush=True)
