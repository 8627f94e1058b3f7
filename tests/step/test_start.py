"""From what a user has to a state and back: the numbers of Flax and Optax alone."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import freeze
from flax.training.train_state import TrainState
from support.covering import weekly
from support.normed_net import (
    ADAM,
    BATCHES,
    KEY,
    Net,
    NnxNet,
    assert_same,
    batch_of,
    losses_of,
    oracle,
    plain_gradients,
    squared,
    step_of,
    variables_of,
)


class Sowing(nnx.Module):
    def __init__(self, rngs, kind=nnx.Intermediate):
        self.inner, self.kind = nnx.Linear(8, 8, rngs=rngs), kind

    def __call__(self, x):
        x = self.inner(x)
        self.sow(self.kind, "seen", x)
        return x


@pytest.mark.filterwarnings("ignore:Using 'Module.sow")
def test_a_module_that_has_sown_starts_without():
    """And is left as it was; what grows in each step and is no `nnx.Intermediate` is refused by its name."""
    batch = {"x": np.ones((8, 8), np.float32)}

    def mean(model, batch):
        return jnp.mean(model(batch["x"]))

    model = Sowing(nnx.Rngs(0))
    model(batch["x"])
    step = step_of(3, model=model, loss=mean)
    state = step.init(KEY, batch)
    for _ in range(2):
        state, _ = step(state, batch)
    assert not jax.tree.leaves(state.variables) and len(model.seen.get_value()) == 1
    growing = Sowing(nnx.Rngs(0), nnx.BatchStat)
    growing(batch["x"])
    with pytest.raises(ValueError, match="variable seen has another structure after a run"):
        step_of(3, model=growing, loss=mean).init(KEY, batch)


@weekly("stage", [0, 3])
@weekly("kind", ["dict", "numpy", "frozen", "bound"], default=2)
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


@weekly("stage", [1, 3])
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


@weekly("give", ["state", "module", "pure dict"])
def test_init_from_nnx(give):
    model = NnxNet(nnx.Rngs(3))
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    given = {"module": model, "state": nnx.state(model), "pure dict": params}[give]
    expected = [float(squared(model, batch_of()))]
    step = step_of(model=NnxNet)
    state = step.init(KEY, batch_of(), params=given)
    np.testing.assert_allclose(losses_of(step, state, [batch_of()])[0], expected, rtol=1e-5)


class NnxTrainState(TrainState):
    other: nnx.State


class LinenTrainState(TrainState):
    batch_stats: dict


def given_in(kind, linen):
    """(A model, what is given of it, its batch statistics or None where they are not in it)."""
    if linen:
        params, stats = variables_of()["params"], variables_of()["batch_stats"]
        return Net(), {"params": {"params": params}, "collections": variables_of(), "bare": params,
                       "bound": Net().bind(variables_of()),
                       "train state": LinenTrainState.create(apply_fn=None, params=params, tx=ADAM, batch_stats=stats),
                       "params of one": TrainState.create(apply_fn=None, params=params, tx=ADAM)}[kind]
    model = NnxNet(nnx.Rngs(3))
    model.norm.mean[...] += 0.25
    _, params, other = nnx.split(model, nnx.Param, ...)
    pure = nnx.to_pure_dict(params)
    return NnxNet, {"params": params, "bare": pure, "module": model, "state": nnx.state(model),
                    "collections": nnx.to_pure_dict(nnx.state(model)),
                    "train state": NnxTrainState.create(apply_fn=None, params=pure, tx=ADAM, other=other),
                    "params of one": TrainState.create(apply_fn=None, params=pure, tx=ADAM)}[kind]


@pytest.mark.parametrize("linen", [True, False])
@weekly("how", ["with_params", "init"])
def test_batch_statistics_are_taken_where_they_are_given_and_else_named(caplog, linen, how):
    lacking = {"params", "bare", "params of one"}
    for kind in ("collections", "train state", *(["bound"] if linen else ["module", "state"]), *sorted(lacking)):
        caplog.clear()
        model, given = given_in(kind, linen)
        step = step_of(model=model)
        state = step.init(KEY, batch_of(), **({"params": given} if how == "init" else {}))
        state = step.with_params(state, given) if how == "with_params" else state
        norm = state.variables["batch_stats"]["BatchNorm_0"] if linen else state.variables["norm"]
        assert float(norm["mean"][0]) == (0.0 if kind in lacking else 0.25), kind
        said = [record.message for record in caplog.records]
        assert len(said) == (kind in lacking), (kind, said)
        assert kind not in lacking or f"no values for {'batch_stats/BatchNorm_0' if linen else 'norm'}/mean" in said[0]


def test_a_step_without_other_variables_names_none(caplog):
    """Negative control of the warning, with random streams, which are not asked for."""
    def model(rngs):
        return nnx.Sequential(nnx.Linear(16, 13, rngs=rngs), nnx.Dropout(0.5, rngs=rngs))

    step = step_of(model=model)
    state = step.init(KEY, batch_of(), params=nnx.to_pure_dict(nnx.state(model(nnx.Rngs(0)), nnx.Param)))
    step.params(state)
    assert not caplog.records


@weekly("stage", [0, 3])
def test_a_trained_nnx_module_comes_back(caplog, stage):
    """The loss of Flax alone in eval mode is the step's, and with the parameters alone it is not, which is said."""
    step = step_of(stage, model=NnxNet(nnx.Rngs(3)))
    _, state = losses_of(step, step.init(KEY, batch_of()))
    expected = float(step.evaluator()(state, batch_of()))
    assert not caplog.records
    found = []
    for trees in ([step.params(state), state.variables], [step.params(state)]):
        model = NnxNet(nnx.Rngs(5))
        nnx.update(model, *trees)
        model.eval()
        found.append(float(squared(model, batch_of())))
    assert abs(found[0] / expected - 1) < 1e-5
    assert abs(found[1] / expected - 1) > 1e-3
    assert ["state.variables has norm/mean, norm/var: nnx.update(" in each.message for each in caplog.records] == [True]
    _, _, other = nnx.split(NnxNet(nnx.Rngs(5)), nnx.Param, ...)
    train_state = NnxTrainState.create(apply_fn=None, params=step.params(state), tx=ADAM, other=other)
    back = step.to_train_state(state, train_state)
    assert_same(nnx.to_pure_dict(back.other)["norm"], state.variables["norm"], 0, 0)


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


@weekly("change, message", [
    (lambda p: {"Dense_0": p["Dense_0"]}, r"params lacks 4 \(BatchNorm_0/bias, BatchNorm_0/scale, Dense_1/bias"),
    (lambda p: {**p, "more": {"kernel": np.ones(3)}}, r"has in addition 1 \(more/kernel\)"),
    (lambda p: {**p, "Dense_1": {**p["Dense_1"], "bias": np.ones(12, np.float32)}}, r"Dense_1/bias has shape \(12,\)"),
    (lambda p: {**p, "Dense_1": {**p["Dense_1"], "bias": np.ones(13, np.int32)}}, "Dense_1/bias has dtype int32"),
    (lambda p: 3, "params is a int: give a tree"), (lambda p: Net(), "is not bound to variables")], default=3)
def test_values_that_do_not_fit_leave_the_state_alone(change, message):
    step = step_of()
    state = step.init(KEY, batch_of())
    with pytest.raises(ValueError, match=message):
        step.with_params(state, change(variables_of()["params"]))
    losses_of(step, state)


@weekly("stage", [0, 3])
def test_to_and_from_a_train_state(stage):
    """A plain loop's third step, taken here, and the same the other way round."""
    def create(variables):
        return LinenTrainState.create(apply_fn=Net().apply, params=variables["params"], tx=ADAM,
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


@pytest.mark.slow
def test_an_optimizers_keys_come_from_the_train_state():
    """Not those that `init` makes: the noise goes on where it was."""
    def init(params):
        return {"key": jax.random.key(5), "each": jax.tree.map(lambda leaf: jax.random.key(leaf.size), params)}

    def update(grads, state, params=None):
        each = jax.tree.map(lambda key: jax.random.split(key)[0], state["each"])
        noise = jax.tree.map(lambda grad, key: 1e-2 * jax.random.normal(key, grad.shape), grads, each)
        return noise, {"key": jax.random.split(state["key"])[1], "each": each}

    params, optimizer = variables_of()["params"], optax.GradientTransformation(init, update)
    train_state = TrainState.create(apply_fn=None, params=params, tx=optimizer).apply_gradients(grads=params)
    step = step_of(optimizer=optimizer)
    state = step.from_train_state(KEY, batch_of(), train_state)
    state, _ = step(state, batch_of())
    expected = train_state.apply_gradients(grads=params)
    assert_same(step.params(state), expected.params)
    back = step.to_train_state(state, train_state)
    assert_same(*(jax.tree.map(jax.random.key_data, each.opt_state) for each in (back, expected)))


def test_a_train_state_of_another_optimizer():
    train_state = TrainState.create(apply_fn=None, params=variables_of()["params"], tx=optax.sgd(0.1))
    with pytest.raises(ValueError, match="opt_state lacks"):
        step_of().from_train_state(KEY, batch_of(), train_state)


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
