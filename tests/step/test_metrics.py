"""Metrics as a loss declares them, with and without microbatches; what a precision rounds of a batch."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support.covering import weekly
from support.flat import flat_step

import zero_jax
from zero_jax import Metric
from zero_jax.jaxpr.equations import all_eqns, primitive_of
from zero_jax.step.metrics import OWNED

SGD = optax.sgd(0.1)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.relu(nn.Dense(16)(x)))


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.first, self.last = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 3, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.relu(self.first(x)))


def batch_of(size=32, seed=0):
    rng = np.random.default_rng(seed)
    return {"x": rng.normal(size=(size, 8)).astype(np.float32), "y": rng.normal(size=(size, 3)).astype(np.float32)}


def reporting(model, batch):
    error = model(batch["x"]) - batch["y"]
    return jnp.mean(error**2), {
        "largest": Metric(jnp.abs(error).max(), "max"), "smallest": Metric(error.min(0), "min"),
        "positive": Metric((error > 0).sum(), "sum"), "any": Metric((error > 1).any(), "max"),
        "by_output": jnp.mean(error**2, 0), "half": jnp.mean(error).astype(jnp.bfloat16)}


def metrics_of(loss=reporting, stage=3, model=None, batch=None, **options):
    step = flat_step(model or Net(), stage, loss=loss, optimizer=SGD, **options)
    batch = batch_of() if batch is None else batch
    state = step.init(jax.random.key(0), batch)
    params = step.params(state)
    return step(jax.tree.map(jnp.copy, state), batch)[1], params


@weekly("options", [{"accumulate": 2, "guard": zero_jax.Guard(), "ema": 0.5}, {}], ids=str)
def test_metrics_of_float64_are_float64(options):
    """The control: in float32 they are others."""
    with jax.enable_x64():
        model = nn.Dense(3, param_dtype=jnp.float64)
        batch = jax.tree.map(lambda leaf: leaf.astype(np.float64), batch_of())
        found, params = metrics_of(model=model, batch=batch, **options)
        loss, grads = jax.jit(jax.value_and_grad(lambda params: reporting(model.bind({"params": params}), batch)[0]))(
            jax.device_get(params))
        for name, expected in (("loss", loss), ("grad_norm", optax.tree.norm(grads))):
            assert found[name].dtype == np.float64 and abs(found[name] / expected - 1) < 1e-13
            assert abs(np.float32(expected) / expected - 1) > 1e-11


@weekly("options", [{"accumulate": 2, "reduce": "once"}, {"accumulate": 4}, {}], ids=str)
def test_metrics_are_those_of_the_whole_batch(options):
    """The oracle is the same loss of the same parameters on one device, over the whole batch."""
    found, params = metrics_of(**options)
    loss, expected = reporting(Net().bind({"params": jax.device_get(params)}), batch_of())
    np.testing.assert_allclose(found["loss"], loss, rtol=1e-5)
    for name, metric in expected.items():
        value = metric.value if isinstance(metric, Metric) else metric
        assert (found[name].shape, found[name].dtype) == (value.shape, value.dtype), name
        np.testing.assert_allclose(np.asarray(found[name], np.float64), np.asarray(value, np.float64),
                                   rtol=1e-2 if name == "half" else 1e-5, atol=1e-2 if name == "half" else 0)


def test_a_mean_of_maxima_is_not_the_maximum():
    """Negative control: what a bare value is under microbatches."""
    def bare(model, batch):
        loss, metrics = reporting(model, batch)
        return loss, {"largest": metrics["largest"].value}

    assert metrics_of(bare, accumulate=4)[0]["largest"] < 0.95 * metrics_of(accumulate=4)[0]["largest"]


@weekly("options", [{"accumulate": 2, "reduce": "once"}, {"accumulate": 4}], ids=str)
def test_means_are_weighted_as_the_loss_is(options):
    def masked(model, batch):
        error = ((model(batch["x"]) - batch["y"]) ** 2) * batch["weights"][:, None]
        total = batch["weights"].sum()
        divisor = jnp.maximum(total, 1)  # a device's rows may all be left out
        return error.sum() / divisor / 3, {"by_output": error.sum(0) / divisor, "valid": Metric(total, "sum")}, total

    weights = (np.arange(32) % 7 < 3).astype(np.float32)
    found, params = metrics_of(masked, batch={**batch_of(), "weights": weights}, **options)
    _, expected, _ = masked(Net().bind({"params": jax.device_get(params)}), {**batch_of(), "weights": weights})
    np.testing.assert_allclose(found["by_output"], expected["by_output"], rtol=1e-5)
    assert found["valid"] == weights.sum()


@weekly("options", [{"accumulate": 2, "reduce": "once"}, {"accumulate": 4}], ids=str)
def test_what_is_0_over_0_of_no_rows_is_left_out_and_what_is_counted_there_is_not(options):
    def masked(model, batch):
        error = ((model(batch["x"]) - batch["y"]) ** 2).mean(1) * batch["weights"]
        total = batch["weights"].sum()
        return error.sum() / total, {
            "weight": Metric(total / total * total, "sum"), "largest": Metric(error.max() * total / total, "max"),
            "smallest": Metric(total / total, "min"), "padding": Metric((batch["weights"] == 0).sum(), "sum")}, total

    weights = (np.arange(32) % 4 == 3).astype(np.float32)
    found, params = metrics_of(masked, batch={**batch_of(), "weights": weights}, **options)
    _, expected, _ = masked(Net().bind({"params": jax.device_get(params)}), {**batch_of(), "weights": weights})
    for name, metric in expected.items():
        np.testing.assert_allclose(found[name], metric.value, rtol=1e-5, err_msg=name)
    found, _ = metrics_of(masked, batch={**batch_of(), "weights": 0 * weights}, **options)
    assert np.isnan(found["weight"]) and found["padding"] == 32, "as of the large batch"


def test_the_mean_of_integers_is_no_integer():
    def counts(model, batch):
        return reporting(model, batch)[0], {"positive": (batch["y"] > 0).sum()}

    one, four = (metrics_of(counts, accumulate=number)[0]["positive"] for number in (1, 4))
    assert one.dtype == jnp.int32 and four.dtype == jnp.float32 and float(one) == 4 * float(four)


@pytest.mark.parametrize("name", ["loss", "grad_norm", "bad", "skipped", "stopped", "loss_scale", "learning_rate",
                                  "learning_rate_1"])
def test_names_of_the_step_are_refused(name):
    def loss(model, batch):
        return reporting(model, batch)[0], {name: jnp.float32(0)}

    with pytest.raises(ValueError, match=f"a metric '{name}', which the step reports itself"):
        metrics_of(loss)


def test_the_names_are_all_that_a_step_reports():
    guard = zero_jax.Guard(skip=1)
    found, _ = metrics_of(lambda model, batch: reporting(model, batch)[0], precision="fp16", guard=guard)
    assert {*found} == {"loss", "grad_norm", "bad", "skipped", "stopped", "loss_scale"}
    assert all(re.fullmatch(OWNED, name) for name in found) and not re.fullmatch(OWNED, "loss_2")


def test_what_is_no_dict_of_metrics():
    with pytest.raises(ValueError, match="returned list as its second item"):
        metrics_of(lambda model, batch: (reporting(model, batch)[0], [1.0]))


def test_what_is_no_name():
    with pytest.raises(ValueError, match="a metric under 1: give it a str"):
        metrics_of(lambda model, batch: (reporting(model, batch)[0], {1: 1.0}))


@pytest.mark.parametrize("metric", [Metric(1j, "max"), Metric(jax.random.key(0), "sum"), jax.random.key(0)],
                         ids=["complex", "key in a Metric", "key"])
def test_what_microbatches_cannot_combine(metric):
    with pytest.raises(ValueError, match="a metric of .*, which has no (max|sum|mean) over microbatches"):
        metrics_of(lambda model, batch: (reporting(model, batch)[0], {"odd": metric}), accumulate=2)


def test_means_of_what_jax_does_not_promote():
    def narrow(model, batch):
        loss, _ = reporting(model, batch)
        return loss, {"eighth": loss.astype(jnp.float8_e4m3fn), "few": jnp.int4(3)}

    found, _ = metrics_of(narrow, accumulate=2)
    assert found["eighth"].dtype == jnp.float8_e4m3fn and float(found["few"]) == 3
    np.testing.assert_allclose(float(found["eighth"]), found["loss"], rtol=0.1)


def test_what_is_no_reduction():
    with pytest.raises(ValueError, match="give one of mean, sum, max, min"):
        Metric(1.0, "median")


def test_an_evaluator_returns_values():
    step = zero_jax.make_zero_train_step(Net(), 3, loss=reporting, optimizer=SGD)
    state = step.init(jax.random.key(0), batch_of())
    _, metrics = step.evaluator()(state, batch_of())
    assert metrics["smallest"].shape == (3,) and metrics["positive"].dtype == jnp.int32


TARGET = 1003.3
"""Which bfloat16 rounds to 1004."""


def seen(model, batch):
    """The dtypes that the loss sees, as numbers."""
    out = model(batch["x"])
    return jnp.mean((out - batch["y"]) ** 2).astype(jnp.float32), {
        "target": batch["y"].max(), "input": batch["x"].max(), "output_bits": 8 * out.dtype.itemsize}


@weekly("model", [Net(), NnxNet], ids=["linen", "nnx"])
@pytest.mark.parametrize(("cast_batch", "target", "bits"), [
    ("inputs", TARGET, 16), (True, 1004, 16), (False, TARGET, 32)])
def test_what_is_rounded_of_a_batch(model, cast_batch, target, bits):
    batch = {**batch_of(), "y": np.full((32, 3), TARGET, np.float32)}
    precision = zero_jax.Precision(params="float32", compute="bfloat16", cast_batch=cast_batch)
    found, _ = metrics_of(seen, model=model, batch=batch, precision=precision)
    assert abs(float(found["target"]) - target) < 1e-3
    assert int(found["output_bits"]) == bits
    assert found["input"].dtype == (jnp.bfloat16 if cast_batch is True else jnp.float32)


@pytest.mark.parametrize(("cast_batch", "dtypes"), [(True, {jnp.bfloat16}), (False, {jnp.float32})])
def test_what_is_planned_of_a_loss_has_the_batch_that_it_gets(cast_batch, dtypes):
    precision = zero_jax.Precision(params="float32", compute="bfloat16", cast_batch=cast_batch)
    step = zero_jax.make_zero_train_step(Net(), 3, loss=lambda model, batch: jnp.mean(model(batch["x"]) ** 2),
                                         precision=precision)
    products = [eqn for eqn in all_eqns(step.trace_forward(batch_of()).jaxpr) if primitive_of(eqn) == "dot_general"]
    assert products and {jnp.dtype(atom.aval.dtype) for eqn in products for atom in eqn.invars} == {
        *map(jnp.dtype, dtypes)}


def test_submodules_and_models_of_the_loss_itself():
    """A Linen submodule that the loss calls casts, and a teacher that is not the model does not."""
    teacher = nn.Dense(3)
    variables = teacher.init(jax.random.key(1), jnp.ones((1, 8)))

    class Pair(nn.Module):
        def setup(self):
            self.encoder, self.decoder = nn.Dense(16), nn.Dense(3)

        def __call__(self, x):
            return self.decoder(self.encoder(x))

    def loss(model, batch):
        out, wanted = model.decoder(model.encoder(batch["x"])), teacher.apply(variables, batch["x"])
        return jnp.mean((out - wanted) ** 2), {"bits": 8 * out.dtype.itemsize, "teacher": 8 * wanted.dtype.itemsize}

    found, _ = metrics_of(loss, model=Pair(), precision="bf16")
    assert (int(found["bits"]), int(found["teacher"])) == (16, 32)


def test_what_is_no_rule_for_the_batch():
    with pytest.raises(ValueError, match="cast_batch='targets'.*give \"inputs\", True or False"):
        zero_jax.Precision(compute="bfloat16", cast_batch="targets")
