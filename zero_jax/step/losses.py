"""The default loss, that of preferences, and what a loss and an optimizer tell as metrics."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zero_jax.errors import UsageError
from zero_jax.frontends.functional import Changed
from zero_jax.step.metrics import as_metrics, is_array
from zero_jax.typing import Batch, Loss, Metrics, OptState, PRNGKey, Scalar


def next_token_loss(model: Any, batch: Batch) -> Any:
    """Mean cross entropy, in nats, of `batch["targets"]` under `model(batch["inputs"])`; both int (batch, length).

    Where there is `batch["weights"]`, float (batch, length) and 0 for what is no token, the mean is weighted by it,
    and its sum is returned too, so that microbatches weigh by their valid tokens: (mean, {}, sum). A batch of packed
    documents has `segment_ids` and `positions` too, which the model is given (`call_model`).
    """
    logits = call_model(model, batch).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    if "weights" not in batch:
        return losses.mean()
    weights = batch["weights"].astype(jnp.float32)
    total = weights.sum()
    return (losses * weights).sum() / jnp.where(total == 0, 1.0, total), {}, total


def call_model(model: Any, batch: Batch, **options: Any) -> Any:
    """`model` of `batch["inputs"]`, and of `segment_ids` and `positions`, int (batch, length), where there are any.

    Attention must not cross segments: raises ValueError for a model without these arguments.
    """
    inputs = batch["inputs"]  # before `try`, so that a batch without it is told by this line
    given = {name: batch[name] for name in ("segment_ids", "positions") if name in batch}
    try:
        return model(inputs, **given, **options)
    except TypeError as error:
        if given and any(f"unexpected keyword argument {name!r}" in str(error) for name in given):
            raise UsageError(f"The batch has packed documents, and the model does not take {' and '.join(given)}: its "
                             "attention would cross documents. Pad them (documents=pad), or give it these arguments."
                             ) from error
        raise


LOSS = 0x1055
"""Folded into the key of a step, or of a microbatch, for the loss's own draws, which no stream of the model shares."""


def takes_key(fun: Any) -> bool:
    """Whether a loss, or a function for an evaluator, has a parameter `rng`."""
    if hasattr(fun, "takes_key"):
        return fun.takes_key
    try:
        return "rng" in inspect.signature(fun).parameters
    except (TypeError, ValueError):  # of a builtin
        return False


def with_key(fun: Any, rng: PRNGKey | None) -> Any:
    """`fun(model, batch)` with the key for its own draws bound, where it takes one; None: any key, to learn shapes."""
    if not takes_key(fun):
        return fun

    def keyed(model: Any, batch: Batch) -> Any:
        return fun(model, batch, rng=jax.random.fold_in(jax.random.key(0) if rng is None else rng, LOSS))

    return keyed


def loss_and_metrics(out: Any) -> tuple[jax.Array, Metrics, Scalar]:
    """What a loss returned, as (scalar, {name: Metric}, weight); the weight is 1 where it tells none.

    Raises ValueError for anything but floating scalars and a dict of metrics under names of their own.
    """
    wanted = ("return a floating scalar, (scalar, {name: metric}), or with a third item the floating scalar that it is "
              "a mean over.")
    items: Any = out if isinstance(out, tuple) else (out,)
    if not 1 <= len(items) <= 3:
        raise UsageError(f"The loss returned a tuple of {len(items)}: {wanted}")
    loss, metrics, weight = items[0], items[1] if len(items) > 1 else {}, items[2] if len(items) > 2 else 1.0
    for what, value in (("loss", loss), ("loss's weight", weight)):
        if not is_array(value):
            hint = " (is there a return?)" if value is None else ""
            raise UsageError(f"The {what} is a {type(value).__name__}{hint}: {wanted}")
        if jnp.shape(value) != () or not jnp.issubdtype(jnp.result_type(value), jnp.floating):
            raise UsageError(f"The {what} has shape {jnp.shape(value)} and dtype {jnp.result_type(value)}: {wanted}")
    return loss, as_metrics(metrics), weight


def checked(loss: Loss) -> Loss:
    """`loss`, which raises ValueError where it returns what `loss_and_metrics` does not take."""
    def with_check(model: Any, batch: Batch) -> Any:
        out = loss(model, batch)
        loss_and_metrics(out.out if isinstance(out, Changed) else out)
        return out

    return with_check


def learning_rates(opt_state: OptState) -> Metrics:
    """`learning_rate`, `learning_rate_1` and so on, where the optimizer's state holds them (`inject_hyperparams`)."""
    found = [rate for _, rate in optax.tree.get_all_with_path(opt_state, "learning_rate")]
    rates = [rate for rate in found if isinstance(rate, jax.Array)]  # and not the state of its schedule
    return {f"learning_rate_{i}" if i else "learning_rate": rate for i, rate in enumerate(rates)}


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
