"""Activations in files: a step that runs layer by layer has the bits of one program, or says why it cannot."""

import os

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from step.test_offload import BATCH, Block, Stacked, Unstacked
from support.stacked_nnx import NnxStacked
from support.targets import mesh_of
from support.two_processes import GPT2_BATCH, two_processes

import zero_jax
from models import gpt2
from zero_jax.disk.scratch import ScratchFile
from zero_jax.errors import CheckpointError, DamagedCheckpointError
from zero_jax.jaxpr import cut
from zero_jax.step.pieces.saved_rounds import SavedRounds
from zero_jax.tree import named_leaves

CLIPPED = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2))


class TwoLoops(nn.Module):
    """Two stacks of layers, one after another, and dropout between them."""

    @nn.compact
    def __call__(self, x):
        x = nn.Embed(96, 64)(x)
        first, second = (nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=length)(
            name=f"of_{length}") for length in (3, 2))
        x = nn.Dropout(0.1, deterministic=False)(first(x, None)[0])
        x, _ = second(x, None)
        return nn.Dense(96)(x)


def made(folder, *, model=Stacked, stage=3, activations="disk", remat="full", **options):
    model = model() if issubclass(model, nn.Module) else model
    return zero_jax.make_zero_train_step(
        model, stage, optimizer=CLIPPED, remat=remat, partition_activations=activations,
        offload=zero_jax.Offload(disk=folder, buffer_bytes=2**16), **options)


def trained(step, steps=3):
    """(The losses and norms of some steps, the last state's leaves)."""
    state, numbers = step.init(jax.random.key(0), BATCH), []
    for _ in range(steps):
        state, metrics = step(state, BATCH)
        numbers.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    state, _ = step.in_memory(state)
    leaves = {name: leaf for name, leaf in named_leaves(state) if name.partition("/")[0] != "disk"}
    return numbers, {name: np.asarray(jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
                                      else leaf) for name, leaf in leaves.items()}


def assert_same_bits(tmp_path, **options):
    wanted = trained(made(tmp_path / "program", activations=False, view="global", **options))
    found = trained(made(tmp_path / "pieces", **options))
    assert wanted[0] == found[0]
    assert [name for name in wanted[1] if wanted[1][name].tobytes() != found[1][name].tobytes()] == []


def test_activations_in_files_have_the_bits_of_one_program(tmp_path, monkeypatch):
    moved, write, read = [], ScratchFile.write, ScratchFile.read
    monkeypatch.setattr(ScratchFile, "write", lambda self, record, fill: (moved.append("w"), write(self, record, fill)))
    monkeypatch.setattr(ScratchFile, "read", lambda self, record, to: (moved.append("r"), read(self, record, to)))
    assert_same_bits(tmp_path, precision="bf16", guard=zero_jax.Guard(skip=2))
    assert moved == (["w"] * 4 + ["r"] * 4) * 3  # of four layers, in three steps
    step = made(tmp_path / "more", precision="bf16")
    assert step.compiled_step(BATCH).saved_bytes == 4 * 16 * 8 * 64 * 2 / jax.device_count()
    assert step.verify(BATCH).violations == ()
    # Nothing of it is found later.
    assert sorted(path.name for path in (tmp_path / "pieces").glob("*/*")) == [
        "commit-0.json", "commit-1.json", "generation-0.bin", "generation-1.bin"]


def test_rounds_that_come_in_another_order_are_other_numbers(tmp_path, monkeypatch):
    """What the tests above must see: backward with the activations of another layer."""
    wanted = trained(made(tmp_path / "right"))
    monkeypatch.setattr(SavedRounds, "_of", lambda self, stack, index: self._records[stack, 3 - index], raising=True)
    found = trained(made(tmp_path / "wrong"))
    assert wanted[0][0][0] == found[0][0][0] and wanted[0] != found[0]


@pytest.mark.slow
@pytest.mark.grid
@pytest.mark.parametrize("options", [
    {"model": TwoLoops}, {"model": NnxStacked, "precision": "bf16"}, {"stage": 0, "precision": "bf16"}, {"stage": 2},
    {"gather": "forward"}, {"hpz_axes": "data_1", "data": (2, 4)}, {"remat": "dots"}, {"ema": 0.9, "frozen": "Dense_0"},
    {"communication": zero_jax.Communication(weights="int8"), "data": (2, 4)}, {"precision": "fp16"},
    {"tensor": 2, "tensor_rules": [("Dense_0/kernel", P(None, "tensor")), ("Dense_1/kernel", P("tensor", None))]}],
    ids=lambda options: "-".join(f"{name}={getattr(value, '__name__', value)}"[:24] for name, value in options.items()))
def test_of_every_kind_of_step(tmp_path, options):
    options = dict(options)
    sizes = {name: options.pop(name) for name in ("data", "tensor") if name in options}
    assert_same_bits(tmp_path, mesh=zero_jax.make_mesh(**sizes), **options)


def test_what_is_refused(tmp_path):
    refused = [({"offload": None}, "without Offload.disk=...*give offload=zero_jax.Offload"),
               ({"accumulate": 2}, "with accumulate=2.*leave accumulate out"),
               ({"prefetch": True}, "with prefetch=True.*leave prefetch out")]
    for options, message in refused:
        options = {"offload": zero_jax.Offload(disk=tmp_path), "partition_activations": "disk"} | options
        with pytest.raises(ValueError, match=f"partition_activations=\"disk\" {message}"):
            zero_jax.make_zero_train_step(Stacked(), 3, **options)
    with pytest.raises(ValueError, match="nothing is checkpointed.*remat=\"full\""):
        made(tmp_path / "a", remat=None).verify(BATCH)
    with pytest.raises(ValueError, match="no loop of this model leaves a checkpoint.*stack its layers"):
        made(tmp_path / "b", model=Unstacked, remat="full").verify(BATCH)
    step = made(tmp_path / "c")
    state = step.init(jax.random.key(0), BATCH)
    with pytest.raises(ValueError, match="gradients with partition_activations=\"disk\""):
        step.gradients(state, BATCH)
    with pytest.raises(ValueError, match=r"lower with .*see compiled_step\(batch\)"):
        step.lower(BATCH)


def test_after_an_error_the_state_is_that_before_the_step(tmp_path, monkeypatch):
    wanted = trained(made(tmp_path / "right"))[0]
    step = made(tmp_path / "wrong")
    state, numbers = step.init(jax.random.key(0), BATCH), []
    step._jitted[0].close()  # whose space `init` has reserved
    for at in range(3):
        with monkeypatch.context() as patched:
            if at == 0:
                patched.setattr(os, "posix_fallocate", full)
                with pytest.raises(CheckpointError, match="scratch.bin cannot be written.*free space"):
                    step(state, BATCH)
            elif at == 1:
                patched.setattr(ScratchFile, "write", lambda self, record, fill: self._written.update(
                    {record.number: self._file.write(record, fill())[::-1]}))
                with pytest.raises(DamagedCheckpointError, match="scratch.bin is damaged.*activations of round 3"):
                    step(state, BATCH)
        state, metrics = step(state, BATCH)
        numbers.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    assert numbers == wanted


def full(*_):
    raise OSError(28, "No space left on device")


@pytest.mark.slow
def test_h100s_need_less_memory_by_what_is_in_files(tmp_path, monkeypatch):
    mesh = mesh_of("h100:8")
    config = gpt2.Config(num_layers=12, width=256, num_heads=4, vocab_size=512, max_length=512)
    tokens = jax.ShapeDtypeStruct((4 * mesh.size, 512), jnp.int32)
    batch = {"inputs": tokens, "targets": tokens}

    def compiled(activations):
        return zero_jax.make_zero_train_step(
            gpt2.build(config), 3, mesh=mesh, precision="bf16", remat="full", partition_activations=activations,
            offload=zero_jax.Offload(disk=tmp_path)).compiled_step(batch)

    program, pieces = compiled(False), compiled("disk")
    assert pieces.verify().violations == ()
    assert pieces.saved_bytes == 12 * 4 * 512 * 256 * 2
    assert pieces.device_bytes <= program.device_bytes - 0.9 * pieces.saved_bytes
    # A piece is given the mask of attention, which is larger than all else, where it does not compute it.
    monkeypatch.setattr(cut, "recipe", lambda var, makers: [])
    assert compiled("disk").device_bytes > program.device_bytes


PROCESS = GPT2_BATCH + """
config = gpt2.Config(num_layers=3, width=32, num_heads=2, vocab_size=96, max_length=16)
for activations in (False, "disk"):
    step = zero_jax.make_zero_train_step(
        gpt2.build(config), 3, optimizer=optax.adam(1e-2), mesh=mesh, remat="full", partition_activations=activations,
        offload=zero_jax.Offload(disk=f"{folder}/{activations}"))
    state, losses = step.init(jax.random.key(0), batch), []
    for _ in range(3):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]).hex())
    print("LOSSES", json.dumps(losses), flush=True)
"""


@pytest.mark.slow
def test_each_of_two_processes_has_a_file_of_its_own(tmp_path):
    with two_processes(PROCESS, str(tmp_path)) as processes:
        texts = [process.communicate(timeout=300)[0] for process in processes]
    losses = [line for text in texts for line in text.splitlines() if line.startswith("LOSSES")]
    assert len(losses) == 4 and len(set(losses)) == 1
