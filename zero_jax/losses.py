"""The default loss, and what a loss and an optimizer tell as metrics."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

Loss = Callable[[Any, Any], Any]


def next_token_loss(model: Any, batch: Any) -> jax.Array:
    """Mean cross entropy, in nats, of `batch["targets"]` under `model(batch["inputs"])`; both int (batch, length)."""
    logits = model(batch["inputs"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


def loss_and_metrics(out: Any) -> tuple[jax.Array, dict[str, Any]]:
    """What a loss returned, as (scalar, metrics). Raises ValueError for anything but a floating scalar."""
    loss, metrics = out if isinstance(out, tuple) else (out, {})
    if jnp.shape(loss) != () or not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
        raise ValueError(
            f"The loss returned shape {jnp.shape(loss)} and dtype {jnp.result_type(loss)}: return a floating scalar, "
            "or (scalar, {name: metric}).")
    return loss, dict(metrics)


def learning_rates(opt_state: Any) -> dict[str, Any]:
    """`learning_rate`, `learning_rate_1` and so on, where the optimizer's state holds them (`inject_hyperparams`)."""
    found = [rate for _, rate in optax.tree.get_all_with_path(opt_state, "learning_rate")]
    rates = [rate for rate in found if isinstance(rate, jax.Array)]  # and not the state of its schedule
    return {f"learning_rate_{i}" if i else "learning_rate": rate for i, rate in enumerate(rates)}
