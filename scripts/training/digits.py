r"""Trains a small ViT on scikit-learn's digits at stage 3 on simulated devices, to 98 % of the images held out.

    python scripts/training/digits.py --out runs/digits          # three runs, 2.4 minutes of CPU time

A fifth of the 1,797 images, 359, is held out at random; no image of it is trained on. The first run is that of

    zero-jax train --stage 3 --devices 2 --model vit:digits --data digits --eval-fraction 0.2 --image-warp 0.15 \
        --ema 0.995 --batch-size 64 --steps 1500 --learning-rate 2e-3 --weight-decay 0.05 --save-every 0

and the others have other seeds and other fifths, of .npz files that this script writes. What counts is the accuracy
after the last step. The settings were chosen on a part of the training images. Writes docs/images/digits.svg and prints
a table; a run that is there is not run again.

Status 1: a run has less than 98 %.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits

from zero_jax.cli.train_config import TrainConfig
from zero_jax.cli.training.train import train

WANTED, HELD_OUT = 0.98, 0.2
PICTURE = Path(__file__).parents[2] / "docs/images/digits.svg"


def data_of(run: int, folder: Path) -> dict[str, Any]:
    """The options of a run's data: `--data digits` for the first, and files of another random split for each other."""
    if run == 0:
        return {"data": ("digits",), "eval_fraction": HELD_OUT}
    folder.mkdir(parents=True, exist_ok=True)
    read = load_digits()
    order = np.random.default_rng(run).permutation(len(read.images))
    parts = np.split(order, [round(HELD_OUT * len(order))])
    files = [folder / f"held_out_{run}.npz", folder / f"train_{run}.npz"]
    for file, part in zip(files, parts, strict=True):
        np.savez(file, images=read.images[part].astype(np.float32) / 16, labels=read.target[part])
    return {"data": (str(files[1]),), "eval_data": (str(files[0]),)}


def evaluations(config: TrainConfig) -> dict[int, dict[str, float]]:
    """What a run measured on the held-out images, by step; trained now where its log has no end."""
    log = config.out / "train.jsonl"
    if not log.exists() or '"summary"' not in log.read_text():
        train(config)
    rows = map(json.loads, log.read_text().splitlines())
    return {row["step"]: row for row in rows if "validation_accuracy" in row}


def draw(runs: list[dict[int, dict[str, float]]]) -> None:
    """docs/images/digits.svg: the accuracy of each run over its steps."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for number, found in enumerate(runs):
        axes.plot(list(found), [100 * row["validation_accuracy"] for row in found.values()], marker=".",
                  label=f"split and seed {number}")
    axes.axhline(100 * WANTED, color="black", linewidth=0.7, linestyle="--")
    axes.set(xlabel="step", ylabel="accuracy on held-out images, %", ylim=(80, 100.2))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(PICTURE, metadata={"Date": None})


def main() -> None:
    """Trains, and says what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/digits"))
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    runs = [evaluations(TrainConfig(
        stage=3, devices=2, model="vit:digits", **data_of(run, args.out / "data"), image_warp=0.15, ema=0.995,
        batch_size=64, steps=1500, learning_rate=2e-3, weight_decay=0.05, eval_every=100, save_every=0, seed=run,
        out=args.out / str(run))) for run in range(args.runs)]
    draw(runs)
    print("| split and seed | accuracy | wrong, of 359 | loss, nats per image |")
    print("| --- | --- | --- | --- |")
    last = [list(found.values())[-1] for found in runs]
    for number, row in enumerate(last):
        accuracy = row["validation_accuracy"]
        print(f"| {number} | {100 * accuracy:.2f} % | {round(359 * (1 - accuracy))} | {row['validation_loss']:.3f} |")
    sys.exit(min(row["validation_accuracy"] for row in last) < WANTED)


if __name__ == "__main__":
    main()
