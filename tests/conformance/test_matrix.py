"""Each feature of a module by flavour, stage and evenness, beside a plain Flax and Optax loop on one device.

All pairs of (feature, stage), (feature, evenness) and (stage, evenness) are in `make test-slow`; by default a few rows
that the random modules do not draw.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from support.covering import weekly
from support.module_pieces import PIECES, WIDTH, squares
from support.oracle import oracle, slow, train
from support.random_modules import Drawn, batches, check

import zero_jax

pytestmark = pytest.mark.short_random
FEATURES = [(flavour, piece) for flavour in PIECES for piece in sorted(PIECES[flavour])]
HIDDEN = {"even": 16, "uneven": 13}
DEFAULT = {("linen", "ragged_dot", 3, "uneven"), ("nnx", "fused attention", 2, "even")}


def rows():
    """Every feature at every stage, with even and uneven shapes by turns, so that both are with every stage."""
    for number, (flavour, piece) in enumerate(FEATURES):
        for stage in range(4):
            row = flavour, piece, stage, ("even", "uneven")[(number + stage) % 2]
            yield pytest.param(*row, marks=() if row in DEFAULT else pytest.mark.slow)


def test_there_are_forty():
    assert len(FEATURES) >= 40


@pytest.mark.grid
@pytest.mark.filterwarnings("ignore:Every device computes the whole of \\S*ragged_dot_general over data")
@pytest.mark.parametrize("flavour, piece, stage, evenness", [*rows()])
def test_a_feature_has_the_numbers_of_one_device(flavour, piece, stage, evenness):
    check(Drawn(0, flavour, (piece,), HIDDEN[evenness], stage, "fp32"))


# A module that maps over the devices itself, and so is made for a mesh.


def over_rows(mesh, x, w):
    return jax.shard_map(lambda x, w: jnp.tanh(x @ w), mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))(x, w)


class Mapping(nn.Module):
    mesh: jax.sharding.Mesh

    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.normal(0.3), (WIDTH, 13))
        return nn.Dense(1)(over_rows(self.mesh, x, w))


class NnxMapping(nnx.Module):
    def __init__(self, mesh, rngs):
        self.w = nnx.Param(nnx.initializers.normal(0.3)(rngs.params(), (WIDTH, 13)))
        self.last, self.mesh = nnx.Linear(13, 1, rngs=rngs), mesh

    def __call__(self, x):
        return self.last(over_rows(self.mesh, x, self.w[...]))


@pytest.mark.grid
@weekly("flavour, stage", [("linen", 3), ("nnx", 2), slow("linen", 1), slow("nnx", 3)])
def test_a_module_with_a_shard_map_of_its_own(flavour, stage):
    def model(mesh):
        return Mapping(mesh) if flavour == "linen" else lambda rngs: NnxMapping(mesh, rngs)

    options = {"batches": batches(), "loss": squares, "optimizer": optax.sgd(0.05)}
    one = oracle(model(zero_jax.make_mesh(1)), **options)
    many = train(model(zero_jax.make_mesh(8)), stage, 8, **options)
    np.testing.assert_allclose(many.losses, one.losses, rtol=2e-5)
    for name, leaf in one.params.items():
        np.testing.assert_allclose(many.params[name], leaf, atol=2e-5)
    assert not np.allclose(many.params["w"], one.start["w"], atol=1e-3)
