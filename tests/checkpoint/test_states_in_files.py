"""Checkpoints of states in files: leaf by leaf, with the files and bits of any other, from and to steps without."""

import json
import os
import signal
import subprocess
import sys
import textwrap

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from orbax.checkpoint.experimental import v1 as ocp
from support.offloaded import BATCH, Stacked, differing
from support.pages import ROOT
from support.saved import difference, dump
from support.stacked_nnx import NnxStacked
from support.two_processes import GPT2_BATCH, two_processes

import zero_jax
from zero_jax.checkpoint import checkpoint
from zero_jax.checkpoint.orbax_files import ArrayWriter, chunk_shape
from zero_jax.errors import CheckpointError, DamagedCheckpointError
from zero_jax.step.disk.records import shard_bytes
from zero_jax.step.disk.states import DiskStates
from zero_jax.tree import named_leaves


class UnevenBlock(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(90)(nn.gelu(nn.Dense(251)(x))), None


class Uneven(nn.Module):
    """Layers that are stored padded, since nothing of them divides by eight."""

    @nn.compact
    def __call__(self, x):
        blocks = nn.scan(UnevenBlock, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return nn.Dense(96)(blocks(name="blocks")(nn.Embed(101, 90)(x), None)[0])


def ordinary(model=Stacked, stage=3, devices=8, **options):
    """A step without files."""
    model, mesh = model if model is NnxStacked else model(), zero_jax.make_mesh(devices=jax.devices()[:devices])
    return zero_jax.make_zero_train_step(model, stage, optimizer=optax.adam(1e-2), mesh=mesh, **options)


def in_files(folder, model=Stacked, optimizer=None, **options):
    return zero_jax.make_zero_train_step(
        model if model is NnxStacked else model(), 3, optimizer=optimizer or optax.adam(1e-2),
        offload=zero_jax.Offload(disk=folder, buffer_bytes=2**16), **options)


def run(step, state=None, steps=3):
    state, losses = step.init(jax.random.key(0), BATCH) if state is None else state, []
    for _ in range(steps):
        state, metrics = step(state, BATCH)
        losses.append(float(metrics["loss"]))
    return state, losses


def passed_on(step, state, other, folder):
    """What `other` has of `state` through a checkpoint."""
    with zero_jax.Checkpoints(folder) as checkpoints:
        checkpoints.save(step, state, wait=True)
        return checkpoints.restore(other, BATCH).state


@pytest.mark.grid
@pytest.mark.parametrize("model, options, stage, devices", [
    pytest.param(Stacked, {"precision": "bf16", "remat": "full"}, 1, 4, id="linen", marks=pytest.mark.slow),
    pytest.param(NnxStacked, {"precision": "bf16", "remat": "full", "ema": 0.9}, 0, 8, marks=pytest.mark.slow),
    pytest.param(Uneven, {}, 2, 2, marks=pytest.mark.slow),
    pytest.param(Stacked, {"frozen": "blocks/Dense_0", "precision": "fp16"}, 3, 2, marks=pytest.mark.slow)])
def test_to_and_from_a_step_without_files_and_on(tmp_path, model, options, stage, devices, monkeypatch):
    step, plain = in_files(tmp_path / "a", model, **options), ordinary(model, stage, devices, **options)
    read, real = [], DiskStates.read_leaves
    monkeypatch.setattr(DiskStates, "read_leaves", lambda self, names: (
        read.append(names := list(names)), real(self, names))[1])
    state, _ = run(step, steps=2)
    found = passed_on(step, state, plain, tmp_path / "1")
    sizes = {name: shard_bytes(leaf) for name, leaf in named_leaves(step.layout().state) if name in step.layout().disk}
    assert sorted(name for names in read for name in names) == sorted(sizes), "each leaf once"
    assert len(read) > 1 and all(sum(sizes[name] for name in names) <= max(sizes.values()) for names in read)
    saved = dump(plain, found)
    assert difference(dump(step, step.in_memory(state)[0]), saved) == []

    # Back into other files, and on: with the bits of a run that nothing interrupted. Leaf for leaf the digests agree.
    other = in_files(tmp_path / "b", model, **options)
    back = passed_on(plain, found, other, tmp_path / "2")
    first, second = (zero_jax.Checkpoints(tmp_path / name).manifest().leaves for name in "12")
    assert first == second
    (on, losses), (wanted, numbers) = run(other, back, 2), run(step, state, 2)
    assert losses == numbers and differing(step.in_memory(wanted)[0], other.in_memory(on)[0]) == []
    assert difference(dump(step, step.in_memory(wanted)[0]), saved) != []  # the control: two steps are seen
    # What was restored is in the files: another process goes on from them.
    other.close()
    again = in_files(tmp_path / "b", model, **options)
    assert differing(step.in_memory(wanted)[0], again.in_memory(again.stored_state(BATCH))[0]) == []


def test_the_files_are_those_of_any_checkpoint(tmp_path):
    """Orbax alone, without zero_jax, reads what was saved leaf by leaf."""
    step = in_files(tmp_path / "a", precision="bf16", remat="full")
    state, _ = run(step, steps=1)
    with zero_jax.Checkpoints(tmp_path / "saved") as checkpoints:
        checkpoints.save(step, state, wait=True)
        parameters, _ = checkpoints.load_params(ordinary(precision="bf16", remat="full"), BATCH)
    path = tmp_path / "saved/1"
    handlers = json.loads((path / "_CHECKPOINT_METADATA").read_text())["item_handlers"]
    assert handlers["state"].endswith(".pytree_handler.PyTreeHandler")
    wanted = dict(named_leaves(step.in_memory(state)[0]))
    name = "opt_state/0/mu/blocks/Dense_0/kernel"
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.ShapeDtypeStruct(wanted[name].shape, wanted[name].dtype, sharding=sharding)
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    with context:
        alone = ocp.load_checkpointables(path, {"state": {name: like}})["state"][name]
    np.testing.assert_array_equal(alone, wanted[name])
    np.testing.assert_array_equal(parameters["blocks"]["Dense_0"]["kernel"],
                                  step.params(state)["blocks"]["Dense_0"]["kernel"])
    index = json.loads((path / "state/_METADATA").read_text())["tree_metadata"]
    assert {entry["key_metadata"][0]["key"] for entry in index.values()} == {
        each for each in wanted if not each.startswith("weights/") and each != "disk"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")  # of Orbax's other reads
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_leaf_in_the_place_of_another_is_found(tmp_path, monkeypatch):
    """The control of the digests: written in the place of another, or read so, no checkpoint is taken."""
    def other(name):
        return name.replace("mu/blocks/Dense_0", "nu/blocks/Dense_0")

    step = in_files(tmp_path / "a", precision="bf16", remat="full")
    state, _ = run(step, steps=1)
    wanted = jax.tree.map(np.asarray, step.params(state))
    with monkeypatch.context() as patch, zero_jax.Checkpoints(tmp_path / "saved") as checkpoints:
        real = ArrayWriter.write
        patch.setattr(ArrayWriter, "write", lambda self, arrays: real(self, {
            other(name): array for name, array in arrays.items()}))
        checkpoints.save(step, state, at=1, wait=True)
    for each in (step, ordinary(precision="bf16", remat="full")):
        with pytest.raises(DamagedCheckpointError, match="blocks/"):
            zero_jax.Checkpoints(tmp_path / "saved").restore(each, BATCH)
    with zero_jax.Checkpoints(tmp_path / "saved") as checkpoints:
        checkpoints.save(step, state, at=2, wait=True)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "read_arrays", lambda path, abstract, real=checkpoint.read_arrays: real(
            path, {other(name): like for name, like in abstract.items()}))
        with pytest.raises(DamagedCheckpointError, match="blocks/.* has the digest"):
            zero_jax.Checkpoints(tmp_path / "saved").restore(step, BATCH)
    # Nothing of it was committed: the files still have the state that they had, and take one that is whole.
    assert differing(wanted, step.params(state)) == []
    zero_jax.Checkpoints(tmp_path / "saved").restore(step, BATCH, at=2)
    assert differing(wanted, step.params(step.stored_state(BATCH))) == []


@pytest.mark.slow
def test_a_damaged_leaf_is_named_and_the_checkpoint_before_it_taken(tmp_path):
    step = in_files(tmp_path / "a", precision="bf16", remat="full")
    state, _ = run(step, steps=1)
    with zero_jax.Checkpoints(tmp_path / "saved") as checkpoints:
        checkpoints.save(step, state, wait=True)
        wanted = {name: np.asarray(leaf) for name, leaf in named_leaves(step.in_memory(state)[0])
                  if name.startswith("params/")}
        state, _ = run(step, state, 1)
        checkpoints.save(step, state, wait=True)
        largest = max((tmp_path / "saved/2/state").glob("ocdbt.process_0leaves/d/*"), key=os.path.getsize)
        raw = bytearray(largest.read_bytes())
        raw[len(raw) // 2] ^= 1
        largest.write_bytes(raw)
        with pytest.raises(DamagedCheckpointError, match="is damaged: leaf .*/blocks/"):
            checkpoints.restore(step, BATCH, at=2)
        restored = zero_jax.Checkpoints(tmp_path / "saved").restore(step, BATCH, fallback=True)
    assert restored.step == 1 and int(restored.state.step) == 1 and len(restored.damaged) == 1
    found = dict(named_leaves(step.in_memory(restored.state)[0]))
    assert all(np.array_equal(found[name], leaf) for name, leaf in wanted.items())


@pytest.mark.slow
def test_an_error_while_leaves_are_written_leaves_the_checkpoint_before(tmp_path, monkeypatch):
    step = in_files(tmp_path / "a", precision="bf16", remat="full")
    state, _ = run(step, steps=1)
    real, calls = ArrayWriter.write, []

    def full(self, arrays):
        calls.append(arrays)
        if len(calls) == 2:
            raise OSError("No space left on device")
        real(self, arrays)

    with zero_jax.Checkpoints(tmp_path / "saved") as checkpoints:
        checkpoints.save(step, state, wait=True)
        state, _ = run(step, state, 1)
        monkeypatch.setattr(ArrayWriter, "write", full)
        with pytest.raises(CheckpointError, match="Checkpoint 2 could not be written .*No space.* are unchanged: 1"):
            checkpoints.save(step, state)
        assert checkpoints.steps() == [1] and sorted(os.listdir(tmp_path / "saved")) == ["1"]
        monkeypatch.setattr(ArrayWriter, "write", real)
        checkpoints.save(step, state, wait=True)
        assert checkpoints.steps() == [1, 2] and int(checkpoints.restore(step, BATCH).state.step) == 2


@pytest.mark.slow
def test_moments_of_another_dtype_are_converted(tmp_path):
    step = in_files(tmp_path / "a", precision="bf16", remat="full")
    state, _ = run(step, steps=1)
    narrow = optax.adam(1e-2, mu_dtype="bfloat16")
    other = in_files(tmp_path / "b", optimizer=narrow, precision="bf16", remat="full")
    plain = zero_jax.make_zero_train_step(Stacked(), 3, optimizer=narrow, precision="bf16", remat="full")
    with zero_jax.Checkpoints(tmp_path / "saved") as checkpoints:
        checkpoints.save(step, state, wait=True)
        with pytest.raises(CheckpointError, match="cast=True would convert it"):
            checkpoints.restore(other, BATCH)
        found, wanted = (checkpoints.restore(each, BATCH, cast=True).state for each in (other, plain))
    assert differing(wanted, other.in_memory(found)[0]) == []
    assert differing(wanted, step.in_memory(state)[0]) != []


PROGRAM = """
    import os, signal, sys
    sys.path.insert(0, {tests!r})
    import zero_jax
    zero_jax.simulate_devices(8)
    from checkpoint.test_states_in_files import in_files, run
    from zero_jax.checkpoint import orbax_store
    from zero_jax.checkpoint.orbax_files import ArrayWriter

    step = in_files({folder!r} + "/states", precision="bf16", remat="full")
    state, _ = run(step, steps=1)
    checkpoints = zero_jax.Checkpoints({folder!r} + "/saved")
    checkpoints.save(step, state, wait=True)
    state, _ = run(step, state, 1)

    def kill(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    if {when!r} == "leaves":
        real, calls = ArrayWriter.write, []
        ArrayWriter.write = lambda self, arrays: kill() if calls.append(0) or len(calls) == 2 else real(self, arrays)
    else:
        orbax_store._publish = kill
    checkpoints.save(step, state, wait=True)
"""


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize("when", ["leaves", "publish"])
def test_a_killed_save_is_no_checkpoint(tmp_path, when):
    """Killed among its leaves, or when all is written but not yet its name; what goes on takes what was complete."""
    program = textwrap.dedent(PROGRAM).format(tests=str(ROOT / "tests"), folder=str(tmp_path), when=when)
    done = subprocess.run([sys.executable, "-c", program], env=os.environ | {
        "JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{ROOT}"}, capture_output=True, text=True, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    left = [each for each in os.listdir(tmp_path / "saved") if each != "1"]
    assert left and all(each.startswith("2.zero_jax-tmp") for each in left), left
    step = in_files(tmp_path / "states", precision="bf16", remat="full")
    with zero_jax.Checkpoints(tmp_path / "saved") as checkpoints:
        assert checkpoints.steps() == [1]
        assert int(checkpoints.restore(step, BATCH).state.step) == 1
        state, _ = run(step, checkpoints.restore(step, BATCH).state, 1)
        checkpoints.save(step, state, wait=True)  # the control: unhurt it is one
        assert checkpoints.steps() == [1, 2]
        assert sorted(os.listdir(tmp_path / "saved")) == ["1", "2"]


PROCESS = GPT2_BATCH + """
config = gpt2.Config(num_layers=3, width=64, num_heads=2, vocab_size=96, max_length=16)

def step_of(folder):
    return zero_jax.make_zero_train_step(
        gpt2.build(config), 3, optimizer=optax.adam(1e-2), mesh=mesh, remat="full", precision="bf16",
        offload=None if folder is None else zero_jax.Offload(disk=folder))

def losses(step, state):
    found = []
    for _ in range(2):
        state, metrics = step(state, batch)
        found.append(float(metrics["loss"]).hex())
    return found

step, plain, other = step_of(f"{folder}/a"), step_of(None), step_of(f"{folder}/b")
state, _ = step(step.init(jax.random.key(0), batch), batch)
for at, (source, target) in enumerate(((step, plain), (plain, other))):
    with zero_jax.Checkpoints(f"{folder}/saved-{at}") as checkpoints:
        checkpoints.save(source, state if at == 0 else found, wait=True)
        found = checkpoints.restore(target, batch).state
wanted = losses(step, state)
print("LOSSES", json.dumps([wanted, losses(other, found)]), flush=True)
damaged = zero_jax.Checkpoints(f"{folder}/saved-0")
path = damaged._folder.at(1) / "state" / "ocdbt.process_1leaves" / "d"
if number == 0:
    largest = max(path.iterdir(), key=lambda each: each.stat().length)
    raw = bytearray(largest.read_bytes())
    raw[len(raw) // 2] ^= 1
    largest.write_bytes(raw)
try:
    damaged.restore(other, batch)
except (zero_jax.DamagedCheckpointError, RuntimeError) as error:
    print("DAMAGED", str(error)[:2000], flush=True)
"""


@pytest.mark.slow
def test_each_of_two_processes_saves_and_restores_its_shards(tmp_path):
    """To a step without files, from it, and on with the same losses; damage that one finds ends both."""
    with two_processes(PROCESS, str(tmp_path), xla_flags="--xla_cpu_max_isa=AVX") as processes:
        outputs = [process.communicate(timeout=300) for process in processes]
    lines = [text.splitlines() for text, _ in outputs]
    found = [json.loads(line.partition(" ")[2]) for each in lines for line in each if line.startswith("LOSSES")]
    assert len(found) == 2, outputs
    assert all(wanted == restored == found[0][0] for wanted, restored in found) and len(set(found[0][0])) == 2
    damaged = [line for each in lines for line in each if line.startswith("DAMAGED")]
    assert len(damaged) == 2 and any("is damaged" in line and "blocks" in line for line in damaged), damaged
    assert {each.name for each in (tmp_path / "saved-0/1/state").glob("*leaves")} == {
        "ocdbt.process_0leaves", "ocdbt.process_1leaves"}


def test_large_parts_are_divided_into_chunks():
    assert chunk_shape((1, 2**10, 2**10), np.float32) == (1, 2**10, 2**10)
    assert chunk_shape((1, 2**15, 3 * 2**14), np.float32) == (1, 2**12, 3 * 2**14)
    assert chunk_shape((7, 2**29), np.float32) == (1, 2**28) and chunk_shape((), np.float32) == ()
