"""Products with padded weights: the numbers of one device, and in programs for H100 no copy of a weight or gradient."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from support.oracle import ADAMW, by_name, loss_difference, oracle, param_difference, train
from support.targets import mesh_of

import zero_jax
from zero_jax.gather.gather import use_of_read
from zero_jax.jaxpr.primitives import own_use
from zero_jax.step import gradients
from zero_jax.transforms import tiled_products as padded_products
from zero_jax.transforms.tiled_products import multiply_padded

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


def test_numbers_are_those_of_one_device(plain, monkeypatch):
    changed = []

    def watched(jaxpr):
        new = multiply_padded(jaxpr)
        changed.extend(own_use(eqn) for eqn in new.eqns if use_of_read(eqn) and use_of_read(eqn) not in [
            use_of_read(each) for each in jaxpr.eqns])
        return new

    monkeypatch.setattr(gradients, "multiply_padded", watched)
    run = train(Net(), 3, 8, batches=batches())
    assert loss_difference(run, plain) < 1e-6 and param_difference(run, plain) < 2e-6
    np.testing.assert_allclose(run.norms, plain.norms, rtol=1e-5)
    assert {use.stored_shape.stored for use in changed} >= {(66, 1024), (1024, 66)}

    # Negative control: what is beside the weight is padded with ones, so that the padding gets a gradient.
    pad = padded_products.lax.pad
    monkeypatch.setattr(padded_products.lax, "pad", lambda value, zero, ends: pad(value, jnp.ones_like(zero), ends))
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
def test_weights_that_tensor_parallelism_splits_are_used_padded_too(plain):
    mesh = zero_jax.make_mesh(4, tensor=2)  # 1,023 are 1,024 over four devices of ZeRO
    step = zero_jax.make_zero_train_step(Net(), 3, mesh=mesh, optimizer=ADAMW, tensor_rules=[
        ("up/kernel", P("tensor", None))])
    state, (first, second) = step.init(jax.random.key(0), batches()[0]), batches()
    assert step.layout().uses["blocks"]["up"]["kernel"].stored_shape.stored == (66, 1024)
    state, metrics = step(state, first)
    state, _ = step(state, second)
    np.testing.assert_allclose(metrics["loss"], plain.losses[0], rtol=1e-6)
    np.testing.assert_allclose(metrics["grad_norm"], plain.norms[0], rtol=1e-5)
    for name, value in by_name(step.params(state)).items():
        np.testing.assert_allclose(value, plain.params[name], atol=2e-6)


class Layers(nn.Module):
    """Layers whose weights 7 devices pad."""

    @nn.compact
    def __call__(self, x):
        class Layer(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                y = nn.Dense(4096, name="down")(nn.gelu(nn.Dense(16384, name="up")(x)))
                return x + y.astype(x.dtype), None

        loop = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        return loop()(x.astype(jnp.bfloat16), None)[0]


def compiled(target, tokens=1024):
    step = zero_jax.make_zero_train_step(
        Layers(), 3, mesh=mesh_of(target), precision="bf16", offload="parameters", remat="full",
        loss=lambda model, batch: jnp.square(model(batch["x"]).astype(jnp.float32)).mean())
    return step.compiled_step({"x": jax.ShapeDtypeStruct((step.mesh.size, tokens, 4096), jnp.bfloat16)})


@pytest.mark.slow
def test_programs_for_h100_copy_no_padded_weight_and_no_gradient(monkeypatch):
    even, uneven = compiled("h100:8"), compiled("h100:7")
    assert not uneven.report.violations
    ours = uneven.memory.temp_size_in_bytes
    assert ours < 1.1 * even.memory.temp_size_in_bytes
    # Negative control: without the pass.
    monkeypatch.setattr(gradients, "multiply_padded", lambda jaxpr: jaxpr)
    cut = compiled("h100:7")
    weight = 2 * 4096 * 16384
    assert cut.memory.temp_size_in_bytes > ours + weight / 2
    sent = [sum(each.communication_bytes * each.count for each in program.collectives) for program in (uneven, cut)]
    assert sent[0] == pytest.approx(sent[1], rel=1e-6)


def test_where_what_is_beside_a_weight_is_larger_the_weight_is_cut():
    seen = []
    for rows in (16, 4096):
        step = zero_jax.make_zero_train_step(Net(), 3)
        batch = {name: jax.ShapeDtypeStruct((rows, 4), "int32") for name in ("inputs", "targets")}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gradients, "multiply_padded", lambda jaxpr: seen.append(
                jaxpr is not multiply_padded(jaxpr)) or jaxpr)
            step.lower(batch)
        seen.append(None)
    small, large = [seen[:seen.index(None)], seen[seen.index(None):-1]]
    assert any(small) and not any(large)
