"""Validation loss of DiLoCo beside synchronous training, on the project's text: the standard library of Python.

    python scripts/tables/diloco.py --steps 400 --seeds 3    # 2 and 4 slices on 4 simulated devices; 15 CPU minutes
    python scripts/tables/diloco.py --json runs.json --only "synchronous" "2 slices: DiLoCo"    # some; --json keeps all

The same byte-level GPT-2, batches, inner optimizer and, for each seed, first parameters. `alone` never averages: it is
what a slice learns from its quarter of the examples. Validation is of the outer parameters (of `alone` those of the
first slice), on held-out text. Writes docs/images/diloco.svg, with the mean over the seeds, and prints a table; --steps
20 shows in half a minute that it runs.
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

DEVICES, LENGTH, ROWS, CHECKS = 4, 64, 32, 15
MEAN = {"every": 20, "learning_rate": 1.0, "momentum": 0.0, "nesterov": False}
VARIANTS = {
    "synchronous": (4, None),
    "2 slices: DiLoCo": (2, {"every": 20}),
    "4 slices: DiLoCo": (4, {"every": 20}),
    "4 slices: DiLoCo, momentum 0.5": (4, {"every": 20, "momentum": 0.5}),
    "2 slices: averaged": (2, MEAN),
    "4 slices: averaged": (4, MEAN),
    "4 slices: averaged, 4 fragments, overlap, bf16": (
        4, MEAN | {"fragments": 4, "overlap": True, "dtype": "bfloat16"}),
    "4 slices: one of them alone": (4, {"every": 10**9}),
}
"""By name: how many slices, and what `make_diloco_step` is asked for. Of synchronous training the slices are groups of
devices that store the same (hybrid sharding), so that its bytes are comparable."""

COLORS = dict(zip(VARIANTS, ("#202428", "#1f6fb2", "#1f6fb2", "#7ab0de", "#2f8f5b", "#2f8f5b", "#f0a030", "#9aa5b1"),
                  strict=True))


def between(steps):
    """Steps between two evaluations."""
    return max(20, steps // CHECKS)


def slice_bytes(trainer, slices, batch):
    """Bytes that a device sends between slices, in a step on average; XLA:CPU sends bfloat16 as float32."""
    if isinstance(trainer, zero_jax.DiLoCoStep):
        elements = sum(chunk.elements for fragment in trainer.fragments(batch) for chunk in fragment.values())
        elements *= jax.numpy.dtype(trainer.outer.dtype).itemsize / 4 / trainer.outer.every
    else:
        elements = trainer.layout(batch).num_params / (DEVICES // slices)
    return 2 * (slices - 1) / slices * elements * 4


def curves(slices, options, tokens, held_out, steps, seeds):
    """(For each seed [(step, validation loss)], bytes between slices in a step on average)."""
    model = gpt2.build(gpt2.Config(2, 64, 4, vocab_size=256, max_length=LENGTH))
    schedule = optax.warmup_cosine_decay_schedule(0.0, 4e-3, min(50, steps // 4), steps, 4e-4)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    mesh = zero_jax.make_mesh(replica=slices)
    step = zero_jax.make_zero_train_step(model, 3, optimizer=optimizer, mesh=mesh)
    trainer = step if options is None else zero_jax.make_diloco_step(step, **options)
    checks = Batches(held_out, batch_size=256, length=LENGTH, sharding=step.batch_sharding)
    checks = [next(checks) for _ in range(2)]
    is_alone, found = options is not None and options["every"] > steps, []
    evaluate = (step if is_alone else trainer).evaluator()

    def checked(state):
        if not is_alone:
            return state
        one = trainer.synchronous(state)
        params = jax.tree.map(lambda leaf, like: jax.device_put(leaf[0], like.sharding), state.params, one.params)
        return dataclasses.replace(one, params=params)

    for seed in range(seeds):
        batches, points = Batches(tokens, batch_size=ROWS, length=LENGTH, seed=seed, sharding=step.batch_sharding), []
        first = next(batches)
        state = trainer.init(jax.random.key(seed), first)
        for number in range(1, steps + 1):
            state, _ = trainer(state, first if number == 1 else next(batches))
            if number % between(steps) == 0:
                one = checked(state)
                points.append((number, float(np.mean([evaluate(one, batch) for batch in checks]))))
        found.append(points)
    return found, slice_bytes(trainer, slices, first)


def draw(path, rows):
    """The mean over the seeds of each row's curves."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "diloco"  # the same file from the same numbers
    figure = Figure(figsize=(8, 3.6), dpi=110, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="steps", ylabel="validation loss, nats per byte")
    for name, row in rows.items():
        steps, losses = np.mean(row["curves"], 0).T
        axes.plot(steps, losses, label=name, color=COLORS[name], linewidth=1.6,
                  linestyle="--" if name.startswith("2") else "-")
    axes.set_title("Slices that take their steps by themselves, averaged every 20", fontsize=11, loc="left")
    axes.legend(frameon=False, fontsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--out", type=Path, default=Path("docs/images/diloco.svg"))
    parser.add_argument("--json", type=Path, default=None, help="what was measured, to go on from with --only")
    args = parser.parse_args()
    zero_jax.simulate_devices(DEVICES)
    tokens, held_out = corpus.split(corpus.python_source(4_000_000), length=LENGTH, holdout=0.02)
    rows = json.loads(args.json.read_text()) if args.json and args.json.exists() else {}
    last = args.steps - args.steps % between(args.steps)
    print(f"| training | bytes between slices, per device and step | validation loss at step {last} of {args.steps} |\n"
          "| --- | --- | --- |")
    for name in args.only:
        found, sent = curves(*VARIANTS[name], tokens, held_out, args.steps, args.seeds)
        rows[name] = {"bytes": sent, "curves": found}
        losses = [points[-1][1] for points in found]
        print(f"| {name} | {sent:,.0f} | {np.mean(losses):.3f} ({', '.join(f'{loss:.3f}' for loss in losses)}) |",
              flush=True)
        if args.json:
            args.json.write_text(json.dumps(rows))
    draw(args.out, {name: rows[name] for name in VARIANTS if name in rows})


if __name__ == "__main__":
    main()
