"""Validation loss of DiLoCo beside synchronous training, on the project's text: the standard library of Python.

    python scripts/tables/diloco.py            # 4 slices of 2 simulated devices, 600 steps; minutes on 2 cores

The same byte-level GPT-2, batches, inner optimizer and seed. `alone` never averages: it is what a slice learns from its
quarter of the examples. Validation is of the outer parameters (of `alone` those of the first slice), on held-out text.
Writes docs/images/diloco.svg and prints a table; --steps 20 shows in half a minute that it runs.
"""

import argparse
import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import optax

import zero_jax
from models import gpt2
from zero_jax.data import corpus
from zero_jax.data.batches import Batches

SLICES, DEVICES, LENGTH, ROWS = 4, 8, 64, 32
VARIANTS = {
    "synchronous": None,
    "averaged every 20 steps": {"every": 20, "learning_rate": 1.0, "momentum": 0.0, "nesterov": False},
    "DiLoCo, every 20 steps": {"every": 20},
    "streaming: 4 fragments, overlap, bf16": {"every": 20, "fragments": 4, "overlap": True, "dtype": "bfloat16"},
    "alone": {"every": 10**9},
}
COLORS = dict(zip(VARIANTS, ("#202428", "#2f8f5b", "#1f6fb2", "#f0a030", "#9aa5b1"), strict=True))


def slice_bytes(diloco, batch):
    """Bytes that a device sends between slices, in a step on average; XLA:CPU sends bfloat16 as float32."""
    elements = sum(piece.elements for fragment in diloco.fragments(batch) for piece in fragment.values())
    return 2 * (SLICES - 1) / SLICES * elements * jax.numpy.dtype(diloco.outer.dtype).itemsize / diloco.outer.every


def curve(options, tokens, held_out, steps, seed):
    """([(step, validation loss)], bytes between slices in a step on average)."""
    model = gpt2.build(gpt2.Config(2, 64, 4, vocab_size=256, max_length=LENGTH))
    schedule = optax.warmup_cosine_decay_schedule(0.0, 4e-3, min(50, steps // 4), steps, 4e-4)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    step = zero_jax.make_zero_train_step(model, 3, optimizer=optimizer, mesh=zero_jax.make_mesh(replica=SLICES))
    batches = Batches(tokens, batch_size=ROWS, length=LENGTH, seed=seed, sharding=step.batch_sharding)
    checks = Batches(held_out, batch_size=256, length=LENGTH, sharding=step.batch_sharding)
    checks = [next(checks) for _ in range(2)]
    first = next(batches)
    trainer = step if options is None else zero_jax.make_diloco_step(step, **options)
    state, evaluate, points = trainer.init(jax.random.key(seed), first), step.evaluator(), []
    params = step.layout(first).num_params
    every_step = 2 * (SLICES - 1) / SLICES * 4 * params / (DEVICES // SLICES)
    sent = every_step if options is None else slice_bytes(trainer, first)

    def to_check(state):
        if options is None:
            return state
        one = trainer.synchronous(state)
        if options["every"] > steps:
            params = jax.tree.map(lambda leaf, like: jax.device_put(leaf[0], like.sharding), state.params, one.params)
            one = dataclasses.replace(one, params=params)
        return one

    for number in range(1, steps + 1):
        state, _ = trainer(state, first if number == 1 else next(batches))
        if number % max(20, steps // 30) == 0:
            checked = to_check(state)
            points.append((number, float(np.mean([evaluate(checked, batch) for batch in checks]))))
    return points, sent


def draw(path, curves):
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "diloco"  # the same file from the same numbers
    figure = Figure(figsize=(8, 3.6), dpi=110, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="steps", ylabel="validation loss, nats per byte")
    for name, points in curves.items():
        axes.plot(*zip(*points, strict=True), label=name, color=COLORS[name], linewidth=1.6)
    axes.set_title(f"{SLICES} slices, each with a quarter of the batch", fontsize=11, loc="left")
    axes.legend(frameon=False, fontsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("docs/images/diloco.svg"))
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    zero_jax.simulate_devices(DEVICES)
    tokens, held_out = corpus.split(corpus.python_source(4_000_000), length=LENGTH, holdout=0.02)
    curves, rows = {}, []
    print(f"| training | bytes between slices, per device and step | validation loss after {args.steps} steps |\n"
          "| --- | --- | --- |")
    for name, options in VARIANTS.items():
        runs = [curve(options, tokens, held_out, args.steps, seed) for seed in range(args.seeds)]
        curves[name], sent = runs[0]
        last = [points[-1][1] for points, _ in runs]
        rows.append({"training": name, "bytes": sent, "losses": last, "curve": curves[name]})
        print(f"| {name} | {sent:,.0f} | {', '.join(f'{loss:.3f}' for loss in last)} |", flush=True)
    draw(args.out, curves)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
