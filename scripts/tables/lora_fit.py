"""GPT-2s that one H100 fine-tunes: with LoRA on a bfloat16 base, and with QLoRA on an nf4 base.

Compiles the real step for the target topology `h100:1` with XLA's compiler for it; no GPU is needed. Rank 16 on every
linear layer, one sequence of 1,024 tokens, blocks checkpointed.

    python scripts/tables/lora_fit.py
"""

import os
import sys
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).parents[2]))

import jax
import jax.numpy as jnp

import zero_jax
from models import gpt2

ROWS = {"bf16": ("20b",), "nf4": ("80b", "100b", "120b")}
"""For each kind of base, presets; `whole` trains all of the model."""
RANK, LENGTH = 16, 1024


def measure(base: str, preset: str, target: str = "h100:1") -> str:
    """A row of the table: what is trained, the model, its parameters, GiB of state and in all, whether it fits."""
    config = gpt2.PRESETS[preset]
    model = gpt2.build(config)
    if base != "whole":
        model = zero_jax.lora(model, RANK, "all-linear", base=None if base == "bf16" else base)
    batch = {name: jax.ShapeDtypeStruct((1, LENGTH), jnp.int32) for name in ("inputs", "targets")}
    plan = zero_jax.plan(model, 3, target, batch, precision="bf16")
    state, needed, limit = (number / 2**30 for number in (
        plan.layout.device_bytes, plan.needed_bytes, plan.memory_bytes or 0))
    verdict = f"refused: {plan.refused.splitlines()[0][:60]}" if plan.refused else "yes" if needed <= limit else "no"
    return (f"| {base} | {preset} | {config.num_params / 1e9:.1f} | {plan.layout.num_params / 1e6:,.1f} | "
            f"{state:.1f} | {needed:.1f} | {verdict} ({limit:.1f}) |")


def main(rows: dict[str, tuple[str, ...]]) -> None:
    """Prints the table."""
    print("| base | model | parameters, 10^9 | trained, 10^6 | state, GiB | needed, GiB | fits (GiB that there are) |\n"
          "| --- | --- | --- | --- | --- | --- | --- |")
    for base, presets in rows.items():
        for preset in presets:
            print(measure(base, preset), flush=True)


if __name__ == "__main__":
    main({base: ROWS[base] for base in sys.argv[1:]} if sys.argv[1:] else ROWS)
