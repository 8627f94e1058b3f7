"""Gradients beside the axes `tensor` and `context`, where no dim divides: scattered where they are made."""

import functools

import jax
import numpy as np
import pytest
from support.covering import covering
from support.oracle import slow
from support.trained_losses import FLAVOURS, LENGTH, losses

import zero_jax
from models import gpt2
from zero_jax.jaxpr.equations import bind_eqn, primitive_of
from zero_jax.jaxpr.primitives import SCATTER_ADD, scatter_dropping
from zero_jax.sharding import reduce_scatter as scatter
from zero_jax.transforms import explicit_scatter as partial

ODD = gpt2.Config(2, 18, 2, vocab_size=66, max_length=LENGTH, remat=True)


@functools.cache
def odd_oracle(flavour):
    return losses(flavour, 0, zero_jax.make_mesh(1), ODD)


@pytest.mark.grid
@pytest.mark.parametrize("flavour, stage, sizes, sequence", [
    *(slow(flavour, stage, {"context": 2, "tensor": 2} if context else {"tensor": 2}, sequence)
      for flavour, stage, context, sequence in covering(FLAVOURS, (3, 1), (False, True), (False, True))),
    slow("linen", 2, {"context": 4}, False), slow("nnx", 3, {"context": 4}, False)])
def test_odd_gradients_are_scattered_where_they_are_made(flavour, stage, sizes, sequence, monkeypatch):
    """And negative controls: rows of an embedding that are another device's, and another's part of the batch."""
    def found():
        options = {"tensor_rules": gpt2.tensor_rules(ODD), "sequence_parallel": sequence} if "tensor" in sizes else {}
        options["view"] = "global"  # of which it is a pass
        return losses(flavour, stage, zero_jax.make_mesh(**sizes), ODD, **options)

    def error(found):
        return np.max(np.abs(found / odd_oracle(flavour) - 1))

    scattered: list[object] = []
    right = partial.PartialGradient.scattered
    monkeypatch.setattr(
        partial.PartialGradient, "scattered", lambda self, eqn: scattered.append(eqn) or right(self, eqn))
    assert error(found()) <= 1e-6
    assert len(scattered) >= 2  # of embeddings and the like: products of padded weights scatter theirs (weight_product)
    if (flavour, stage, sequence) == ("linen", 3, False) and "tensor" in sizes:
        with monkeypatch.context() as broken:
            broken.setattr(partial.PartialGradient, "bind", lambda self, eqn, args: (
                scatter_dropping if primitive_of(eqn) == SCATTER_ADD else bind_eqn)(eqn, args))
            assert error(found()) > 1e-6
        monkeypatch.setattr(partial, "reduce_parts", lambda value, axes, spec, *_, **__: scatter.reduce_parts(
            value * (1 + 1e-2 * jax.lax.axis_index("data")), axes, spec))
        assert error(found()) > 1e-6
