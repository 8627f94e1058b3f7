"""Trains an 11M-parameter LLaMA on Python's own library at stage 3, beside a plain Flax and Optax loop.

    python scripts/training/language_model.py --out runs/language_model                 # hours on 2 cores
    python scripts/training/language_model.py --out runs/short --steps 100 --together

Tokenizes the text (a BPE of 4,096 tokens, trained on it), runs `zero_jax train` on simulated devices and a loop on one
device that uses the model, the optimizer and the batches but nothing else of the library, and writes the two curves as
loss.svg (that of a run is docs/images/language_model.svg) and their distance as a table. --together runs all at once:
each then has a part of the cores.

Two programs round differently, and training magnifies that. How much is told by the same plain loop with the rows of
each batch in reverse, for the first steps (--control): the same mathematics, summed in another order.
"""

import argparse
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import matplotlib.pyplot as plt
import optax
from fine_tune import flags_of

from models import llama
from zero_jax.cli.objectives.choose import objective_of
from zero_jax.cli.train_config import TrainConfig
from zero_jax.cli.training.evaluation import evaluate, token_sums
from zero_jax.optim.presets import make_schedule

MODEL = "llama:11m"


def config_of(out: Path, args: argparse.Namespace) -> TrainConfig:
    """The options of the run, and of the plain loop beside it."""
    return TrainConfig(
        stage=3, model=MODEL, devices=args.devices, data=(str(out / "tokens"),), batch_size=8, seq_len=256,
        steps=args.steps, learning_rate=2e-3, eval_every=100, save_every=200, out=out / "library", resume=True)


def plain_loop(config: TrainConfig, *, steps: int, order: int = 1) -> Iterator[dict[str, float]]:
    """Each step's loss, and validation losses, of training on one device by Flax and Optax alone.

    steps: of the run, from the first. order: 1, or -1 for the rows of each batch in reverse.
    """
    model: Any = llama.build(llama.PRESETS[MODEL.partition(":")[2]])
    schedule = make_schedule(config.schedule, **config.schedule_arguments(config.steps))
    optimizer = optax.chain(optax.clip_by_global_norm(config.grad_clip_norm),
                            optax.adamw(schedule, weight_decay=config.weight_decay))
    train, held_out = objective_of(config).load_data().batches(None)

    def loss_of(params: Any, batch: Any) -> jax.Array:
        logits = model.apply({"params": params}, batch["inputs"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    sums = jax.jit(lambda params, batch: token_sums(model.bind({"params": params}), batch))
    key, _ = jax.random.split(jax.random.key(config.seed))  # as the library documents it
    params = jax.jit(model.init)({"params": jax.random.fold_in(key, 0)}, train[0]["inputs"])["params"]
    state = jax.jit(optimizer.init)(params)
    for number in range(steps):
        batch = jax.tree.map(lambda rows: rows[::order], train[number])
        params, state, loss = step(params, state, batch)
        yield {"step": number + 1, "loss": float(loss)}
        if (number + 1) % config.eval_every == 0 or number + 1 == steps:
            batches = itertools.islice(held_out.once(), config.eval_batches)
            measured = evaluate(lambda batch, params=params: sums(params, batch), batches)
            yield {"step": number + 1, "validation_loss": measured["loss"]}


def write_plain(path: Path, lines: Iterator[dict[str, float]]) -> None:
    """`lines` of a plain loop as JSON, with the CPU seconds of this process so far."""
    with path.open("w") as file:
        for line in lines:
            print(json.dumps(line | {"cpu_seconds": time.process_time()}), file=file, flush=True)


def curves(path: Path) -> dict[str, dict[int, float]]:
    """{"loss" and "validation_loss": {step: value}} of a log; empty where there is none."""
    found: dict[str, dict[int, float]] = {"loss": {}, "validation_loss": {}}
    if not path.exists():
        return found
    for line in path.read_text().splitlines():
        record = json.loads(line)
        for name, values in found.items():
            if name in record and "step" in record:
                values[record["step"]] = record[name]
    return found


def draw(out: Path, library: dict[str, dict[int, float]], plain: dict[str, dict[int, float]]) -> None:
    """loss.svg: both curves, and validation."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(*zip(*library["loss"].items(), strict=True), linewidth=0.7, label="stage 3, training")
    axes.plot(*zip(*plain["loss"].items(), strict=True), linewidth=0.7, alpha=0.6, label="plain loop, training")
    axes.plot(*zip(*library["validation_loss"].items(), strict=True), "o", label="stage 3, validation")
    axes.plot(*zip(*plain["validation_loss"].items(), strict=True), "x", color="black", label="plain loop, validation")
    axes.set(xlabel="step", ylabel="loss, nats per token")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(out / "loss.svg", metadata={"Date": None})


def largest_difference(one: dict[int, float], other: dict[int, float], step: int) -> str:
    """Of the losses up to `step`; "" where one of them ended before."""
    if step not in one or step not in other:
        return ""
    return f"{max(abs(one[k] - other[k]) for k in one if k <= step):.1e}"


def main() -> None:
    """Runs all and compares them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--control", type=int, default=200, help="steps of the plain loop in another order; 0: none")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--together", action="store_true")
    parser.add_argument("--only", choices=("plain", "control", "table"), help="one part of it")
    args = parser.parse_args()
    config, plain, control = config_of(args.out, args), args.out / "plain.jsonl", args.out / "control.jsonl"
    if args.only == "plain":
        return write_plain(plain, plain_loop(config, steps=config.steps))
    if args.only == "control":
        return write_plain(control, plain_loop(config, steps=args.control, order=-1))
    if args.only is None:
        run_all(config, args)
    library, plain, control = curves(config.out / "train.jsonl"), curves(plain), curves(control)
    draw(args.out, library, plain)
    print("| step | stage 3, validation | plain loop | steps' losses apart | and of the plain loop, in another order |")
    print("| --- | --- | --- | --- | --- |")
    for step, loss in library["validation_loss"].items():
        beside = f"{plain['validation_loss'][step]:.4f}" if step in plain["validation_loss"] else ""
        apart, by_order = (largest_difference(plain["loss"], other["loss"], step) for other in (library, control))
        print(f"| {step} | {loss:.4f} | {beside} | {apart} | {by_order} |")


def run_all(config: TrainConfig, args: argparse.Namespace) -> None:
    """Tokenizes where that is not done, and runs the library, the plain loop and the control."""
    python = [sys.executable, "-m", "zero_jax"]
    if not (args.out / "tokens").exists():
        subprocess.run([*python, "tokenize", "--data", "python", "--vocab-size", "4096",
                        "--out", str(args.out / "tokens")], check=True)
    commands = [[*python, "train", *flags_of(config)], [sys.executable, *sys.argv, "--only", "plain"]]
    commands += [[sys.executable, *sys.argv, "--only", "control"]] * bool(args.control)
    running = []
    for command in commands:
        running.append(subprocess.Popen(command))
        if not args.together:
            running[-1].wait()
    if any(process.wait() for process in running):
        raise SystemExit("A run failed.")


if __name__ == "__main__":
    main()
