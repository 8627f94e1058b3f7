"""Validation loss with quantised collectives beside bf16, as a Markdown table: a small GPT-2 on the project's text.

    python scripts/tables/quantized_loss.py                                 # 1,000 steps, 3 seeds: hours on 2 cores
    python scripts/tables/quantized_loss.py --steps 200 --seeds 1 --width 64

Trains on four simulated devices, as two nodes of two, at stage 3 in bf16, and validates on the last 5 % of the text.
Every policy sees the same batches from the same parameters. After some hundred steps runs differ by 0.1 and more by
chance: the loss falls steeply there.
"""

import argparse
import dataclasses
from collections.abc import Iterator

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
    "int8 weights": Communication(weights="int8"),
    "int8 weights, int4 inside and int8 across": Communication(weights="int8", gradients=("int4", "int8")),
    "fp8 weights and gradients": Communication(weights="fp8", gradients="fp8"),
    "int4 weights and gradients": Communication(weights="int4", gradients="int4"),
}
LENGTH, BATCH, VALIDATIONS = 64, 16, 16


@dataclasses.dataclass(frozen=True)
class Settings:
    """steps and seeds of each run; width, layers and block: of the model and of quantised blocks."""

    steps: int = 1000
    seeds: int = 3
    width: int = 128
    layers: int = 2
    block: int = 256


def validation_losses(settings: Settings, seed: int) -> Iterator[tuple[str, float]]:
    """The loss of each policy after all steps."""
    tokens = corpus.load("python")
    train, held_out = corpus.split(tokens, length=LENGTH, holdout=0.05)
    batches = Batches(train, batch_size=BATCH, length=LENGTH, seed=seed)
    validation = Batches(held_out, batch_size=8 * BATCH, length=LENGTH, seed=0)
    schedule = optax.warmup_cosine_decay_schedule(0, 3e-3, settings.steps // 10, settings.steps, 3e-4)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.1))
    model = gpt2.Config(settings.layers, settings.width, 4, vocab_size=256, max_length=LENGTH)
    for name, policy in POLICIES.items():
        policy = policy and dataclasses.replace(policy, block=settings.block)
        step = zero_jax.make_zero_train_step(
            gpt2.build(model), 3, mesh=zero_jax.make_mesh((2, 2)), precision="bf16", optimizer=optimizer,
            communication=policy)
        state = step.init(jax.random.key(seed), batches[0])
        for number in range(settings.steps):
            state, metrics = step(state, batches[number])
            if number % 20 == 0:
                jax.block_until_ready(metrics["loss"])
        evaluate = step.evaluator()
        yield name, float(np.mean([float(evaluate(state, validation[number])) for number in range(VALIDATIONS)]))


def main() -> None:
    """Prints the table, a row for each policy: its losses by seed, and their mean difference to bf16's."""
    parser = argparse.ArgumentParser(description=__doc__)
    for field in dataclasses.fields(Settings):
        parser.add_argument(f"--{field.name}", type=int, default=field.default)
    settings = Settings(**vars(parser.parse_args()))
    zero_jax.simulate_devices(4)
    losses: dict[str, list[float]] = {name: [] for name in POLICIES}
    for seed in range(settings.seeds):
        for name, loss in validation_losses(settings, seed):
            losses[name].append(loss)
            print(f"seed {seed}, {name}: {loss:.4f}", flush=True)
    print("\n| sent | " + " | ".join(f"seed {seed}" for seed in range(settings.seeds)) + " | over bf16 |")
    print("| --- " * (settings.seeds + 2) + "|")
    for name, values in losses.items():
        over = np.mean(np.array(values) - losses["bf16"])
        print(f"| {name} | " + " | ".join(f"{value:.4f}" for value in values) + f" | {over:+.4f} |")


if __name__ == "__main__":
    main()
