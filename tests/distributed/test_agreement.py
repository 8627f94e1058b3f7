"""Two real processes that see different things go on in the same way: one kind of error on both, or none on either."""

import pytest
from support.two_processes import two_processes

PROGRAM = """
import errno, os, pathlib, sys, threading
import jax
address, number, folder = sys.argv[1], int(sys.argv[2]), pathlib.Path(sys.argv[3])
jax.distributed.initialize(address, 2, number)
import flax.linen as nn, numpy as np, optax
import zero_jax
from zero_jax import files
from zero_jax.distributed import agreement
from zero_jax.errors import CheckpointError, DamagedCheckpointError, UsageError
from zero_jax.step.disk.states import newest_commit

def attempt(what, do):
    try:
        print("SAID", what, do(), flush=True)
    except Exception as error:
        print("SAID", what, type(error).__name__, str(error).replace(str(folder), "")[:300], flush=True)

def raising(*errors):  # of each process
    def do():
        if errors[number] is not None:
            raise errors[number]
    return lambda: agreement.all_or_none(do)

damaged, unread = DamagedCheckpointError("damaged"), CheckpointError("unread")
attempt("none", raising(None, None))
attempt("damaged on 1", raising(None, damaged))
attempt("damaged on 0, unread on 1", raising(damaged, unread))
attempt("unread on 0, other on 1", raising(unread, KeyError("other")))
attempt("damaged on 0, transient on 1", raising(damaged, OSError(errno.EIO, "I/O")))
attempt("wrong on 0", raising(UsageError("wrong"), None))
attempt("any", lambda: [agreement.on_any(number == 1), agreement.on_any(False)])
attempt("first", lambda: agreement.from_first(lambda: [7, 8]))

files.WAITS = (0.0,)
mesh = zero_jax.make_mesh(4)
rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
batch = {name: jax.make_array_from_callback((8, size), rows, np.ones((8, size), np.float32).__getitem__)
         for name, size in (("x", 64), ("y", 64))}

def made(offload):
    return zero_jax.make_zero_train_step(
        nn.Dense(64), 1, optimizer=optax.adam(1e-2), mesh=mesh, offload=offload,
        loss=lambda model, batch: ((model(batch["x"]) - batch["y"]) ** 2).mean())

step = made(zero_jax.Offload(disk=str(folder / "states")))
state = step.init(jax.random.key(0), batch)
for _ in range(2):
    state, _ = step(state, batch)
step.close()
own = folder / f"states/process-0000{number}-of-00002"
whole = {path: path.read_bytes() for path in own.iterdir()}

def stored(what):
    attempt(what, lambda: [int(step.stored_state(batch).step), newest_commit(folder / "states").step])
    step.close()
    attempt(what + " (init)", lambda: step.init(jax.random.key(0), batch))
    step.close()

def restored():
    for path, content in whole.items():
        path.write_bytes(content)

stored("whole")
preadv = os.preadv
def fails(*args):
    raise OSError(errno.EIO, "I/O")
if number == 1:
    os.preadv = fails
stored("unread on 1")
os.preadv = preadv
assert {path: path.read_bytes() for path in own.iterdir()} == whole
if number == 1:
    (own / "generation-1.bin").write_bytes(bytes(len(whole[own / "generation-1.bin"])))
attempt("newest damaged on 1", lambda: int(step.stored_state(batch).step))
step.close()
restored()
if number == 1:
    for path in own.glob("commit-*.json"):
        path.write_text("{}")
stored("records damaged on 1")
if number == 1:
    for path in own.iterdir():
        path.unlink()
agreement.all_or_none(lambda: None)
stored("nothing on 1")
restored()
# Process 0 alone has its first generation: it was killed while process 1 wrote that.
other = made(zero_jax.Offload(disk=str(folder / "other")))
other.init(jax.random.key(0), batch)
other.close()
if number == 1:
    (folder / "other/process-00001-of-00002/commit-1.json").unlink()
agreement.all_or_none(lambda: None)
attempt("begun on 0", lambda: [newest_commit(folder / "other"), other.stored_state(batch)])
def again():
    state = other.init(jax.random.key(0), batch)
    for _ in range(2):
        state, _ = other(state, batch)
    other.close()
    return int(other.stored_state(batch).step)
attempt("begun on 0 (init)", again)

# A checkpoint that process 0 alone has found to be damaged, when it looked at which ones need not stay.
plain = made(None)
state = plain.init(jax.random.key(0), batch)
checkpoints = zero_jax.Checkpoints(folder / "checkpoints", keep_last=1)
checkpoints.save(plain, state, at=1, wait=True)
if number == 0:
    (folder / "checkpoints/1/manifest/data.json").write_text("{}")
agreement.all_or_none(lambda: None)
checkpoints.save(plain, state, at=2, wait=True)
attempt("steps", lambda: [checkpoints.steps(), checkpoints.latest()])
attempt("at 1", lambda: checkpoints.restore(plain, batch, at=1))
checkpoints.close()

# The control: what one process alone calls does not return.
if number == 0:
    alone = threading.Thread(target=lambda: agreement.on_any(True), daemon=True)
    alone.start()
    alone.join(3)
    print("SAID alone", alone.is_alive(), flush=True)
    os._exit(0)
threading.Event().wait(8)
os._exit(0)
"""
WHOLE = "already holds the state of a run, after step 2: "
SAID = {
    "none": "None", "damaged on 1": "DamagedCheckpointError", "damaged on 0, unread on 1": "CheckpointError",
    "unread on 0, other on 1": ("RuntimeError Process 1 failed: KeyError: 'other'", "KeyError 'other'"),
    "damaged on 0, transient on 1": ("OSError Process 1 failed: OSError: [Errno 5] I/O", "OSError [Errno 5] I/O"),
    "wrong on 0": "UsageError", "any": "[True, False]", "first": "[7, 8]",
    "whole": "[2, 2]", "whole (init)": f"UsageError disk: /states {WHOLE}",
    "unread on 1": "CheckpointError", "unread on 1 (init)": f"UsageError disk: /states {WHOLE}",
    "newest damaged on 1": "1",
    "records damaged on 1": "DamagedCheckpointError", "records damaged on 1 (init)": "DamagedCheckpointError",
    "nothing on 1": "DamagedCheckpointError disk: /states: there is no generation that all 2 processes have",
    "nothing on 1 (init)": "DamagedCheckpointError disk: /states: there is no generation that all 2 processes have",
    "begun on 0": "CheckpointError disk: /other holds no committed state", "begun on 0 (init)": "2",
    "steps": "[[2], 2]", "at 1": "CheckpointError /checkpoints has no checkpoint 1: there are 2"}


@pytest.mark.slow
def test_processes_that_see_different_things_go_on_in_the_same_way(tmp_path):
    with two_processes(PROGRAM, str(tmp_path)) as processes:
        ended = [process.communicate(timeout=400) for process in processes]
    outputs = [[line.removeprefix("SAID ") for line in out.splitlines() if line.startswith("SAID ")]
               for out, _ in ended]
    for number, lines in enumerate(outputs):
        for line, (what, wanted) in zip(lines, SAID.items(), strict=False):
            wanted = wanted[number] if isinstance(wanted, tuple) else wanted
            assert line.startswith(f"{what} {wanted}"), (number, line, ended[number][1][-2000:])
        assert len(lines) == len(SAID) + (number == 0), (lines, ended[number][1][-3000:])
    assert outputs[0][-1] == "alone True"
