"""Complex parameters in slices that train by themselves."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.slices import MODELS, VOCABULARY, WIDTH, batches, make, trained


class Turned(nn.Module):
    """A product with complex weights."""

    @nn.compact
    def __call__(self, x, _):
        turned = x @ self.param("turn", nn.initializers.normal(0.3), (WIDTH, 64), jnp.complex64)
        return x + nn.Dense(WIDTH)(jnp.abs(turned) + turned.imag), None


class Complex(nn.Module):
    """Two such layers in a loop."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCABULARY, WIDTH)(tokens)
        blocks = nn.scan(Turned, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        return nn.Dense(VOCABULARY)(blocks(name="blocks")(x, None)[0])


def assert_close(left, right):
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6), left, right)


@pytest.mark.grid
def test_both_parts_of_complex_parameters_are_averaged(monkeypatch):
    """Averaged in every step they are those of synchronous training, in one part and in several."""
    monkeypatch.setitem(MODELS, "complex", Complex())
    given = batches(3)
    options = {"flavour": "complex", "inner": optax.sgd(0.1), "every": 1, "learning_rate": 1.0, "momentum": 0.0,
               "nesterov": False}
    diloco = make(**options)
    state = diloco.step.init(jax.random.key(0), given[0])
    start = np.asarray(diloco.step.params(state)["blocks"]["turn"])
    for batch in given:
        state, _ = diloco.step(state, batch)
    averaged, synchronous = diloco.params(trained(diloco, given)[1]), diloco.step.params(state)
    assert np.abs((synchronous["blocks"]["turn"] - start).imag).max() > 1e-4
    assert_close(averaged, synchronous)
    beside = []
    for parts in (1, 4):
        diloco = make(**options, overlap=True)
        diloco.layout(given[0])
        monkeypatch.setattr(diloco.functions, "num_parts", lambda fragment, batch=None, parts=parts: parts)
        beside.append(diloco.params(trained(diloco, given)[1]))
    assert_close(*beside)
    make(**options).verify(given[0])
