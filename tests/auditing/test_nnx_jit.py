"""The audit of what `nnx.jit` returns: Flax's recipe of a module and an optimizer, which are updated in place."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from support.audited_steps import mesh_of_8

import zero_jax


def audited(loss=None, **options):
    mesh = mesh_of_8(("data", 8))
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("data", None))

    def train_step(model, optimizer, x):
        value, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
        optimizer.update(model, grads)
        return value

    with jax.set_mesh(mesh):
        model = nnx.Linear(256, 512, use_bias=False, rngs=nnx.Rngs(0), kernel_init=init)
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
        batch = jax.device_put(np.ones((4096, 256), np.float32), jax.NamedSharding(mesh, jax.P("data")))
        return zero_jax.audit(nnx.jit(train_step, **options), model, optimizer, batch, loss=loss)


def test_the_same_at_stage_3_is_of_a_loss_of_the_modules_state():
    """Control: without a loss there is none."""
    report = audited(lambda state, x: ((x @ state["kernel"][...]) ** 2).mean(), donate_argnums=(0, 1))
    assert report.stage_3.memory()["params"] == report.memory()["params"] == 4 * 256 * 512 / 8
    assert audited().stage_3 is None


def test_a_step_of_modules_is_read_as_one_of_states():
    """Control: the step that donates nothing is named, and that which donates the optimizer alone."""
    clean = audited(donate_argnums=(0, 1))
    roles = {leaf.label: (leaf.role, leaf.num_shards) for leaf in clean.program.leaves if leaf.shape}
    assert roles == {"model['kernel'].value": ("params", 8), "optimizer['opt_state'][0]['mu']['kernel'].value":
                     ("optimizer", 8), "optimizer['opt_state'][0]['nu']['kernel'].value": ("optimizer", 8),
                     "x": ("batch", 8)}
    assert clean.to_json()["stage"] == 3
    held = {}
    for options in ({}, {"donate_argnames": "optimizer"}, {"donate_argnums": (0, 1)}):
        found = {each.code: each for each in audited(**options).findings}
        held[len(options.get("donate_argnums", options))] = found.get("not_donated")
    kernel = jnp.zeros((256, 512)).nbytes / 8
    assert held[0].bytes >= 3 * kernel and held[1].bytes == kernel and held[2] is None
