"""Text from a trained model, token by token and without a KV cache: a quick look at what it has learned."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def next_logits(model: Any, batch: Any) -> jax.Array:
    """Logits, float32 (batch, vocab), of the token after position `batch["last"]`, int (batch,), of `batch["inputs"]`.

    For `ZeroTrainStep.evaluator`. A causal model does not attend to what comes after that position.
    """
    logits = model(batch["inputs"])
    return jnp.take_along_axis(logits, batch["last"][:, None, None], axis=1)[:, 0].astype(jnp.float32)


def generate(
    logits_of: Callable[[Any], Any], prompts: np.ndarray, *, num_tokens: int, length: int, temperature: float, seed: int
) -> np.ndarray:
    """`num_tokens` more tokens for each prompt: int32 (batch, num_tokens).

    Args:
      logits_of: from {"inputs": int32 (batch, length), "last": int32 (batch,)} to logits (batch, vocab) of the token
        after position `last`.
      prompts: int (batch, prompt length), of which the last `length` tokens are used.
      num_tokens: tokens to sample.
      length: of the window, always the same, so that `logits_of` compiles once.
      temperature: divides the logits; near 0 the most likely token is chosen.
      seed: of the samples.
    """
    noise = np.random.Generator(np.random.PCG64(seed))
    batch, start = prompts.shape
    tokens = np.concatenate([prompts.astype(np.int32), np.zeros((batch, num_tokens), np.int32)], axis=1)
    for end in range(start, start + num_tokens):
        first = max(0, end - length)
        window = np.zeros((batch, length), np.int32)
        window[:, : end - first] = tokens[:, first:end]
        logits = np.asarray(logits_of({"inputs": window, "last": np.full(batch, end - first - 1, np.int32)}))
        # The argmax of logits + Gumbel noise is a sample from their softmax.
        tokens[:, end] = (logits / max(temperature, 1e-6) + noise.gumbel(size=logits.shape)).argmax(axis=1)
    return tokens[:, start:]
