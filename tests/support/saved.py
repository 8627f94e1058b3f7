"""What the tests of checkpoints share: small steps, each made once, and states as bytes."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import zero_jax
from support.flat import flat_step
from zero_jax.tree import named_leaves

LENGTH, WORDS = 4, 61
MODEL = nn.Sequential([nn.Embed(WORDS, 16), nn.Dense(24), nn.gelu, nn.Dense(WORDS)])
ADAMW = optax.adamw(3e-4, eps=1e-6)


def batch_of(number: int, rows: int = 8) -> dict[str, np.ndarray]:
    tokens = np.random.default_rng(number).integers(0, WORDS, (rows, LENGTH + 1)).astype(np.int32)
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


BATCH = batch_of(0)


def mesh_of(count: int, **options):
    return zero_jax.make_mesh(devices=jax.devices()[:count], **options)


def make_step(stage, count, model=MODEL, *, optimizer=ADAMW, mesh=None, **options):
    return flat_step(model, stage, optimizer=optimizer, mesh=mesh or mesh_of(count), **options)


def muon_by_owner(mesh):
    """Muon for matrices, each of which a device owns, and AdamW for the rest."""
    muon = zero_jax.whole_matrices(optax.contrib.muon(1e-2), mesh, "owner")
    return optax.partition({True: muon, False: optax.adamw(1e-3)},
                           lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 1, tree))


@functools.cache
def step_for(stage: int, count: int):
    """The step of the small model, made and compiled once for all tests of a process."""
    return make_step(stage, count)


def trained(step, num_steps: int = 3, seed: int = 0):
    state = step.init(jax.random.key(seed), BATCH)
    return advanced(step, state, range(num_steps))[0]


def advanced(step, state, numbers):
    """(the state after a step on each numbered batch, its losses)."""
    losses = []
    for number in numbers:
        state, metrics = step(state, batch_of(number))
        losses.append(metrics["loss"])
    return state, np.array(losses, np.float32)


def dump(step, state) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Every leaf in its true shape, by name, as (dtype, shape, bytes); the working copy of the parameters too."""
    views = dict(named_leaves(step.layout().stored_shapes))
    found = {}
    for name, leaf in named_leaves(state):
        dtype = str(leaf.dtype)
        data = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        true, shape = views[name].load(np.asarray(data)), views[name].shape
        if stack := re.search(r"/owned/(\d+)x", name):  # the rest only fills it up to a multiple of the devices
            true, shape = true[: int(stack[1])], (int(stack[1]), *shape[1:])
        found[name] = dtype, shape, np.ascontiguousarray(true).tobytes()
    return found


def difference(before, after) -> list[str]:
    """The leaves of two dumps that are not bitwise the same; the working copy may be in one of them only."""
    names = {**before, **after}
    return [name for name in names if before.get(name) != after.get(name) and (
        not name.startswith("weights/") or name in before and name in after)]
