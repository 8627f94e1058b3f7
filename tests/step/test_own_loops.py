"""Loops of one's own: gradients and their application, and steps inside of a jitted program."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.covering import weekly
from support.normed_net import (
    BATCHES,
    KEY,
    assert_same,
    batch_of,
    losses_of,
    plain_gradients,
    squared,
    step_of,
    variables_of,
)
from support.oracle import slow

import zero_jax

GUARD = {"guard": zero_jax.Guard(skip=2)}


@weekly("options", [
    {"accumulate": 2}, {}, {"stage": 0}, {"stage": 2, "precision": "bf16"}, {"precision": "fp16", **GUARD}], ids=str)
def test_gradients_and_their_application_are_a_step(options):
    step = step_of(**options)
    state = step.init(KEY, batch_of(), params=variables_of())
    expected, after = losses_of(step, jax.tree.map(jnp.copy, state))
    found = []
    for batch in BATCHES:
        grads, metrics, variables = step.gradients(state, batch)
        state, applied = step.apply_gradients(state, grads, loss=metrics["loss"], variables=variables)
        found.append(float(metrics["loss"]))
        assert float(applied["grad_norm"]) == pytest.approx(float(metrics["grad_norm"]), rel=1e-5)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert_same(step.params(state), step.params(after), rtol=1e-5, atol=1e-5)
    assert int(state.step) == 3


def test_gradients_are_those_of_the_plain_loop():
    step = step_of()
    state = step.init(KEY, batch_of(), params=variables_of())
    grads, metrics, _ = step.gradients(state, batch_of())
    (_, _), plain = plain_gradients(*variables_of().values(), batch_of())
    true = jax.tree.map(lambda shape, grad: shape.load(grad), step.layout().stored_shapes.params, grads)
    assert_same(true, plain)
    assert float(metrics["grad_norm"]) == pytest.approx(float(optax.tree.norm(plain)), rel=1e-5)
    with pytest.raises(ValueError, match="gradients differ from the parameters"):
        step.apply_gradients(state, {"Dense_0": grads["Dense_0"]})


def ascended(params, grads, norm):
    return jax.tree.map(lambda param, grad: param + 0.5 * grad / norm, params, grads)


@weekly("options", [{"stage": 2, "precision": "bf16"}, {}], ids=str)
def test_sam(options):
    """Sharpness-aware minimization: the gradient where the first one leads, applied here; SGD, so that it shows."""
    sgd = optax.sgd(0.1)
    step = step_of(optimizer=sgd, **options)
    state = step.init(KEY, batch_of(), params=variables_of())
    params, stats = variables_of()["params"], variables_of()["batch_stats"]
    for batch in BATCHES:
        grads, metrics, variables = step.gradients(state, batch)
        moved = ascended(state.params, grads, metrics["grad_norm"])
        grads, _, _ = step.gradients(state, batch, params=moved)
        state, _ = step.apply_gradients(state, grads, variables=variables)

        (_, new_stats), plain = plain_gradients(params, stats, batch)
        moved = ascended(params, plain, optax.tree.norm(plain))
        _, plain_there = plain_gradients(moved, stats, batch)
        params, other = (jax.tree.map(lambda param, grad: param - 0.1 * grad, params, each)
                         for each in (plain_there, plain))
        stats = new_stats
    tolerance = {"rtol": 5e-2, "atol": 2e-2} if options else {}
    assert_same(step.params(state), params, **tolerance)
    if not options:  # negative control: without the ascent
        with pytest.raises(AssertionError):
            assert_same(step.params(state), other)


@pytest.mark.slow
def test_a_loss_for_each_part_of_a_model():
    """As a GAN does: two losses, each for its own part, one optimizer for each."""
    def half(model, batch):
        return 0.5 * squared(model, batch)

    def labels(params):
        return {name: "first" if name == "Dense_0" else "rest" for name in params}

    optimizer = optax.multi_transform({"first": optax.sgd(0.1), "rest": optax.adam(1e-2)}, labels)
    step = step_of(optimizer=optimizer)
    state = step.init(KEY, batch_of(), params=variables_of())
    one, metrics, variables = step.gradients(state, batch_of())
    other, _, _ = step.gradients(state, batch_of(), loss=half)
    state, _ = step.apply_gradients(state, {**one, "Dense_0": other["Dense_0"]}, variables=variables)
    params = variables_of()["params"]
    _, grads = plain_gradients(*variables_of().values(), batch_of())
    grads = {**grads, "Dense_0": jax.tree.map(lambda grad: 0.5 * grad, grads["Dense_0"])}
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    assert_same(step.params(state), optax.apply_updates(params, updates))


def test_a_guard_that_looks_for_spikes_needs_the_loss():
    step = step_of(guard=zero_jax.Guard(spike=3.0))
    state = step.init(KEY, batch_of())
    grads, _, _ = step.gradients(state, batch_of())
    with pytest.raises(ValueError, match="give loss="):
        step.apply_gradients(state, grads)


def test_an_optimizer_that_looks_at_the_loss_needs_it():
    step = step_of(optimizer=optax.chain(optax.adam(1e-2), optax.contrib.reduce_on_plateau(patience=1)))
    state = step.init(KEY, batch_of())
    gradients = jax.tree.map(jnp.zeros_like, state.params)
    with pytest.raises(ValueError, match="this step's optimizer looks at it: give loss="):
        step.apply_gradients(state, gradients)
    step.apply_gradients(state, gradients, loss=1.0)


@pytest.mark.parametrize("change, message", [
    ({"loss": jnp.ones(3)}, "give a real scalar"), ({"loss": "low"}, "give a real scalar"),
    ({"loss": jnp.complex64(1)}, "give a real scalar"),
    ({"dtype": jnp.complex64}, "gradients: BatchNorm_0/bias has dtype complex64, and the parameter has float32"),
    ({"dtype": jnp.int32}, "gradients: BatchNorm_0/bias has dtype int32"),
    ({"variables": {}}, "variables differ from those of the state in batch_stats/BatchNorm_0/mean"),
    ({"variables": {"batch_stats": {"BatchNorm_0": {"mean": np.zeros(3), "var": np.zeros(67)}}}}, "variables differ"),
], ids=["loss of 3", "text", "complex loss", "complex", "integers", "no variables", "wrong variables"])
def test_what_cannot_be_applied(change, message):
    step = step_of(guard=zero_jax.Guard(skip=1))
    state = step.init(KEY, batch_of())
    gradients = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, change.get("dtype")), state.params)
    with pytest.raises(ValueError, match=message):
        step.apply_gradients(state, gradients, **{name: value for name, value in change.items() if name != "dtype"})


@pytest.mark.parametrize("options, message", [
    ({"params": variables_of}, "params differ from the parameters as they are stored in"),
    ({"params": jnp.int32}, "params: BatchNorm_0/bias has dtype int32"), ({"loss": "l2"}, "is a str: give a function"),
], ids=["true shapes", "integers", "no function"])
def test_where_gradients_cannot_be_taken(options, message):
    step = step_of()
    state = step.init(KEY, batch_of())
    params = options.get("params")
    if params is variables_of:
        options = {"params": variables_of()["params"]}
    elif params is not None:
        options = {"params": jax.tree.map(lambda leaf: leaf.astype(params), state.params)}
    with pytest.raises(ValueError, match=message):
        step.gradients(state, batch_of(), **options)


STACKED = jax.tree.map(lambda *leaves: np.stack(leaves), *BATCHES)
OPTIONS = [{}, {"precision": "fp16", **GUARD}, {"stage": 2, "accumulate": 2}]


@pytest.mark.grid
@pytest.mark.parametrize("way, options", [
    row if row in (("multi", {}), ("scan", OPTIONS[1])) else slow(*row)
    for row in itertools.product(("multi", "jit", "scan"), OPTIONS)], ids=str)
def test_steps_inside_one_program(way, options):
    """`multi`, the user's own `jit` and the user's own `scan`: the numbers of single steps."""
    step = step_of(**options)
    state = step.init(KEY, batch_of(), params=variables_of())
    expected, after = losses_of(step, jax.tree.map(jnp.copy, state))
    if way == "multi":
        state, metrics = step.multi(state, STACKED)
        found = metrics["loss"]
    elif way == "scan":
        state, metrics = jax.jit(lambda state, batches: jax.lax.scan(step, state, batches))(state, STACKED)
        found = metrics["loss"]
    else:
        jitted, found = jax.jit(step), []
        for batch in BATCHES:
            state, metrics = jitted(state, batch)
            found.append(metrics["loss"])
    np.testing.assert_allclose(np.array(found, np.float64), expected, rtol=1e-5)
    assert_same(step.params(state), step.params(after), rtol=1e-4, atol=1e-5)
    for leaf, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(step.layout().shardings), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    step.check(state)
    step(state, batch_of())


@weekly("way", ["multi", "scan"])
def test_bad_steps_inside_one_program(way):
    """One in the middle is skipped; three in a row stop, and are told of by `check`."""
    step = step_of(**GUARD)
    start = step.init(KEY, batch_of(), params=variables_of())

    def run(state, batches):
        if way == "multi":
            return step.multi(state, batches)
        return jax.jit(lambda state, batches: jax.lax.scan(step, state, batches))(state, batches)

    one_bad = {**STACKED, "y": np.concatenate([STACKED["y"][:1], STACKED["y"][1:2] * np.nan, STACKED["y"][2:]])}
    state, metrics = run(jax.tree.map(jnp.copy, start), one_bad)
    assert metrics["skipped"].tolist() == [0, 1, 1] and int(state.step) == 2
    expected, after = losses_of(step, jax.tree.map(jnp.copy, start), [BATCHES[0], BATCHES[2]])
    assert_same(step.params(state), step.params(after), rtol=1e-5, atol=1e-6)
    step.check(state)
    state, metrics = run(start, {**STACKED, "y": STACKED["y"] * np.nan})
    assert metrics["stopped"].tolist() == [0, 0, 1]
    with pytest.raises(zero_jax.BadStepError, match="more than the guard skips"):
        step.check(state)
    step(step.forgive(state), batch_of())


def test_batches_that_are_no_several():
    step = step_of()
    with pytest.raises(ValueError, match=r"shape \(steps, global batch, ...\).*x \(2, 16, 16\), y \(3, 16, 13\)"):
        step.multi(step.init(KEY, batch_of()), {**STACKED, "x": STACKED["x"][:2]})
