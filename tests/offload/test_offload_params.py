"""Parameters in host memory: the same numbers, layers come up an iteration ahead, and what cannot be is refused."""

import dataclasses

import flax.linen as nn
import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from support.flat import flat_step
from support.offloaded import BATCH, host_leaves, run
from support.stacked_nnx import NnxBlock, NnxStacked
from support.targets import mesh_of

import zero_jax
from models import gpt2
from zero_jax.contract.host import HostBudget, HostUse, host_violations
from zero_jax.sharding import host_arrays
from zero_jax.step import gradients, options
from zero_jax.tree import leaf_bytes, named_leaves
from zero_jax.xla import platform
from zero_jax.xla.host_reads import HostRead, host_reads

SMALL_BUFFER = zero_jax.Offload(buffer_bytes=2**16)
PARAMETERS = zero_jax.Offload(parameters="host", buffer_bytes=2**16)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(64)(nn.gelu(nn.Dense(256)(x))), None


class Stacked(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Embed(101, 64)(x)  # 101 rows: padded where they are split
        blocks = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=4)
        x, _ = blocks(name="blocks")(x, None)
        return nn.Dense(96)(x)


class Unstacked(nnx.Module):
    def __init__(self, *, rngs):
        self.embed = nnx.Embed(96, 64, rngs=rngs)
        self.layers = nnx.List([NnxBlock(rngs) for _ in range(2)])

    def __call__(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.embed.attend(x)  # tied: read twice


def trained(offload, *, model=Stacked, optimizer=None, **options):
    """(step, its state after three steps, losses and norms)."""
    made = model() if issubclass(model, nn.Module) else model(rngs=nnx.Rngs(0))
    optimizer = optimizer or optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
    step = flat_step(made, 3, optimizer=optimizer, offload=offload, **options)
    return step, *run(step, step.init(jax.random.key(0), BATCH), 3)


def values(state):
    """Parameters, moments and average by name."""
    return {name: np.asarray(leaf) for name, leaf in named_leaves((state.params, state.frozen, state.opt_state,
                                                                   state.ema))}


@pytest.mark.grid
@pytest.mark.parametrize("exact, setup", [
    (True, {"ema": 0.9}),
    pytest.param(True, {"model": NnxStacked, "guard": zero_jax.Guard(skip=2)}, marks=pytest.mark.slow),
    pytest.param(True, {"model": Unstacked, "precision": "bf16", "remat": "full"}, marks=pytest.mark.slow),
    # XLA:CPU fuses a multiplication and an addition in one of the two programs alone.
    pytest.param(False, {"precision": "fp16", "accumulate": 2}, marks=pytest.mark.slow),
    pytest.param(False, {"frozen": ("Embed",), "mesh": {"tensor": 2}, "tensor_rules": [
        ("Dense_0/kernel", P(None, "tensor")), ("Dense_1/kernel", P("tensor", None))]}, marks=pytest.mark.slow)])
def test_parameters_on_the_host_have_the_numbers_of_none(exact, setup):
    setup = {**setup, **({"mesh": zero_jax.make_mesh(**setup["mesh"])} if "mesh" in setup else {})}
    # A bf16 copy is read with the roundings of one whose master weights are on the host (test_offload.py).
    _, device, numbers = trained(SMALL_BUFFER if "precision" in setup else None, **setup)
    step, host, same = trained(PARAMETERS, **setup)
    np.testing.assert_allclose(numbers, same, rtol=0 if exact else 1e-4)
    for (name, left), right in zip(values(device).items(), values(host).values(), strict=True):
        if exact:
            assert left.tobytes() == right.tobytes(), name
        np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-5, err_msg=name)

    # What the model reads is on the host, large kernels by layer, and stays there; its gradients are not.
    layout = step.layout()
    assert host_leaves(host) == layout.host and layout.host_params >= {
        name for name, leaf in named_leaves(layout.state.params) if name.endswith("kernel")}
    assert f"{layout.host_param_bytes:,} bytes forward and as many backward" in layout.describe()
    gradients, _, _ = step.gradients(host, BATCH)
    assert not host_leaves(gradients)
    assert np.isfinite(jax.tree.leaves(step.evaluator()(host, BATCH))[0])


@pytest.mark.slow
def test_a_state_is_made_and_taken_in_by_groups(monkeypatch):
    step = zero_jax.make_zero_train_step(Stacked(), 3, precision="bf16", ema=0.9, offload="parameters")
    whole = step.init(jax.random.key(0), BATCH)
    monkeypatch.setattr(host_arrays, "GROUP_BYTES", 2**13)  # less than a kernel
    sizes = [leaf_bytes(leaf.sharding.shard_shape(leaf.shape), leaf.dtype)
             for leaf in jax.tree.leaves(step.layout().state)]
    groups = host_arrays._groups(sizes)
    assert len(groups) > 4 and sorted(i for group in groups for i in group) == [*range(len(sizes))]
    assert all(len(group) == 1 or sum(sizes[i] for i in group) <= 2**13 for group in groups)
    parts = step.init(jax.random.key(0), BATCH)
    imported = step.with_params(step.init(jax.random.key(1), BATCH), step.params(parts))
    other = step.init(jax.random.key(2), BATCH)
    for state in (parts, imported, other):
        assert host_leaves(state) == host_leaves(whole) == step.layout().host
    # XLA:CPU may round the last bit of a leaf that it computes alone in another way.
    whole, parts, imported, other = (values(state) for state in (whole, parts, imported, other))
    assert all(np.allclose(whole[name], parts[name], rtol=1e-6, atol=1e-7) for name in whole)
    assert all(np.array_equal(parts[name], imported[name]) for name in whole)
    assert not all(np.allclose(whole[name], other[name]) for name in whole)


@pytest.mark.slow
def test_a_step_that_is_not_clipped_is_another():
    _, device, numbers = trained(None)
    _, host, same = trained(PARAMETERS, optimizer=optax.adamw(1e-2))
    assert numbers[1:] != same[1:]


@pytest.mark.slow
def test_checkpoints_are_restored_to_either_memory(tmp_path):
    device, at_device, _ = trained(None)
    host, at_host, _ = trained(PARAMETERS, precision="bf16")
    for name, step, state, other in (("device", device, at_device, host), ("host", host, at_host, device)):
        with zero_jax.Checkpoints(tmp_path / name) as checkpoints:
            checkpoints.save(step, state)
            before = values(step.layout().load(state))
        for restoring in (step, other):
            found = zero_jax.Checkpoints(tmp_path / name).restore(restoring, BATCH).state
            assert host_leaves(found) == restoring.layout().host
            for (leaf, left), right in zip(before.items(), values(restoring.layout().load(found)).values(),
                                           strict=True):
                assert left.tobytes() == right.tobytes(), leaf
            restoring(found, BATCH)


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize("target", ["h100:8", "v5p:2x2x1"])
def test_layers_come_up_a_iteration_ahead(target, monkeypatch):
    def compiled():
        step = zero_jax.make_zero_train_step(
            Stacked(), 3, mesh=mesh_of(target), precision="bf16", offload="parameters")
        return step.compiled_step({name: jax.ShapeDtypeStruct((16, 8), jnp.int32) for name in BATCH})

    right = compiled()
    budget, use = right.contract.host, right.host_use
    assert not right.report.violations and use.argument_bytes == use.alias_bytes and not use.temporary_bytes
    batch_bytes = right.memory.argument_size_in_bytes - right.memory.alias_size_in_bytes
    assert batch_bytes <= 2**12  # in the tiles of a TPU
    layers = [read for read in use.param_reads(budget) if read.is_slice and read.in_loop]
    ahead = sum(read.bytes * read.runs for read in layers if read.is_ahead)
    assert {read.source.count("blocks") for read in layers} == {1}
    # XLA:TPU chooses: of layers as small as these it lets some be waited for.
    assert ahead == sum(read.bytes * read.runs for read in layers) if target.startswith("h100") else ahead
    total = sum(read.bytes * read.runs for read in use.param_reads(budget))
    assert budget.param_bytes < total <= 1.05 * budget.read_bytes == 1.05 * 2 * budget.param_bytes
    assert "an iteration ahead of their use" in str(right.report)

    # Controls: without XLA's options each iteration waits for its own layer; and twice as many reads.
    if target.startswith("h100"):
        monkeypatch.setattr(options, "host_prefetch_options", lambda device, **_: {})
        assert any("the others are waited for" in line for line in compiled().report.violations)
    twice = dataclasses.replace(use, reads=use.reads * 2)
    assert any("come up from host memory in a step" in line for line in host_violations(budget, twice))


class Product(nn.Module):
    """One product that no loop runs over, behind a norm: backward reads its weight for the norm's gradient alone."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(4096, use_bias=False)(nn.LayerNorm()(x))


@pytest.mark.parametrize("target", ["h100:1", pytest.param("h100:8", marks=[pytest.mark.slow, pytest.mark.grid])])
def test_a_weight_that_is_read_whole_is_not_copied_in_host_memory(target, monkeypatch):
    """By kernels; by copy engines (jax 0.11.2) XLA needs no copy for the control, either."""
    monkeypatch.setattr(platform, "ENGINES_SINCE", (99,))

    def compiled():
        step = zero_jax.make_zero_train_step(
            Product(), 3, mesh=mesh_of(target), precision="bf16", offload="parameters",
            loss=lambda model, batch: jnp.square(model(batch["x"]).astype(jnp.float32)).mean())
        return step.compiled_step({"x": jax.ShapeDtypeStruct((16, 4096), jnp.bfloat16)})

    right = compiled()
    assert not right.report.violations and not right.host_use.copies and not right.host_use.temporary_bytes
    # The control: an update that need not wait for backward's read.
    monkeypatch.setattr(gradients, "wait_for_reads", lambda closed, *_: closed)
    (line,) = compiled().report.violations
    shard = 2 * 4096**2 // mesh_of(target).size
    assert f"{shard:,} bytes of temporaries are in host memory" in line and "tiling={its name" in line


@pytest.mark.slow
def test_a_trillion_on_64_gpus():
    """Layers come up beside products; backward, with jaxlib 0.10, beside a reduction of 21 times the bytes.

    By copy engines (jax 0.12) those of one direction do, by the schedule; kernels wait for each other, as scheduled.
    """
    mesh, config = mesh_of("h100:8x8"), gpt2.PRESETS["1t"]
    step = zero_jax.make_zero_train_step(gpt2.build(config), 3, mesh=mesh, precision="bf16", offload="parameters",
                                         remat="full")
    batch = {name: jax.ShapeDtypeStruct((mesh.size, config.max_length), jnp.int32) for name in BATCH}
    made = step.compiled_step(batch)
    made.verify()
    layers = [read for read in made.host_use.param_reads(made.contract.host) if read.in_loop and read.is_slice]
    assert sum(read.bytes * read.runs for read in layers) == 62_423_040_000
    ahead = sum(read.bytes * read.runs for read in layers if read.is_ahead)
    assert ahead >= 62_423_040_000 // (2 if step.options.uses_copy_engines(step.axes) else 1)
    assert made.memory.host_argument_size_in_bytes == made.memory.host_alias_size_in_bytes
    assert made.device_bytes < 53 * 2**30 and made.memory.host_temp_size_in_bytes == 0
    # The control: the same reads in the iteration that uses them.
    late = [dataclasses.replace(read, is_ahead=False) for read in made.host_use.reads]
    assert [*host_violations(made.contract.host, dataclasses.replace(made.host_use, reads=tuple(late)))]


LAYER = HostRead("slice", "state.weights['blocks']['kernel']", 100, 4, in_loop=True, is_ahead=True, is_slice=True)


@pytest.mark.parametrize("reads, words", [
    ([LAYER, LAYER], ""), ([dataclasses.replace(LAYER, is_ahead=False)] * 2, "0 come up an iteration ahead"),
    ([LAYER, LAYER, LAYER], "1,200 bytes of parameters come up from host memory in a step, 800 should"),
    ([LAYER, LAYER, dataclasses.replace(LAYER, source="state.opt_state[0]", is_ahead=False)], "")])
def test_reads_beyond_the_promise_break_the_contract(reads, words):
    lines = [*host_violations(HostBudget(400, param_bytes=400), HostUse(400, 400, 0, (), tuple(reads)))]
    assert words in "".join(lines) and bool(lines) == bool(words)


def test_checkpoints_that_are_waited_for_break_the_contract():
    ahead = dataclasses.replace(LAYER, source="")  # a stack that a loop made
    late = dataclasses.replace(ahead, is_ahead=False)

    def lines(read, budget):
        return [*host_violations(budget, HostUse(0, 0, 400, (), (read,)))]

    asked = HostBudget(0, activations=True)
    assert not lines(ahead, asked) and not lines(late, dataclasses.replace(asked, ahead=False))  # as on TPUs
    (line,) = lines(late, asked)
    assert "400 bytes of checkpoints that backward reads from host memory, 0 come up an iteration ahead" in line


READING = """HloModule step, is_scheduled=true

%sliced (p: f32[6,8], q: s32[], z: s32[]) -> f32[1,8] {
  %p = f32[6,8]{1,0:S(5)} parameter(0)
  %q = s32[] parameter(1)
  %z = s32[] parameter(2)
  ROOT %slice = f32[1,8]{1,0} dynamic-slice(%p, %q, %z), dynamic_slice_sizes={1,8}
}

%work (w: f32[1,8]) -> f32[1,8] {
  %w = f32[1,8]{1,0} parameter(0)
  ROOT %double = f32[1,8]{1,0} add(%w, %w)
}

%body (b: (s32[], f32[6,8], f32[1,8], f32[1,8])) -> (s32[], f32[6,8], f32[1,8], f32[1,8]) {
  %b = (s32[], f32[6,8]{1,0:S(5)}, f32[1,8]{1,0}, f32[1,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%b), index=0
  %one = s32[] constant(1)
  %zero = s32[] constant(0)
  %stack = f32[6,8]{1,0:S(5)} get-tuple-element(%b), index=1
  %layer = f32[1,8]{1,0} get-tuple-element(%b), index=2
  %next = s32[] add(%i, %one)
  %start = ((f32[6,8]{1,0:S(5)}, s32[], s32[]), f32[1,8]{1,0}, u32[]) fusion-start(%stack, %next, %zero), kind=kLoop, calls=%sliced
  %used = f32[1,8]{1,0} fusion(%layer), kind=kLoop, calls=%work
  %done = f32[1,8]{1,0} fusion-done(%start)
  ROOT %out = (s32[], f32[6,8]{1,0:S(5)}, f32[1,8]{1,0}, f32[1,8]{1,0}) tuple(%next, %stack, %done, %used)
}

%cond (c: (s32[], f32[6,8], f32[1,8], f32[1,8])) -> pred[] {
  %c = (s32[], f32[6,8]{1,0:S(5)}, f32[1,8]{1,0}, f32[1,8]{1,0}) parameter(0)
  %j = s32[] get-tuple-element(%c), index=0
  %six = s32[] constant(6)
  ROOT %less = pred[] compare(%j, %six), direction=LT
}

ENTRY %main (x: f32[6,8], y: f32[1,8]) -> (s32[], f32[6,8], f32[1,8], f32[1,8]) {
  %x = f32[6,8]{1,0:S(5)} parameter(0), metadata={op_name="state.weights['blocks']['kernel']"}
  %y = f32[1,8]{1,0} parameter(1)
  %nought = s32[] constant(0)
  %first = (s32[], f32[6,8]{1,0:S(5)}, f32[1,8]{1,0}, f32[1,8]{1,0}) tuple(%nought, %x, %y, %y)
  ROOT %loop = (s32[], f32[6,8]{1,0:S(5)}, f32[1,8]{1,0}, f32[1,8]{1,0}) while(%first), condition=%cond, body=%body
}
"""  # noqa: E501 (lines of a compiled program)


def test_reads_of_a_compiled_program_are_found():
    (read,) = host_reads(READING)
    assert read == HostRead("slice", "state.weights['blocks']['kernel']", 32, 6, in_loop=True, is_ahead=True,
                            is_slice=True) and read.field == "weights"
    (waiting,) = host_reads(READING.replace("fusion(%layer)", "fusion(%done)"))
    # Started ahead of its use, but with nothing beside it.
    lines = READING.splitlines()
    used = next(line for line in lines if "%used =" in line)
    lines.remove(used)
    lines.insert(next(i for i, line in enumerate(lines) if "%done =" in line) + 1, used)
    (blocking,) = host_reads("\n".join(lines))
    assert not waiting.is_ahead and not blocking.is_ahead
    # A product is enough, of whatever else the iteration does; elementwise work is not, where it is less than half.
    more = "  %more = f32[1,8]{1,0} fusion(%layer), kind=kLoop, calls=%work\n"
    many = READING.replace("  ROOT %out", more + more.replace("more", "most") + "  ROOT %out")
    product = "dot(%w, %w), lhs_contracting_dims={1}, rhs_contracting_dims={1}"
    assert not host_reads(many)[0].is_ahead
    assert host_reads(many.replace("f32[1,8]{1,0} add(%w, %w)", f"f32[1,1]{{1,0}} {product}"))[0].is_ahead
    assert not host_reads(READING.replace("{1,0:S(5)}", "{1,0}"))


@pytest.mark.parametrize("width, sync, is_ahead", [
    (128, "false", True), (64, "false", False), (128, "true", False)])
def test_a_copy_may_be_beside_what_is_sent(width, sync, is_ahead):
    """The iteration sends 16 times the 32 bytes that it copies, and would wait anyhow; with less it is waited for."""
    lines = READING.splitlines()
    used = next(line for line in lines if "%used =" in line)
    lines.remove(used)
    place = next(i for i, line in enumerate(lines) if "%start =" in line)
    sent = f"f32[1,{width}]{{1,0}}"
    lines[place:place] = [used, f"  %sum = {sent} broadcast(%used), dimensions={{}}",
                          f"  %begun = {sent} all-reduce-start(%sum), replica_groups={{{{0,1}}}}, to_apply=%work, "
                          f'backend_config={{"is_sync":{sync}}}']
    place = next(i for i, line in enumerate(lines) if "%done =" in line)
    lines.insert(place + 1, f"  %summed = {sent} all-reduce-done(%begun)")
    assert [read.is_ahead for read in host_reads("\n".join(lines))] == [is_ahead]
