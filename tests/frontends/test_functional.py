"""Steps of pure functions of parameters have the numbers of a plain loop, and send what a Flax model's step sends."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.covering import weekly
from support.flat import flat_step
from support.normed_net import losses_of
from support.targets import mesh_of
from support.workloads import token_batches

import zero_jax
from models import gpt2
from zero_jax.step.losses import next_token_loss

OPTIMIZER = optax.adamw(1e-2)
BATCHES = token_batches(3, size=16)
TINY = gpt2.Config(2, 64, 4, vocab_size=64, max_length=16, scan_layers=True)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Linear:
    """As a module of Equinox: a pytree with fields."""

    weight: jax.Array
    bias: jax.Array

    def __call__(self, x):
        return x @ self.weight + self.bias[None, None]


def make(rng, *, width=32):
    """Lists, tuples, dataclasses, and four stacked layers."""
    keys = jax.random.split(rng, 4)
    stacked = Linear(0.1 * jax.random.normal(keys[1], (4, width, width)), jnp.zeros((4, width)))
    return {"embed": 0.1 * jax.random.normal(keys[0], (64, width)), "layers": [stacked],
            "out": (Linear(0.1 * jax.random.normal(keys[2], (width, 64)), jnp.zeros(64)), jnp.ones(width))}


def loss(params, batch):
    def layer(x, linear):
        return x + jnp.tanh(linear(x)), None

    out, scale = params["out"]
    x, _ = jax.lax.scan(jax.checkpoint(layer), params["embed"][batch["inputs"]], params["layers"][0])
    logits = jax.jit(lambda out, x: out(x))(out, x * scale[None, None])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


def plain(params, batches, loss=loss):
    @jax.jit
    def step(params, state, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, state = OPTIMIZER.update(grads, state, params)
        return value, optax.apply_updates(params, updates), state

    state, losses = OPTIMIZER.init(params), []
    for batch in batches:
        value, params, state = step(params, state, batch)
        losses.append(float(value))
    return params, losses


def trained(params, stage, loss=loss, batches=BATCHES, **options):
    step = flat_step(
        params=params, loss=loss, stage=stage, optimizer=OPTIMIZER, mesh=zero_jax.make_mesh(8), **options)
    losses, state = losses_of(step, step.init(jax.random.key(0), batches[0]), batches)
    return step, state, losses


@weekly("stage", [3, 0, 1, 2])
@weekly("width, options", [(33, {"accumulate": 2}), (32, {})], ids=["uneven", "even"])
def test_numbers_are_those_of_a_plain_loop(stage, width, options):
    """Control: a loop that leaves out an eighth of each batch."""
    params = make(jax.random.key(1), width=width)
    wanted, losses = plain(params, BATCHES)
    step, state, found = trained(params, stage, **options)
    np.testing.assert_allclose(found, losses, rtol=2e-6)
    result = step.params(state)
    assert jax.tree.structure(result) == jax.tree.structure(wanted)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=5e-5), result, wanted)
    np.testing.assert_allclose(step.evaluator()(state, BATCHES[0]), loss(wanted, BATCHES[0]), rtol=2e-5)
    fewer = [jax.tree.map(lambda leaf: leaf[2:], batch) for batch in BATCHES]
    assert not np.allclose(plain(params, fewer)[1], losses, rtol=1e-4)


@weekly("options, rtol", [
    ({"offload": "parameters"}, 2e-6), ({"remat": "full", "gather": "forward"}, 2e-6),
    ({"precision": "bf16"}, 5e-3)], ids=str)
def test_options_have_the_numbers_of_a_plain_loop(options, rtol):
    """Control: a loop whose embedding is not trained, which `frozen` asks for."""
    params = make(jax.random.key(1))
    losses = plain(params, BATCHES)[1]
    np.testing.assert_allclose(trained(params, 3, **options)[2], losses, rtol=rtol)
    assert not np.allclose(trained(params, 3, frozen="embed", **options)[2], losses, rtol=rtol)


def test_metrics_and_a_key_are_those_of_any_loss():
    def drawn(params, batch, rng):
        value = loss(params, batch)
        return value, {"twice": zero_jax.Metric(2 * value), "noise": jax.random.uniform(rng)}

    step = zero_jax.make_zero_train_step(params=make, loss=drawn, stage=3)
    state, found = step.init(jax.random.key(0), BATCHES[0]), []
    for batch in BATCHES:
        state, metrics = step(state, batch)
        found.append(metrics)
    assert all(each["twice"] == 2 * each["loss"] for each in found)
    assert len({float(each["noise"]) for each in found}) == 3


def test_stacked_layers_are_gathered_in_their_loop_and_shards_are_what_is_stored():
    """Control: layers that pass through an operation before the loop are gathered whole."""
    step, state, _ = trained(make, 3, batches=BATCHES[:1])
    reads = step.layout().reads
    assert reads["layers/0/weight"].stacked == (0,) and reads["embed"].stacked == ()
    assert state.params["layers"]["0"]["weight"].addressable_shards[0].data.size == 4 * 32 * 32 // 8
    step.verify(BATCHES[0])

    def doubled(params, batch):
        return loss({**params, "layers": jax.tree.map(lambda leaf: 1 * leaf, params["layers"])}, batch)

    other, _, _ = trained(make, 3, doubled, BATCHES[:1])
    assert other.layout().reads["layers/0/weight"].stacked == ()


@pytest.mark.parametrize("target", ["cpu", pytest.param("h100:8", marks=pytest.mark.slow)])
def test_it_sends_what_the_step_of_the_same_flax_model_sends(target):
    """Control: the loss that reads a parameter twice, past a barrier, sends more."""
    model, mesh = gpt2.build(TINY), zero_jax.make_mesh(8) if target == "cpu" else mesh_of(target)
    flax = zero_jax.make_zero_train_step(model, 3, mesh=mesh)
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((1, 16), jnp.int32))["params"])

    def of_params(params, batch):
        return next_token_loss(lambda inputs: model.apply({"params": params}, inputs), batch)

    pure = zero_jax.make_zero_train_step(params=shapes, loss=of_params, stage=3, mesh=mesh)
    sent = [step.compiled_step(BATCHES[0]).report.communication_bytes for step in (flax, pure)]
    assert sent[0] == sent[1] > 0

    def twice(params, batch):
        return of_params(params, batch) + 0 * jax.lax.optimization_barrier(
            params["blocks"]["down"]["kernel"]).sum()

    more = zero_jax.make_zero_train_step(params=shapes, loss=twice, stage=3, mesh=mesh)
    assert more.compiled_step(BATCHES[0]).report.communication_bytes > sent[0]


def test_values_come_from_arrays_and_from_a_key():
    values = make(jax.random.key(2))
    step = zero_jax.make_zero_train_step(params=values, loss=loss, stage=3)
    state = step.init(jax.random.key(0), BATCHES[0])
    jax.tree.map(np.testing.assert_array_equal, step.params(state), values)
    drawn = zero_jax.make_zero_train_step(params=make, loss=loss, stage=3)
    one, other = (drawn.params(drawn.init(jax.random.key(seed), BATCHES[0])) for seed in (0, 1))
    assert not np.allclose(one["embed"], other["embed"])
    jax.tree.map(np.testing.assert_array_equal, step.params(step.with_params(state, one)), one)


@pytest.mark.parametrize("arguments, message", [
    ({"params": {"w": jnp.ones(8)}}, "and loss, a function of such a pytree"),
    ({}, "give a Flax model; or params"),
    ({"params": {"w": jnp.ones(8), "act": jnp.tanh}, "loss": loss}, "act is a "),
    ({"params": {"a/b": jnp.ones(8), "a": {"b": jnp.ones(8)}}, "loss": loss}, "each of a name of its own"),
    ({"params": {}, "loss": loss}, "give a pytree of arrays"),
])
def test_what_is_no_function_of_parameters_is_refused(arguments, message):
    with pytest.raises(zero_jax.UsageError, match=message):
        flat_step(stage=3, **arguments)


@pytest.mark.parametrize("in_files", [False, True])
def test_values_that_are_missing_or_of_another_tree_are_refused(tmp_path, in_files):
    values = make(jax.random.key(2))
    offload = zero_jax.Offload(disk=tmp_path / "states") if in_files else None
    step = zero_jax.make_zero_train_step(
        params=jax.eval_shape(lambda: values), loss=loss, stage=3, offload=offload)
    with pytest.raises(zero_jax.UsageError, match="made of shapes alone"):
        step.init(jax.random.key(0), BATCHES[0])
    with pytest.raises(zero_jax.UsageError, match="another pytree"):
        step.init(jax.random.key(0), BATCHES[0], params=[values])
    state = step.init(jax.random.key(0), BATCHES[0], params=values)
    jax.tree.map(np.testing.assert_array_equal, step.params(state), values)
