"""Text from a trained model: one token after another, without a cache, for a look at what it learned."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def next_logits(model: Any, batch: Any) -> jax.Array:
    """Logits, float32 (batch, vocab), of the token after position `batch["last"]`, int (batch,), of `batch["inputs"]`.

    For `ZeroTrainStep.evaluator`. What lies beyond that position is not seen by a causal model.
    """
    logits = model(batch["inputs"])
    return jnp.take_along_axis(logits, batch["last"][:, None, None], axis=1)[:, 0].astype(jnp.float32)


def generate(
    logits_of: Callable[[Any], Any], prompts: np.ndarray, *, num_tokens: int, length: int, temperature: float, seed: int
) -> np.ndarray:
    """`num_tokens` more tokens for each prompt: int32 (batch, num_tokens).

    Args:
      logits_of: {"inputs": int32 (batch, length), "last": int32 (batch,)} to logits (batch, vocab) that follow `last`.
      prompts: int (batch, prompt length), of which the last `length` are seen.
      num_tokens: how many to draw.
      length: of the window, always the same, so that `logits_of` compiles once.
      temperature: divides the logits; towards 0 the likeliest token is drawn.
      seed: of the draws.
    """
    draws = np.random.Generator(np.random.PCG64(seed))
    batch, start = prompts.shape
    tokens = np.concatenate([prompts.astype(np.int32), np.zeros((batch, num_tokens), np.int32)], axis=1)
    for end in range(start, start + num_tokens):
        first = max(0, end - length)
        window = np.zeros((batch, length), np.int32)
        window[:, : end - first] = tokens[:, first:end]
        logits = np.asarray(logits_of({"inputs": window, "last": np.full(batch, end - first - 1, np.int32)}))
        # The largest of logits + Gumbel noise is a draw from their softmax.
        tokens[:, end] = (logits / max(temperature, 1e-6) + draws.gumbel(size=logits.shape)).argmax(axis=1)
    return tokens[:, start:]
