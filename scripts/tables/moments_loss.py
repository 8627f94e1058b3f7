"""Validation loss with AdamW's moments in 16 and 8 bits beside float32's, as a Markdown table: a small GPT-2.

    python scripts/tables/moments_loss.py                          # 300 steps, 3 seeds: 5 CPU minutes or more
    python scripts/tables/moments_loss.py --steps 20 --seeds 1     # shows that it runs

Trains at stage 3 in float32 on four simulated devices, on the project's text, by the optimizers of
`zero-jax train --moments`. For each seed all have the same first parameters and the same batches. How much is chance is
told by the control: float32 with the rows of each batch in reverse, the same mathematics summed in another order.
"""

import argparse

import jax
import numpy as np
import optax

import zero_jax
from models import gpt2
from zero_jax.data import corpus
from zero_jax.data.batches import Batches
from zero_jax.optim.presets import make_optimizer

MOMENTS = {"float32": None, "float32, rows in reverse": None, "16: bfloat16": 16, "8: codes in blocks": 8}
BASE, CONTROL = list(MOMENTS)[:2]
LENGTH, ROWS, CHECKS = 64, 16, 4


def make_step(bits, steps):
    """The train step."""
    mesh = zero_jax.make_mesh()
    optimizer = make_optimizer("adamw", mesh, weight_decay=0.1, bits=bits, betas=(0.9, 0.95),
                               learning_rate=optax.warmup_cosine_decay_schedule(0.0, 2e-3, steps // 10, steps, 0.0))
    return zero_jax.make_zero_train_step(
        gpt2.build(gpt2.Config(2, 128, 4, vocab_size=256, max_length=LENGTH)), 3, mesh=mesh,
        optimizer=optax.chain(optax.clip_by_global_norm(1.0), optimizer))


def loss_after(step, text, seed, steps, *, reverse):
    """The validation loss of one run."""
    train, validation = text
    batches = Batches(train, batch_size=ROWS, length=LENGTH, seed=seed)
    state = step.init(jax.random.key(seed), batches[0])
    for number in range(1, steps + 1):
        batch = jax.tree.map(lambda rows: rows[::-1], batches[number]) if reverse else batches[number]
        state, metrics = step(state, batch)
        if number % 20 == 0:
            jax.block_until_ready(metrics)
    evaluate = step.evaluator()
    return float(np.mean([evaluate(state, validation[at]) for at in range(CHECKS)]))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=list(MOMENTS), choices=MOMENTS)
    args = parser.parse_args()
    chosen = {name: bits for name, bits in MOMENTS.items() if name in (BASE, *args.only)}
    zero_jax.simulate_devices(4)
    train, held_out = corpus.split(corpus.python_source(4_000_000), length=LENGTH, holdout=0.05)
    text = train, Batches(held_out, batch_size=8 * ROWS, length=LENGTH, seed=0)
    made = {bits: make_step(bits, args.steps) for bits in dict.fromkeys(chosen.values())}
    losses = {name: [loss_after(made[bits], text, seed, args.steps, reverse=name == CONTROL)
                     for seed in range(args.seeds)] for name, bits in chosen.items()}
    print("| moments | validation loss | over float32, by seed |", "| --- | --- | --- |", sep="\n")
    for name, each in losses.items():
        over = "-" if name == BASE else ", ".join(f"{own - base:+.4f}" for own, base in zip(
            each, losses[BASE], strict=True))
        print(f"| {name} | {np.mean(each):.4f} | {over} |")


if __name__ == "__main__":
    main()
