"""Several processes: what they do not give alike is told by all of them, and what is of one alone is refused."""

import pytest
from support.two_processes import two_processes

PROGRAM = """
import sys
import flax.linen as nn
import jax, jax.numpy as jnp, numpy as np, optax
import zero_jax

jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
me = jax.process_index()


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8)(nn.tanh(nn.Dense(16)(x)))
        jax.debug.callback(lambda x: None, x[0, 0])  # whose address is another in each process
        return x


def loss(model, batch):
    return jnp.mean((model(batch["x"]) - 1) ** 2)


def step_of(rate=0.1, stage=3, **options):
    return zero_jax.make_zero_train_step(Model(), stage, loss=loss, optimizer=optax.adam(rate), **options)


def rows(step, number=8):
    local = np.random.default_rng(me).normal(size=(number, 4)).astype(np.float32)
    return {"x": jax.make_array_from_process_local_data(step.batch_sharding, local)}


def started(key=0, **options):
    step = step_of(**options)
    return step, step.init(jax.random.key(key), rows(step))


def told(name, call):
    try:
        call()
    except zero_jax.UsageError as error:
        print(name, "|", error, flush=True)
    else:
        print(name, "| passed", flush=True)


def steps(batches=(8,), **options):
    step, state = started(**options)
    for number in batches:
        state, metrics = step(state, rows(step, number))
    return float(metrics["loss"])


def local(how):
    step, state = started()
    step(state, rows(step))[0]
    how(*started(), {"x": jnp.ones((8, 4))})


def evaluated(number):
    step, state = started()
    return step.evaluator()(state, {"x": np.full((3, 4), number, np.float32)})


told("alike", lambda: steps((8, 4)))
told("key", lambda: started(key=me))
told("stage", lambda: started(stage=2 + me))
told("rate", lambda: steps(rate=0.1 + me))
told("stage 0", lambda: steps(rate=0.1 + me, stage=0))
told("microbatches", lambda: steps(accumulate=1 + me))
told("rows", lambda: steps((8 + 4 * me,)))
told("later rows", lambda: steps((8, 2 + 2 * me)))
told("own array", lambda: local(lambda step, state, batch: step(state, batch)))
told("own array to evaluate", lambda: local(lambda step, state, batch: step.evaluator()(state, batch)))
told("own gradients", lambda: local(lambda step, state, batch: step.gradients(state, batch)))
told("own arrays of steps", lambda: local(lambda step, state, batch: step.multi(
    state, {"x": np.asarray(batch["x"])[None]})))


def alone():  # on a mesh of each process's own devices
    mesh = zero_jax.make_mesh(devices=jax.local_devices())
    step, batch = step_of(mesh=mesh, rate=0.1 + me), {"x": jnp.ones((8 + 4 * me, 4))}
    step(step.init(jax.random.key(me), batch), batch)


told("alone", alone)
told("last rows", lambda: evaluated(me))
told("same last rows", lambda: evaluated(1))
"""

PROGRAM_OF_A_STEP = "The program of a step of process 1 is another than that of process 0: give all processes the same"
OWN = "is an array on this process's devices, and there are 2 processes, of which each has examples of its own"
EXPECTED = {
    "alike": "passed", "key": "The key of init of process 1 is another than that of process 0: give all",
    "stage": "The layout of the state of process 1 is another than that", "rate": PROGRAM_OF_A_STEP,
    "stage 0": PROGRAM_OF_A_STEP, "microbatches": PROGRAM_OF_A_STEP, "rows": PROGRAM_OF_A_STEP,
    "later rows": PROGRAM_OF_A_STEP, "own array": OWN, "own array to evaluate": OWN, "own gradients": OWN,
    "alone": "passed", "own arrays of steps": "is a NumPy array, and there are 2 processes",
    "last rows": "computed whole on each of them, of process 1 is another", "same last rows": "passed"}


@pytest.mark.slow
def test_what_processes_do_not_give_alike_is_told_by_all():
    """Negative controls: what they give alike passes, though a callback has another address in each of them."""
    with two_processes(PROGRAM) as processes:
        ended = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], ended
    for out, _ in ended:
        found = dict(line.split(" | ", 1) for line in out.splitlines() if " | " in line)
        assert found.keys() == EXPECTED.keys()
        assert all(words in found[name] for name, words in EXPECTED.items()), found
