"""Options that change how weights and gradients travel or where states are, together: the numbers without them."""

import jax
import numpy as np
import optax
import pytest
from support.flat import flat_step
from support.normed_net import losses_of
from support.workloads import token_batches

import zero_jax
from models import gpt2

CONFIG = gpt2.Config(2, 64, 4, vocab_size=250, max_length=32)
INT8 = zero_jax.Communication(weights="int8")


def losses(**options):
    batches = token_batches(3, 16, 32, 250)
    step = flat_step(
        gpt2.build(CONFIG), 3, optimizer=optax.adamw(1e-3, eps=1e-6), accumulate=2, mesh=zero_jax.make_mesh(8),
        **options)
    return np.array(losses_of(step, step.init(jax.random.key(0), batches[0]), batches)[0])


@pytest.mark.slow
def test_together_they_are_what_each_is():
    """In bf16, where each has something to send or to store in less; measured: 1.5e-5."""
    exact = losses(precision="bf16")
    for options in ({"gather": "step", "reduce": "once"}, {"gather": "step", "offload": "optimizer"}):
        np.testing.assert_allclose(losses(precision="bf16", **options), exact, rtol=3e-5, err_msg=str(options))
    codes = losses(precision="bf16", communication=INT8)
    assert abs(codes - exact).max() > 2e-5  # negative control: the codes are seen
    found = losses(precision="bf16", communication=INT8, gather="step", offload="optimizer")
    np.testing.assert_allclose(found, codes, rtol=3e-5)
