"""Text from a trained model, token by token: with a cache of keys and values where the model has one."""

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


def likeliest(logits: jax.Array, top_k: int | None, top_p: float | None) -> jax.Array:
    """`logits`, (..., vocab), with -inf in the place of all but the likeliest tokens: `top_k`, and of these `top_p`.

    top_p: the fewest whose probabilities come to at least that. None: all. Tokens as likely as the last one stay.
    """
    if top_k is not None and top_k < logits.shape[-1]:
        logits = jnp.where(logits < jax.lax.top_k(logits, top_k)[0][..., -1:], -jnp.inf, logits)
    if top_p is not None:
        ordered = jnp.sort(logits, axis=-1)[..., ::-1]
        chances = jax.nn.softmax(ordered, axis=-1)
        before = jnp.cumsum(chances, axis=-1) - chances
        least = jnp.where(before < top_p, ordered, jnp.inf).min(-1, keepdims=True)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return logits


def sample_with_cache(decoder: Any, *, num_tokens: int, temperature: float, top_k: int | None = None,
                      top_p: float | None = None) -> Callable[..., jax.Array]:
    """A function of (model, batch, rng) to `num_tokens` more tokens for each row of `batch["inputs"]`: int32.

    For `ZeroTrainStep.evaluator`: one program reads the prompt at once, and then one token after another, so that a
    token takes the FLOPs of one position; parameters are gathered where they are used.

    Args:
      decoder: a Linen model of the same parameters, whose tokens follow those in its collection `cache`; or for NNX an
        object with such an `apply`, which gets the module as `params`.
      num_tokens: at least 1.
      temperature: divides the logits; near 0 the most likely token is chosen.
      top_k: draw from so many of the likeliest alone, by `likeliest`, after the temperature.
      top_p: and of these from the fewest whose probabilities come to this.
    """
    def sample(model: Any, batch: Any, rng: jax.Array) -> jax.Array:
        params, prompts = model.variables["params"] if hasattr(model, "variables") else model, batch["inputs"]
        shapes = jax.eval_shape(lambda: decoder.apply({"params": params}, prompts, mutable=["cache"])[1]["cache"])
        cache = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

        def one(cache: Any, tokens: jax.Array, key: jax.Array) -> tuple[Any, jax.Array]:
            logits, new = decoder.apply({"params": params, "cache": cache}, tokens, mutable=["cache"])
            wide = logits[:, -1].astype(jnp.float32) / max(temperature, 1e-6)
            return new["cache"], jax.random.categorical(key, likeliest(wide, top_k, top_p)).astype(jnp.int32)

        def following(carry: Any, key: jax.Array) -> Any:
            cache, token = one(carry[0], carry[1][:, None], key)
            return (cache, token), token

        keys = jax.random.split(rng, num_tokens)
        cache, first = one(cache, prompts, keys[0])
        _, rest = jax.lax.scan(following, (cache, first), keys[1:])
        return jnp.concatenate([first[:, None], rest.T], axis=1)

    return sample


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
