"""What training needs beside the stages: frozen parameters, averages, and every precision."""

import functools
import math

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support.covering import weekly
from support.oracle import loss_difference, param_difference, slow, train
from support.programs import SMALL, program
from support.targets import mesh_of
from support.workloads import KEY_BIAS, classify, token_batches, vector_batches

import zero_jax
from models import gpt2
from zero_jax.contract import verify as contract
from zero_jax.step import update
from zero_jax.tree import map_named, named_leaves

GPT2 = gpt2.Config(2, 32, 2, vocab_size=64, max_length=16)
TOKENS, VECTORS = token_batches(4), vector_batches(5, size=16)


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8)(nn.relu(nn.LayerNorm()(nn.Dense(64)(x))))


@functools.cache
def gpt2_frozen(stage, num_devices, precision):
    return train(gpt2.build(GPT2), stage, num_devices, batches=TOKENS, frozen=("wte", "blocks/.*kernel"),
                 precision=precision)


class TestFrozen:
    """No gradient, no optimizer state and no reduction for what is not trained."""

    @pytest.mark.grid
    @pytest.mark.parametrize("stage, precision", [slow(1, "fp32"), slow(3, "fp32"), slow(1, "bf16"), slow(3, "bf16")])
    def test_it_stays_and_the_rest_is_one_device(self, stage, precision):
        one, many = gpt2_frozen(0, 1, precision), gpt2_frozen(stage, 8, precision)
        assert loss_difference(many, one) < (1e-6 if precision == "fp32" else 4e-3)
        assert param_difference(many, one, KEY_BIAS) < (1e-5 if precision == "fp32" else 8e-3)
        trained = {name for name, _ in named_leaves(many.state.params)}
        assert trained and not [name for name in trained if "wte" in name or "kernel" in name]
        start = many.step.init(jax.random.key(0), TOKENS[0])
        chex.assert_trees_all_equal(start.frozen, many.state.frozen)
        chex.assert_type(jax.tree.leaves(many.state.frozen), jnp.float32 if precision == "fp32" else jnp.bfloat16)
        assert all("wte" in name or "kernel" in name for name, _ in named_leaves(many.state.frozen))
        moments = {name.split("mu/")[-1] for name, _ in named_leaves(many.state.opt_state) if "mu/" in name}
        assert moments == trained

    @pytest.mark.slow
    def test_all_parameters_trained_is_another_run(self):
        """Negative control."""
        everything = train(gpt2.build(GPT2), 3, 8, batches=TOKENS, precision="fp32")
        assert loss_difference(gpt2_frozen(3, 8, "fp32"), everything) > 1e-5

    @pytest.mark.grid
    @pytest.mark.parametrize("stage", [slow(2), slow(3)])
    def test_nothing_is_reduced_for_it(self, stage):
        trained, frozen = program(f"h100 stage {stage}"), program(f"h100 stage {stage}, frozen kernels")
        # Negative control: the promise for frozen kernels is broken by a step that trains them.
        with pytest.raises(zero_jax.ContractError, match="gradients are reduced"):
            contract.verify(trained.text, frozen.contract)
        kernels = SMALL.num_layers * 12 * SMALL.width**2 * 2 * 7 / 8
        (gathered, reduced, _), (gathered_frozen, reduced_frozen, _) = (
            [kept.communication_bytes for kept in each.verify().results]
            for each in (trained, frozen))
        assert abs((reduced - reduced_frozen) / kernels - 1) < 0.02
        if stage == 3:  # they are still read, forward and backward
            assert abs(gathered_frozen / gathered - 1) < 0.02
        else:  # and never change
            assert abs((gathered - gathered_frozen) / kernels - 1) < 0.02

    def test_lora(self):
        """Of `nnx.LoRA`, the two small matrices are trained, and the base is not."""

        class Net(nnx.Module):
            def __init__(self, rngs):
                self.first = nnx.LoRALinear(16, 64, lora_rank=4, rngs=rngs)
                self.last = nnx.LoRALinear(64, 8, lora_rank=4, rngs=rngs)

            def __call__(self, x):
                return self.last(nnx.relu(self.first(x)))

        options = {"batches": VECTORS, "loss": classify, "frozen": ("kernel", "bias"), "optimizer": optax.adam(1e-2)}
        one, many = train(Net, 0, 1, **options), train(Net, 3, 8, **options)
        assert loss_difference(many, one) < 1e-6 and param_difference(many, one) < 1e-5
        trained = {name.rsplit("/", 1)[-1] for name, _ in named_leaves(many.state.params)}
        assert trained == {"lora_a", "lora_b"}

    @pytest.mark.parametrize("frozen, told", [
        ("nothing_like_it", "'nothing_like_it' matches no parameter.*There are: .*wte"), (".", "nothing to train")])
    def test_patterns_that_make_no_sense(self, frozen, told):
        step = zero_jax.make_zero_train_step(gpt2.build(GPT2), 3, mesh=zero_jax.make_mesh(8), frozen=frozen)
        with pytest.raises(ValueError, match=told):
            step.layout(TOKENS[0])

    def test_a_mask_of_all_parameters_is_told(self):
        """Controls: a function in its place, and the same mask where nothing is frozen."""
        params = gpt2.build(GPT2).init(jax.random.key(0), TOKENS[0]["inputs"])["params"]
        tree = jax.tree.map(lambda leaf: leaf.ndim > 1, params)

        def layout(mask, frozen):
            zero_jax.make_zero_train_step(gpt2.build(GPT2), 3, mesh=zero_jax.make_mesh(8), frozen=frozen,
                                          optimizer=optax.adamw(1e-2, mask=mask)).layout(TOKENS[0])

        with pytest.raises(zero_jax.UsageError, match="without wte/embedding, which frozen names. Give a function"):
            layout(tree, ("wte",))
        layout(tree, ())
        layout(lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params), ("wte",))


class TestAverage:
    @weekly("stage, precision", [(3, None), (2, "bf16"), (0, None), (1, None)])
    def test_it_is_that_of_the_parameters(self, stage, precision):
        step = zero_jax.make_zero_train_step(
            Mlp(), stage, loss=classify, mesh=zero_jax.make_mesh(8), ema=0.8, precision=precision)
        state = step.init(jax.random.key(0), VECTORS[0])
        expected = {name: np.array(leaf) for name, leaf in named_leaves(state.params)}
        for batch in VECTORS:
            state, _ = step(state, batch)
            params = {name: np.asarray(leaf) for name, leaf in named_leaves(state.params)}
            expected = {name: 0.8 * expected[name] + 0.2 * leaf for name, leaf in params.items()}
        moments = dict(named_leaves(step.layout(VECTORS[0]).gradients))
        for name, leaf in named_leaves(state.ema):
            np.testing.assert_allclose(leaf, expected[name], atol=1e-6)
            assert leaf.sharding.is_equivalent_to(moments[name], leaf.ndim)
            assert np.abs(expected[name] - params[name]).max() > 1e-5  # negative control
        # and it is what the evaluator reads
        loss = step.evaluator(lambda model, batch: classify(model, batch)[0], ema=True)(state, VECTORS[0])
        tree = map_named(lambda name, leaf: jnp.asarray(expected[name]), state.params)
        plain = Mlp().apply({"params": tree}, VECTORS[0]["x"])
        plain = optax.softmax_cross_entropy_with_integer_labels(plain, VECTORS[0]["y"]).mean()
        np.testing.assert_allclose(loss, plain, rtol=1e-5 if precision is None else 2e-2)

    def test_wrong_use(self):
        with pytest.raises(ValueError, match="ema=1.5"):
            zero_jax.make_zero_train_step(Mlp(), 3, ema=1.5)
        with pytest.raises(ValueError, match="keeps no average"):
            zero_jax.make_zero_train_step(Mlp(), 3, mesh=zero_jax.make_mesh(8)).evaluator(ema=True)


@functools.cache
def gpt2_in(precision, stage, num_devices):
    return train(gpt2.build(GPT2), stage, num_devices, batches=TOKENS * 3, precision=precision,
                 optimizer=optax.adamw(3e-3, eps=1e-6))


@pytest.mark.grid
@pytest.mark.parametrize("precision", ["fp16", slow("bf16-stochastic")])
@pytest.mark.parametrize("stage", [slow(0), slow(1), slow(2), 3])
def test_every_precision_is_one_device(precision, stage):
    """Up to its own rounding, which is compared with how far the run goes."""
    one, many = gpt2_in(precision, 0, 1), gpt2_in(precision, stage, 8)
    assert many.losses[-1] < 0.97 * many.losses[0]
    assert loss_difference(many, one) < (2e-3 if precision == "fp16" else 2e-2)
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(many.state.params)}
    assert dtypes == {jnp.dtype("float32" if precision == "fp16" else "bfloat16")}


def test_stochastic_rounding_is_fair_and_exact():
    values = jnp.asarray(np.random.default_rng(0).normal(size=256) * 10.0 ** np.arange(-8, 8).repeat(16), jnp.float32)
    like = values.astype(jnp.bfloat16)
    rounded = jax.jit(jax.vmap(lambda key: update.round_stochastically(values, like, key)))(
        jax.random.split(jax.random.key(0), 4000)).astype(jnp.float32)
    unit = np.abs(np.asarray(values)) * 2.0**-7
    assert (np.abs(np.asarray(rounded) - np.asarray(values)) < unit).all()  # to one of the two neighbours
    drift = np.abs(np.asarray(rounded).mean(0) - np.asarray(values)) / unit
    assert drift.max() < 0.05
    nearest = np.asarray(like.astype(jnp.float32))  # negative control
    assert (np.abs(nearest - np.asarray(values)) / unit).max() > 0.2
    exact = jnp.asarray([1.5, -0.0, math.inf, -math.inf], jnp.float32)
    np.testing.assert_array_equal(
        update.round_stochastically(exact, exact.astype(jnp.bfloat16), jax.random.key(1)), exact.astype(jnp.bfloat16))
    assert np.isnan(update.round_stochastically(jnp.float32(np.nan), jnp.bfloat16(0), jax.random.key(1)))


def test_small_updates_are_not_lost():
    """An update of 2^-12 of the parameter: nearest loses it always (the control), at random it arrives on average."""
    policies = {"random": "bf16-stochastic", "nearest": zero_jax.Precision(params="bfloat16", compute="bfloat16")}
    moved = {}
    for name, precision in policies.items():
        class Ones(nn.Module):
            @nn.compact
            def __call__(self, x):
                return x * self.param("scale", nn.initializers.ones, (1024,))[None]

        step = zero_jax.make_zero_train_step(
            Ones(), 3, loss=lambda model, batch: model(batch["x"]).astype(jnp.float32).sum(-1).mean(),
            mesh=zero_jax.make_mesh(8), precision=precision, optimizer=optax.sgd(2.0**-12))
        batch = {"x": np.ones((8, 1024), np.float32)}
        state = step.init(jax.random.key(0), batch)
        for _ in range(16):
            state, _ = step(state, batch)
        moved[name] = 1 - float(state.params["scale"].astype(jnp.float32).mean())
    assert moved["nearest"] == 0
    assert abs(moved["random"] / (16 * 2.0**-12) - 1) < 0.15


def test_parameters_that_stay_float32_by_rule():
    rule = zero_jax.Precision(params="float32", compute="bfloat16", keep=("LayerNorm", "Dense_1/bias"))
    step = zero_jax.make_zero_train_step(
        Mlp(), 2, loss=classify, mesh=zero_jax.make_mesh(8), precision=rule)
    state = step.init(jax.random.key(0), VECTORS[0])
    wide = {name for name, leaf in named_leaves(state.weights) if leaf.dtype == jnp.float32}
    assert wide == {"LayerNorm_0/scale", "LayerNorm_0/bias", "Dense_1/bias"}
    at_use = zero_jax.make_zero_train_step(
        Mlp(), 3, loss=classify, mesh=zero_jax.make_mesh(8), precision=rule).layout(VECTORS[0]).uses
    assert {name for name, use in named_leaves(at_use) if use.dtype == jnp.float32} == wide
    assert len(named_leaves(at_use)) == 6
    with pytest.raises(ValueError, match="keep: 'attention' matches no parameter"):
        zero_jax.make_zero_train_step(Mlp(), 3, loss=classify, precision=zero_jax.Precision(
            compute="bfloat16", keep="attention")).layout(VECTORS[0])


@pytest.mark.parametrize("options, told", [
    ({"keep": "norm"}, "without compute"), ({"rounding": "up"}, "rounding='up'"),
    ({"params": "float32", "rounding": "stochastic"}, "params=jnp.bfloat16")])
def test_policies_that_make_no_sense(options, told):
    with pytest.raises(ValueError, match=told):
        zero_jax.Precision(**options)


def test_a_tpu_has_no_float16():
    with pytest.raises(ValueError, match="a TPU has no float16.*bf16"):
        zero_jax.make_zero_train_step(gpt2.build(GPT2), 3, mesh=mesh_of("v5e:2x4"), precision="fp16")


@pytest.mark.grid
@pytest.mark.parametrize("target, policy, dtype", [
    slow("h100", "fp16", "f16"), slow("h100", "bf16-stochastic", "bf16"), ("h100", "fp32", "f32"),
    slow("v5e", "bf16-stochastic", "bf16"), slow("v5e", "fp32", "f32")])
def test_collectives_carry_the_dtype(target, policy, dtype):
    found = program(f"{target} stage 3, {policy}")
    gather, reduce, _ = found.verify().results
    for kept in (gather, reduce):
        large = {dtype for c in kept.collectives for dtype, dims in c.shapes if math.prod(dims) >= SMALL.width**2}
        if kept is gather and dtype == "f32" and target == "v5e":
            large.discard("bf16")  # a TPU rounds what it multiplies, and XLA does so before a gather
        assert large == {dtype}
