"""Small models, losses and batches that tests of all packages train with."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from models import gpt2, gpt2_nnx

FLAVOURS = {"linen": gpt2.build, "nnx": gpt2_nnx.build}


def without_key_bias(bias):
    """The bias of query, key and value without the key's: softmax does not see it."""
    return np.delete(bias.reshape(*bias.shape[:-1], 2, 3, -1), 1, axis=-2)


KEY_BIAS = [("qkv/bias", without_key_bias)]


def token_batches(num=5, size=8, length=16, vocab=64):
    """Counting upwards from anywhere, modulo the vocabulary: soon learned."""
    starts = np.random.default_rng(0).integers(0, vocab, (num, size, 1))
    tokens = ((starts + np.arange(length + 1)) % vocab).astype(np.int32)
    return [{"inputs": t[:, :-1], "targets": t[:, 1:]} for t in tokens]


class Mlp(nn.Module):
    """Batch statistics over the global batch, and dropout."""

    rate: float = 0.0

    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = nn.Dense(32)(x)
            x = nn.BatchNorm(use_running_average=False, momentum=0.9)(x)
            x = nn.Dropout(self.rate, deterministic=self.rate == 0)(nn.relu(x))
        return nn.Dense(8)(x)


class NnxMlp(nnx.Module):
    def __init__(self, rate, *, rngs):
        self.first = nnx.Linear(16, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.last = nnx.Linear(32, 8, rngs=rngs)

    def __call__(self, x):
        return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))))


def classify(model, batch):
    logits = model(batch["x"]).astype(jnp.float32)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()
    return loss, {"accuracy": (logits.argmax(-1) == batch["y"]).mean()}


def vector_batches(num=5, size=32):
    rng = np.random.default_rng(1)
    return [{"x": rng.normal(size=(size, 16)).astype(np.float32), "y": rng.integers(0, 8, size)} for _ in range(num)]


def classify_images(model, batch):
    logits = model(batch["images"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


MLPS = {
    "linen batch norm": Mlp(), "linen dropout": Mlp(rate=0.2),
    "nnx batch norm": functools.partial(NnxMlp, 0.0), "nnx dropout": functools.partial(NnxMlp, 0.2),
}


def kernels_apart(params):
    """The labels of `optax.partition` that tell kernels from the rest."""
    return jax.tree.map_with_path(lambda path, _: "kernel" if "kernel" in str(path) else "rest", params)


def only_matrices(params):
    """The mask of `optax.masked` for leaves of at least two dims."""
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 10)
WRAPPERS = {
    "sgd with momentum": optax.sgd(0.1, momentum=0.9),
    "masked": optax.chain(optax.masked(optax.add_decayed_weights(0.1), only_matrices), optax.adam(1e-2)),
    "multi_transform": optax.multi_transform({"kernel": optax.adamw(1e-2), "rest": optax.sgd(0.1)}, kernels_apart),
    "frozen biases": optax.multi_transform({"kernel": optax.adam(1e-2), "rest": optax.set_to_zero()}, kernels_apart),
    "inject_hyperparams": optax.inject_hyperparams(optax.adamw)(learning_rate=SCHEDULE),
    "clip and schedule": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(SCHEDULE)),
    "reduce_on_plateau": optax.chain(optax.adam(1e-2), optax.contrib.reduce_on_plateau(patience=1)),
    "flattened": optax.flatten(optax.adam(1e-2)),
    "every second step": optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "skips what is not finite": optax.apply_if_finite(optax.adam(1e-2), 3),
}
