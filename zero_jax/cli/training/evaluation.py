"""Sums over an evaluation set, and what they come to."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zero_jax.step.losses import call_model


def token_sums(model: Any, batch: Any) -> dict[str, jax.Array]:
    """`label_sums` of the next tokens of a batch. For `ZeroTrainStep.evaluator`."""
    return label_sums(call_model(model, batch), batch)


def label_sums(logits: jax.Array, batch: Any) -> dict[str, jax.Array]:
    """Sums over the targets of a batch, float32: `loss` in nats, `accuracy` (the likeliest is the target), `weight`.

    logits: (..., classes); batch["targets"]: int (...). Each counts as `batch["weights"]`, float (...), where there is
    that, and as 1 otherwise.
    """
    logits, targets = logits.astype(jnp.float32), batch["targets"]
    weights = batch["weights"].astype(jnp.float32) if "weights" in batch else jnp.ones(targets.shape, jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return {"loss": (losses * weights).sum(), "accuracy": ((logits.argmax(-1) == targets) * weights).sum(),
            "weight": weights.sum()}


def evaluate(sums_of: Callable[[Any], dict[str, jax.Array]], batches: Iterable[Any]) -> dict[str, float]:
    """The means over all `batches`, by name: each sum over the sum of `weight`; nan where nothing has a weight.

    sums_of: those of a batch. One batch after another: two programs with collectives at once may deadlock on
    simulated devices. Not a mean of the batches' means, which would weigh the tokens of short ones more.
    """
    total = {"loss": 0.0}
    for batch in batches:
        for name, value in sums_of(batch).items():
            total[name] = total.get(name, 0.0) + float(value)
    weight = total.pop("weight", 0.0) or math.nan
    return {name: value / weight for name, value in total.items()}
