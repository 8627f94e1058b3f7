"""States in files of two real processes, of which one is killed while both commit: both go on from the same step."""

import json
import signal

import pytest
from support.two_processes import two_processes

PROCESS = """
import hashlib, json, os, signal, sys
import jax
address, number, folder, killed_at, steps = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), 4
jax.distributed.initialize(address, 2, number)
import flax.linen as nn, numpy as np, optax
import zero_jax
from zero_jax.disk.generations import Generations
from zero_jax.distributed import agreement
from zero_jax.tree import named_leaves

rng = np.random.default_rng(0)
batch = {"x": rng.normal(size=(8, 64)).astype(np.float32), "y": rng.normal(size=(8, 1)).astype(np.float32)}
mesh = zero_jax.make_mesh(4)
rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
counts = [agreement.devices_on_host(mesh)]
machine, agreement._machine = agreement._machine, lambda: sys.argv[2]
counts.append(agreement.devices_on_host(mesh))  # were they on machines of their own
agreement._machine = machine
print("ON_HOST", json.dumps(counts), flush=True)
batch = {name: jax.make_array_from_callback(leaf.shape, rows, leaf.__getitem__) for name, leaf in batch.items()}

def step_of(offload):
    return zero_jax.make_zero_train_step(
        nn.Sequential([nn.Dense(67), nn.gelu, nn.Dense(1)]), 2, optimizer=optax.adam(1e-2), mesh=mesh, offload=offload,
        loss=lambda model, batch: ((model(batch["x"]) - batch["y"]) ** 2).mean())

def digest(state):
    sums = {}
    for name, leaf in named_leaves(state):
        if name.split("/")[0] in ("params", "opt_state", "step"):
            sums[name] = [hashlib.sha256(np.asarray(each.data).tobytes()).hexdigest() for each in
                          sorted(leaf.addressable_shards, key=lambda each: each.device.id)]
    return sums

def say(word, value):
    print(word, json.dumps(value), flush=True)

commit = Generations.commit
def dies(self, step, note=None):
    if step == killed_at and number == 1:
        os.kill(os.getpid(), signal.SIGKILL)  # all that it wrote is there, but for the commit
    result = commit(self, step, note)
    if step == killed_at:
        say("COMMITTED", step)
    return result
Generations.commit = dies

def run(step, state, offloads=True):
    for at in range(int(state.step), steps):
        if offloads:
            step.note = {"after": at + 1}
        state, metrics = step(state, batch)
        say("LOSS", [at + 1, float(metrics["loss"]).hex()])
    return state

step = step_of(zero_jax.Offload(disk=folder, buffer_bytes=2**16))
if killed_at < 0:
    memory = step_of(None)
    wanted = digest(run(memory, memory.init(jax.random.key(0), batch), offloads=False))
    say("MEMORY", wanted)
    state = step.stored_state(batch)
    say("RESUMED", [int(state.step), step.note])
    say("FILES", digest(step.in_memory(run(step, state))[0]))
else:
    run(step, step.init(jax.random.key(0), batch))
"""


def run(folder, killed_at=-1):
    """What each process printed, by the first word of a line; both are ended once process 1 is dead."""
    with two_processes(PROCESS, str(folder), str(killed_at), xla_flags="--xla_cpu_max_isa=AVX") as processes:
        if killed_at >= 0:
            assert processes[1].wait(timeout=240) == -signal.SIGKILL, processes[1].stderr.read()
            for line in processes[0].stdout:
                if line.startswith("COMMITTED"):
                    break
            processes[0].kill()
        outputs = [process.communicate(timeout=240) for process in processes]
    assert killed_at >= 0 or not any(process.returncode for process in processes), [errors for _, errors in outputs]
    rows = []
    for output, _ in outputs:
        rows.append({})
        for line in output.splitlines():
            word, _, value = line.partition(" ")
            if word in ("LOSS", "RESUMED", "MEMORY", "FILES", "ON_HOST"):
                rows[-1].setdefault(word, []).append(json.loads(value))
    return rows


@pytest.mark.slow
def test_two_processes_have_the_bits_of_memory_and_go_on_together(tmp_path):
    # Process 1 dies before its commit of step 3, which process 0 has made.
    run(tmp_path / "states", killed_at=3)
    commits = {(path.parent.name[:13], json.loads(path.read_text())["step"])
               for path in (tmp_path / "states").rglob("commit-*.json")}
    assert commits == {("process-00000", 2), ("process-00000", 3), ("process-00001", 1), ("process-00001", 2)}
    first, second = run(tmp_path / "states")
    for mine in (first, second):
        assert mine["ON_HOST"] == [[4, 2]]
        assert mine["RESUMED"] == [[2, {"after": 2}]]
        memory, files = mine["LOSS"][:4], mine["LOSS"][4:]
        assert files == memory[2:] and mine["FILES"] == mine["MEMORY"]
    # The control: from another step the losses would be others, and the shards of two processes are not the same.
    assert first["LOSS"][2][1] != first["LOSS"][1][1] and first["MEMORY"] != second["MEMORY"]
