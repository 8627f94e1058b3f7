"""Checkpoints: saved at one stage on some devices, restored at another on others, bit for bit; and what is kept."""

import functools
import json
import logging

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from support.covering import weekly
from support.oracle import slow
from support.saved import BATCH, MODEL, advanced, batch_of, difference, dump, make_step, step_for, trained

import zero_jax
from zero_jax.checkpoint.manifest import FORMAT
from zero_jax.tree import named_leaves

CHANGES = ((8, 8), (8, 4), (8, 2), (8, 1), (4, 8), (1, 8))
DIAGONAL = {(3, 3, 8, 8), (0, 3, 8, 4), (1, 2, 8, 2), (2, 0, 8, 1), (3, 1, 4, 8), (3, 2, 1, 8)}
MORE = range(3, 8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@functools.cache
def source(root, stage, count):
    """(folder of a checkpoint after 3 steps, its state as bytes, the losses of the next 5 steps)."""
    step, path = step_for(stage, count), root / f"{stage}-{count}"
    state = trained(step)
    with zero_jax.Checkpoints(path) as checkpoints:
        checkpoints.save(step, state, data={"position": 3})
        before = dump(step, state)
        _, losses = advanced(step, state, MORE)  # the state is donated while it is written
    return path, before, losses


def combinations():
    for stage in range(4):
        for other in range(4):
            for count, others in CHANGES:
                row = stage, other, count, others
                yield row if row in DIAGONAL else slow(*row)


@pytest.mark.grid
@weekly("stage, other, count, others", combinations())
def test_every_stage_and_device_count_to_every_other(folder, stage, other, count, others):
    path, before, losses = source(folder, stage, count)
    step = step_for(other, others)
    found = zero_jax.Checkpoints(path).restore(step, BATCH)
    assert (found.step, found.data, found.damaged) == (3, {"position": 3}, ())
    assert found.run["stage"] == stage and found.run["mesh"] == {"data": count}
    assert difference(before, dump(step, found.state)) == []
    shardings = jax.tree.map(lambda leaf: leaf.sharding, found.state)
    assert jax.tree.all(jax.tree.map(lambda a, b, x: a.is_equivalent_to(b, x.ndim), shardings,
                                     step.layout().shardings, found.state))
    _, after = advanced(step, found.state, MORE)
    if (stage, count) == (other, others):
        np.testing.assert_array_equal(after, losses)
    else:
        np.testing.assert_allclose(after, losses, rtol=1e-5)


def test_a_difference_is_found(folder):
    _, before, losses = source(folder, 3, 8)
    step = step_for(3, 8)
    state = trained(step)
    assert difference(before, dump(step, state)) == []
    other = jax.tree.map(jnp.asarray, state)
    bias = other.params["layers_1"]["bias"]
    other.params["layers_1"]["bias"] = bias.at[0].set(jnp.nextafter(bias[0], 1.0))
    assert difference(before, dump(step, other)) == ["params/layers_1/bias"]
    later, _ = advanced(step, state, [3])
    assert "params/layers_3/kernel" in difference(before, dump(step, later))


MESHES = {
    "torus": lambda: zero_jax.make_mesh((4, 2)),
    "hybrid": lambda: zero_jax.make_mesh(data=4, replica=2),
    "tensor": lambda: zero_jax.make_mesh(data=4, tensor=2),
    "reversed": lambda: zero_jax.make_mesh(devices=jax.devices()[:6][::-1]),
}


@pytest.mark.grid
@weekly("stage, name", [
    (3, "torus"), (3, "tensor"), slow(3, "hybrid"), slow(3, "reversed"), slow(1, "tensor")])
def test_other_meshes(folder, tmp_path, stage, name):
    path, before, _ = source(folder, 3, 8)
    rules = (("layers_1/kernel", P(None, "tensor")), ("layers_3/kernel", P("tensor", None)))
    step = make_step(stage, 8, mesh=MESHES[name](), tensor_rules=rules if name == "tensor" else ())
    batch = batch_of(0, rows=24)
    found = zero_jax.Checkpoints(path).restore(step, batch)
    assert difference(before, dump(step, found.state)) == []
    zero_jax.Checkpoints(tmp_path).save(step, found.state, wait=True)
    back = step_for(3, 8)
    assert difference(before, dump(back, zero_jax.Checkpoints(tmp_path).restore(back, BATCH).state)) == []


def test_parameters_alone(folder, tmp_path):
    path, before, _ = source(folder, 3, 8)
    step = step_for(2, 4)
    state = zero_jax.Checkpoints(path).restore(step, BATCH).state
    only = zero_jax.Checkpoints(tmp_path)
    assert only.save(step, state, only_params=True, wait=True) == 3
    names = only.manifest().leaves
    assert names and all(name.startswith("params/") for name in names)
    for checkpoints in (only, zero_jax.Checkpoints(path)):
        params, variables = checkpoints.load_params(step_for(3, 8), BATCH)
        assert variables == {}
        for name, leaf in named_leaves(params):
            assert np.asarray(leaf).tobytes() == before[f"params/{name}"][2]
    logits = MODEL.apply({"params": params}, BATCH["inputs"])
    assert logits.shape == (*BATCH["inputs"].shape, 61)
    with pytest.raises(zero_jax.CheckpointError, match="only_params=True and holds no step: read it with load_params"):
        only.restore(step, BATCH)


def test_parameters_of_a_larger_model_are_refused(tmp_path):
    """Of a checkpoint of parameters alone as of one of a state; the control is the model itself."""
    step, names = step_for(3, 8), ("params", "state")
    state = trained(step, 1)
    smaller = make_step(3, 8, nn.Sequential(MODEL.layers[:2]))
    for name in names:
        checkpoints = zero_jax.Checkpoints(tmp_path / name)
        checkpoints.save(step, state, only_params=name == "params", wait=True)
        checkpoints.load_params(step, BATCH)
        with pytest.raises(zero_jax.CheckpointError, match="params/layers_3/bias .* in the checkpoint and not in"):
            checkpoints.load_params(smaller, BATCH)


def test_a_cast_is_asked_for(tmp_path):
    step = step_for(3, 8)
    state = trained(step)
    checkpoints = zero_jax.Checkpoints(tmp_path)
    checkpoints.save(step, state, wait=True)
    half = make_step(1, 4, precision=zero_jax.Precision(params=jnp.bfloat16))
    with pytest.raises(zero_jax.CheckpointError, match=r"float32 \[16, 24\].* bfloat16 \[16, 24\].*cast=True"):
        checkpoints.restore(half, BATCH)
    found = checkpoints.restore(half, BATCH, cast=True).state
    rounded = np.asarray(state.params["layers_1"]["kernel"]).astype(jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(found.params["layers_1"]["kernel"]), rounded)
    params, _ = checkpoints.load_params(half, BATCH, cast=True)
    np.testing.assert_array_equal(np.asarray(params["layers_1"]["kernel"]), rounded)


def test_what_is_kept(tmp_path):
    step = step_for(0, 1)
    state = trained(step)
    checkpoints = zero_jax.Checkpoints(tmp_path, keep_last=2, keep_every=4)
    for number in range(1, 8):
        checkpoints.save(step, state, at=number)
        checkpoints.wait()
        assert number in checkpoints.steps()
    assert checkpoints.steps() == [4, 6, 7] and checkpoints.latest() == 7
    every = zero_jax.Checkpoints(tmp_path, keep_last=None)
    every.save(step, state, at=9, wait=True)
    assert every.steps() == [4, 6, 7, 9]


def test_what_is_damaged_or_unfinished_never_counts(tmp_path, caplog):
    step = step_for(0, 1)
    state = trained(step)
    checkpoints = zero_jax.Checkpoints(tmp_path, keep_last=2)
    for number in (1, 2, 3):
        checkpoints.save(step, state, at=number, wait=True)
    # 3 loses half a file, 2 is damaged from its manifest on.
    largest = max((tmp_path / "3/state").rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
    largest.write_bytes(largest.read_bytes()[:-100])
    (tmp_path / "4.zero_jax-tmp.orbax-checkpoint-tmp/state").mkdir(parents=True)
    (tmp_path / "notes").mkdir()
    for number in (5, 6):
        checkpoints = zero_jax.Checkpoints(tmp_path, keep_last=2)
        with caplog.at_level(logging.WARNING):
            checkpoints.save(step, state, at=number, wait=True)
        if number == 5:  # 2 and 5 are the last good ones
            assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3", "5", "notes"]
            assert checkpoints.steps() == [2, 5] and f"{largest.name} has" in caplog.text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["5", "6", "notes"]
    assert zero_jax.Checkpoints(tmp_path).restore(step, BATCH).step == 6


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_damaged_one_gives_way_to_the_one_before_it(tmp_path, caplog):
    step = step_for(3, 8)
    state = trained(step)
    with zero_jax.Checkpoints(tmp_path) as checkpoints:
        for number in (1, 2, 3):
            checkpoints.save(step, state, at=number, data=number)
    for number in (2, 3):
        for path in (tmp_path / str(number) / "state").rglob("d/*"):
            path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    with pytest.raises(zero_jax.DamagedCheckpointError, match=r"3 is damaged: leaf \S+ .*in .*3/state"):
        zero_jax.Checkpoints(tmp_path).restore(step, BATCH)
    checkpoints = zero_jax.Checkpoints(tmp_path)
    with caplog.at_level(logging.WARNING):
        found = checkpoints.restore(step, BATCH, fallback=True)
    assert (found.step, found.data, len(found.damaged)) == (1, 1, 2)
    assert "Checkpoint 1 of" in caplog.text and "instead of 3" in caplog.text
    assert checkpoints.steps() == [1]
    # A run that goes on from 1 comes by 2 again, and replaces it.
    assert checkpoints.save(step, found.state, at=2, data="new", wait=True) == 2
    assert zero_jax.Checkpoints(tmp_path).restore(step, BATCH, at=2).data == "new"
    with pytest.raises(zero_jax.CheckpointError, match="has a checkpoint 2 already"):
        checkpoints.save(step, found.state, at=2)


def test_the_manifest_tells_of_the_run(folder):
    path, _, _ = source(folder, 3, 8)
    manifest = zero_jax.Checkpoints(path).manifest()
    assert manifest.run == {"stage": 3, "mesh": {"data": 8}, "devices": 8, "platform": "cpu", "processes": 1}
    assert manifest.versions["jax"] == jax.__version__ and "orbax-checkpoint" in manifest.versions
    assert str(manifest.leaves["params/layers_1/kernel"]) == "float32 [16, 24]"
    assert str(manifest.leaves["rng"]) == "key<fry> []"
    assert not any(name.startswith("weights") for name in manifest.leaves)
    assert json.loads((path / "3/manifest/data.json").read_text())["manifest"]["format"] == FORMAT


def test_leaves_without_elements_and_odd_names(tmp_path):
    class Odd(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            self.variable("empty", "of nothing", lambda: jnp.zeros((0, 3)))
            self.variable("keys", "a.b", lambda: jax.random.split(jax.random.key(5, impl="rbg"), 2))
            return nn.Dense(61, name="a.b c")(nn.Embed(61, 8, name="a")(tokens))

    step = make_step(3, 8, Odd())
    state = trained(step)
    zero_jax.Checkpoints(tmp_path).save(step, state, wait=True)
    other = make_step(1, 2, Odd())
    found = zero_jax.Checkpoints(tmp_path).restore(other, BATCH).state
    assert difference(dump(step, state), dump(other, found)) == []
    assert found.variables["empty"]["of nothing"].shape == (0, 3)
    assert str(found.variables["keys"]["a.b"].dtype) == "key<rbg>"


def test_restored_states_compile_nothing_anew(tmp_path):
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: compiled.append(event) if event.endswith("backend_compile_duration") else None)
    step = step_for(3, 8)
    state = trained(step)
    with zero_jax.Checkpoints(tmp_path) as checkpoints:
        for number in range(3):
            checkpoints.save(step, state)
            restored = checkpoints.restore(step, BATCH).state
            if number:
                assert compiled == []
            state, _ = advanced(step, restored, [3])
            compiled.clear()
    jax.jit(lambda x: x * 3)(np.arange(7.0))
    assert len(compiled) == 1  # the control: compiling is seen


@pytest.mark.slow
def test_the_optimizer_reads_what_it_wrote(tmp_path):
    optimizer = optax.inject_hyperparams(optax.adamw)(learning_rate=optax.linear_schedule(1e-3, 1e-4, 10))
    step = make_step(2, 8, optimizer=optimizer)
    state = trained(step)
    with zero_jax.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(step, state)
        state, metrics = step(state, BATCH)
        _, again = step(checkpoints.restore(step, BATCH).state, BATCH)
    assert metrics["learning_rate"] == again["learning_rate"] and metrics["loss"] == again["loss"]
