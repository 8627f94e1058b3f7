"""Loss, perplexity and accuracy of next tokens on an evaluation set."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zero_jax.step.losses import call_model


def token_sums(model: Any, batch: Any) -> dict[str, jax.Array]:
    """Sums over the tokens of a batch, float32: `loss` in nats, `correct` (the likeliest is the target), `tokens`.

    Each token counts as `batch["weights"]`, float (batch, length), where there is that. For `ZeroTrainStep.evaluator`.
    """
    logits, targets = call_model(model, batch).astype(jnp.float32), batch["targets"]
    weights = batch["weights"].astype(jnp.float32) if "weights" in batch else jnp.ones(targets.shape, jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return {"loss": (losses * weights).sum(), "correct": ((logits.argmax(-1) == targets) * weights).sum(),
            "tokens": weights.sum()}


def evaluate(sums_of: Callable[[Any], dict[str, jax.Array]], batches: Iterable[Any]) -> dict[str, float]:
    """`loss` (nats per token), `perplexity` (its exponential) and `accuracy` over all tokens of `batches`.

    sums_of: `token_sums` of a batch. One batch after another: two programs with collectives at once may deadlock on
    simulated devices. Not a mean of the batches' means, which would weigh the tokens of short ones more.
    """
    total = {"loss": 0.0, "correct": 0.0, "tokens": 0.0}
    for batch in batches:
        for name, value in sums_of(batch).items():
            total[name] += float(value)
    tokens = total["tokens"] or math.nan  # no token has a weight
    loss = total["loss"] / tokens
    return {"loss": loss, "perplexity": math.exp(loss) if loss < 700 else math.inf,  # beyond which exp overflows
            "accuracy": total["correct"] / tokens}
