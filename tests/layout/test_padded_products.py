"""Products with weights that are stored padded: the numbers of one device."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from support.flat import flat_step
from support.oracle import ADAMW, by_name, loss_difference, oracle, param_difference, train
from support.program_controls import unsent_by_one_device

import zero_jax
from zero_jax.tree import named_leaves

WIDE = 1023  # 1,024 over 8 devices: of less padding than merged dims are worth


def batches(steps=2):
    return [{name: jax.random.randint(jax.random.key(10 * number + i), (16, 4), 0, 96)
             for i, name in enumerate(("inputs", "targets"))} for number in range(steps)]


class Block(nn.Module):
    """Of two products, one of which keeps the padded dim of its weight, and one sums over it."""

    width: int

    @nn.compact
    def __call__(self, x, _=None):
        up = nn.Dense(WIDE, name="up")(x)
        return x + nn.Dense(self.width, name="down", dtype=jnp.float32)(nn.gelu(up)).astype(x.dtype), None


class Net(nn.Module):
    """Blocks in a loop over layers, or one; heads of a product of three dims."""

    width: int = 66
    scanned: bool = False

    @nn.compact
    def __call__(self, x):
        x = nn.Embed(96, self.width)(x)
        if self.scanned:
            loop = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
            x, _ = loop(self.width, name="blocks")(x, None)
        else:
            x, _ = Block(self.width, name="blocks")(x)
        return nn.Dense(96, name="head")(x)


class NnxNet(nnx.Module):
    """The first weight, transposed before its product."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(96, 66, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDE, 66, rngs=rngs), nnx.Linear(WIDE, 96, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.gelu(self.embed(x) @ self.up.kernel[...].T))


@pytest.fixture(scope="module")
def plain():
    return oracle(Net(), batches=batches())


def test_numbers_are_those_of_one_device(plain):
    run = train(Net(), 3, 8, batches=batches())
    assert loss_difference(run, plain) < 1e-6 and param_difference(run, plain) < 2e-6
    np.testing.assert_allclose(run.norms, plain.norms, rtol=1e-5)
    stored = {use.stored_shape.stored for _, use in named_leaves(run.step.layout().uses) if use is not None}
    assert stored >= {(66, 1024), (1024, 66)}

    with unsent_by_one_device():  # negative control
        broken = train(Net(), 3, 8, batches=batches()[:1])
    assert abs(broken.norms[0] - plain.norms[0]) > 1e-3


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize(("model", "precision", "options"), [
    (Net(scanned=True), None, {"remat": "full"}), (Net(), "bf16", {}), (Net(scanned=True), "bf16", {"accumulate": 2}),
    (Net(scanned=True), "bf16", {"offload": "parameters"}), (NnxNet, None, {}), (NnxNet, "bf16", {"stage": 2}),
    (Net(), None, {"accumulate": 2, "reduce": "once"}), (Net(), "bf16", {"communication": zero_jax.Communication(
        weights="int8")}),
    (Net(), None, {"mesh": (2, 4), "hpz_axes": ("data_0",)})])
def test_models_have_the_numbers_of_one_device(model, precision, options):
    made = (lambda rngs: NnxNet(rngs)) if model is NnxNet else model
    stage, sizes = options.get("stage", 3), options.get("mesh", 8)
    options = {name: value for name, value in options.items() if name not in ("stage", "mesh")}
    run = train(made, stage, sizes, batches=batches(), precision=precision, **options)
    one = oracle(made, batches=batches(), precision=precision)
    loose = bool(precision) + 20 * ("communication" in options)
    assert loss_difference(run, one) < (1e-6 if not loose else loose * 2e-4)
    assert param_difference(run, one) < (3e-6 if not loose else loose * 2e-3)


@pytest.mark.slow
def test_weights_that_tensor_parallelism_splits_are_padded_too(plain):
    mesh = zero_jax.make_mesh(4, tensor=2)  # 1,023 are 1,024 over four devices of ZeRO
    step = flat_step(Net(), 3, mesh=mesh, optimizer=ADAMW, tensor_rules=[
        ("up/kernel", P("tensor", None))])
    state, (first, second) = step.init(jax.random.key(0), batches()[0]), batches()
    assert step.layout().uses["blocks"]["up"]["kernel"].stored_shape.stored == (66, 1024)
    state, metrics = step(state, first)
    state, _ = step(state, second)
    np.testing.assert_allclose(metrics["loss"], plain.losses[0], rtol=1e-6)
    np.testing.assert_allclose(metrics["grad_norm"], plain.norms[0], rtol=1e-5)
    for name, value in by_name(step.params(state)).items():
        np.testing.assert_allclose(value, plain.params[name], atol=2e-6)
