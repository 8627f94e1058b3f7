"""What a run measures and generates: sums over an evaluation set, and continuations of held-out text."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zero_jax.cli.environment import shown_text
from zero_jax.cli.model_lookup import ModelChoice
from zero_jax.cli.step_from_config import evaluator_of
from zero_jax.cli.train_config import TrainConfig
from zero_jax.cli.weights.generate import generate, next_logits, sample_with_cache
from zero_jax.distributed.initialize import on_host, put_global
from zero_jax.step.losses import call_model
from zero_jax.step.step import ZeroTrainStep


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


PROMPT_TOKENS, SAMPLE_TOKENS, TEMPERATURE = 64, 160, 0.7


def continuations(config: TrainConfig, choice: ModelChoice, step: ZeroTrainStep, state: Any, held_out: np.ndarray,
                  decode: Callable[[np.ndarray], str]) -> tuple[str, ...]:
    """Continuations of held-out tokens, int (number,), as text by `decode`.

    With a cache where the model has one: prompt and new tokens together are then no longer than a training sequence,
    since learned positions beyond it were never trained. Without, a window of that length moves along.
    """
    if not config.samples:
        return ()
    longest = max(1, config.seq_len // 4) if _has_cache(config, choice) else config.seq_len
    prompts = held_out_rows(held_out, config.samples, min(PROMPT_TOKENS, longest), step)
    new = continued(config, choice, step, state, prompts)

    def text(ids: np.ndarray) -> str:
        return shown_text(decode(ids))

    return tuple(f"--- held-out text:\n{text(prompts[i])}\n--- continued by the model:\n{text(new[i])}"
                 for i in range(config.samples))


def continued(config: TrainConfig, choice: ModelChoice, step: ZeroTrainStep, state: Any, prompts: np.ndarray
              ) -> np.ndarray:
    """What the model says after `prompts`, int (rows, length) of a number that divides over the devices."""
    if _has_cache(config, choice):
        new = min(SAMPLE_TOKENS, config.seq_len - prompts.shape[1])
        sample = sample_with_cache(choice.decoder_for(prompts.shape[1] + new), num_tokens=new, temperature=TEMPERATURE)
        batch = put_global({"inputs": prompts.astype(np.int32)}, step.batch_sharding)
        return on_host(evaluator_of(config, step, sample)(state, batch, jax.random.key(config.seed)))
    evaluate = evaluator_of(config, step, next_logits)

    def logits(batch: Any) -> np.ndarray:
        # Sharded like any batch: otherwise every device would compute all rows.
        return on_host(evaluate(state, put_global(batch, step.batch_sharding)))

    return generate(logits, prompts, num_tokens=SAMPLE_TOKENS, length=config.seq_len, temperature=TEMPERATURE,
                    seed=config.seed)


def _has_cache(config: TrainConfig, choice: ModelChoice) -> bool:
    return choice.decoder is not None and config.seq_len > 1


def held_out_rows(held_out: np.ndarray, number: int, length: int, step: ZeroTrainStep) -> np.ndarray:
    """Windows of held-out tokens, int32 (rows, length), evenly apart: `number`, or more to divide over the devices."""
    devices = step.batch_sharding.num_devices
    rows = -(-number // devices) * devices
    starts = np.arange(rows) * (len(held_out) - length) // rows
    return np.stack([held_out[start:start + length] for start in starts]).astype(np.int32)


def marked_text(ids: np.ndarray, *, decode: Callable[[np.ndarray], str], marks: Mapping[int | None, str]) -> str:
    """The text of the first ids, with `marks` in place of ids that are no text.

    >>> marked_text(np.array([72, 258, 105]), decode=lambda ids: bytes(ids.tolist()).decode(), marks={258: "[?]"})
    'H[?]i'
    """
    ids = ids[:SAMPLE_TOKENS]
    special = np.isin(ids, [mark for mark in marks if mark is not None])
    runs = np.split(np.arange(len(ids)), np.flatnonzero(special[1:] | special[:-1]) + 1) if len(ids) else []
    return shown_text("".join(marks[int(ids[run[0]])] if special[run[0]] else decode(ids[run]) for run in runs))
