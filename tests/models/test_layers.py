"""Norms and activation functions of `models.layers`: Flax's values and gradients, and fewer bytes saved."""

import dataclasses
import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.covering import weekly

from models import gpt2, gpt2_nnx
from models.layers import activations, norms
from models.layers.attention import attention

BATCH, LENGTH, WIDTH = 3, 48, 64


@jax.custom_vjp
def kernel(q, k, v):
    return q + k + v


kernel.defvjp(lambda q, k, v: (kernel(q, k, v), (q, k, v)), lambda saved, out: tuple(out + each for each in saved))


def attend(q, k, v, **_):
    """What a kernel of attention saves, and nothing of what it computes."""
    return kernel(q, k, v)


CONFIG = gpt2.Config(3, WIDTH, 2, vocab_size=32, max_length=LENGTH, dtype=jnp.bfloat16, attention=attend)


def saved_by_a_layer(module, config):
    """Bytes per token and feature of what backward reads, for each layer, without parameters and what is outside."""
    def saved(layers):
        each = dataclasses.replace(config, num_layers=layers)
        tokens = jnp.zeros((BATCH, LENGTH), jnp.int32)
        if module is gpt2:
            model = gpt2.build(each)
            params = jax.eval_shape(model.init, jax.random.key(0), tokens)
            logits = functools.partial(model.apply, tokens=tokens)
        else:
            graphdef, params = nnx.split(nnx.eval_shape(lambda: module.build(each)(nnx.Rngs(0))))
            logits = lambda params: nnx.merge(graphdef, params)(tokens)  # noqa: E731
        pullback = jax.eval_shape(lambda params: jax.vjp(logits, params)[1], params)
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(pullback)
                   if BATCH * LENGTH in (math.prod(leaf.shape[:2]), math.prod(leaf.shape[1:3])))

    return (saved(4) - saved(2)) / (2 * BATCH * LENGTH * WIDTH)


@pytest.mark.parametrize("module", [gpt2, gpt2_nnx])
@weekly("scanned", [True, False])
def test_a_layer_in_bfloat16_saves_what_is_published(module, scanned, monkeypatch):
    """34 bytes per token and feature, of which two masks of dropout are 2 (arXiv 2205.05198); the control: Flax's."""
    config = dataclasses.replace(CONFIG, scan_layers=scanned)
    assert 30 < saved_by_a_layer(module, config) < 35
    for name, theirs in (("LayerNorm", nn.LayerNorm), ("NnxLayerNorm", nnx.LayerNorm), ("gelu", nn.gelu)):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, theirs)
    assert saved_by_a_layer(module, config) > 70


FUNCTIONS = {"gelu": (activations.gelu, nn.gelu), "silu": (activations.silu, nn.silu),
             "exact_gelu": (activations.exact_gelu, functools.partial(nn.gelu, approximate=False))}


def value_and_gradient(fun, *args):
    """Of the sum of squares of the result, in float32."""
    def loss(*args):
        return jnp.square(fun(*args).astype(jnp.float32)).sum()

    return fun(*args), jax.grad(loss, argnums=tuple(range(len(args))))(*args)


def differences(ours, theirs, *args):
    found, expected = (value_and_gradient(fun, *args) for fun in (ours, theirs))
    return [float(np.abs(np.asarray(a, np.float32) - np.asarray(b, np.float32)).max() / np.abs(np.asarray(b)).max())
            for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)]


@pytest.mark.parametrize("dtype, tolerance", [(jnp.float32, 1e-6), (jnp.bfloat16, 2e-2)])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_activation_functions_have_flaxs_values_and_slopes(name, dtype, tolerance):
    x = jax.random.normal(jax.random.key(0), (16, 32), dtype) * 2
    ours, theirs = FUNCTIONS[name]
    assert max(differences(ours, theirs, x)) < tolerance
    if dtype == jnp.float32 and name != "silu":  # the control: the other GELU is another function
        other, = {"gelu", "exact_gelu"} - {name}
        assert max(differences(ours, FUNCTIONS[other][1], x)) > 10 * tolerance


NORMS = {"layer": (norms.LayerNorm, nn.LayerNorm, norms.NnxLayerNorm, nnx.LayerNorm),
         "rms": (norms.RMSNorm, nn.RMSNorm, norms.NnxRMSNorm, nnx.RMSNorm)}


@pytest.mark.parametrize("dtype, tolerance", [(jnp.float32, 3e-6), (jnp.bfloat16, 2e-2)])
@pytest.mark.parametrize("name", NORMS)
def test_norms_have_flaxs_values_gradients_and_parameters(name, dtype, tolerance):
    rng, features = np.random.default_rng(0), 24
    x = jnp.asarray(rng.normal(1, 2, (3, 5, features)), dtype)
    ours, theirs, our_nnx, their_nnx = NORMS[name]
    params = {key: jnp.asarray(rng.normal(size=features), jnp.float32)
              for key in ours().init(jax.random.key(0), x)["params"]}
    expected = dict(theirs().init(jax.random.key(0), x)["params"])
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, expected)

    def linen(module):
        return lambda params, x: module(dtype=dtype).apply({"params": params}, x)

    def with_nnx(module):
        def applied(params, x):
            graphdef, state = nnx.split(module(features, dtype=dtype, epsilon=1e-6, rngs=nnx.Rngs(0)))
            nnx.replace_by_pure_dict(state, params)
            return nnx.merge(graphdef, state)(x)

        return applied

    assert max(differences(linen(ours), linen(theirs), params, x)) < tolerance
    assert max(differences(with_nnx(our_nnx), with_nnx(their_nnx), params, x)) < tolerance
    # The control: another epsilon.
    assert max(differences(linen(functools.partial(ours, epsilon=0.5)), linen(theirs), params, x)) > 1.5 * tolerance


def test_capped_scores_take_no_other_kernel():
    """Negative control: without a cap the function is asked."""
    heads = jnp.ones((1, 4, 2, 8))
    with pytest.raises(ValueError, match="only XLA's attention caps scores"):
        attention(heads, heads, heads, causal=True, softcap=2.0, implementation=attend)
    attention(heads, heads, heads, causal=True, implementation=attend)
    attention(heads, heads, heads, causal=True, softcap=2.0, implementation="xla")
