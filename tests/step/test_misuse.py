"""What a user may get wrong in a call: one clear error each, before anything compiles, and nothing that was allowed."""

import collections
import contextlib
import dataclasses
import threading
import timeit

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support.covering import weekly

import zero_jax
from zero_jax.step.call_checks import check_is_state


class Net(nn.Module):
    features: int = 8

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.features)(nn.Dense(16)(x))


def squared(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def batch_of(size=16, dtype=np.float32, **more):
    rng = np.random.default_rng(size)
    return {"x": rng.normal(size=(size, 8)).astype(dtype), "y": rng.normal(size=(size, 8)).astype(np.float32), **more}


def step_of(stage=3, model=None, loss=squared, **options):
    return zero_jax.make_zero_train_step(model or Net(), stage, loss=loss, optimizer=optax.adam(1e-2), **options)


@contextlib.contextmanager
def compiles(times):
    """Checks that so many programs are compiled within; what is done eagerly counts too."""
    compiled = collections.Counter()

    def count(event, seconds, **_):
        compiled.update([event] if "backend_compile" in event else [])

    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        yield
    finally:
        jax.monitoring.unregister_event_duration_listener(count)
    assert sum(compiled.values()) == times


@pytest.fixture(scope="module")
def trained():
    """A step and its state after one batch, whose next batch compiles nothing."""
    step = step_of()
    state, _ = step(step.init(jax.random.key(0), batch_of()), batch_of())
    return step, state


def copied(state):
    return jax.tree.map(jnp.copy, state)


def test_a_donated_state_is_one_error(trained):
    step, state = trained
    old = copied(state)
    new, _ = step(old, batch_of())
    for call in (lambda: step(old, batch_of()), lambda: step.params(old), lambda: step.gradients(old, batch_of()),
                 lambda: step.with_params(old, {}), lambda: step.multi(old, jax.tree.map(lambda x: x[None], batch_of()))
                 ):
        with compiles(0), pytest.raises(ValueError, match="donated to an earlier call.*state, metrics = step"):
            call()
    with pytest.raises(ValueError, match="donated"):  # one field of it, too
        step(dataclasses.replace(new, params=old.params), batch_of())
    step(new, batch_of())  # negative control: what is alive


def test_the_check_of_donation_takes_microseconds(trained):
    step, state = trained
    assert min(timeit.repeat(lambda: check_is_state(state), number=100, repeat=5)) / 100 < 100e-6


def test_a_state_of_another_step(trained):
    step, state = trained
    wide = step_of(model=Net(24), loss=lambda model, batch: (model(batch["x"]) ** 2).mean())
    for other, message in (
            (step_of(1, precision="bf16"), "has weights/Dense_0/bias.* in addition"), (step_of(0), "is sharded as"),
            (zero_jax.make_zero_train_step(Net(), 3, loss=squared, optimizer=optax.sgd(0.1)), "lacks opt_state/0/"),
            (wide, r"params/Dense_0/bias is float32 \(24,\), and is stored as float32 \(8,\)")):
        foreign = other.init(jax.random.key(0), batch_of())
        with pytest.raises(ValueError, match=f"not of this step.*{message}"):
            step(foreign, batch_of())
    with pytest.raises(ValueError, match="state is a dict: give the ZeroState"):
        step(state.params, batch_of())
    for what in (lambda state: step.evaluator()(state, batch_of()), lambda state: step.gradients(state, batch_of()),
                 step.params):
        with pytest.raises(ValueError, match="not of this step.*lacks opt_state/0/"):
            what(foreign_optimizer())
    twin = step_of()  # negative control: a step that is made alike
    twin(copied(state), batch_of())


def foreign_optimizer():
    other = zero_jax.make_zero_train_step(Net(), 3, loss=squared, optimizer=optax.sgd(0.1))
    return other.init(jax.random.key(0), batch_of())


def linen_apply(params, batch):
    return jnp.mean(Net().apply({"params": params}, batch["x"]) ** 2)


def subscripts(p, batch):
    return jnp.mean((batch["x"] @ p["Dense_0"]["kernel"]) ** 2)


@pytest.mark.parametrize("loss", [linen_apply, subscripts])
@pytest.mark.parametrize("model", [Net(), lambda rngs: nnx.Linear(8, 8, rngs=rngs)])
def test_a_loss_of_parameters(model, loss):
    with pytest.raises(ValueError, match=r"called as loss\(model, batch\).*not as loss\(params.*write model\(batch"):
        step_of(model=model, loss=loss).init(jax.random.key(0), batch_of())


def test_a_loss_that_reads_none_of_the_parameters():
    mine = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="reads none of the parameters"):
        step_of(model=lambda rngs: nnx.Linear(8, 8, rngs=rngs), loss=lambda model, batch: (mine(batch["x"]) ** 2).mean()
                ).layout(batch_of())


def test_other_errors_of_a_loss_are_its_own():
    """Negative control: what has another cause keeps its type."""
    def divides(model, batch):
        return squared(model, batch) * (1 / len([]))

    def other_key(model, batch):
        return squared(model, batch) * {}["scale"]

    for loss, error in ((divides, ZeroDivisionError), (other_key, KeyError)):
        with pytest.raises(error):
            step_of(loss=loss).layout(batch_of())


@pytest.mark.parametrize(("loss", "message"), [
    (lambda params, batch, scale: 0.0, "takes .*scale.*called as loss\\(model, batch\\).*partial"),
    (lambda model: 0.0, "called as loss\\(model, batch\\)"), ("mse", "loss='mse' is a str")])
def test_what_cannot_be_called_as_a_loss(loss, message):
    with pytest.raises(ValueError, match=message):
        step_of(loss=loss)
    step_of(loss=lambda model, batch, scale=1.0: scale * squared(model, batch))  # negative control


def test_a_missing_key_of_the_batch():
    with pytest.raises(ValueError, match="reads batch\\['inputs'\\], and the batch has 'x', 'y'.*loss="):
        zero_jax.make_zero_train_step(nn.Sequential([nn.Embed(8, 8), nn.Dense(8)]), 3).init(
            jax.random.key(0), batch_of())


@pytest.mark.parametrize(("batch", "message"), [
    ({"x": batch_of()["x"]}, "lacks y, beside the first batch"),
    (batch_of(weights=np.ones(16, np.float32)), "has in addition weights"),
    (batch_of(dtype=np.float16), "batch\\['x'\\] is float16, and was float32"),
    (batch_of(dtype=np.int32), "batch\\['x'\\] is int32, and was float32")])
def test_batches_of_other_keys_and_dtypes(trained, batch, message):
    step, state = trained
    state = copied(state)
    with compiles(0), pytest.raises(ValueError, match=message):
        step(state, batch)
    assert not state.step.is_deleted()


def test_batches_of_other_sizes_and_of_64_bits_are_allowed(trained):
    step, state = trained
    state = copied(state)
    for batch in (batch_of(32), {name: leaf.astype(np.float64) for name, leaf in batch_of(16).items()}):
        state, _ = step(state, batch)


def test_integers_that_jax_would_cut():
    class Ids(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(4)(nn.Embed(8, 8)(x))

    ids = {"inputs": np.arange(32).reshape(8, 4) % 4, "targets": np.zeros((8, 4), np.int64)}
    step = zero_jax.make_zero_train_step(Ids(), 3)
    state, _ = step(step.init(jax.random.key(0), ids), ids)  # negative control: 64 bits of small integers
    large = {**ids, "inputs": ids["inputs"] + 2**32}
    with pytest.raises(ValueError, match=r"from 4294967296 to 4294967299, and JAX keeps 32 bits.*below 2\*\*31"):
        step(state, large)
    assert np.array_equal(jnp.asarray(large["inputs"]), ids["inputs"])  # what JAX alone makes of it
    with pytest.raises(ValueError, match=r"from 4294967296 to 4294967299"):
        step.evaluator()(state, large)
    with pytest.raises(ValueError, match=r"batch\['targets'\] holds -100.*weights"):
        step(state, {**ids, "targets": ids["targets"] - 100})


def test_scalars_that_jax_would_cut():
    step = step_of(loss=lambda model, batch: jnp.mean((model(batch["x"]) - batch["y"]) ** 2) * batch["scale"])
    state = step.init(jax.random.key(0), batch_of(scale=1))
    for scale in (2**31 - 1, np.int64(2)):  # the control
        step.gradients(state, batch_of(scale=scale))
    assert np.asarray(jax.jit(lambda x: x)(np.int64(2**32 + 1))) == 1  # what JAX alone makes of it
    for scale in (2**31, 2**63, np.int64(2**32 + 1)):
        for method in (step, step.gradients, step.evaluator()):
            with pytest.raises(ValueError, match=f"from {scale} to {scale}, and JAX keeps 32 bits"):
                method(state, batch_of(scale=scale))


def test_microbatches_that_do_not_divide_at_a_later_step():
    step = step_of(accumulate=2)
    state, _ = step(step.init(jax.random.key(0), batch_of()), batch_of())
    with compiles(0), pytest.raises(ValueError, match="24 does not divide into 2 microbatches"):
        step(state, batch_of(24))
    step(state, batch_of(32))


class NoFlax:
    """A module of another library: callable, with arrays."""

    weight = jnp.ones((8, 8))

    def __call__(self, x):
        return x @ self.weight


def failing(rngs):
    raise KeyError("of its own")


@pytest.mark.parametrize("model", [
    lambda params, x: x @ params, lambda x: x @ jnp.ones((8, 8)), lambda x: jnp.dot(x, jnp.ones((8, 8))),
    lambda x, *, train: x, NoFlax(), jnp.tanh, nn.relu, jax.jit(lambda x: x + 1)])
def test_a_model_that_is_no_flax_module(model):
    with pytest.raises(ValueError, match="neither a Flax module nor a function of rngs that makes an nnx.Module"):
        step_of(model=model)
    step_of(model=lambda rngs: nnx.Linear(8, 8, rngs=rngs))  # negative controls
    with pytest.raises(KeyError, match="of its own"):
        step_of(model=failing)


@weekly("labels", [
    lambda scores: optax.softmax_cross_entropy_with_integer_labels(scores, jnp.arange(16)).mean(),
    lambda scores: -(jnp.eye(16) * jax.nn.log_softmax(scores)).sum() / 16])
def test_a_loss_of_a_batch_that_takes_no_microbatch(labels):
    """CLIP's, whose pairs are those of the batch that its labels count."""
    def contrastive(model, batch):
        return labels(model(batch["x"]) @ batch["y"].T)

    step = step_of(loss=contrastive, accumulate=2)
    with pytest.raises(ValueError, match="not a microbatch of accumulate=2.* take sizes from the arrays"):
        step(step.init(jax.random.key(0), batch_of()), batch_of())
    step = step_of(loss=contrastive)  # negative control
    step(step.init(jax.random.key(0), batch_of()), batch_of())


def test_threads_with_one_state():
    """One of them has it, and the others are told: without a lock the process ends (SIGSEGV) within a few runs."""
    step = step_of()
    evaluate = step.evaluator()
    state = step.init(jax.random.key(0), batch_of())
    evaluate(state, batch_of())
    for _ in range(10):
        results, barrier = [], threading.Barrier(4)

        def run(kind, state=state, results=results, barrier=barrier):
            barrier.wait()
            try:
                results.append(kind(state, batch_of()))
            except ValueError as error:
                results.append(str(error))

        threads = [threading.Thread(target=run, args=(kind,)) for kind in (step, step, step, evaluate)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (taken,) = [result for result in results if isinstance(result, tuple)]
        told = [result for result in results if isinstance(result, str)]
        assert len(results) == 4 and 2 <= len(told) <= 3 and all("was donated" in text for text in told)
        state = taken[0]
