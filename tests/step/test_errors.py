"""Bad input: one clear error each, that says what is wrong and what to do."""

import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh
from support.flat import flat_step

import zero_jax
from models import gpt2


class Tiny(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8)(x)


def batch(size=8, targets=None):
    return {"inputs": np.zeros((size, 4), np.int32), "targets": np.zeros((targets or size, 4), np.int32)}


def model():
    return gpt2.build(gpt2.Config(1, 8, 1, vocab_size=16, max_length=4))


@pytest.mark.parametrize("stage", [4, -1, "3", 3.0, True, None])
def test_wrong_stage(stage):
    with pytest.raises(ValueError, match="is not a ZeRO stage: give the integer 0 .*1 .*2 .*3"):
        zero_jax.make_zero_train_step(model(), stage)


@pytest.mark.parametrize(("wrong", "message"), [
    ("gpt2", "not a Flax module: give a flax.linen.Module"),
    (Tiny, "is a Linen class: give an instance"),
    (lambda rngs: jnp.ones(3), "made an array, which is no Flax module"),
])
def test_what_is_no_model(wrong, message):
    with pytest.raises(ValueError, match=message):
        zero_jax.make_zero_train_step(wrong, 3)


@pytest.mark.parametrize("wrong", ["adamw", optax.adamw, object()])
def test_what_is_no_optimizer(wrong):
    with pytest.raises(ValueError, match="not an optax transform"):
        zero_jax.make_zero_train_step(model(), 3, optimizer=wrong)


@pytest.mark.parametrize(("wrong", "message"), [
    (batch(8, 16), "differ in their leading dim.*inputs 8, targets 16"),
    (batch(12), "batch of 12 does not divide over the 8 devices"),
    (batch(4), "batch of 4 does not divide over the 8 devices"),
    (batch(0), "batch of 0 does not divide"),
    ({}, "batch is empty"),
])
@pytest.mark.parametrize("call", ["init", "layout", "lower"])
def test_batches_that_do_not_fit(wrong, message, call):
    step = zero_jax.make_zero_train_step(model(), 3)
    with pytest.raises(ValueError, match=message):
        step.init(jax.random.key(0), wrong) if call == "init" else getattr(step, call)(wrong)


def test_a_batch_that_does_not_fit_at_a_step_leaves_the_state_alone():
    step = zero_jax.make_zero_train_step(model(), 3)
    state = step.init(jax.random.key(0), batch())
    with pytest.raises(ValueError, match="batch of 12 does not divide"):
        step(state, batch(12))
    state, _ = step(state, batch())
    assert int(state.step) == 1


@pytest.mark.parametrize(("mesh", "axis", "message"), [
    (("x", "y"), None, "no axis 'data' for ZeRO to shard over"),
    (("data", "y"), None, "'y' has no role"),
    (("data", "y"), "z", "no axis 'z'"),
])
def test_meshes_that_do_not_fit(mesh, axis, message):
    devices = np.array(jax.devices()).reshape(4, 2)
    with pytest.raises(ValueError, match=message):
        flat_step(model(), 3, mesh=Mesh(devices, mesh), axis=axis)


def test_what_is_no_mesh():
    with pytest.raises(ValueError, match="is not a jax.sharding.Mesh"):
        zero_jax.make_zero_train_step(model(), 3, mesh=8)


@pytest.mark.parametrize(("options", "message"), [
    ({"data": 16}, "needs 16 devices and there are 8.*simulate_devices\\(16\\)"),
    ({"data": 0}, "sizes must be positive"),
    ({"replica": 3}, "8 devices do not divide by .*replica.: 3"),
    ({"data": (2, 8)}, "needs 16 devices"),
])
def test_mesh_sizes(options, message):
    with pytest.raises(ValueError, match=message):
        zero_jax.make_mesh(**options)


def test_simulating_too_late():
    with pytest.raises(ValueError, match="already started with 8 cpu device.*before anything else runs on JAX"):
        zero_jax.simulate_devices(16)


def test_simulating_in_time_and_too_late_in_a_fresh_process():
    code = "import jax, zero_jax; zero_jax.simulate_devices(4); print(jax.device_count()); zero_jax.simulate_devices(8)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "4\n"
    assert "already started with 4 cpu device" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("precision", ["fp8", "bf17"])
def test_unknown_precision(precision):
    with pytest.raises(ValueError, match="is unknown: give one of fp32, bf16"):
        zero_jax.make_zero_train_step(model(), 3, precision=precision)
    with pytest.raises(ValueError, match="give a floating dtype"):
        zero_jax.Precision(compute=jnp.int32)


@pytest.mark.parametrize("name", ["params", "compute", "reduce"])
def test_a_dtype_that_jax_would_cut(name):
    precision = zero_jax.Precision(**{name: jnp.float64})
    with pytest.raises(ValueError, match=f"Precision.{name}=float64.: JAX makes float32 of it: set jax_enable_x64"):
        zero_jax.make_zero_train_step(model(), 3, precision=precision)
    with jax.enable_x64():
        zero_jax.make_zero_train_step(model(), 3, precision=precision)


def test_parameters_in_a_half_initialised_state():
    abstract = nnx.eval_shape(lambda: nnx.Linear(4, 4, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="kernel is abstract|bias is abstract"):
        zero_jax.make_zero_train_step(abstract, 3)


def test_integer_parameters():
    class Counts(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x * self.param("count", lambda _: jnp.ones((), jnp.int32))

    step = zero_jax.make_zero_train_step(Counts(), 3, loss=lambda m, b: m(b["x"]).mean())
    with pytest.raises(ValueError, match="Parameter count has dtype int32"):
        step.layout({"x": np.ones((8, 2), np.float32)})


def test_a_missing_stream():
    class Noisy(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(2)(x) + jax.random.normal(self.make_rng("noise"), (2,))[None]

    step = zero_jax.make_zero_train_step(Noisy(), 3, loss=lambda m, b: m(b["x"]).mean(), rng_streams=())
    with pytest.raises(ValueError, match="noise.*rng_streams="):
        step.layout({"x": np.ones((8, 2), np.float32)})


@pytest.mark.parametrize("loss", [lambda m, b: m(b["inputs"]), lambda m, b: jnp.int32(3)])
def test_a_loss_that_is_no_scalar(loss):
    step = zero_jax.make_zero_train_step(model(), 3, loss=loss)
    with pytest.raises(ValueError, match="return a floating scalar"):
        step.layout(batch())


def test_a_key_that_is_none():
    with pytest.raises(ValueError, match="not a key: give jax.random.key"):
        zero_jax.make_zero_train_step(model(), 3).init(0, batch())


def test_step_and_state_are_printed_in_one_line():
    step = zero_jax.make_zero_train_step(nn.Dense(16), 3, loss=lambda m, b: m(b["x"]).mean(), optimizer=optax.sgd(0.1))
    assert repr(step) == "ZeroTrainStep(stage=3, mesh={'data': 8})"
    state = step.init(jax.random.key(0), {"x": np.ones((8, 16), np.float32)})
    device_bytes = step.layout().device_bytes
    assert repr(step) == (f"ZeroTrainStep(stage=3, mesh={{'data': 8}}, num_params=272, "
                          f"state_bytes_per_device={device_bytes:,})")
    assert repr(state) == f"ZeroState(mesh={{'data': 8}}, stored_params=272, bytes_per_device={device_bytes:,})"
