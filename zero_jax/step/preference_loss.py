"""Direct preference optimization (DPO, arXiv 2305.18290, equation 7): a loss of pairs of responses."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from zero_jax.errors import UsageError
from zero_jax.typing import Batch


def response_log_probs(model: Any, batch: Batch) -> jax.Array:
    """The log-probability of each response, float32 (batch, 2): of `batch["targets"]` under `model(batch["inputs"])`.

    Both are int (batch, 2, length), the preferred response first; `batch["weights"]`, of the same shape, is 1 for the
    tokens of the response and 0 for those of the prompt and for padding. As a function of an evaluator it makes the
    reference of `dpo_loss`: of a `zero_jax.lora` step before its first step, that of the base, since B is zero.
    """
    for name in ("inputs", "targets", "weights"):
        if name not in batch or batch[name].ndim != 3 or batch[name].shape[1] != 2:
            raise UsageError(f"batch[{name!r}]: give an array (batch, 2, length), the preferred response first; "
                             f"this batch has {', '.join(f'{key} {leaf.shape}' for key, leaf in batch.items())}.")
    # The pairs of an example stay on its device: the leading dim is the sharded one.
    shape = batch["inputs"].shape
    logits = model(batch["inputs"].reshape(-1, shape[-1])).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"].reshape(-1, shape[-1]))
    return -(losses.reshape(shape) * batch["weights"].astype(jnp.float32)).sum(-1)


def dpo_loss(model: Any, batch: Batch, *, beta: float = 0.1) -> Any:
    """The loss of DPO, with the share of pairs in the right order and the mean margin as metrics.

    batch: as for `response_log_probs`, and `reference`, float (batch, 2): what that returned for the reference model.
    beta: how strongly the model is held to the reference; bind another by `functools.partial`.
    """
    means = {name: value.mean() for name, value in dpo_by_pair(model, batch, beta=beta).items()}
    return means.pop("loss"), means


def dpo_by_pair(model: Any, batch: Batch, *, beta: float) -> dict[str, jax.Array]:
    """What `dpo_loss` takes the means of, float32 (batch,): `loss`, `accuracy` (1 or 0) and `margin`."""
    if "reference" not in batch:
        raise UsageError("dpo_loss: the batch has no reference: add response_log_probs of the model before training, "
                         "as step.evaluator(zero_jax.response_log_probs)(state, batch).")
    rewards = beta * (response_log_probs(model, batch) - batch["reference"].astype(jnp.float32))
    margins = rewards[:, 0] - rewards[:, 1]
    return {"loss": -jax.nn.log_sigmoid(margins), "accuracy": (margins > 0).astype(jnp.float32), "margin": margins}
