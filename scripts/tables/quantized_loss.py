"""Validation loss with quantised collectives beside bf16, as a Markdown table: a small GPT-2 on the project's text.

    python scripts/tables/quantized_loss.py --json runs.json        # 1,000 steps, 3 seeds: 25 CPU minutes or more
    python scripts/tables/quantized_loss.py --steps 100 --seeds 1 --out /tmp/curve.svg     # shows that it runs

Trains at stage 3 in bf16 on four simulated devices as two nodes of two, with hpZ; gathers and sums are of the formats
named, or products are in float8. For each seed every policy has the same first parameters and the same batches, so that
differences to bf16 are paired: the table has their mean and its standard error over the seeds. How much is chance is
told by the control: bf16 with the rows of each batch in reverse, the same mathematics summed in another order.

The learning rate ends at 0, and the last loss is the mean of the last two evaluations. Writes the curves to
docs/images/quantized_loss.svg. --json keeps all that was measured, and goes on from it.
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
from zero_jax import Communication
from zero_jax.data import corpus
from zero_jax.data.batches import Batches

POLICIES = {
    "bf16": None,
    "bf16, rows in reverse": None,
    "int8 weights, int4 inside, int8 across": Communication(weights="int8", gradients=("int4", "int8")),
    "int8 weights and gradients": Communication(weights="int8", gradients="int8"),
    "int8 weights, int4 and int8 in blocks of 32": Communication(weights="int8", gradients=("int4", "int8"), block=32),
    "int8 weights, int8 inside, fp4 across": Communication(weights="int8", gradients=("int8", "fp4")),
    "int8 weights, fp4 gradients": Communication(weights="int8", gradients="fp4"),
    "float8 products": "bf16-fp8",
}
"""What is sent as codes; or the name of a precision."""
BASE, CONTROL = list(POLICIES)[:2]
COLORS = dict(zip(POLICIES, ("#202428", "#9aa5b1", "#1f6fb2", "#3a9d5d", "#7a5fb8", "#f0a030", "#c03a2b", "#8a5a2b"),
                  strict=True))
WIDTH, LAYERS, LENGTH, ROWS, CHECKS, BETWEEN, LAST = 64, 2, 64, 16, 4, 100, 2


def make_step(policy, steps):
    """The train step, and the evaluator of its loss."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, 2e-3, steps // 10, steps, 0.0)
    step = zero_jax.make_zero_train_step(
        gpt2.build(gpt2.Config(LAYERS, WIDTH, 4, vocab_size=256, max_length=LENGTH)), 3,
        mesh=zero_jax.make_mesh((2, 2)), precision=policy if isinstance(policy, str) else "bf16",
        communication=dataclasses.replace(
            zero_jax.Communication() if isinstance(policy, str) else policy, hpz_axes="data_1"),
        optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.1)))
    return step, step.evaluator()


def curve(step, evaluate, text, seed, steps, *, reverse):
    """[(step, validation loss)] of one run."""
    train, validation = text
    batches = Batches(train, batch_size=ROWS, length=LENGTH, seed=seed)
    state, points = step.init(jax.random.key(seed), batches[0]), []
    for number in range(1, steps + 1):
        batch = batches[number]
        state, metrics = step(state, jax.tree.map(lambda rows: rows[::-1], batch) if reverse else batch)
        if number % 20 == 0:
            jax.block_until_ready(metrics)
        if number % BETWEEN == 0:
            points.append((number, float(np.mean([evaluate(state, validation[at]) for at in range(CHECKS)]))))
    return points


def differences(runs, name):
    """For each seed and evaluation the loss of `name` less bf16's, (seeds, evaluations)."""
    seeds = [seed for seed in runs[name] if seed in runs[BASE]]
    return np.array([[own - base for (_, own), (_, base) in zip(runs[name][seed], runs[BASE][seed], strict=True)]
                     for seed in seeds])


def standard_error(values):
    """Of the mean over the first dim; NaN for one value."""
    return np.std(values, axis=0, ddof=1) / len(values)**0.5 if len(values) > 1 else np.full(values.shape[1:], np.nan)


def draw(path, runs):
    """The curves, and beside them their differences to bf16: means over the seeds."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "quantized_loss"  # the same file from the same numbers
    figure = Figure(figsize=(9, 3.6), dpi=110, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for name, by_seed in runs.items():
        steps, losses = np.mean(list(by_seed.values()), 0).T
        left.plot(steps, losses, label=name, color=COLORS[name], linewidth=1.4)
        if name != BASE:
            over = differences(runs, name)
            error = standard_error(over)
            right.plot(steps, over.mean(0), color=COLORS[name], linewidth=1.4)
            right.fill_between(steps, over.mean(0) - error, over.mean(0) + error, color=COLORS[name], alpha=0.12)
    left.set(xlabel="steps", ylabel="validation loss, nats per byte")
    right.set(xlabel="steps", ylabel="over bf16", ylim=(-0.02, 0.12))
    right.axhspan(-0.005, 0.005, color="#202428", alpha=0.07)
    left.legend(frameon=False, fontsize=8)
    for axes in (left, right):
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def table(runs):
    """Lines of Markdown: a row for each policy."""
    yield "| sent | validation loss | over bf16, by seed | mean and standard error |"
    yield "| --- | --- | --- | --- |"
    for name, by_seed in runs.items():
        loss = np.mean([[value for _, value in points[-LAST:]] for points in by_seed.values()])
        over = differences(runs, name)[:, -LAST:].mean(1)
        rest = "- | -" if name == BASE else (", ".join(f"{each:+.4f}" for each in over)
                                             + f" | {over.mean():+.4f} +- {standard_error(over):.4f}")
        yield f"| {name} | {loss:.4f} | {rest} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=list(POLICIES), choices=POLICIES)
    parser.add_argument("--out", type=Path, default=Path("docs/images/quantized_loss.svg"))
    parser.add_argument("--json", type=Path, default=None, help="what was measured, to go on from")
    args = parser.parse_args()
    zero_jax.simulate_devices(4)
    train, held_out = corpus.split(corpus.python_source(4_000_000), length=LENGTH, holdout=0.05)
    text = train, Batches(held_out, batch_size=8 * ROWS, length=LENGTH, seed=0)
    runs = json.loads(args.json.read_text()) if args.json and args.json.exists() else {}
    if BASE not in (*args.only, *runs):
        parser.error(f"--only without {BASE!r}, to which the others are compared, and --json has none of it")
    made = {}
    for seed in range(args.seeds):
        for name in [name for name in args.only if str(seed) not in runs.setdefault(name, {})]:
            policy = POLICIES[name]
            if policy not in made:  # the control has bf16's
                made[policy] = make_step(policy, args.steps)
            points = curve(*made[policy], text, seed, args.steps, reverse=name == CONTROL)
            runs[name][str(seed)] = points
            print(f"seed {seed}, {name}: {points[-1][1]:.4f}", flush=True)
            if args.json:
                args.json.write_text(json.dumps(runs))
    runs = {name: runs[name] for name in POLICIES if runs.get(name)}
    print("", *table(runs), sep="\n")
    draw(args.out, runs)


if __name__ == "__main__":
    main()
