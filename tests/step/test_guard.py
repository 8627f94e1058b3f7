"""Bad steps: one decision for all devices, and a state that is bit for bit as if the batch had not been."""

import dataclasses
import functools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.covering import weekly

import zero_jax
from zero_jax.precision import LossScale
from zero_jax.step.guard import Guard, GuardLogic

SKIP = 2
GUARD = Guard(skip=SKIP)
DEVICE = 5
"""Whose rows are poisoned where one device alone sees a bad value."""


@jax.custom_vjp
def spoil_gradient(x, poison):
    return x


spoil_gradient.defvjp(lambda x, poison: (x, poison),
                      lambda poison, cotangent: (cotangent + poison.astype(cotangent.dtype), jnp.zeros_like(poison)))


class Net(nn.Module):
    """Whose second kernel gets a gradient of the batch's choice; with batch statistics."""

    @nn.compact
    def __call__(self, x, poison):
        x = nn.Dense(16)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=False)(x))
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (16, 8))
        return x @ spoil_gradient(kernel, poison)


def loss_of(model, batch):
    logits = model(batch["x"], batch["leaf"].max()).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]) + batch["loss"]
    return losses.mean()


def batch_of(number, place=None, value=0.0):
    rng = np.random.default_rng(number)
    batch = {"x": rng.normal(size=(16, 8)), "y": rng.integers(0, 8, 16), "loss": np.zeros(16), "leaf": np.zeros(16)}
    if place == "loss":
        batch["loss"] += value
    elif place == "one device":
        batch["loss"][2 * DEVICE] = value
    elif place == "one leaf":
        batch["leaf"] += value
    return {name: leaf.astype(np.int32 if name == "y" else np.float32) for name, leaf in batch.items()}


@functools.cache
def step_of(precision="fp16", guard=GUARD, ema=0.9, stage=3):
    return zero_jax.make_zero_train_step(
        Net(), stage, loss=loss_of, mesh=zero_jax.make_mesh(8), precision=precision, guard=guard, ema=ema,
        optimizer=optax.adamw(1e-2))


@functools.cache
def initial(step):
    return step.init(jax.random.key(0), batch_of(0))


def fresh(step):
    """A copy, since steps donate what they are given."""
    return jax.tree.map(jnp.copy, initial(step))


def copied(state):
    """As numpy arrays, all but what remembers bad steps."""
    state = dataclasses.replace(state, guard=None, rng=jax.random.key_data(state.rng))
    return [np.array(leaf) for leaf in jax.tree.leaves(state)]


def same(left, right):
    return all(a.tobytes() == b.tobytes() for a, b in zip(left, right, strict=True))


def agree(*leaves):
    """Whether every device holds the same of what all should."""
    return all(np.array_equal(shard.data, leaf.addressable_shards[0].data, equal_nan=True)
               for leaf in leaves for shard in leaf.addressable_shards)


WHEN = {"first step": (0, 1), "step k": (3, 1), "k in a row": (2, SKIP), "k + 1 in a row": (2, SKIP + 1)}


@pytest.mark.parametrize("when", WHEN)
@weekly("value", [np.nan, np.inf])
@pytest.mark.parametrize("place", ["loss", "one leaf", "one device"])
def test_overflow_walk(place, value, when):
    step = step_of()
    (before, bad), state = WHEN[when], fresh(step)
    for number in range(before):
        state, metrics = step(state, batch_of(number))
        assert not metrics["bad"]
    kept, scale = copied(state), float(state.guard.scale)
    for number in range(bad):
        state, metrics = step(state, batch_of(100 + number, place, value))
        assert metrics["bad"] == metrics["skipped"] == number + 1
        assert agree(*jax.tree.leaves(state.guard), *metrics.values())
        assert same(copied(state), kept)
        assert state.guard.scale == scale / 2 ** (number + 1)
        assert bool(metrics["stopped"]) == (number == SKIP)
    if bad > SKIP:
        with pytest.raises(zero_jax.BadStepError, match="more than the guard skips.*forgive"):
            step.check()
        state, metrics = step(state, batch_of(before))  # a good batch is not taken either, until forgiven
        assert same(copied(state), kept) and metrics["stopped"]
        with pytest.raises(zero_jax.BadStepError):
            step.check()
        state = step.forgive(state)
    state, metrics = step(state, batch_of(before))
    step.check()
    assert not metrics["bad"] and not same(copied(state), kept)
    # As if the bad batches had not been; the scale is another, a power of two, and its rounding is none.
    clean = fresh(step)
    for number in range(before + 1):
        clean, _ = step(clean, batch_of(number))
    chex.assert_trees_all_close(copied(state), copied(clean), rtol=2e-3, atol=2e-3)


def test_without_scale_a_skipped_batch_is_as_if_it_had_not_been():
    step = step_of("fp32")
    state, clean = fresh(step), fresh(step)
    for number in range(4):
        state, _ = step(state, batch_of(number))
        state, _ = step(state, batch_of(50 + number, "one device", np.nan))
        clean, _ = step(clean, batch_of(number))
    assert same(copied(state), copied(clean)) and state.guard.skipped == 4
    step.check()


def test_no_guard_lets_it_in():
    """Negative control: the same walk without a guard is in the parameters."""
    step = step_of("fp32", guard=None)
    state, _ = step(fresh(step), batch_of(0, "one leaf", np.nan))
    assert not all(np.isfinite(leaf).all() for leaf in copied(state))


class Kept(nn.Module):
    """Keeps a number of the batch as a variable, and has one kernel, whose gradient is of the batch's choice."""

    @nn.compact
    def __call__(self, batch):
        self.variable("kept", "mean", jnp.zeros, ()).value = batch["kept"].mean()
        kernel = self.param("kernel", nn.initializers.ones, (16, 8))
        return (batch["x"] @ spoil_gradient(kernel, batch["leaf"].max())).mean()


def overflowing():
    """Keeps the gradient's third power, which overflows at 1e13, and makes updates that do so from 1e11 to 1e12."""
    def update(grads, state, params=None):
        size = jax.tree.map(jnp.abs, grads)
        return jax.tree.map(lambda grad, size: jnp.where((size > 1e11) & (size < 1e12), 1e30, 1e-3) * grad, grads,
                            size), {**state, "cubes": jax.tree.map(lambda grad: grad**3, grads)}

    return optax.GradientTransformation(lambda params: {  # a best loss that is yet to come is infinite, and may be
        "best": jnp.inf, "cubes": jax.tree.map(jnp.zeros_like, params)}, update)


def test_what_would_be_written_is_finite():
    """The loss and the gradient are, and what follows from them is not. The control: without a guard it is written."""
    batch = {"x": np.ones((16, 16), np.float32), "leaf": np.zeros(16, np.float32), "kept": np.ones(16, np.float32)}
    spoiled = {"variables": {"kept": np.full(16, np.nan, np.float32)},
               "params": {"leaf": np.full(16, 5e11, np.float32)}, "opt_state": {"leaf": np.full(16, 1e13, np.float32)}}

    def finite(state):
        return sum(np.sum(~np.isfinite(leaf)) for leaf in copied(state)) == 1  # the best loss

    for guard in (GUARD, None):
        step = zero_jax.make_zero_train_step(
            Kept(), 2, loss=lambda model, batch: model(batch), mesh=zero_jax.make_mesh(8), guard=guard,
            optimizer=overflowing())
        start, _ = step(step.init(jax.random.key(0), batch), batch)
        kept = copied(start)
        assert finite(start) and int(start.step) == 1
        for field, change in spoiled.items():
            state, metrics = step(jax.tree.map(jnp.copy, start), {**batch, **change})
            assert np.isfinite([float(metrics["loss"]), float(metrics["grad_norm"])]).all()
            if guard is None:
                assert not finite(state), field
            else:
                assert metrics["bad"] == 1 and same(copied(state), kept), field


def test_one_device_alone_would_be_told():
    """Negative control of `agree`: devices that differ."""
    mesh = zero_jax.make_mesh(8)
    rows = [jax.device_put(np.float32(i), device) for i, device in enumerate(mesh.devices.flat)]
    whole = jax.NamedSharding(mesh, jax.P())
    assert not agree(jax.make_array_from_single_device_arrays((), whole, rows))


def test_raise_names_what_was_seen_and_keeps_the_state():
    step = step_of("fp32", Guard())
    state, _ = step(fresh(step), batch_of(0))
    kept = copied(state)
    with pytest.raises(zero_jax.BadStepError, match="the loss is nan"):
        for _ in range(3):  # told at most two calls late, and what is handed in then is alive
            last = state
            state, _ = step(state, batch_of(1, "loss", np.nan))
    assert same(copied(last), kept)


def test_a_spike_is_skipped():
    step = step_of("fp32", Guard(skip=1, spike=3.0, warmup=3))
    state = fresh(step)
    state, metrics = step(state, batch_of(0, "loss", 100.0))  # not warm yet
    assert not metrics["bad"]
    state = fresh(step)
    for number in range(4):
        state, _ = step(state, batch_of(number))
    kept = copied(state)
    state, metrics = step(state, batch_of(9, "loss", 100.0))
    assert metrics["bad"] == 1 and same(copied(state), kept)
    state, metrics = step(state, batch_of(9, "loss", 1.0))
    assert not metrics["bad"] and metrics["skipped"] == 1
    step.check()


def test_an_average_below_zero_has_no_spikes():
    """Three times such an average is below it, so that every loss would be above."""
    guard = GuardLogic(Guard(spike=3.0, warmup=1), None)
    state = guard.init()
    for loss, norm in ((-2.0, 1.0), (-1.5, 1.0), (-2.5, 1.0)):
        good, state = guard.judge(state, jnp.float32(loss), jnp.float32(norm))
        assert good
    assert not guard.judge(state, jnp.float32(-2.0), jnp.float32(jnp.inf))[0]


def test_microbatches_are_skipped_together():
    step = zero_jax.make_zero_train_step(
        Net(), 2, loss=loss_of, mesh=zero_jax.make_mesh(8), precision="fp16", guard=Guard(skip=1), accumulate=2,
        optimizer=optax.adamw(1e-2))
    state = fresh(step)
    kept = copied(state)
    state, metrics = step(state, batch_of(0, "one device", np.inf))
    assert metrics["bad"] == 1 and same(copied(state), kept)
    state, metrics = step(state, batch_of(0))
    assert not metrics["bad"] and not same(copied(state), kept)


def walk(rule, finite):
    watch = GuardLogic(None, rule)
    state, scales = watch.init(), []
    for good in finite:
        _, state = watch.judge(state, jnp.float32(1.0), jnp.float32(1.0 if good else np.inf))
        scales.append(float(state.scale))
    return scales, watch.stopped(state)


def test_the_scale_grows_and_backs_off():
    rule = LossScale(initial=8.0, interval=2, smallest=2.0, largest=32.0)
    assert walk(rule, [True] * 6)[0] == [8, 16, 16, 32, 32, 32]
    assert walk(rule, [True, False, True, True, True])[0] == [8, 4, 4, 8, 8]
    scales, stopped = walk(rule, [False] * 3)
    assert scales == [4, 2, 2] and stopped
    assert not walk(rule, [False, True])[1]


def test_fp16_needs_the_scale():
    """A gradient of 1e-7 is lost in fp16, whose smallest is 6e-8, for a batch of 16; the negative control."""

    def tiny(model, batch):
        return 1e-7 * loss_of(model, batch)

    norms = {}
    for name, precision in (("bare", zero_jax.Precision(params="float32", compute="float16")), ("scaled", "fp16"),
                            ("fp32", "fp32")):
        step = zero_jax.make_zero_train_step(
            Net(), 3, loss=tiny, mesh=zero_jax.make_mesh(8), precision=precision, optimizer=optax.sgd(0.1))
        _, metrics = step(fresh(step), batch_of(0))
        norms[name] = float(metrics["grad_norm"])
    assert abs(norms["scaled"] / norms["fp32"] - 1) < 0.02
    assert abs(norms["bare"] / norms["fp32"] - 1) > 0.1


@pytest.mark.parametrize("make", [
    lambda: Guard(skip=-1), lambda: Guard(spike=0.5), lambda: Guard(decay=1.0), lambda: LossScale(initial=0.5),
    lambda: LossScale(factor=1.0), lambda: LossScale(interval=0)])
def test_rules_that_make_no_sense_are_refused(make):
    with pytest.raises(ValueError, match="give"):
        make()


@weekly("guard, precision", [
    ({"skip": 1, "spike": 2.0, "warmup": 2**40}, "fp32"), ({"skip": 2**40}, "fp32"),
    ({"skip": 1}, zero_jax.Precision(compute=jnp.float16, loss_scale=LossScale(interval=2**40)))])
def test_numbers_of_steps_above_those_that_are_counted(guard, precision):
    """Counters are int32: what none of them reaches is never reached."""
    step = step_of(precision=precision, guard=Guard(**guard))
    state = step.init(jax.random.key(0), batch_of(0))
    state, metrics = step(state, batch_of(0))
    state, metrics = step(state, batch_of(1, "loss", np.nan))
    assert metrics["skipped"] == 1 and not metrics["stopped"]
