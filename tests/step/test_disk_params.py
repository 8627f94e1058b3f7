"""Parameters and gradients of stacked layers in files: the bits of the device's memory, read layer by layer."""

import json
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from step.test_disk import CLIPPED, differing
from step.test_disk_activations import TwoLoops
from step.test_offload import BATCH, Stacked, Unstacked
from support.stacked_nnx import NnxStacked
from support.targets import mesh_of
from support.two_processes import GPT2_BATCH, two_processes

import zero_jax
from models import gpt2
from zero_jax.disk.scratch import ScratchFile
from zero_jax.errors import CheckpointError, DamagedCheckpointError
from zero_jax.step.disk.layer_files import LayerFiles
from zero_jax.step.disk.layer_gradients import LayerGradients
from zero_jax.tree import named_leaves

ADAM = optax.adam(1e-2)


def made(folder, *, model=Stacked, parameters="disk", gradients=None, optimizer=ADAM, stage=3, **options):
    model = model() if model in (Stacked, TwoLoops) else model
    offload = zero_jax.Offload(disk=folder, parameters=parameters, gradients=gradients, buffer_bytes=2**16)
    options = {"view": "global", **options}  # as what runs in pieces is, to the bit
    return zero_jax.make_zero_train_step(model, stage, optimizer=optimizer, offload=offload, **options)


def run(step, state=None, steps=3):
    state, numbers = step.init(jax.random.key(0), BATCH) if state is None else state, []
    for _ in range(steps):
        state, metrics = step(state, BATCH)
        numbers.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    return state, numbers


def both(tmp_path, **options):
    """(The step, its state and its numbers) with parameters on the device, and with them in files; closed."""
    rows = []
    for parameters in ("device", "disk"):
        given = {**options, **({"gradients": None} if parameters == "device" else {})}
        step = made(tmp_path / parameters, parameters=parameters, **given)
        state, numbers = run(step)
        rows.append((step, step.in_memory(state)[0], numbers))
        step.close()
    return rows


def test_parameters_in_files_have_the_bits_of_the_device_and_go_on_from_the_files_alone(tmp_path, monkeypatch):
    read, real = [], LayerFiles.read
    monkeypatch.setattr(LayerFiles, "read", lambda self, names, order: (
        read.append((sorted(names), list(order))), real(self, names, order))[1])
    device, (step, found, numbers) = both(tmp_path, precision="bf16", remat="full")
    layers = ["weights/blocks/Dense_0/kernel", "weights/blocks/Dense_1/kernel"]
    assert read == [(layers, [0, 1, 2, 3]), (layers, [3, 2, 1, 0])] * 3
    assert differing(device[1], found) == []
    assert [loss for loss, _ in numbers] == [loss for loss, _ in device[2]]
    np.testing.assert_allclose([norm for _, norm in numbers], [norm for _, norm in device[2]], rtol=1e-5)
    assert sorted(path.name for path in (tmp_path / "disk").glob("*/*")) == [
        "commit-0.json", "commit-1.json", "generation-0.bin", "generation-1.bin"]

    # What a model of stacked layers keeps on the device is what no loop reads, and what is small.
    layout = step.layout(BATCH)
    assert layout.disk_layers == {*layers} and sorted(layout.disk_gradients) == [
        name.removeprefix("weights/") for name in layers]
    described = layout.describe()
    for name in layers:
        assert f"  {name}: bfloat16 4 x " in described and described.count("on disk\n") >= 2
    assert "parameters read from disk layer by layer: 32,768 bytes forward and as many backward" in described
    assert "gradients written to disk by backward, layer by layer, and read by the update: 32,768 bytes" in described
    assert step.verify(BATCH).violations == ()
    resident = device[0].layout(BATCH).device_bytes - layout.device_bytes
    assert resident == 32_768

    # Another object, as another process would, resumes from the folder, with the same numbers from there on.
    step = made(tmp_path / "disk", precision="bf16", remat="full")
    resumed = step.stored_state(BATCH)
    assert int(resumed.step) == 3 and differing(resumed, found) == []
    again, _ = run(step, resumed, 1)
    onward = made(tmp_path / "device", parameters="device", precision="bf16", remat="full")
    wanted, _ = run(onward, onward.stored_state(BATCH), 1)
    assert differing(onward.in_memory(wanted)[0], step.in_memory(again)[0]) == []
    assert step.evaluator()(again, BATCH) == onward.evaluator()(wanted, BATCH)
    assert differing(onward.params(wanted), step.params(again)) == []


@pytest.mark.slow
def test_checkpoints_evaluators_and_frozen_layers(tmp_path):
    options = {"frozen": "blocks/Dense_0", "ema": 0.9}
    memory, step = made(tmp_path / "a", parameters="device", **options), made(tmp_path / "b", **options)
    (wanted, _), (state, _) = run(memory), run(step)
    assert "frozen/blocks/Dense_0/kernel" in step.layout().disk_layers
    assert differing(memory.in_memory(wanted)[0], step.in_memory(state)[0]) == []
    for ema in (False, True):
        assert memory.evaluator(ema=ema)(wanted, BATCH) == step.evaluator(ema=ema)(state, BATCH)
    with zero_jax.Checkpoints(tmp_path / "saved") as checkpoints:
        checkpoints.save(step, state, wait=True)
        back = checkpoints.restore(step, BATCH).state
    assert differing(memory.in_memory(wanted)[0], step.in_memory(back)[0]) == []
    params = jax.tree.map(np.asarray, step.params(back))
    assert differing(params, step.params(step.with_params(back, params))) == []


@pytest.mark.slow
@pytest.mark.grid
@pytest.mark.parametrize("options", [
    {"model": NnxStacked, "precision": "bf16", "remat": "full", "partition_activations": "disk", "ema": 0.9,
     "guard": zero_jax.Guard(skip=2)},
    {"model": TwoLoops, "remat": "full"}, {"precision": "fp16"}, {"optimizer": optax.lion(1e-3)},
    {"gradients": "device", "optimizer": CLIPPED, "precision": "bf16"},
    {"tensor": 2, "precision": "bf16", "tensor_rules": [
        ("Dense_0/kernel", P(None, "tensor")), ("Dense_1/kernel", P("tensor", None))]},
    {"data": (2, 4), "precision": "bf16"},
    {"tiling": {"Dense_./kernel": 4}, "precision": "bf16", "remat": "full", "partition_activations": "disk"}],
    ids=lambda options: "-".join(f"{name}={getattr(value, '__name__', value)}"[:24] for name, value in options.items()))
def test_of_every_kind_of_step(tmp_path, options):
    options = dict(options)
    sizes = {name: options.pop(name) for name in ("data", "tensor") if name in options}
    device, found = both(tmp_path, mesh=zero_jax.make_mesh(**sizes), **options)
    assert differing(device[1], found[1]) == []
    assert found[0].verify(BATCH).violations == ()


@pytest.mark.slow
def test_a_global_norm_is_the_sum_of_what_rounds_sum(tmp_path):
    """Clipping: the factor's last bits may be others, since layers are added up one by one."""
    device, found = both(tmp_path, optimizer=CLIPPED, precision="bf16")
    np.testing.assert_allclose(device[2], found[2], rtol=1e-5)
    full = dict(named_leaves(found[1]))
    for name, leaf in named_leaves(device[1].params):
        np.testing.assert_allclose(leaf, full[f"params/{name}"], rtol=1e-3, atol=2e-3, err_msg=name)


@pytest.mark.slow
def test_another_layers_parameters_or_gradients_are_other_numbers(tmp_path, monkeypatch):
    """The controls of the tests above."""
    wanted, numbers = run(made(tmp_path / "right"), steps=2)
    with monkeypatch.context() as patched:
        read = LayerFiles.read
        patched.setattr(LayerFiles, "read", lambda self, names, order: read(self, names, [3 - at for at in order]))
        assert run(made(tmp_path / "layers"), steps=1)[1][0] != numbers[0]
    write = LayerGradients.write
    monkeypatch.setattr(LayerGradients, "write", lambda self, name, index, part: write(self, name, 3 - index, part))
    _, found = run(made(tmp_path / "gradients"), steps=2)
    assert found[0] == numbers[0] and found[1] != numbers[1]


def test_errors_leave_the_state_before_the_step(tmp_path, monkeypatch):
    wanted, numbers = run(made(tmp_path / "right"))
    step = made(tmp_path / "wrong")
    state, first = run(step, steps=1)
    write = ScratchFile.write
    with monkeypatch.context() as patched:  # while backward writes
        patched.setattr(os, "pwritev", full)
        with pytest.raises(CheckpointError, match="scratch.bin cannot be written.*free space"):
            step(state, BATCH)
    state, second = run(step, state, 1)
    monkeypatch.setattr(ScratchFile, "write", lambda self, record, fill: (  # and while the update reads
        write(self, record, fill), self._written.update({record.number: self._written[record.number][::-1]})))
    with pytest.raises(DamagedCheckpointError, match="scratch.bin is damaged.*gradients/blocks.*stored_state"):
        step(state, BATCH)
    monkeypatch.undo()
    _, third = run(step, step.stored_state(BATCH), 1)
    assert first + second + third == numbers


def full(*_):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("options", [{}, pytest.param(
    {"parameters": "device", "remat": "full", "partition_activations": "disk"}, marks=pytest.mark.slow)])
def test_space_for_what_a_step_writes_is_looked_for_at_init(tmp_path, monkeypatch, options):
    step = made(tmp_path / "run", **options)
    needed = step._prepared(BATCH).generations.disk_bytes
    free = [needed + 2**14]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9 - free[0], free[0]))
    with pytest.raises(CheckpointError, match=f"two generations .* are {needed:,}, the activations and gradients of a "
                                              f"step [0-9,]+ more, and .* has {free[0]:,} bytes free.*smaller batch"):
        step.init(jax.random.key(0), BATCH)
    assert not list((tmp_path / "run").rglob("*.bin"))
    free[0] = 2 * needed + 2**20
    assert int(step.init(jax.random.key(0), BATCH).step) == 0


def test_what_is_refused(tmp_path):
    disk = {"disk": tmp_path / "a"}
    for given, message in (
            ({"parameters": "disk"}, "without disk=.*give disk="),
            ({**disk, "gradients": "disk"}, "without parameters=\"disk\".*give parameters=\"disk\""),
            ({**disk, "parameters": "disk", "gradients": "host"}, "gradients=\"host\", disk=..."),
            ({**disk, "parameters": "disk", "master": "device"}, "in files of what is in the device's"),
            ({**disk, "parameters": "disk", "optimizer": "device"}, "leave optimizer out"),
            ({**disk, "parameters": "disk", "fraction": 0.5}, "leave one of them out"),
            ({**disk, "parameters": "host"}, "give parameters=\"disk\""),
            ({**disk, "parameters": "ram"}, "give \"host\" or \"device\" or \"disk\"")):
        with pytest.raises(ValueError, match=message):
            zero_jax.Offload(**given)
    for options, message in (
            ({"stage": 2}, "at stage 2.*take stage 3"), ({"accumulate": 2}, "with accumulate=2.*leave accumulate out"),
            ({"prefetch": True}, "with prefetch=True"), ({"gather": "forward"}, "with gather="),
            ({"partition_activations": "cpu", "remat": "full"}, "with partition_activations=\"cpu\""),
            ({"communication": zero_jax.Communication(weights="int8")}, "with communication=")):
        with pytest.raises(ValueError, match=f"Offload.parameters=\"disk\". {message}.*leave parameters out"):
            made(tmp_path / "a", **options)
    with pytest.raises(ValueError, match="none of this model's loops over stacked layers.*stack the layers"):
        made(tmp_path / "a", model=Unstacked).layout(BATCH)
    with pytest.raises(ValueError, match="needs all layers of blocks/Dense_0/kernel.*is elementwise"):
        made(tmp_path / "a", optimizer=optax.lamb(1e-2)).init(jax.random.key(0), BATCH)
    with pytest.raises(ValueError, match="the gradient of blocks/.*more than sums .*gradients=\"device\""):
        made(tmp_path / "a", optimizer=optax.chain(optax.centralize(), ADAM)).init(jax.random.key(0), BATCH)
    step = made(tmp_path / "b")
    state = step.init(jax.random.key(0), BATCH)
    for refused, message in ((lambda: step.gradients(state, BATCH), "gradients with Offload.parameters=\"disk\""),
                             (lambda: step.apply_gradients(state, step.params(state)), "apply_gradients with"),
                             (lambda: step.lower(BATCH), r"lower with .*see compiled_step\(batch\)")):
        with pytest.raises(ValueError, match=message):
            refused()


@pytest.mark.slow
def test_h100s_hold_a_layer_of_what_is_in_files(tmp_path):
    mesh = mesh_of("h100:8")
    config = gpt2.Config(num_layers=24, width=512, num_heads=8, vocab_size=512, max_length=128)
    tokens = jax.ShapeDtypeStruct((mesh.size, 128), jnp.int32)
    batch = {"inputs": tokens, "targets": tokens}

    def compiled(tiling=None, **options):
        return zero_jax.make_zero_train_step(
            gpt2.build(config), 3, mesh=mesh, precision="bf16", remat="full", tiling=tiling,
            offload=zero_jax.Offload(disk=tmp_path, **options)).compiled_step(batch)

    program, pieces = compiled(), compiled(parameters="disk")
    assert pieces.verify().violations == ()
    stacks = 2 * 12 * 24 * 512**2 // 8  # bytes of bf16 parameters, and as many of their gradients
    assert pieces.device_bytes < program.device_bytes - 1.8 * stacks

    # With products in tiles, less of a layer than one of its weights: of the widest, and of its gradient, in bf16.
    tiled = compiled({"(up|down)/kernel": 8}, parameters="disk")
    assert tiled.verify().violations == () and tiled.device_bytes < pieces.device_bytes - 2 * 4 * 512**2


PROCESS = GPT2_BATCH + """
config = gpt2.Config(num_layers=3, width=64, num_heads=2, vocab_size=96, max_length=16)
for parameters in ("device", "disk"):
    step = zero_jax.make_zero_train_step(
        gpt2.build(config), 3, optimizer=optax.adam(1e-2), mesh=mesh, remat="full",
        offload=zero_jax.Offload(disk=f"{folder}/{parameters}", parameters=parameters))
    state, losses = step.init(jax.random.key(0), batch), []
    for at in range(4):
        if at == 2:
            step.close()
            state = step.stored_state(batch)
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]).hex())
    print("LOSSES", json.dumps(losses), flush=True)
"""


@pytest.mark.slow
def test_each_of_two_processes_reads_and_writes_its_shards(tmp_path):
    with two_processes(PROCESS, str(tmp_path), xla_flags="--xla_cpu_max_isa=AVX") as processes:
        texts = [process.communicate(timeout=300)[0] for process in processes]
    losses = [json.loads(line.partition(" ")[2]) for text in texts for line in text.splitlines()
              if line.startswith("LOSSES")]
    assert len(losses) == 4 and all(each == losses[0] for each in losses) and len(set(losses[0])) == 4
