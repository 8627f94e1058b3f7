"""Gradients in host memory: the same numbers, what the compiled program keeps there, and what cannot be is refused."""

import dataclasses
import types

import flax.linen as nn
import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.offloaded import BATCH, run
from support.plain_training import plain_training
from support.stacked_nnx import NnxStacked
from support.targets import mesh_of

import zero_jax
from zero_jax.cli.planning.plan_report import transfers_text
from zero_jax.contract.host import HostBudget, HostUse, host_violations
from zero_jax.offload import host_update
from zero_jax.planning.transfers import transfers_of
from zero_jax.sharding.host_arrays import fetch, put_on_host
from zero_jax.step import accumulate, gradients
from zero_jax.transforms import host_gradients
from zero_jax.tree import named_leaves
from zero_jax.xla.host_reads import HostRead, HostWrite
from zero_jax.xla.targets import target_of

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
    state, numbers = run(step, step.init(jax.random.key(0), BATCH), 3)
    return step, state, *zip(*numbers, strict=True)


def assert_same(left, right, *, exact=True):
    """Whether two runs have the same parameters, moments, average and losses, and norms but for the last bits."""
    np.testing.assert_allclose(left[3], right[3], rtol=1e-6 if exact else 1e-4)
    np.testing.assert_allclose(left[2], right[2], rtol=0 if exact else 1e-5)
    fields = [(state.params, state.opt_state, state.ema) for state in (left[1], right[1])]
    for (name, one), (_, other) in zip(*map(named_leaves, fields), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=0 if exact else 1e-4,
                                   atol=0 if exact else 1e-5, err_msg=name)


@pytest.mark.grid
@pytest.mark.parametrize("exact, offload, setup", [
    (True, GRADIENTS, {"guard": zero_jax.Guard(skip=2)}),
    pytest.param(True, GRADIENTS, {"accumulate": 2, "precision": "bf16"}, marks=pytest.mark.slow),
    pytest.param(True, ALL, {"precision": "bf16", "ema": 0.9}, marks=pytest.mark.slow),
    pytest.param(True, ALL, {"accumulate": 2, "guard": zero_jax.Guard(skip=2), "ema": 0.9}, marks=pytest.mark.slow),
    pytest.param(True, GRADIENTS, {"accumulate": 2, "precision": "fp16"}, marks=pytest.mark.slow),
    pytest.param(True, ALL, {"accumulate": 2, "model": lambda: NnxStacked(rngs=nnx.Rngs(0)), "precision": "bf16",
                             "remat": "full"}, marks=pytest.mark.slow),
    # Clipping multiplies by what follows from the norm, whose last bits are others.
    pytest.param(False, GRADIENTS, {"accumulate": 2, "optimizer": optax.chain(
        optax.clip_by_global_norm(0.5), optax.adamw(1e-2))}, marks=pytest.mark.slow),
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
    described, size, iterations = layout.describe(), layout.host_gradient_bytes, setup.get("accumulate", 1)
    assert (f"by backward, layer by layer: {size:,} bytes" if iterations == 1 else
            f"sums over microbatches, of which each of {iterations} reads and writes {size:,} bytes for each device, "
            f"{iterations * size:,} each way in a step") in described
    assert "gradients in device memory, of no stacked layers or with small shards: " in described


@pytest.mark.slow
def test_a_sum_of_one_device_is_found(monkeypatch):
    right = trained(STATES)
    monkeypatch.setattr(host_update.UnitRun, "over_devices", lambda self, sums: list(sums))
    with pytest.raises(AssertionError):
        assert_same(right, trained(GRADIENTS))


MASKED = {**BATCH, "mask": jnp.arange(16) // 8}  # two microbatches


def masked_loss(model, batch):
    """A mean over other numbers of tokens in each microbatch."""
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["inputs"]), batch["targets"])
    mask = (batch["targets"] % (1 + 2 * batch["mask"][:, None]) == 0).astype(losses.dtype)
    return (losses * mask).sum() / mask.sum(), {}, mask.sum()


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize("model, precision, compute, tolerance", [
    (Stacked(), "fp32", None, 2e-5), (Stacked(), "bf16", jnp.bfloat16, 0.02), (NnxStacked, "fp32", None, 2e-5)])
def test_sums_over_microbatches_are_those_of_a_plain_loop(model, precision, compute, tolerance):
    """Of Flax and Optax, on the whole batch; without the weights of the microbatches they are others."""
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9))
    plain = plain_training(model, optimizer, masked_loss, [MASKED] * 3, compute=compute)

    def differences(loss):
        step = zero_jax.make_zero_train_step(
            model, 3, loss=loss, optimizer=optimizer, offload=GRADIENTS, accumulate=2, precision=precision)
        state, losses, norms = step.init(jax.random.key(0), MASKED), [], []
        for _ in range(3):
            state, metrics = step(state, MASKED)
            losses.append(float(metrics["loss"]))
            norms.append(float(metrics["grad_norm"]))
        params = zip(jax.tree.leaves(step.params(state)), jax.tree.leaves(plain.params), strict=True)
        return [*(abs(one / float(other) - 1) for pair in ((losses, plain.losses), (norms, plain.norms))
                  for one, other in zip(*pair, strict=True)),
                *(np.linalg.norm(one - other) / np.linalg.norm(other) for one, other in params)]

    assert max(differences(masked_loss)) < tolerance
    assert max(differences(lambda model, batch: masked_loss(model, batch)[:1])) > 2 * tolerance


@pytest.mark.slow
@pytest.mark.parametrize("valid", [slice(None, None, 2), slice(1, None, 2)], ids=["the first", "the last"])
def test_a_microbatch_of_no_weight_adds_nothing(valid):
    """Its loss is 0 / 0, and so is its gradient; the whole batch's is not."""
    def over_valid(model, batch):
        losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["inputs"]), batch["targets"])
        weights = jnp.broadcast_to(batch["weights"][:, None], losses.shape)
        return (losses * weights).sum() / weights.sum(), {}, weights.sum()

    def trained_on(rows):
        batch, optimizer = {**BATCH, "weights": jnp.zeros(16).at[rows].set(1)}, optax.sgd(0.1, momentum=0.9)
        step = zero_jax.make_zero_train_step(
            Stacked(), 3, loss=over_valid, optimizer=optimizer, offload=GRADIENTS, accumulate=2)
        state = step.init(jax.random.key(0), batch)
        for _ in range(2):
            state, metrics = step(state, batch)
        assert len(step.layout().host_gradients) == 2
        return step.params(state), metrics, plain_training(Stacked(), optimizer, over_valid, [batch] * 2)

    params, metrics, plain = trained_on(valid)
    np.testing.assert_allclose(metrics["loss"], plain.losses[-1], rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], plain.norms[-1], rtol=1e-5)
    for one, other in zip(jax.tree.leaves(params), jax.tree.leaves(plain.params), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    params, metrics, plain = trained_on(slice(0))
    assert all(np.isnan(leaf).all() for tree in (params, plain.params) for leaf in jax.tree.leaves(tree["blocks"]))


@pytest.mark.slow
def test_what_host_memory_had_before_a_step_is_not_added(monkeypatch):
    """XLA leaves it as it was; taken for a number, it is found."""
    def stale(shape, dtype):
        return put_on_host(jnp.full(shape, jnp.nan, dtype))

    right = trained(GRADIENTS, accumulate=2)
    monkeypatch.setattr(accumulate, "empty_on_host", stale)
    assert_same(right, trained(GRADIENTS, accumulate=2))
    monkeypatch.setattr(accumulate, "HostSums", lambda stacks, first: gradients.HostSums(stacks, first & False))
    assert np.isnan(trained(GRADIENTS, accumulate=2)[3]).all()


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


@pytest.mark.slow
def test_the_compiled_program_adds_microbatches_in_host_memory(monkeypatch):
    """Each reads and writes a layer at a time; one that reads two breaks the contract."""
    batch = {name: jax.ShapeDtypeStruct((32, 8), jnp.int32) for name in ("inputs", "targets")}

    def compiled(offload=ALL):
        step = zero_jax.make_zero_train_step(
            Stacked(256, 1024, 12), 3, mesh=mesh_of("h100:8"), precision="bf16", offload=offload, accumulate=4,
            optimizer=optax.adamw(1e-3))
        return step.compiled_step(batch)

    host, size = compiled(), 2 * 12 * 256 * 1024 * 4 // 8  # two kernels in float32, over eight devices
    report, use = host.verify(), host.host_use
    assert sum(host.contract.host.gradients) == host.memory.host_temp_size_in_bytes == size
    assert (f"gradients that backward writes there: {4 * size:,} bytes, and reads as sums over microbatches: "
            f"{4 * size:,}; the update reads {size:,}") in str(report)
    assert all(write.bytes == write.stack_bytes // 12 for write in use.writes)
    moved = transfers_of(host, target_of("h100:8").chip, types.SimpleNamespace(seconds=0.0))
    assert (moved.gradients_down, moved.gradients_up) == (4 * size, 4 * size)
    text = transfers_text(types.SimpleNamespace(transfers=moved, layout=host.layout))
    assert "backward reads and writes 12.0 MiB of gradients, the sums of 4 microbatches in 3.0 MiB" in text
    device = compiled(dataclasses.replace(ALL, gradients="device"))
    # That has beside the sums those of one microbatch, in bf16, too.
    assert device.memory.temp_size_in_bytes - host.memory.temp_size_in_bytes > 1.2 * size

    def two_layers(stack, start, sizes, **options):
        if not options:  # the update's
            return dynamic_slice(stack, start, sizes)
        return fetch(dynamic_slice(stack, start, (2, *sizes[1:]), **options))[:1]

    dynamic_slice = jax.lax.dynamic_slice
    monkeypatch.setattr(host_gradients.jax.lax, "dynamic_slice", two_layers)
    (line,) = compiled().report.violations
    assert f"{8 * size:,} bytes of gradients are read from host memory by backward in a step, {4 * size:,} sh" in line


CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def compiled_for_tpu(target="v5p:2x2x1", offload="all", inner=1024, optimizer=CLIPPED, **options):
    """Twelve layers, of which vectors are no smaller than what goes to host memory."""
    rows = 16 * options.get("accumulate", 1)
    batch = {name: jax.ShapeDtypeStruct((rows, 8), jnp.int32) for name in ("inputs", "targets")}
    offload = dataclasses.replace(ALL if offload == "all" else GRADIENTS, buffer_bytes=2**18)
    step = zero_jax.make_zero_train_step(
        Stacked(512, inner, 12), 3, mesh=mesh_of(target), precision="bf16", offload=offload, remat="full",
        optimizer=optimizer, **options)
    return step.compiled_step(batch)


@pytest.mark.slow
@pytest.mark.parametrize("target, offload, accumulate, inner", [
    ("v5p:2x2x1", "all", 4, 1024), ("v5p:2x2x2", "all", 1, 1024),
    pytest.param("v5p:2x2x2", "gradients", 4, 1024, marks=pytest.mark.grid),
    # 514 columns of a shard are no whole tiles.
    pytest.param("v5p:2x2x1", "gradients", 4, 2056, marks=pytest.mark.grid)])
def test_on_tpus_stacks_are_in_host_memory_once_and_in_the_order_of_the_states(target, offload, accumulate, inner):
    made = compiled_for_tpu(target, offload, inner, accumulate=accumulate)
    report, use, budget = made.verify(), made.host_use, made.contract.host
    devices = 8 if target == "v5p:2x2x2" else 4
    size = 2 * 12 * 512 * inner * (4 if accumulate > 1 else 2) // devices
    assert sum(budget.gradients) == size <= made.memory.host_temp_size_in_bytes <= size + budget.gradient_padding
    assert f"gradients that backward writes there: {accumulate * size:,} bytes" in str(report)
    # A layer at a time, which clipping reads for the norm, and once more, or keeps the first one of both.
    assert all(write.bytes == write.stack_bytes // 12 for write in use.writes)
    assert all(read.is_slice for read in use.gradient_reads)
    assert 23 / 12 * size <= sum(read.bytes * read.runs for read in use.gradient_reads) <= 2 * size


@pytest.mark.slow
def test_on_tpus_gradients_in_another_order_are_copied_whole_and_found(monkeypatch):
    monkeypatch.setattr(gradients, "order_stacked_gradients", lambda jaxpr, **options: jaxpr)
    made, size = compiled_for_tpu(inner=2048, optimizer=optax.adamw(1e-3), accumulate=4), 2 * 12 * 512 * 2048 * 4 // 4
    assert made.memory.host_temp_size_in_bytes == 3 * size
    lines = made.report.violations
    assert f"{2 * size:,} bytes of temporaries are in host memory beside the gradients: a second copy" in lines[0]
    assert any(f"{size:,} bytes of gradients in host memory are brought up whole" in line for line in lines)


def test_on_tpus_stacks_of_vectors_stay_on_the_device():
    """XLA:TPU neither reads nor writes a part of a word or a tile in host memory."""
    batch = {name: jax.ShapeDtypeStruct((16, 8), jnp.int32) for name in ("inputs", "targets")}
    offload = ALL
    for target, vectors in (("v5p:2x2x1", False), ("h100:4", True)):
        layout = zero_jax.make_zero_train_step(
            Stacked(256, 2**17), 3, mesh=mesh_of(target), precision="bf16", offload=offload).layout(batch)
        assert ("blocks/Dense_1/bias" in layout.host_gradients) == vectors
        assert ("weights/blocks/Dense_1/bias" in layout.host) == vectors
        assert "blocks/Dense_0/kernel" in layout.host_gradients
        (line,) = (line for line in layout.describe().splitlines() if line.startswith("gradients in device memory"))
        assert ("or stacks of vectors" in line and "blocks/Dense_1/bias" in line) != vectors


def writes(*sizes, runs=4):
    """Of stacks of these sizes in quarters."""
    return tuple(HostWrite(size, size // 4, runs) for size in sizes)


def reads(*sizes, runs=4):
    return tuple(HostRead("slice", "", size // 4, runs, True, False, True) for size in sizes)


@pytest.mark.parametrize("microbatches, use, words", [
    (1, HostUse(192, 192, 0), "96 bytes of gradients, of 96"),
    (1, HostUse(192, 192, 96, writes=writes(64)), "32 bytes of gradients, of 96"),
    (1, HostUse(192, 192, 64, writes=writes(64, 32)), "32 bytes of gradients, of 96"),
    (1, HostUse(192, 192, 160, writes=writes(64, 32, 64)),
     "64 bytes of temporaries are in host memory beside the gradients"),
    (1, HostUse(192, 192, 96, writes=writes(64, 32, runs=8)), "192 bytes of gradients are written"),
    (1, HostUse(192, 192, 96, writes=writes(64, 32), reads=reads(64)), "64 bytes of gradients are read"),
    (3, HostUse(192, 192, 96, writes=writes(64, 32), reads=reads(64, 32, runs=12)),
     "96 bytes of gradients are written"),
    (3, HostUse(192, 192, 96, writes=writes(64, 32, runs=12), reads=reads(64, 32)), "96 bytes of gradients are read"),
    (3, HostUse(192, 192, 96, writes=writes(64, 32, runs=12), reads=reads(64, 32, 256, runs=12)),
     "1,056 bytes of gradients are read from host memory by backward in a step, 288 should be"),
    (3, HostUse(192, 192, 192, writes=writes(64, 32, runs=12), reads=reads(64, 32, runs=12)),
     "96 bytes of temporaries are in host memory beside the gradients"),
    (1, HostUse(192, 192, 96, writes=writes(64, 32), reads=(HostRead("copy-start", "", 64, 1, False, False, False),)),
     "64 bytes of gradients in host memory are brought up whole by copy-start"),
    (3, HostUse(192, 192, 96, copies=((64, "copy.1", True),), writes=writes(64, 32, runs=12),
                reads=reads(64, 32, runs=12)), "whole stacks are copied")])
def test_gradients_elsewhere_break_the_contract(microbatches, use, words):
    budget = HostBudget(192, gradients=(64, 32), microbatches=microbatches)
    lines = [*host_violations(budget, use)]
    assert words in lines[0]
    right = HostUse(192, 192, 96, writes=writes(32, 64, runs=4 * microbatches),
                    reads=reads(64, 32, runs=4 * microbatches) if microbatches > 1 else ())
    assert not [*host_violations(budget, right)]


class ReadTwice(nn.Module):
    """Its loop over layers runs twice, with the same weights."""

    @nn.compact
    def __call__(self, x):
        blocks = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)(256, name="blocks")
        x, _ = blocks(nn.Embed(96, 64)(x), None)
        x, _ = blocks(x, None)
        return nn.Dense(96)(x)


def test_gradients_that_no_loop_stacks_are_refused():
    unrolled = nn.Sequential([nn.Embed(96, 64), nn.Dense(256), nn.gelu, nn.Dense(96)])
    for model, words in ((unrolled, "none of this model's loops over stacked layers"),
                         (ReadTwice(), "blocks/Dense_0/kernel, blocks/Dense_1/kernel is no stack that one loop")):
        step = zero_jax.make_zero_train_step(model, 3, offload=GRADIENTS)
        with pytest.raises(zero_jax.UsageError, match=words):
            step.lower(BATCH)
