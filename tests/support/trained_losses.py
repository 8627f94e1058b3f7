"""Losses of a small GPT-2 over three batches, on any mesh and with any options."""

import jax
import numpy as np
import optax

from models import gpt2, gpt2_nnx
from support.flat import flat_step

LENGTH, BATCH, VOCAB = 16, 8, 64
CONFIG = gpt2.Config(2, 32, 4, vocab_size=VOCAB, max_length=LENGTH, remat=True)
FLAVOURS = {"linen": gpt2, "nnx": gpt2_nnx}


def batches(steps=3):
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB, (steps, BATCH, LENGTH + 1))
    return [{"inputs": row[:, :-1], "targets": row[:, 1:]} for row in tokens]


def losses(flavour, stage, mesh, config=CONFIG, **options):
    step = flat_step(FLAVOURS[flavour].build(config), stage, mesh=mesh,
                                         optimizer=optax.adamw(1e-3, eps=1e-6), **options)
    given = batches()
    state, found = step.init(jax.random.key(0), given[0]), []
    for batch in given:
        state, metrics = step(state, batch)
        found.append(float(metrics["loss"]))
    return np.array(found)
