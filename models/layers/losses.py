"""Losses of a model and a batch that several modules of models have."""

from typing import Any

import jax
import jax.numpy as jnp
import optax


def classification_loss(model: Any, batch: Any) -> Any:
    """Mean cross entropy of `targets` (batch,) under the logits of the images, `inputs`, and the accuracy."""
    logits = model(batch["inputs"]).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    return losses.mean(), {"accuracy": (logits.argmax(-1) == batch["targets"]).astype(jnp.float32).mean()}


def weighted_mean(losses: jax.Array, weights: jax.Array) -> Any:
    """(Mean, {}, sum of the weights), so that microbatches weigh by that; both of one shape, 0 where all weigh 0."""
    total = weights.sum()
    return (losses * weights).sum() / jnp.where(total == 0, 1.0, total), {}, total
