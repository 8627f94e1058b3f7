"""From what a user has to a state and back, and loops of one's own: the numbers of Flax and Optax alone."""

import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import freeze
from flax.training.train_state import TrainState
from support.oracle import slow

import zero_jax

ADAM = optax.adam(1e-2)


class Net(nn.Module):
    """Of dims that no eight devices divide, and with batch statistics."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(67)(x)
        x = nn.BatchNorm(use_running_average=False, momentum=0.9)(nn.relu(x))
        return nn.Dense(13)(x)


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.first, self.norm = nnx.Linear(16, 67, rngs=rngs), nnx.BatchNorm(67, momentum=0.9, rngs=rngs)
        self.dropout, self.last = nnx.Dropout(0.0, rngs=rngs), nnx.Linear(67, 13, rngs=rngs)

    def __call__(self, x):
        return self.last(self.dropout(self.norm(nnx.relu(self.first(x)))))


def squared(model, batch):
    return jnp.mean((model(batch["x"]).astype(jnp.float32) - batch["y"]) ** 2)


def batch_of(number=0, size=16):
    rng = np.random.default_rng(number)
    return {"x": rng.normal(size=(size, 16)).astype(np.float32), "y": rng.normal(size=(size, 13)).astype(np.float32)}


BATCHES = [batch_of(number) for number in range(3)]
KEY = jax.random.key(0)


@functools.cache
def variables_of(seed=7):
    variables = Net().init(jax.random.key(seed), batch_of()["x"])
    stats = jax.tree.map(lambda leaf: leaf + 0.25, variables["batch_stats"])
    return {"params": variables["params"], "batch_stats": stats}


@functools.cache
def oracle(optimizer=ADAM, seed=7):
    """(losses, the last params, batch statistics, optimizer state) of a plain loop from `variables_of(seed)`."""
    variables = variables_of(seed)
    params, stats, opt_state, losses = variables["params"], variables["batch_stats"], None, []
    opt_state = optimizer.init(params)
    for batch in BATCHES:
        (loss, stats), grads = plain_gradients(params, stats, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
    return losses, params, stats, opt_state


@jax.jit
def plain_gradients(params, stats, batch):
    def loss_of(params):
        out, new = Net().apply({"params": params, "batch_stats": stats}, batch["x"], mutable=["batch_stats"])
        return jnp.mean((out - batch["y"]) ** 2), new["batch_stats"]

    return jax.value_and_grad(loss_of, has_aux=True)(params)


def step_of(stage=3, model=None, loss=squared, optimizer=ADAM, **options):
    return zero_jax.make_zero_train_step(model or Net(), stage, loss=loss, optimizer=optimizer, **options)


def losses_of(step, state, batches=BATCHES):
    losses = []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, state


def assert_same(given, expected, rtol=2e-5, atol=2e-6):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), jax.device_get(given),
                 jax.device_get(expected))


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("kind", ["dict", "numpy", "frozen", "bound"])
def test_init_from_variables(stage, kind):
    """Losses, parameters and statistics of the plain loop; the user's arrays stay alive and unchanged."""
    variables = {"dict": variables_of(), "numpy": jax.device_get(variables_of()), "frozen": freeze(variables_of()),
                 "bound": Net().bind(variables_of())}[kind]
    before = jax.device_get(variables_of())
    if kind == "bound":
        step = step_of(stage, model=variables)
        state = step.init(KEY, batch_of())
    else:
        step = step_of(stage)
        state = step.init(KEY, batch_of(), params=variables)
    losses, params, stats, _ = oracle()
    found, state = losses_of(step, state)
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    assert_same(step.params(state), params)
    assert_same(state.variables["batch_stats"], stats)
    assert_same(jax.device_get(variables if kind == "numpy" else variables_of()), before, rtol=0, atol=0)


def test_without_them_it_is_another_run():
    """Negative control: the same step from its own key."""
    step = step_of()
    assert abs(losses_of(step, step.init(KEY, batch_of()))[0][0] / oracle()[0][0] - 1) > 1e-2


@pytest.mark.parametrize("stage", [1, 3])
def test_the_working_copy_and_the_average_follow(stage):
    """At stages 1 and 2 under bf16 the model reads a copy, which would be stale."""
    step = step_of(stage, precision="bf16", ema=0.9)
    state = step.with_params(step.init(KEY, batch_of()), variables_of())
    direct = step.evaluator()(state, batch_of())
    plain = squared(functools.partial(lambda x: Net().apply(variables_of(), x, mutable=["batch_stats"])[0]), batch_of())
    assert abs(float(direct) / float(plain) - 1) < 2e-2
    assert abs(float(step.evaluator(ema=True)(state, batch_of())) / float(plain) - 1) < 2e-2
    if stage == 1:
        assert state.weights is not None


@pytest.mark.parametrize("give", ["module", "state", "pure dict"])
def test_init_from_nnx(give):
    model = NnxNet(nnx.Rngs(3))
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    given = {"module": model, "state": nnx.state(model), "pure dict": params}[give]
    expected = [float(squared(model, batch_of()))]
    step = step_of(model=NnxNet)
    state = step.init(KEY, batch_of(), params=given)
    np.testing.assert_allclose(losses_of(step, state, [batch_of()])[0], expected, rtol=1e-5)


def test_a_bound_module_without_its_values():
    with pytest.raises(ValueError, match="params lacks 6 .*of the 6 leaves"):
        step_of(model=Net().bind({"params": {}})).init(KEY, batch_of())


def test_an_object_with_a_module_and_params_starts_from_them():
    class Pretrained:
        module, params = Net(), variables_of()

    step = step_of(model=Pretrained())
    np.testing.assert_allclose(losses_of(step, step.init(KEY, batch_of()))[0], oracle()[0], rtol=1e-5)


def test_frozen_parameters_are_given_too():
    step = step_of(frozen=("Dense_0",))
    state = step.init(KEY, batch_of(), params=variables_of())
    assert_same(step.params(state), variables_of()["params"], rtol=0, atol=0)


@pytest.mark.parametrize(("change", "message"), [
    (lambda p: {"Dense_0": p["Dense_0"]}, r"params lacks 4 \(BatchNorm_0/bias, BatchNorm_0/scale, Dense_1/bias"),
    (lambda p: {**p, "more": {"kernel": np.ones(3)}}, r"has in addition 1 \(more/kernel\)"),
    (lambda p: {**p, "Dense_1": {**p["Dense_1"], "bias": np.ones(12, np.float32)}}, r"Dense_1/bias has shape \(12,\)"),
    (lambda p: {**p, "Dense_1": {**p["Dense_1"], "bias": np.ones(13, np.int32)}}, "Dense_1/bias has dtype int32"),
    (lambda p: 3, "params is a int: give a tree"), (lambda p: Net(), "is not bound to variables")])
def test_values_that_do_not_fit_leave_the_state_alone(change, message):
    step = step_of()
    state = step.init(KEY, batch_of())
    with pytest.raises(ValueError, match=message):
        step.with_params(state, change(variables_of()["params"]))
    losses_of(step, state)


@pytest.mark.parametrize("stage", [0, 3])
def test_to_and_from_a_train_state(stage):
    """A plain loop's third step, taken here, and the same the other way round."""
    class WithStats(TrainState):
        batch_stats: dict

    def create(variables):
        return WithStats.create(apply_fn=Net().apply, params=variables["params"], tx=ADAM,
                                batch_stats=variables["batch_stats"])

    train_state = create(variables_of())
    for batch in BATCHES[:2]:
        (_, stats), grads = plain_gradients(train_state.params, train_state.batch_stats, batch)
        train_state = train_state.apply_gradients(grads=grads, batch_stats=stats)
    step = step_of(stage)
    state = step.from_train_state(KEY, batch_of(), train_state)
    assert int(state.step) == 2
    found, state = losses_of(step, state, BATCHES[2:])
    losses, params, stats, opt_state = oracle()
    np.testing.assert_allclose(found, losses[2:], rtol=1e-5)
    back = step.to_train_state(state, create(variables_of()))
    assert int(back.step) == 3
    assert_same((back.params, back.batch_stats, back.opt_state), (params, stats, opt_state))
    losses_of(step, state)  # donates the state: the TrainState has copies
    assert_same(back.params, params)


def test_a_train_state_of_another_optimizer():
    train_state = TrainState.create(apply_fn=None, params=variables_of()["params"], tx=optax.sgd(0.1))
    with pytest.raises(ValueError, match="opt_state lacks"):
        step_of().from_train_state(KEY, batch_of(), train_state)


GUARD = {"guard": zero_jax.Guard(skip=2)}


@pytest.mark.parametrize("options", [
    {}, {"stage": 0}, {"accumulate": 2}, {"stage": 2, "precision": "bf16"}, {"precision": "fp16", **GUARD}], ids=str)
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


@pytest.mark.parametrize("options", [{}, {"stage": 2, "precision": "bf16"}], ids=str)
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


STACKED = jax.tree.map(lambda *leaves: np.stack(leaves), *BATCHES)
OPTIONS = [{}, {"precision": "fp16", **GUARD}, {"stage": 2, "accumulate": 2}]


@pytest.mark.parametrize("way, options", [
    row if row[0] == "multi" or row == ("scan", OPTIONS[1]) else slow(*row)
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


@pytest.mark.parametrize("way", ["multi", "scan"])
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


def test_an_evaluator_of_a_ragged_batch():
    step = step_of(model=nn.Dense(13))
    state = step.init(KEY, batch_of())
    params, ragged = jax.device_get(step.params(state)), batch_of(5, size=13)
    evaluate = step.evaluator()
    for batch in (ragged, batch_of(6)):
        np.testing.assert_allclose(evaluate(state, batch), squared(nn.Dense(13).bind({"params": params}), batch),
                                   rtol=1e-5)
    best = step.evaluator(lambda model, batch: model(batch["x"]).argmax(-1))(state, ragged)
    assert best.dtype == jnp.int32 and best.shape == (13,)
    np.testing.assert_array_equal(best, (ragged["x"] @ params["kernel"] + params["bias"]).argmax(-1))
    with pytest.raises(ValueError, match="batch of 13 does not divide"):  # a step does not
        step(state, ragged)
    fresh = step_of(model=nn.Dense(13))  # and one that has no layout yet
    np.testing.assert_allclose(fresh.evaluator()(state, ragged), evaluate(state, ragged), rtol=1e-6)


class Noisy(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dropout(0.5, deterministic=False)(nn.Dense(13)(x))


class NnxNoisy(nnx.Module):
    def __init__(self, rngs):
        self.linear, self.rngs = nnx.Linear(16, 13, rngs=rngs), rngs.fork() if hasattr(rngs, "fork") else rngs

    def __call__(self, x):
        return self.linear(x) + jax.random.normal(self.rngs.params(), (13,))[None]


@pytest.mark.parametrize("model", [Noisy(), NnxNoisy], ids=["linen", "nnx"])
def test_an_evaluator_takes_a_key(model):
    step = step_of(model=model)
    state = step.init(KEY, batch_of())
    evaluate = step.evaluator(lambda model, batch: model(batch["x"]))
    one, again, other = (evaluate(state, batch_of(), jax.random.key(seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, again)
    assert not np.allclose(one, other)


@pytest.mark.parametrize("given", [True, False])
def test_given_parameters_are_not_drawn_before(given):
    """Negative control: without any they are."""
    draws = []

    def drawn(key, shape, dtype=jnp.float32):
        def draw():
            draws.append(shape)
            return np.ones(shape, dtype)

        return jax.pure_callback(draw, jax.ShapeDtypeStruct(shape, dtype))

    model = nn.Dense(13, kernel_init=drawn)
    params = {"kernel": np.full((16, 13), 0.5, np.float32), "bias": np.zeros(13, np.float32)}
    step = step_of(model=model)
    state = step.init(KEY, batch_of(), **({"params": params} if given else {}))
    assert float(step.params(state)["kernel"][0, 0]) == (0.5 if given else 1.0)
    assert bool(draws) != given
