"""Memory of each device by ZeRO stage, as the target's compiler allocates it: the picture at the top of README.md.

    python scripts/paper/stage_memory.py                              # GPT-2 8B on 8 H100; a minute, no accelerator
    python scripts/paper/stage_memory.py --model 1.5b --target v5p:2x2x2 --out /tmp/stages.svg

Every stage's real train step (bf16 with an fp32 master copy, AdamW, one sequence of 1024 tokens on each device, every
block recomputed) is compiled for the target. Parameters and optimizer states are those of `step.layout`; the rest is
the program's peak memory without them: gradients, activations, gathered layers, the batch. A stage whose state alone is
larger than the device's memory is not compiled, and is drawn with its state only. GB are 1e9 bytes.
"""

import argparse
import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp

import zero_jax
from models import gpt2
from zero_jax.stages import STAGES
from zero_jax.xla.targets import target_of

LENGTH = 1024
COLORS = {
    "parameters, fp32 master copy": "#1f6fb2",
    "optimizer states (Adam's moments)": "#f0a030",
    "gradients, activations, buffers": "#9aa5b1",
}


def parts_of(plan):
    """GB of a device by kind, in the order of COLORS."""
    params = sum(row.device_bytes for row in plan.layout.placements()
                 if row.name.partition("/")[0] in ("params", "weights", "variables"))
    states = plan.layout.device_bytes - params
    rest = max(0, plan.needed_bytes - params - states)
    return dict(zip(COLORS, (size / 1e9 for size in (params, states, rest)), strict=True))


def draw(path, plans, title):
    """Writes the bars of `plans` to `path`, an SVG or a PNG."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "stage_memory"  # the same file from the same numbers
    figure = Figure(figsize=(9, 2.9), dpi=110, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="GB")
    axes.set_title(title, fontsize=11, loc="left", pad=10)
    names = {0: "stage 0: nothing sharded", 1: "1: optimizer states", 2: "2: and gradients", 3: "3: and parameters"}
    labels, widest = [names[plan.stage] for plan in plans], max(sum(parts_of(plan).values()) for plan in plans)
    left = [0.0] * len(plans)
    for kind, color in COLORS.items():
        sizes = [parts_of(plan)[kind] for plan in plans]
        axes.barh(labels, sizes, left=left, color=color, label=kind, height=0.62)
        left = [start + size for start, size in zip(left, sizes, strict=True)]
    for row, (total, plan) in enumerate(zip(left, plans, strict=True)):
        text = f"{total:.1f}" if plan.fits else f"{total:.0f} and more: does not fit"
        axes.text(total + widest * 0.01, row, text, va="center", fontsize=10)
    limit = plans[0].memory_bytes / 1e9
    axes.axvline(limit, linestyle="--", color="#b03030", linewidth=1)
    axes.text(limit, 0.5, f" {limit:.0f} GB usable", color="#b03030", va="center", fontsize=9)
    axes.set_xlim(0, widest * 1.36)
    axes.set_ylim(len(plans) - 0.5, -0.6)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="lower right")
    figure.savefig(path, metadata={"Date": None} if Path(path).suffix == ".svg" else None)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="8b", choices=sorted(gpt2.PRESETS))
    parser.add_argument("--target", default="h100:8")
    parser.add_argument("--out", type=Path, default=Path("docs/images/memory_by_stage.svg"))
    args = parser.parse_args()
    config = dataclasses.replace(gpt2.PRESETS[args.model], remat=True)
    devices = target_of(args.target).num_devices
    batch = {name: jax.ShapeDtypeStruct((devices, LENGTH), jnp.int32) for name in ("inputs", "targets")}
    plans = []
    for stage in STAGES:
        plans.append(zero_jax.plan(gpt2.build(config), stage.number, args.target, batch, precision="bf16"))
        print(f"stage {stage.number}:", {kind: round(size, 2) for kind, size in parts_of(plans[-1]).items()},
              "fits" if plans[-1].fits else "does not fit", flush=True)
    draw(args.out, plans,
         f"Memory of each device by ZeRO stage: GPT-2 {args.model.upper()} on {args.target}, bf16, AdamW")
    print(args.out)


if __name__ == "__main__":
    main()
