"""docs/images/large_batch.svg: LAMB and AdamW where the batch grows, as for BERT in the LAMB paper (arXiv 1904.00962).

    python scripts/training/large_batch.py --out runs/large_batch         # about ten minutes of CPU time

A BERT of 130,000 parameters predicts masked bytes of Python's own library. Every run sees as many tokens; where the
batch is 16 times as large it takes a 16th of the steps, with 16 times the fraction of warmup, as in the paper. Both
optimizers try the same learning rates at both batches: a grid by factors of 2, times sqrt(16) at the large batch (the
paper's square-root scaling), in which each goes on until its best rate has a worse one on both sides. Best is the loss
on held-out text after the last step. A run that is there is not run again.
"""

import argparse
import json
from pathlib import Path

import matplotlib.pyplot as plt

from models import bert
from zero_jax.cli.train_config import TrainConfig
from zero_jax.cli.training.train import train

PRESETS = {"small": bert.Config(2, 64, 4, 256, vocab_size=384, max_length=32, init_range=0.08)}
build, loss, batch_shapes = bert.build, bert.loss, bert.batch_shapes

PICTURE = Path(__file__).parents[2] / "docs/images/large_batch.svg"
LENGTH, BATCH, STEPS, WARMUP, EVAL_ROWS = 32, 16, 1024, 0.025, 2048
MIDDLE, WIDEST = 4e-3, 5
"""The rate of the small batch where the grid begins, and how many factors of 2 it may go to either side."""


def config_of(optimizer: str, times: int, exponent: int, out: Path) -> TrainConfig:
    """The options of a run at `times` the batch, 2**exponent times the rate in the middle of the grid."""
    return TrainConfig(
        stage=3, model=f"{Path(__file__).stem}:small", devices=1, optimizer=optimizer, batch_size=BATCH * times,
        seq_len=LENGTH, steps=STEPS // times, learning_rate=MIDDLE * 2.0**exponent * times**0.5, warmup=WARMUP * times,
        schedule="linear", final_rate=0.0, weight_decay=0.01, max_bytes=4 << 20, eval_every=STEPS,
        eval_batches=EVAL_ROWS // (BATCH * times), save_every=0, samples=0, html=False,
        out=out / f"{optimizer}-{times}-{exponent}")


def evaluation_of(config: TrainConfig) -> dict[str, float]:
    """What a run measured at its end; trained now where its log has none."""
    log = config.out / "train.jsonl"
    if not log.exists() or '"summary"' not in log.read_text():
        train(config)
    return [row for row in map(json.loads, log.read_text().splitlines()) if "validation_loss" in row][-1]


def searched(optimizer: str, times: int, out: Path) -> dict[int, dict[str, float]]:
    """The evaluations by exponent, sorted: the best has a worse one on both sides, unless the grid ends."""
    found: dict[int, dict[str, float]] = {}
    wanted = {0}
    while wanted:
        for exponent in sorted(wanted):
            found[exponent] = evaluation_of(config_of(optimizer, times, exponent, out))
        best = best_of(found)
        wanted = {best - 1, best + 1} & {*range(-WIDEST, WIDEST + 1)} - {*found}
    return dict(sorted(found.items()))


def best_of(found: dict[int, dict[str, float]]) -> int:
    """The exponent of the least loss on held-out text."""
    return min(found, key=lambda exponent: found[exponent]["validation_loss"])


def draw(results: dict[tuple[str, int], dict[int, dict[str, float]]]) -> None:
    """The loss on held-out text over the learning rates, before their scaling by sqrt(times)."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    colors = {times: f"C{k}" for k, times in enumerate(dict.fromkeys(times for _, times in results))}
    for (optimizer, times), found in results.items():
        axes.plot([MIDDLE * 2.0**exponent for exponent in found], [row["validation_loss"] for row in found.values()],
                  {"adamw": "--", "lamb": "-"}[optimizer], color=colors[times], marker="o",
                  label=f"{optimizer}, batch {BATCH * times}, {STEPS // times} steps")
    axes.set(xscale="log", xlabel="learning rate of the small batch (times sqrt(16) at the large one)",
             ylabel="validation loss, nats per predicted byte")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(PICTURE, metadata={"Date": None})


def main() -> None:
    """Runs all, draws them, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/large_batch"))
    parser.add_argument("--times", type=int, nargs="+", default=[1, 16])
    args = parser.parse_args()
    results = {(optimizer, times): searched(optimizer, times, args.out)
               for times in args.times for optimizer in ("adamw", "lamb")}
    draw(results)
    print("| optimizer | batch | steps | rates tried | best rate | validation loss | accuracy of masked bytes |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for (optimizer, times), found in results.items():
        best = best_of(found)
        config, row = config_of(optimizer, times, best, args.out), found[best]
        print(f"| {optimizer} | {config.batch_size} | {config.steps} | {len(found)} | {config.learning_rate:.3g} | "
              f"{row['validation_loss']:.3f} | {100 * row['validation_accuracy']:.1f} % |")


if __name__ == "__main__":
    main()
