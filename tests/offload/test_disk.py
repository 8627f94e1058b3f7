"""States in files between the compiled segments of a step: the bits of memory, resumed at the last step, or refused."""

import os
import resource
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.offloaded import BATCH, differing, made, plain, run, unstacked

import zero_jax
from zero_jax.offload import file_update
from zero_jax.offload.disk_leaves import OnDisk, disk_traffic
from zero_jax.sharding.shard_reader import UnreadLeaf
from zero_jax.step.disk.update import InitialOptimizerState
from zero_jax.tree import named_leaves


@pytest.mark.parametrize("stage, precision", [(0, "bf16"), (1, "fp32"), (3, "bf16")])
def test_what_files_take_is_known_before_they_are_made(tmp_path, stage, precision):
    step = made(stage, tmp_path / "run", precision=precision)
    layout, parts = step.layout(BATCH), [
        part for record in step._prepared(BATCH).records.layout.records for part in record.parts]
    traffic = disk_traffic(layout, jax.device_count())
    total = sum(part.num_bytes for part in parts)
    assert abs(traffic.stored * jax.device_count() - 2 * total) <= 2 * jax.device_count()
    assert abs(traffic.read * jax.device_count() - sum(part.num_bytes for part in parts if part.leaf in layout.disk)
               ) <= jax.device_count()
    assert not (tmp_path / "run").exists() and traffic.written < disk_traffic(layout, 1).written + stage


def test_states_in_files_have_the_bits_of_memory_and_go_on_from_the_files_alone(tmp_path):
    memory = made(3, None)
    wanted, numbers = run(memory, memory.init(jax.random.key(0), BATCH), 4)
    step = made(3, tmp_path / "run")
    state, first = run(step, old := step.init(jax.random.key(0), BATCH), 2)

    # What is in files is no array here; the rest is as in memory.
    disk = step.layout().disk
    assert {name.split("/")[0] for name in disk} == {"opt_state"} and all("u/" in name for name in disk)
    assert disk.isdisjoint(name for name, _ in named_leaves(state))
    assert isinstance(state.opt_state[1][0].mu["Embed_0"]["embedding"], OnDisk)
    assert "on disk for each" in step.layout().describe() and step.layout().disk_bytes > 0
    with pytest.raises(ValueError, match="generation 1 .* have generation 3 .*go on from the state"):
        step(old, BATCH)
    step.close()

    # Another object, as another process would, resumes from the folder.
    step = made(3, tmp_path / "run")
    resumed = step.stored_state(BATCH)
    assert int(resumed.step) == 2 and differing(state, resumed) == []
    resumed, last = run(step, resumed, 2)
    assert first + last == numbers
    full, layout = step.in_memory(resumed)
    assert differing(wanted, full) == [] and not layout.disk

    # Checkpoints copy the whole state, for any placement.
    with zero_jax.Checkpoints(tmp_path / "saved") as checkpoints:
        checkpoints.save(step, resumed, wait=True)
        assert differing(wanted, checkpoints.restore(memory, BATCH).state) == []
        back = checkpoints.restore(step, BATCH).state
    with pytest.raises(ValueError, match="go on from the state"):
        step(resumed, BATCH)
    assert differing(wanted, step.in_memory(back)[0]) == []

    # Refused: what cannot be, and what would be lost.
    with pytest.raises(ValueError, match="call the step once for each batch"):
        step.multi(back, jax.tree.map(lambda leaf: leaf[None], BATCH))
    with pytest.raises(ValueError, match="outside of jit and scan"):
        jax.jit(lambda batch: step(back, batch))(BATCH)
    other = made(3, tmp_path / "run")
    with pytest.raises(ValueError, match="in use by another step of this process"):
        other.stored_state(BATCH)
    step.close()
    with pytest.raises(ValueError, match="already holds the state of a run, after step 4: go on"):
        other.init(jax.random.key(0), BATCH)
    other.close()


def test_a_lost_block_is_found(tmp_path, monkeypatch):
    """The control: an update that leaves out the first block of each group has other bits."""
    computed = file_update.BlockPrograms.run

    def all_but_one(self, group, index, stored, buffers, values):
        new, whole, blocks = computed(self, group, index, [[jnp.copy(leaf) for leaf in each] for each in stored],
                                    buffers, values)
        return (new, whole, blocks) if index else (stored, whole, blocks)

    monkeypatch.setattr(file_update.BlockPrograms, "run", all_but_one)
    memory, step = made(3, None), made(3, tmp_path / "run")
    wanted, _ = run(memory, memory.init(jax.random.key(0), BATCH), 1)
    state, _ = run(step, step.init(jax.random.key(0), BATCH), 1)
    assert [name for name in differing(wanted, step.in_memory(state)[0]) if "/mu/" in name]
    step.close()


def test_a_bad_step_leaves_the_files_and_an_error_while_writing_loses_nothing(tmp_path, monkeypatch):
    batch = {**BATCH, "weights": jnp.ones((16, 8))}
    step = made(2, tmp_path / "run", model=unstacked, precision="bf16", guard=zero_jax.Guard(skip=2))
    state = step.init(jax.random.key(0), batch)
    assert any(name.startswith("params/") for name in step.layout().disk)
    state, _ = step(state, batch)
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*.*") if path.suffix != ".lock"}
    state, metrics = step(state, {**batch, "weights": jnp.full((16, 8), jnp.nan)})
    assert (int(metrics["bad"]), int(state.step)) == (1, 1)
    assert files == {path: path.stat().st_mtime_ns for path in files}
    state, metrics = step(state, batch)
    assert (int(metrics["bad"]), int(state.step)) == (0, 2)
    gradients = [leaf for leaf in jax.tree.leaves(step.lower(batch).out_info[1]) if leaf.size >= 1024]
    assert gradients and all(leaf.dtype == jnp.bfloat16 for leaf in gradients), "in memory until the update as reduced"
    params = step.params(state)

    # A disk that is full in the middle of a step: the state was donated, and its last commit is in the files.
    writes, real = [], os.pwritev

    def full(*args):
        writes.append(args)
        if len(writes) > 1:
            raise OSError(28, "No space left on device")
        return real(*args)

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(zero_jax.CheckpointError, match="No space left on device.*free space on that disk.*unchanged"):
        step(state, batch)
    monkeypatch.undo()
    state = step.stored_state(batch)
    assert int(state.step) == 2 and differing(params, step.params(state)) == []
    assert int(step(state, batch)[0].step) == 3
    step.close()


def small(path, **options):
    return zero_jax.make_zero_train_step(unstacked(), 2, offload=zero_jax.Offload(disk=path), **options)


def test_an_abstract_batch_may_have_a_typed_key(tmp_path):
    """The control: another key of init makes another state."""
    batch, states = {**BATCH, "key": jax.random.key(1)}, []
    for seed, given in ((0, batch), (0, jax.eval_shape(lambda: batch)), (1, batch)):
        step = small(tmp_path / str(len(states)), optimizer=optax.adam(1e-2))
        states.append(step.in_memory(step.init(jax.random.key(seed), given))[0])
        step.close()
    assert differing(states[0], states[1]) == [] != differing(states[0], states[2])


def test_what_cannot_be_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for path, message in ((tmp_path / "file", "is no folder"), ("", "give the path of a folder"),
                          (3, "give the path of a folder"), (tmp_path / "file" / "x", "cannot be written")):
        with pytest.raises(ValueError, match=message):
            zero_jax.Offload(disk=path)
    with pytest.raises(ValueError, match="one number from the states of .* all files would have to be read twice"):
        small(tmp_path / "a", optimizer=optax.chain(optax.adam(1e-2), optax.clip_by_global_norm(1.0))).init(
            jax.random.key(0), BATCH)
    with pytest.raises(ValueError, match="no leaf of this state"):
        small(tmp_path / "a", optimizer=optax.sgd(1e-2)).init(jax.random.key(0), BATCH)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9 - 5000, 5000))
        with pytest.raises(ValueError, match="two generations of .* has 5,000 bytes free"):
            small(tmp_path / "a").init(jax.random.key(0), BATCH)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(zero_jax.CheckpointError, match="raise the limit on the size of a file"):
            small(tmp_path / "b").init(jax.random.key(0), BATCH)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with pytest.raises(zero_jax.CheckpointError, match="holds no committed state"):
        small(tmp_path / "c").stored_state(BATCH)

    # Another model's folder, another run's, and one of something else.
    step = small(tmp_path / "d", optimizer=optax.adam(1e-2))
    step.init(jax.random.key(0), BATCH)
    step.close()
    with pytest.raises(ValueError, match="states of another model.* is not there in the files|in the files, and"):
        small(tmp_path / "d", optimizer=optax.lion(1e-3)).stored_state(BATCH)
    held = subprocess.Popen([sys.executable, "-c", textwrap.dedent(f"""
        from zero_jax.disk.run_lock import RunLock
        RunLock({str(tmp_path / "d" / "process-00000-of-00001")!r}).acquire(); print("locked", flush=True); input()
        """)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert held.stdout and held.stdout.readline() == "locked\n"
    with pytest.raises(zero_jax.CheckpointError, match="says that process .* saves to this folder"):
        small(tmp_path / "d", optimizer=optax.adam(1e-2)).stored_state(BATCH)
    held.communicate("\n")
    folder = tmp_path / "e" / "process-00000-of-00001"
    folder.mkdir(parents=True)
    (folder / "thesis.tex").write_text("")
    with pytest.raises(ValueError, match="thesis.tex, which are no states"):
        small(tmp_path / "e").init(jax.random.key(0), BATCH)


def test_given_values_are_taken_and_after_an_error_in_init_the_folder_is_free(tmp_path, monkeypatch):
    """Of an ordinary state, and of a file that is read part by part; frozen ones and an average, too."""
    options = {"precision": "bf16", "frozen": "blocks/Dense_0", "ema": 0.9}
    memory, step, make = made(3, None, **options), made(3, tmp_path / "run", **options), InitialOptimizerState.__call__

    def fails(self, names):
        if "nu" in names[0]:
            raise KeyboardInterrupt
        return make(self, names)

    with monkeypatch.context() as patched:
        patched.setattr(InitialOptimizerState, "__call__", fails)
        with pytest.raises(KeyboardInterrupt):
            step.init(jax.random.key(1), BATCH)
    step.close()
    step = made(3, tmp_path / "run", **options)
    with pytest.raises(zero_jax.CheckpointError, match="holds no committed state"):
        step.stored_state(BATCH)
    wanted = memory.init(jax.random.key(5), BATCH)
    given = jax.tree.map(np.asarray, memory.params(wanted))
    state = step.init(jax.random.key(5), BATCH, params=given)
    assert differing(wanted, step.in_memory(state)[0]) == []
    state = step.with_params(state, jax.tree.map(lambda value: UnreadLeaf(
        "a file", value.shape, value.dtype, lambda: lambda index: 2 * value[index]), given))
    wanted = memory.with_params(wanted, jax.tree.map(lambda value: 2 * value, given))
    assert differing(wanted, step.in_memory(state)[0]) == []
    assert differing(given, step.params(state)) != []  # the control
    with pytest.raises(ValueError, match="lacks 1 "):
        step.with_params(state, {name: value for name, value in given.items() if name != "Embed_0"})
    step.close()


def test_commit_records_that_are_not_whole_are_refused_by_init_and_named(tmp_path, caplog):
    step = small(tmp_path / "run", optimizer=optax.adam(1e-2))
    state = step.init(jax.random.key(0), BATCH)
    for _ in range(2):
        state, _ = step(state, BATCH)
    step.close()
    own = tmp_path / "run" / "process-00000-of-00001"
    whole = {path: path.read_bytes() for path in own.iterdir()}
    older, newer = own / "commit-0.json", own / "commit-1.json"
    newer.write_bytes(whole[newer][:-40])
    assert int(step.stored_state(BATCH).step) == 1
    assert "commit-1.json is damaged" in caplog.text and "The state after step 1 is taken." in caplog.text
    step.close()
    for damage in (b"", b"{}", whole[newer][:-40], whole[newer].replace(b"1", b"2")):
        for path in (older, newer):
            path.write_bytes(damage)
        before = {path: path.read_bytes() for path in own.iterdir()}
        with pytest.raises(zero_jax.DamagedCheckpointError, match="commit-0.json is damaged.*commit-1.json is damaged.*"
                           "no generation is whole: restore a checkpoint, or remove"):
            step.init(jax.random.key(0), BATCH)
        with pytest.raises(zero_jax.DamagedCheckpointError, match="no generation is whole"):
            step.stored_state(BATCH)
        assert before == {path: path.read_bytes() for path in own.iterdir()}
    for path in (older, newer):
        path.write_bytes(whole[path])
    other = own.rename(own.with_name("process-00000-of-00002"))
    for call in (step.stored_state, lambda batch: step.init(jax.random.key(0), batch)):
        with pytest.raises(zero_jax.CheckpointError, match="has the states of process-00000-of-00002, and"):
            call(BATCH)
    # The control: as they were written.
    other.rename(own)
    assert int(step.stored_state(BATCH).step) == 2
    step.close()


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize("stage, options", [
    (1, {"accumulate": 2}), (3, {"precision": "fp16"}), (2, {"optimizer": optax.lamb(1e-2)}),
    (2, {"optimizer": optax.contrib.muon(1e-2)}), (3, {"optimizer": optax.adafactor(1e-2)})])
def test_other_optimizers_and_scales_have_their_numbers(tmp_path, stage, options):
    """Close, and not equal: XLA:CPU reassociates products of scalars across what are two programs here."""
    memory, step = made(stage, None, **options), made(stage, tmp_path / "run", **options)
    wanted, numbers = run(memory, memory.init(jax.random.key(0), BATCH), 3)
    state, same = run(step, step.init(jax.random.key(0), BATCH), 3)
    np.testing.assert_allclose(numbers, same, rtol=1e-5)
    full = dict(named_leaves(step.in_memory(state)[0]))
    for name, leaf in named_leaves(wanted):
        np.testing.assert_allclose(plain(leaf), plain(full[name]), rtol=1e-4, atol=1e-5, err_msg=name)
    step.close()


WITHOUT_FMA = """
import flax.nnx as nnx, jax, numpy as np, optax, zero_jax
from support.offloaded import BATCH, differing, made, run, unstacked
cases = [(3, {"optimizer": optax.adamw(1e-2), "ema": 0.9}), (0, {"precision": "bf16", "optimizer": optax.adam(1e-2)}),
         (2, {"precision": "bf16", "optimizer": optax.adamw(1e-2), "guard": zero_jax.Guard(skip=2)}),
         (3, {"precision": "bf16-stochastic", "model": unstacked}), (2, {"optimizer": optax.lion(1e-3)})]
for number, (stage, options) in enumerate(cases):
    memory, step = made(stage, None, **options), made(stage, f"{FOLDER}/{number}", **options)
    wanted, numbers = run(memory, memory.init(jax.random.key(0), BATCH), 3)
    state, same = run(step, step.init(jax.random.key(0), BATCH), 3)
    assert differing(wanted, step.in_memory(state)[0]) == [], number
    for (loss, norm), (loss_same, norm_same) in zip(numbers, same):  # a sum of squares is in another order at stage 0
        assert loss == loss_same and (norm == norm_same or stage == 0 and abs(norm / norm_same - 1) < 1e-6), number
    if "ema" in options:
        left = memory.evaluator(ema=True)(wanted, BATCH)
        assert left == step.evaluator(ema=True)(state, BATCH) != step.evaluator()(state, BATCH)
    gradients, metrics, variables = step.gradients(state, BATCH)
    state, _ = step.apply_gradients(state, gradients, loss=metrics["loss"], variables=variables)
    gradients, metrics, variables = memory.gradients(wanted, BATCH)
    wanted, _ = memory.apply_gradients(wanted, gradients, loss=metrics["loss"], variables=variables)
    assert differing(wanted, step.in_memory(state)[0]) == [], number
    state = step.with_params(state, params := jax.tree.map(np.asarray, step.params(state)))
    assert differing(params, step.params(state)) == []
    step.close()
    again = made(stage, f"{FOLDER}/{number}", **options)
    assert differing(state, again.stored_state(BATCH)) == []
    again.close()
print("equal")
"""


@pytest.mark.slow
def test_all_stages_have_the_bits_of_memory_without_fused_multiply_adds(tmp_path):
    """XLA:CPU fuses a product and a sum at one place and not at another: here on a processor that cannot."""
    environment = {**os.environ, "XLA_FLAGS": os.environ["XLA_FLAGS"] + " --xla_cpu_max_isa=AVX",
                   "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), str(Path(__file__).parents[2])])}
    code = ("from zero_jax.sharding.mesh import simulate_local\nsimulate_local(8)\n"
            f"FOLDER = {str(tmp_path)!r}\n{WITHOUT_FMA}")
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=900)
    assert result.stdout.endswith("equal\n"), result.stderr[-3000:]
