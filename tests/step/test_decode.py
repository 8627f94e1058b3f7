"""Tokens one after another, with a cache, from the sharded parameters of a state: those of one device."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.oracle import slow

import zero_jax

VOCAB, PROMPT, LENGTH = 31, 3, 8


class Decoder(nn.Module):
    """Of dims that no eight devices divide; `decode` keeps keys and values in the collection `cache`."""

    decode: bool = False

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, 36)(tokens)
        mask = None if self.decode else nn.make_causal_mask(tokens)
        x = x + nn.MultiHeadDotProductAttention(num_heads=3, decode=self.decode)(x, mask=mask)
        return nn.Dense(VOCAB)(nn.tanh(x))


def generate(params, prompt):
    """`prompt` continued up to LENGTH tokens, int32 (batch, LENGTH)."""
    decoder = Decoder(decode=True)
    tokens = jnp.pad(prompt, ((0, 0), (0, LENGTH - PROMPT)))
    cache = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(
        decoder.init, jax.random.key(0), tokens)["cache"])

    def one(carry, position):
        cache, tokens = carry
        token = jax.lax.dynamic_slice_in_dim(tokens, position, 1, axis=1)
        logits, new = decoder.apply({"params": params, "cache": cache}, token, mutable=["cache"])
        following = jnp.where(position + 1 < PROMPT, tokens[:, position + 1], logits[:, 0].argmax(-1))
        return (new["cache"], tokens.at[:, position + 1].set(following)), None

    return jax.lax.scan(one, (cache, tokens), jnp.arange(LENGTH - 1))[0][1]


@pytest.mark.grid
@pytest.mark.parametrize("stage, gathered", [slow(0, "once"), slow(3, "once"), (3, "in each iteration")])
def test_decoding_with_a_cache(stage, gathered):
    def decode(model, batch):
        params = model.variables["params"]
        return generate(nn.unbox(params) if gathered == "once" else params, batch["inputs"][:, :PROMPT])

    tokens = np.random.default_rng(0).integers(0, VOCAB, (8, LENGTH)).astype(np.int32)
    batch = {"inputs": tokens, "targets": tokens}
    step = zero_jax.make_zero_train_step(Decoder(), stage)
    state = step.init(jax.random.key(0), batch)
    params = jax.device_get(step.params(state))
    found = step.evaluator(decode)(state, batch)
    np.testing.assert_array_equal(found, generate(params, tokens[:, :PROMPT]))
    # Against the whole sequence at once, without a cache.
    logits = Decoder().apply({"params": params}, found)
    np.testing.assert_array_equal(found[:, PROMPT:], logits.argmax(-1)[:, PROMPT - 1:-1])
    # Negative control: other parameters go on with other tokens.
    other = {**params, "Dense_0": jax.tree.map(lambda leaf: -leaf, params["Dense_0"])}
    assert not np.array_equal(found, generate(other, tokens[:, :PROMPT]))


class NnxDecoder(nnx.Module):
    """The same in NNX, whose attention has the cache as variables."""

    def __init__(self, rngs):
        self.embed, self.head = nnx.Embed(VOCAB, 36, rngs=rngs), nnx.Linear(36, VOCAB, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(3, 36, decode=False, rngs=rngs)

    def __call__(self, tokens, decode=False):
        x = self.embed(tokens)
        x = x + self.attention(x, mask=None if decode else nnx.make_causal_mask(tokens), decode=decode)
        return self.head(nnx.tanh(x))


def nnx_generate(model, prompt, loop):
    """`prompt` continued up to LENGTH tokens, int32 (batch, LENGTH)."""
    model.attention.init_cache((prompt.shape[0], LENGTH, 36))
    tokens = jnp.pad(prompt, ((0, 0), (0, LENGTH - PROMPT)))

    def one(position, carry):
        model, tokens = carry
        logits = model(jax.lax.dynamic_slice_in_dim(tokens, position, 1, axis=1), decode=True)
        following = jnp.where(position + 1 < PROMPT, tokens[:, position + 1], logits[:, 0].argmax(-1))
        return model, tokens.at[:, position + 1].set(following)

    if loop == "fori_loop":
        return nnx.fori_loop(0, LENGTH - 1, one, (model, tokens))[1]
    for position in range(LENGTH - 1):
        _, tokens = one(position, (model, tokens))
    return tokens


@pytest.mark.grid
@pytest.mark.parametrize("stage, loop", [slow(3, "fori_loop"), slow(3, "python"), slow(1, "fori_loop")])
def test_decoding_in_nnx(stage, loop):
    tokens = np.random.default_rng(0).integers(0, VOCAB, (8, LENGTH)).astype(np.int32)
    batch = {"inputs": tokens, "targets": tokens}
    step = zero_jax.make_zero_train_step(NnxDecoder, stage)
    state = step.init(jax.random.key(0), batch)
    found = step.evaluator(lambda model, batch: nnx_generate(model, batch["inputs"][:, :PROMPT], loop))(state, batch)
    alone = NnxDecoder(nnx.Rngs(0))
    expected = nnx_generate(alone, tokens[:, :PROMPT], "python")  # negative control: its own parameters are others
    assert not np.array_equal(found, expected)
    nnx.update(alone, jax.device_get(step.params(state)))
    np.testing.assert_array_equal(found, nnx_generate(alone, tokens[:, :PROMPT], "python"))
    np.testing.assert_array_equal(found[:, PROMPT:], alone(found).argmax(-1)[:, PROMPT - 1:-1])
