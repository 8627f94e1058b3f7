"""Moments in 8 and 16 bits: bytes, rounding, the numbers of one device, nothing sent, and checkpoints."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from support.covering import weekly
from support.flat import flat_step
from support.oracle import by_name, loss_difference, oracle, slow, train
from support.targets import mesh_of
from support.workloads import token_batches

import zero_jax
from models import gpt2
from zero_jax.layout import make_layout
from zero_jax.optim import narrow_moments as narrow
from zero_jax.xla import hlo

pytestmark = pytest.mark.own_random  # what the controls ask was measured with JAX's own numbers
CONFIG = gpt2.Config(2, 256, 4, vocab_size=512, max_length=128)  # every leaf divides by eight
SMALL = gpt2.Config(1, 128, 2, vocab_size=131, max_length=128)  # a vocabulary that does not, and a width that does
BATCH = {name: jax.ShapeDtypeStruct((8, 16), jnp.int32) for name in ("inputs", "targets")}


def adamw(bits=32, **options):
    inner = optax.adamw(1e-3, eps=1e-6, **options)
    return inner if bits == 32 else zero_jax.narrow_moments(inner, bits)


def step_of(bits, *, config=CONFIG, stage=3, mesh=None):
    return zero_jax.make_zero_train_step(gpt2.build(config), stage, optimizer=adamw(bits), mesh=mesh)


@weekly("bits, of_large, whole", [(8, 6 + 8 / 128, 6.068), (16, 8, 8), (32, 12, 12)])
def test_bytes_of_the_state_at_stage_3(bits, of_large, whole):
    """Parameter and moments; biases and norms keep 12 bytes beside 8-bit moments. `whole`: of GPT-2 of 124M."""
    def stored(config):
        layout = step_of(bits, config=config).layout(BATCH)
        names = dict(by_name(jax.tree.map(lambda leaf: np.zeros(leaf.shape, bool), layout.state.params)))
        large = sum(leaf.size for name, leaf in names.items() if "bias" not in name and "scale" not in name)
        return layout.device_bytes * 8, large, layout.num_params

    held, large, num_params = stored(CONFIG)
    small = 8 if bits == 16 else 12
    counts = 8 * 4 * (2 + (bits != 32)) + 64  # steps on each device, twice or three times, and a key
    assert 0 <= held - (of_large * large + small * (num_params - large)) <= counts
    held, _, num_params = stored(gpt2.Config(12, 768, 12, vocab_size=50304, max_length=1024))
    assert held / num_params == pytest.approx(whole, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("bits", "bytes_per_param"), [(32, 12), (16, 8), (8, 6.087)])
def test_arguments_of_a_program_for_eight_h100(bits, bytes_per_param):
    step = step_of(bits, mesh=mesh_of("h100:8"))
    arguments = step.compile(BATCH).memory_analysis().argument_size_in_bytes - 2 * 16 * 4  # a row of both
    num_params = step.layout(BATCH).num_params
    assert arguments * 8 / num_params == pytest.approx(bytes_per_param, rel=2e-3)


def rounded(values, top, noise):
    scales = narrow._block_scales(values)
    return narrow._values(narrow._codes(values, scales, noise, top), scales, top)


def noise_of(values, number):
    return narrow._noise(values.shape, narrow._mixed(jnp.uint32(number)))


@weekly("top", [255, 127])
def test_rounding_is_to_a_neighbour_and_right_on_average(top):
    values = jnp.asarray(np.random.default_rng(0).normal(size=(300, 200)), jnp.float32)
    values = values**2 if top == 255 else values
    half = jnp.full(values.shape, 2**31, jnp.uint32)
    draws = np.stack([rounded(values, top, noise_of(values, number)) for number in range(64)])
    counted = np.abs(values) > 1e-3
    error = (draws / np.asarray(values)[None] - 1)[:, counted]
    assert np.abs(error).max() < 0.126
    assert abs(error.mean()) < 2e-4 and np.abs(error.mean(0)).max() < 0.04
    # The control: to the nearest, each number is off by the same in every draw.
    assert np.abs((rounded(values, top, half) / values - 1)[counted]).max() > 0.055


def test_what_a_code_cannot_hold():
    values = jnp.zeros((2, 256)).at[0, 0].set(1.0).at[0, 1].set(-1e-6).at[0, 200].set(-1e-6)
    noise = jnp.zeros(values.shape, jnp.uint32)
    signed, unsigned = (np.asarray(rounded(jnp.abs(values) if top == 255 else values, top, noise))
                        for top in (127, 255))
    assert signed[0, 0] == unsigned[0, 0] == 1 and not signed[1].any() and not unsigned[1].any()
    assert signed[0, 1] == 0 and signed[0, 200] == np.float32(-1e-6)  # of another block, whose largest it is
    tiny = rounded(jnp.zeros((1, 128)).at[0, 0].set(1.0).at[0, 1].set(1e-20), 255, noise[:1, :128])[0, 1]
    assert 0 < tiny < 1e-9  # Adam divides by its root
    nan = rounded(values.at[0, 5].set(jnp.nan), 127, noise)
    assert np.isnan(nan[0, :128]).all() and not np.isnan(nan[1]).any()  # which the guard finds in the scales


@pytest.mark.parametrize("bits", [16, 8])
def test_what_changes_by_less_than_a_code_changes_on_average(bits):
    """A second moment that no gradient feeds halves in 700 steps of 0.1 %; the control: to the nearest it stays."""
    start = jnp.asarray(np.random.default_rng(1).uniform(0.5, 1, (128, 128)), jnp.float32)

    def decayed(noise):
        def one(number, values):
            new = values * 0.999
            return narrow.to_bfloat16(new, noise(number) >> 16).astype(jnp.float32) if bits == 16 else (
                rounded(new, 255, noise(number)))

        return float(jnp.mean(jax.lax.fori_loop(0, 700, one, start)) / jnp.mean(start))

    assert decayed(lambda number: noise_of(start, number)) == pytest.approx(0.999**700, rel=0.02)
    if bits == 16:
        assert decayed(lambda number: jnp.full(start.shape, 2**31, jnp.uint32)) > 0.95
    else:  # the largest of each block is its scale, and the others stay at their codes below it
        kept = rounded(start, 255, jnp.full(start.shape, 2**31, jnp.uint32))
        assert float(jnp.mean(rounded(kept * 0.999, 255, jnp.full(start.shape, 2**31, jnp.uint32)) / kept)) > 0.9985


@pytest.mark.parametrize("bits", [16, 8])
def test_what_is_no_moment_may_be_a_plain_number(bits):
    """Of an optimizer's own state; the control is the moment with it, which is narrowed."""
    optimizer = optax.GradientTransformation(
        lambda params: {"mu": params, "rate": 0.5}, lambda updates, state, params=None: (updates, state))
    params = {"w": jnp.ones((256, 256))}
    narrowed = zero_jax.narrow_moments(optimizer, bits)
    _, state = narrowed.update(params, narrowed.init(params), params)
    assert state.inner["rate"] == 0.5 and state.inner["mu"]["w"].dtype == {16: jnp.bfloat16, 8: jnp.uint8}[bits]


@functools.cache
def alone(bits):
    return oracle(gpt2.build(SMALL), batches=token_batches(8), optimizer=adamw(bits))


@pytest.mark.grid
@weekly("bits, stage, devices", [
    (16, 3, 8), (8, 3, 8), slow(8, 0, 8), slow(8, 1, 8), slow(8, 2, 2), slow(16, 2, 8)])
def test_trajectory_is_one_device(bits, stage, devices):
    many = train(gpt2.build(SMALL), stage, devices, batches=token_batches(8), optimizer=adamw(bits))
    assert loss_difference(many, alone(bits)) < 1e-6
    assert loss_difference(alone(bits), alone(32)) > 1e-5  # the control: it would not pass for another rounding


def test_noise_is_that_of_one_device():
    """Codes after a step on eight devices, of padded and sharded leaves, are those on one, but for gradients' bits."""
    def codes(stage, devices):
        run = train(gpt2.build(SMALL), stage, devices, batches=token_batches(1), optimizer=adamw(8))
        views = run.step.layout(token_batches(1)[0]).stored_shapes.opt_state
        return {name: view.load(leaf) for (name, leaf), view in zip(
            by_name(run.state.opt_state).items(), jax.tree.leaves(views), strict=True) if leaf.dtype == np.uint8}

    many, one = codes(3, 8), codes(0, 1)
    assert len(one) == 12 and {leaf.shape for leaf in one.values()} >= {(131, 128), (1, 128, 512)}
    for name, leaf in one.items():
        assert np.mean(many[name] != leaf) < 2e-3, name
        assert np.mean((np.roll(many[name], 1, -1) != leaf)[leaf > 0]) > 0.5, name  # the control: other places


@functools.cache
def text_of(bits, config, target):
    return step_of(bits, config=config, mesh=mesh_of(target)).compile(BATCH).as_text()


def reduced(text):
    return hlo.communication_bytes(text, kinds=["all-reduce"])


@pytest.mark.parametrize("target", ["cpu", slow("h100:8")])
def test_nothing_is_sent_for_blocks(target, monkeypatch):
    assert reduced(text_of(8, SMALL, target)) == reduced(text_of(32, SMALL, target))
    # The control: an embedding that is sharded over its last dim has blocks on several devices, which they compare.
    monkeypatch.setattr(make_layout, "BLOCK_SCALES", "none")
    assert reduced(text_of.__wrapped__(8, SMALL, target)) > reduced(text_of(32, SMALL, target)) + 1000


@pytest.mark.slow
@pytest.mark.parametrize("target", ["cpu", "h100:8"])
def test_nothing_more_is_sent_where_dims_divide(target):
    assert hlo.communication_bytes(text_of(8, CONFIG, target)) == hlo.communication_bytes(text_of(32, CONFIG, target))


@pytest.mark.slow
@weekly("inner, codes", [
    (optax.lion(1e-3), 6),
    (optax.chain(optax.clip_by_global_norm(1.0), optax.inject_hyperparams(optax.adamw)(1e-3)), 12),
    (optax.masked(optax.adam(1e-3), lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 2, tree)), 8)],
    ids=["lion", "injected", "masked"])
def test_other_optimizers(inner, codes):
    step = zero_jax.make_zero_train_step(gpt2.build(SMALL), 3, optimizer=zero_jax.narrow_moments(inner, 8))
    layout = step.layout(BATCH)
    assert sum(leaf.dtype == jnp.uint8 for leaf in jax.tree.leaves(layout.state.opt_state)) == codes
    state, metrics = step(step.init(jax.random.key(0), token_batches(1)[0]), token_batches(1)[0])
    assert np.isfinite(metrics["loss"]) and ("learning_rate" in metrics) == (codes == 12)


def test_other_numbers_of_bits_are_refused():
    with pytest.raises(ValueError, match=r"narrow_moments\(bits=4\): give 8 .* or 16"):
        zero_jax.narrow_moments(optax.adamw(1e-3), 4)


@pytest.mark.parametrize("bits, inner, words", [
    (16, optax.sgd(0.1), "changes: leave it out"), (8, optax.adam(0.1), "at least 128 rows of 32: give 16 bits, or")])
def test_an_optimizer_without_such_moments_is_refused(bits, inner, words):
    params = {"kernel": jnp.zeros((64, 64))}
    with pytest.raises(ValueError, match=words):
        zero_jax.narrow_moments(inner, bits).init(params)
    zero_jax.narrow_moments(optax.adam(0.1), bits).init({"kernel": jnp.zeros((128, 64))})  # the control


def test_a_last_dim_that_tensor_parallelism_splits_is_refused_with_8_bits():
    def layout(bits, *spec):
        return flat_step(
            gpt2.build(CONFIG), 3, optimizer=adamw(bits), mesh=zero_jax.make_mesh(4, tensor=2),
            tensor_rules=[("up/kernel", P(*spec))]).layout(BATCH)

    with pytest.raises(ValueError, match="blocks/up/kernel has moments.*'tensor' splits: give narrow_moments"):
        layout(8, None, None, "tensor")
    assert layout(8, None, "tensor", None).device_bytes < layout(16, None, None, "tensor").device_bytes  # the controls


@pytest.mark.slow
def test_checkpoints_are_resharded(tmp_path):
    batches = token_batches(3)
    run = train(gpt2.build(SMALL), 3, 8, batches=batches, optimizer=adamw(8))
    zero_jax.Checkpoints(tmp_path).save(run.step, run.state, at=3, wait=True)
    other = zero_jax.make_zero_train_step(gpt2.build(SMALL), 1, optimizer=adamw(8), mesh=zero_jax.make_mesh(2))
    restored = zero_jax.Checkpoints(tmp_path).restore(other, batches[0]).state

    def true(step, state):
        return [view.load(np.asarray(leaf)) for view, leaf in zip(
            jax.tree.leaves(step.layout(batches[0]).stored_shapes.opt_state), jax.tree.leaves(state.opt_state),
            strict=True)]

    saved, found = true(run.step, run.state), true(other, restored)
    new = true(other, other.init(jax.random.key(0), batches[0]))
    assert any(leaf.dtype == np.uint8 and leaf.any() for leaf in saved)
    assert any(not np.array_equal(left, right) for left, right in zip(saved, new, strict=True))  # the control
    for left, right in zip(saved, found, strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.mark.grid
@pytest.mark.slow
def test_loss_is_that_of_float32_moments():
    """The mean of the last ten of 60 losses, of three seeds; the control: a rate that is a tenth lower."""
    batches = token_batches(60)

    def last(optimizer):
        step = zero_jax.make_zero_train_step(gpt2.build(SMALL), 3, optimizer=optimizer)
        found = []
        for seed in range(3):
            state, losses = step.init(jax.random.key(seed), batches[0]), []
            for batch in batches:
                state, metrics = step(state, batch)
                losses.append(float(metrics["loss"]))
            found.append(np.mean(losses[-10:]))
        return np.array(found)

    wide = last(adamw(32))
    assert np.abs(last(adamw(16)) - wide).max() < 0.001
    assert np.abs(last(adamw(8)) - wide).max() < 0.005
    assert np.abs(last(optax.adamw(9e-4, eps=1e-6)) - wide).min() > 0.05
