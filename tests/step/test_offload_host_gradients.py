"""Gradients in host memory: the same numbers, what the compiled program keeps there, and what cannot be is refused."""

import dataclasses

import flax.linen as nn
import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.stacked_nnx import NnxStacked
from support.targets import mesh_of

import zero_jax
from zero_jax.contract.host import HostBudget, HostUse, host_violations
from zero_jax.optim import streamed_update
from zero_jax.step import gradients
from zero_jax.tree import named_leaves

BATCH = {name: jax.random.randint(jax.random.key(seed), (16, 8), 0, 96) for seed, name in enumerate(
    ("inputs", "targets"))}
STATES = zero_jax.Offload(buffer_bytes=2**16)
GRADIENTS = zero_jax.Offload(gradients="host", buffer_bytes=2**16)
ALL = zero_jax.Offload(gradients="host", parameters="host", buffer_bytes=2**16)


class Block(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(x.shape[-1])(nn.gelu(nn.Dense(self.width)(x))), None


class Stacked(nn.Module):
    width: int = 64
    inner: int = 257  # padded to 264 where 8 devices split it
    layers: int = 3

    @nn.compact
    def __call__(self, x):
        blocks = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.layers)
        x, _ = blocks(self.inner, name="blocks")(nn.Embed(96, self.width)(x), None)
        return nn.Dense(96)(x)


def clipped_by_a_power_of_two():
    """As clipping by a global norm, but that its last bits, which depend on the order of the sum, do not matter."""
    def update(grads, state, params=None):
        factor = jnp.exp2(-jnp.ceil(jnp.log2(optax.tree.norm(grads))))
        return jax.tree.map(lambda grad: grad * factor.astype(grad.dtype), grads), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def trained(offload, *, model=Stacked, optimizer=None, **options):
    """(step, its state after three steps, losses, norms)."""
    optimizer = optimizer or optax.chain(clipped_by_a_power_of_two(), optax.adamw(1e-2))
    step = zero_jax.make_zero_train_step(model(), 3, optimizer=optimizer, offload=offload, **options)
    state, losses, norms = step.init(jax.random.key(0), BATCH), [], []
    for _ in range(3):
        state, metrics = step(state, BATCH)
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
    return step, state, losses, norms


def assert_same(left, right, *, exact=True):
    """Whether two runs have the same parameters, moments, average and losses, and norms but for the last bits."""
    np.testing.assert_allclose(left[3], right[3], rtol=1e-6 if exact else 1e-4)
    np.testing.assert_allclose(left[2], right[2], rtol=0 if exact else 1e-5)
    fields = [(state.params, state.opt_state, state.ema) for state in (left[1], right[1])]
    for (name, one), (_, other) in zip(*map(named_leaves, fields), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=0 if exact else 1e-4,
                                   atol=0 if exact else 1e-5, err_msg=name)


@pytest.mark.parametrize("exact, offload, setup", [
    (True, GRADIENTS, {"guard": zero_jax.Guard(skip=2)}),
    pytest.param(True, ALL, {"precision": "bf16", "ema": 0.9}, marks=pytest.mark.slow),
    pytest.param(True, GRADIENTS, {"model": lambda: NnxStacked(rngs=nnx.Rngs(0)), "precision": "bf16", "remat": "full"},
                 marks=pytest.mark.slow),
    # XLA:CPU fuses products with a scale in one of two programs alone.
    pytest.param(False, GRADIENTS, {"precision": "fp16"}, marks=pytest.mark.slow)])
def test_gradients_on_the_host_have_the_numbers_of_those_on_the_device(exact, offload, setup):
    states = dataclasses.replace(offload, gradients="device")
    host = trained(offload, **setup)
    assert_same(trained(states, **setup), host, exact=exact)
    layout = host[0].layout()
    assert len(layout.host_gradients) == 2 and all(name.startswith("blocks/") for name in layout.host_gradients)
    described = layout.describe()
    assert f"by backward, layer by layer: {layout.host_gradient_bytes:,} bytes" in described
    assert "gradients in device memory, of no stacked layers or with small shards: " in described


@pytest.mark.slow
def test_a_sum_of_one_device_is_found(monkeypatch):
    right = trained(STATES)
    monkeypatch.setattr(streamed_update._UnitRun, "over_devices", lambda self, sums: list(sums))
    with pytest.raises(AssertionError):
        assert_same(right, trained(GRADIENTS))


@pytest.mark.slow
def test_a_bad_step_changes_nothing_and_own_loops_get_gradients_on_the_device():
    step = zero_jax.make_zero_train_step(Stacked(), 3, offload=GRADIENTS, guard=zero_jax.Guard(skip=3),
                                         optimizer=optax.adam(1e-2))
    state = step.init(jax.random.key(0), BATCH)
    grads, metrics, _ = step.gradients(state, BATCH)
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(grads)} == {"device"}
    before = jax.tree.map(np.asarray, (state.params, state.opt_state))
    broken = dataclasses.replace(state, params=jax.tree.map(lambda leaf: leaf * jnp.inf, state.params))
    broken, metrics = step(broken, BATCH)
    assert metrics["bad"] == 1 and np.isnan(metrics["grad_norm"])
    for old, new in zip(jax.tree.leaves(before[1]), jax.tree.leaves(broken.opt_state), strict=True):
        assert np.asarray(new).tobytes() == old.tobytes()


@pytest.mark.slow
def test_the_compiled_program_stacks_gradients_in_host_memory(monkeypatch):
    """And its device has less than with a program that leaves them there, which breaks the contract."""
    batch = {name: jax.ShapeDtypeStruct((8, 8), jnp.int32) for name in ("inputs", "targets")}

    def compiled():
        step = zero_jax.make_zero_train_step(
            Stacked(256, 1024, 12), 3, mesh=mesh_of("h100:8"), precision="bf16", offload=ALL,
            optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)))
        return step.compiled_step(batch)

    host = compiled()
    report, size = host.verify(), 2 * 12 * 256 * 1024 * 2 // 8  # two kernels in bf16, over eight devices
    assert sum(host.contract.host.gradients) == host.memory.host_temp_size_in_bytes == size
    assert f"gradients that backward writes there: {size:,} bytes" in str(report)
    # Read once for the norm, once for the update.
    assert 2 * size <= sum(read.bytes * read.runs for read in host.host_use.gradient_reads) < 2.01 * size

    monkeypatch.setattr(gradients, "stack_on_host", lambda closed, outputs: closed)
    monkeypatch.setattr(gradients, "check_on_host", lambda grads, names: None)
    device = compiled()
    (line,) = device.report.violations
    assert f"{size:,} bytes of gradients, of {size:,} that backward should write to host memory, are not there" in line
    # As many bytes less, but that what is at the peak is now alive at another time.
    assert 0.75 * size < device.memory.temp_size_in_bytes - host.memory.temp_size_in_bytes <= 1.01 * size


@pytest.mark.parametrize("use, words", [
    (HostUse(192, 192, 0, stacks=()), "96 bytes of gradients, of 96"),
    (HostUse(192, 192, 96, stacks=(64,)), "32 bytes of gradients, of 96"),
    (HostUse(192, 192, 64, stacks=(64, 32)), "32 bytes of gradients, of 96"),
    (HostUse(192, 192, 160, stacks=(64, 32, 64)), "64 bytes of temporaries are in host memory beside the gradients")])
def test_gradients_elsewhere_break_the_contract(use, words):
    budget = HostBudget(192, gradients=(64, 32))
    (line,) = host_violations(budget, use)
    assert words in line
    assert not [*host_violations(budget, HostUse(192, 192, 96, stacks=(32, 64)))]


@pytest.mark.parametrize("stage, offload, setup, words", [
    (2, GRADIENTS, {}, "at stage 2: its parameters are whole"),
    (3, GRADIENTS, {"accumulate": 2}, "with accumulate=2: the sum over microbatches"),
    (3, GRADIENTS, {"tiling": {"Dense_0/kernel": 4}}, "with tiling=: the gradient of a weight in tiles"),
    (3, GRADIENTS, {"communication": zero_jax.Communication(weights="int8")}, "leave communication out"),
    (3, GRADIENTS, {"partition_activations": "cpu"}, "with partition_activations=\"cpu\": what backward reads and"),
    (3, GRADIENTS, {"gather": "forward"}, "gather=.*leave gradients out"),
    (3, "gradients", {"mesh": "v5p:2x2x1"}, "on TPUs: not built")])
def test_what_keeps_gradients_on_the_devices_is_refused(stage, offload, setup, words):
    setup = {**setup, **({"mesh": mesh_of(setup["mesh"])} if "mesh" in setup else {})}
    with pytest.raises(zero_jax.UsageError, match=words):
        zero_jax.make_zero_train_step(Stacked(), stage, offload=offload, **setup)


class ReadTwice(nn.Module):
    """Its loop over layers runs twice, with the same weights."""

    @nn.compact
    def __call__(self, x):
        blocks = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)(256, name="blocks")
        x, _ = blocks(nn.Embed(96, 64)(x), None)
        x, _ = blocks(x, None)
        return nn.Dense(96)(x)


def test_gradients_that_no_loop_stacks_are_refused():
    for wrong in {"disk": "states"}, {"fraction": 0.5}, {"optimizer": "device", "master": None}:
        with pytest.raises(zero_jax.UsageError, match="leave one of them out"):
            zero_jax.Offload(gradients="host", **wrong)
    unrolled = nn.Sequential([nn.Embed(96, 64), nn.Dense(256), nn.gelu, nn.Dense(96)])
    for model, words in ((unrolled, "none of this model's loops over stacked layers"),
                         (ReadTwice(), "blocks/Dense_0/kernel, blocks/Dense_1/kernel is no stack that one loop")):
        step = zero_jax.make_zero_train_step(model, 3, offload=GRADIENTS)
        with pytest.raises(zero_jax.UsageError, match=words):
            step.lower(BATCH)
