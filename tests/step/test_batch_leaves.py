"""Batches with leaves that are no examples, and losses that draw: graphs, scalars, keys; beside one device."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from support.flat import flat_step
from support.oracle import slow

import zero_jax
from zero_jax.step.losses import LOSS

SGD = optax.sgd(0.1)
EDGES = [("senders|receivers", P("data"))]
NUM_NODES = 16


class Net(nn.Module):
    """Of dims that no eight devices divide."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(nn.tanh(nn.Dense(67)(x)))


def graph_loss(model, batch):
    """Of nodes, edges between them, noise from a key and a scalar, all in the batch."""
    nodes = model(batch["x"] + 0.1 * jax.random.normal(batch["key"], batch["x"].shape))
    along_edges = nodes[batch["senders"]] - nodes[batch["receivers"]]
    return batch["scale"] * jnp.mean((nodes - batch["y"]) ** 2) + jnp.mean(along_edges**2)


def batch_of(number, num_edges=24):
    rng = np.random.default_rng(number)
    edges = {name: rng.integers(0, NUM_NODES, num_edges).astype(np.int32) for name in ("senders", "receivers")}
    return {"x": rng.normal(size=(NUM_NODES, 13)).astype(np.float32), "scale": np.float32(0.5 + number), **edges,
            "y": rng.normal(size=(NUM_NODES, 1)).astype(np.float32), "key": jax.random.key(number)}


def plain(loss, params, batches):
    """(losses, parameters) of a loop by optax alone; `loss(model, batch)` with a model of the parameters."""
    losses, opt_state = [], SGD.init(params)
    for batch in batches:
        value, grads = jax.value_and_grad(lambda tree, batch=batch: loss(Net().bind({"params": tree}), batch))(params)
        updates, opt_state = SGD.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        losses.append(value)
    return np.array(losses), params


def assert_trains_as_plain(step, state, batches, loss):
    start, found = jax.device_get(step.params(state)), []
    expected, params = plain(loss, start, batches)
    for batch in batches:
        state, metrics = step(state, batch)
        found.append(metrics["loss"])
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), jax.device_get(step.params(state)), params)
    return state


@pytest.mark.grid
@pytest.mark.parametrize("stage", [slow(0), slow(1), slow(2), 3])
def test_a_graph_with_a_scalar_and_a_key(stage):
    batches = [batch_of(number) for number in range(3)]
    step = flat_step(Net(), stage, loss=graph_loss, optimizer=SGD, batch_specs=EDGES)
    state = step.init(jax.random.key(0), step.abstract_batch(batches[0]))
    shardings = {name: leaf.sharding.spec for name, leaf in step.abstract_batch(batches[0]).items()}
    assert shardings["senders"] == shardings["x"] == P(("data",)) or shardings["senders"] == P("data")
    assert "whole on every device: key, scale" in step.layout().describe()
    state = assert_trains_as_plain(step, state, batches, graph_loss)
    params = jax.device_get(step.params(state))
    for batch in (batches[0], {**batches[0], "x": batches[0]["x"][:13], "y": batches[0]["y"][:13]}):  # a ragged one
        np.testing.assert_allclose(step.evaluator()(state, batch),
                                   graph_loss(Net().bind({"params": params}), batch), rtol=1e-5)
    # Negative control: another key, scalar or edge is another loss.
    losses = {name: float(step.evaluator()(state, {**batches[0], name: batches[1][name]}))
              for name in ("y", "key", "scale", "senders")}
    assert len({round(loss, 5) for loss in losses.values()}) == 4


def test_leaves_that_do_not_divide_are_whole_by_a_rule():
    batch = batch_of(0, num_edges=23)
    step = flat_step(Net(), 3, loss=graph_loss, optimizer=SGD, batch_specs=[("ers$", None)])
    assert_trains_as_plain(step, step.init(jax.random.key(0), batch), [batch], graph_loss)
    assert step.layout().replicated_batch == ("key", "receivers", "scale", "senders")


def test_several_steps_at_once():
    batches = [batch_of(number) for number in range(2)]
    stacked = {name: jnp.stack([batch[name] for batch in batches]) for name in batches[0]}
    step = flat_step(Net(), 3, loss=graph_loss, optimizer=SGD, batch_specs=EDGES)
    state = step.init(jax.random.key(0), batches[0])
    expected, _ = plain(graph_loss, jax.device_get(step.params(state)), batches)
    np.testing.assert_allclose(step.multi(state, stacked)[1]["loss"], expected, rtol=1e-5)


def noisy_loss(model, batch):
    noise = jax.random.normal(batch["key"], batch["x"].shape)
    return batch["scale"] * jnp.mean((model(batch["x"] + noise) - batch["y"] @ batch["table"]) ** 2)


def drawing_loss(model, batch, rng):
    return noisy_loss(model, {**batch, "key": rng})


def microbatches_of(batch, number, num_devices, name):
    """As the library cuts and folds: microbatch i has the i-th rows of every device."""
    rows = {leaf: batch[leaf].reshape(num_devices, number, -1, batch[leaf].shape[-1]) for leaf in ("x", "y")}
    for index in range(number):
        cut = {leaf: np.concatenate(rows[leaf][:, index]) for leaf in rows}
        yield {**batch, **cut, name: jax.random.fold_in(batch[name], index)}


@pytest.mark.grid
@pytest.mark.parametrize("reduce, draws", [
    ("every", False), slow("once", False), slow("every", True), slow("once", True)])
def test_microbatches(reduce, draws):
    """Each has all of what is whole, and a key of its own: of the batch, or of the step."""
    batch = {name: leaf for name, leaf in batch_of(0).items() if name in ("x", "y", "scale", "key")}
    batch["table"] = np.float32([[2.0]])
    step = flat_step(Net(), 3, loss=drawing_loss if draws else noisy_loss, optimizer=SGD,
                                         accumulate=2, reduce=reduce, batch_specs=[("table", None)])
    state = step.init(jax.random.key(0), batch)
    step_key = jax.random.fold_in(state.rng, 0)

    def loss(model, batch, folded=True):
        cut = list(microbatches_of({**batch, "key": step_key if draws else batch["key"]}, 2, 8, "key"))
        keys = [jax.random.fold_in(each["key"], LOSS) if draws else each["key"] for each in cut]
        keys = keys if folded else [batch["key"]] * len(keys)
        return jnp.mean(jnp.stack([noisy_loss(model, {**each, "key": key})
                                   for each, key in zip(cut, keys, strict=True)]))

    params = jax.device_get(step.params(state))
    assert_trains_as_plain(step, state, [batch], loss)
    unfolded, _ = plain(functools.partial(loss, folded=False), params, [batch])
    folded, _ = plain(loss, params, [batch])
    assert abs(unfolded[0] / folded[0] - 1) > 1e-3  # negative control: one key for all


@pytest.mark.parametrize("precision", [None, slow("bf16")])
def test_a_loss_that_takes_the_key_of_the_step(precision):
    batch = {**{name: leaf for name, leaf in batch_of(0).items() if name in ("x", "y", "scale")}}
    batch["table"] = np.float32([[1.0]])
    options = {"batch_specs": [("table", None)], "precision": precision}
    step = flat_step(Net(), 3, loss=drawing_loss, optimizer=SGD, **options)
    state = step.init(jax.random.key(0), batch)
    bound, tolerance = Net().bind({"params": jax.device_get(step.params(state))}), 2e-2 if precision else 1e-5

    def expected(key):
        return drawing_loss(bound, batch, jax.random.fold_in(key, LOSS))

    evaluate = step.evaluator()
    np.testing.assert_allclose(evaluate(state, batch, jax.random.key(7)), expected(jax.random.key(7)), rtol=tolerance)
    with pytest.raises(ValueError, match="takes rng: give the evaluator a key"):
        evaluate(state, batch)
    keys = [jax.random.fold_in(state.rng, number) for number in range(2)]
    first, second = expected(keys[0]), expected(keys[1])
    assert abs(float(first) / float(second) - 1) > 1e-2  # negative control: the key changes
    _, metrics = step(state, batch)
    np.testing.assert_allclose(metrics["loss"], first, rtol=tolerance)


@pytest.mark.parametrize("options, change, message", [
    ({}, {}, r"differ in their leading dim.*x 16.*batch_specs=\["),
    ({"batch_specs": EDGES}, {"senders": np.zeros(23, int)}, r"dim 0 of batch\['senders'\] of shape \(23,\) does"),
    ({"batch_specs": EDGES, "accumulate": 2}, {}, r"batch\['receivers'\] is no part of the examples that accumulate=2"),
    ({"batch_specs": [("edges", None)]}, {}, "'edges' matches no leaf of the batch, which has key, receivers"),
    ({"batch_specs": [("ers$", P("data", "data"))]}, {}, r"of shape \(24,\) has fewer dims than"),
    ({"batch_specs": [("x|y|ers$", None)], "accumulate": 2}, {}, "the examples of a batch, and this one has none"),
    ({"batch_specs": [("ers$", P("model"))]}, {}, "names 'model', and the mesh has the axes"),
    ({"batch_specs": ["ers$"]}, {}, "'ers\\$' is no rule: give pairs of a pattern and a PartitionSpec"),
    ({"batch_specs": 5}, {}, "batch_specs=5: give a list of rules"),
])
def test_what_is_refused(options, change, message):
    with pytest.raises(ValueError, match=message):
        step = flat_step(Net(), 3, loss=graph_loss, **options)
        step.lower({**batch_of(0), **change})


@pytest.mark.slow
def test_a_leaf_that_becomes_a_scalar_or_examples_compiles_once_more():
    """A batch of the same keys whose leaf has other dims is sharded otherwise than the first one."""
    def loss(model, batch):
        return jnp.mean((model(batch["x"]) * jnp.reshape(batch["scale"], (-1, 1)) - batch["y"]) ** 2)

    step = zero_jax.make_zero_train_step(Net(), 3, optimizer=SGD, loss=loss)
    examples, scalar = ({**{name: batch_of(0)[name] for name in "xy"}, "scale": scale}
                        for scale in (np.full(NUM_NODES, 2, np.float32), np.float32(2)))
    state, evaluate = step.init(jax.random.key(0), examples), step.evaluator()
    assert evaluate(state, examples) == evaluate(state, scalar) != evaluate(state, {**scalar, "scale": np.float32(3)})
    both = [jax.device_get(step.gradients(state, batch)[0]) for batch in (examples, scalar)]
    jax.tree.map(np.testing.assert_array_equal, *both)
    metrics = []
    for batch in (examples, scalar, examples):
        copy, found = step(jax.tree.map(jnp.copy, state), batch)
        metrics.append(found["loss"])
        copy, found = step.multi(copy, jax.tree.map(lambda leaf: np.stack([leaf]), batch))
        metrics.append(found["loss"][0])
    assert metrics[:2] == metrics[2:4] == metrics[4:] and metrics[0] != metrics[1]
