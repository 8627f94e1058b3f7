"""Silent corruption: one bit of one device's copy is found, and the device is named."""

import dataclasses
import os
import socket
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.command_line import ROOT, message, run

import zero_jax
from zero_jax.errors import ReplicaError, UsageError
from zero_jax.step.step import ZeroTrainStep


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(16)(nn.Dense(32)(x))


def squared(model, batch):
    return jnp.mean(model(batch["x"]) ** 2)


BATCH = {"x": np.ones((16, 16), np.float32)}


def started(stage, mesh=None, **options):
    step = zero_jax.make_zero_train_step(
        Net(), stage, loss=squared, mesh=mesh, optimizer=optax.adam(1e-2), **options)
    state = step.init(jax.random.key(0), jax.eval_shape(lambda: BATCH))
    return step, state


def flipped(leaf, number, bit=0):
    """`leaf` with one bit of its first element flipped in what device `number` stores."""
    parts = []
    for shard in leaf.addressable_shards:
        value = np.array(shard.data)
        if shard.device.id == number:
            value.reshape(-1).view(f"u{value.itemsize}")[0] ^= 1 << bit
        parts.append(jax.device_put(value, shard.device))
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, parts)


def corrupted(state, field, number, bit=0):
    tree = getattr(state, field)
    leaves, kind = jax.tree.flatten(tree)
    leaves[-1] = flipped(leaves[-1], number, bit)
    return dataclasses.replace(state, **{field: jax.tree.unflatten(kind, leaves)})


@pytest.mark.parametrize(("stage", "field", "options"), [
    (0, "params", {}), (0, "opt_state", {}), (1, "weights", {"precision": "bf16"}), (2, "params", {})])
def test_one_bit_of_one_device_is_found(stage, field, options):
    step, state = started(stage, **options)
    report = step.check_replicas(state)  # negative control: what is intact
    assert report.leaves >= 4 and report.bytes > 0.3 * (report.bytes + report.other_bytes)
    for number, bit in ((5, 0), (0, 15)):
        message = rf"device {number} \(cpu, process 0\) differs from most of its copies in {field}/.*Dense_1/kernel\. A"
        with pytest.raises(ReplicaError, match=message):
            step.check_replicas(corrupted(state, field, number, bit))
    assert not state.params["Dense_0"]["kernel"].is_deleted()


def test_nothing_else_notices():
    """Negative control: the step goes on with what one device alone has."""
    step, state = started(0)
    state, metrics = step(corrupted(state, "params", 3, 20), BATCH)
    assert np.isfinite(metrics["loss"])
    with pytest.raises(ReplicaError, match="device 3 "):
        step.check_replicas(state)


def test_of_two_copies_both_are_named():
    step, state = started(1, mesh=zero_jax.make_mesh(2))
    with pytest.raises(ReplicaError, match=r"device 0 .* and device 1 .* differ in .* no majority tells which"):
        step.check_replicas(corrupted(state, "params", 1))


def test_stage_3():
    step, state = started(3)
    report = step.check_replicas(state)
    assert report.bytes < 0.2 * report.other_bytes and "have copies that are compared" in str(report)
    step, state = started(3, mesh=zero_jax.make_mesh(replica=4))
    report = step.check_replicas(state)
    assert report.other_leaves == 0
    with pytest.raises(ReplicaError, match=r"device 6 .* differs from most of its copies in params/Dense_1/kernel"):
        step.check_replicas(corrupted(state, "params", 6))


def test_one_device_has_no_copies():
    step, state = started(0, mesh=zero_jax.make_mesh(1))
    with pytest.raises(UsageError, match="no two devices of the mesh .* store the same"):
        step.check_replicas(state)


@pytest.mark.slow
def test_the_option_of_train(monkeypatch, tmp_path):
    done = run("train", "--check-replicas", "1")
    said = "--check-replicas 1 at stage 3 without --replica: each device stores a shard"
    assert done.returncode == 2 and said in message(done)
    compared = []

    def compare(step, state):
        compared.append(int(state.step))
        if len(compared) == 2:
            raise ReplicaError("device 3 differs")

    monkeypatch.setattr(ZeroTrainStep, "check_replicas", compare)
    (tmp_path / "text.txt").write_text("some text to learn " * 100)
    done = run("train", "--stage", "0", "--check-replicas", "2", "--seq-len", "16", "--steps", "8",
               "--batch-size", "8", "--samples", "0", "--data", str(tmp_path / "text.txt"), "--model", "gpt2:bytes")
    assert compared == [2, 4] and done.returncode == 1 and done.stderr.endswith("error: device 3 differs\n")


PROGRAM = """
import sys, jax, zero_jax
sys.path[:0] = [{tests!r}, {root!r}]
zero_jax.initialize()
from step.test_replicas import corrupted, started
step, state = started(1)
print(step.check_replicas(state).leaves)
try:
    step.check_replicas(corrupted(state, "params", int(jax.devices()[-1].id)))
except zero_jax.ReplicaError as error:
    print(error)
"""


@pytest.mark.slow
def test_in_two_processes():
    """Both processes name the device of the second one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "ZERO_JAX_COORDINATOR": f"127.0.0.1:{port}",
           "ZERO_JAX_NUM_PROCESSES": "2", "ZERO_JAX_DEVICES_PER_PROCESS": "2"}
    program = PROGRAM.format(tests=str(ROOT / "tests"), root=str(ROOT))
    processes = [subprocess.Popen([sys.executable, "-c", program], text=True, stdout=subprocess.PIPE,
                                  env={**env, "ZERO_JAX_PROCESS_ID": str(number)}) for number in range(2)]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    for output in outputs:
        *_, count, told = output.splitlines()  # Gloo prints, too
        assert int(count) > 4 and "(cpu, process 1) differs from most of its copies" in told
