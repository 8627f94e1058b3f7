"""Every optimizer of optax: sharded, it has the trajectory of one device and a state that stays where it is put."""

import dataclasses
import functools
import inspect
import math

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.covering import weekly
from support.oracle import loss_difference, oracle, param_difference, slow, train
from support.updates import check_same, on_one_device, on_shards
from support.workloads import classify, vector_batches

import zero_jax

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated")

RATE = 1e-2
BATCHES = vector_batches(4, size=16)
COMPILED: list[float] = []
LISTENERS: list[int] = []


@pytest.fixture(autouse=True, scope="module")
def _compilations():
    """Each of JAX's compilations is noted, by the last listener alone: a worker may come back to this module.

    Not when this file is imported: other tests clear the listeners.
    """
    number = len(LISTENERS)
    LISTENERS.append(number)
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: COMPILED.append(seconds) if (
            event.endswith("backend_compile_duration") and number == LISTENERS[-1]) else None)


def squared_gradients():
    """A diagonal of the Hessian that needs no second look at the loss, for sophia."""
    return optax.stateless_with_tree_map(lambda grad, _: grad**2)


# Those that start from a tiny rate of their own get a larger one, else nothing moves and any two runs agree.
OPTIMIZERS = {
    **{name: {"learning_rate": RATE} for name in (
        "adabelief", "adadelta", "adagrad", "adam", "adamax", "adamaxw", "adamw", "adan", "amsgrad", "fromage",
        "lamb", "lars", "lion", "nadam", "nadamw", "novograd", "optimistic_adam", "optimistic_adam_v2",
        "optimistic_gradient_descent", "radam", "rmsprop", "rprop", "sgd", "sign_sgd", "signum", "sm3", "yogi",
        "contrib.ademamix", "contrib.adopt", "contrib.cocob", "contrib.madgrad", "contrib.momo", "contrib.momo_adam",
        "contrib.muon", "contrib.schedule_free_adamw", "contrib.schedule_free_sgd")},
    "adadelta": {"learning_rate": 10.0},
    "adafactor": {"learning_rate": RATE, "min_dim_size_to_factor": 8},
    "lars": {"learning_rate": 1.0},
    "lbfgs": {"learning_rate": RATE, "linesearch": None, "memory_size": 4},
    "noisy_sgd": {"learning_rate": RATE, "key": 0},
    "polyak_sgd": {},
    "radam": {"learning_rate": 1.0},
    "contrib.acprop": {"learning_rate": RATE, "eps": 1e-2},
    "contrib.dadapt_adamw": {"learning_rate": 1.0, "estim_lr0": 1e-2},
    "contrib.dog": {"init_step": ("learning_rate", 0.1)},
    "contrib.dowg": {"init_estim_sq_dist": 0.1},
    # Of full rank it would rotate by singular vectors of rounding errors, the softmax's null direction among them.
    "contrib.galore": {"learning_rate": RATE, "rank": 4},
    "contrib.mechanize": {"base_optimizer": optax.adamw(RATE), "s_init": 1.0},
    "contrib.prodigy": {"estim_lr0": 1e-2},
    "contrib.sam": {"optimizer": optax.sgd(0.1), "adv_optimizer": optax.chain(
        optax.contrib.normalize(), optax.sgd(0.05))},
    "contrib.schedule_free": {"base_optimizer": optax.sgd(0.1), "learning_rate": 0.1},
    "contrib.simplified_ademamix": {"learning_rate": 1e-3},
    "contrib.sophia": {"learning_rate": RATE, "hessian_diagonal_fn": squared_gradients()},
}
REFUSED = {
    "lookahead": ({"fast_optimizer": optax.sgd(0.1), "sync_period": 2, "slow_step_size": 0.5},
                  "attribute 'fast'.*two sets of parameters"),
    "lbfgs": ({}, "missing 2 required keyword-only arguments: 'grad' and 'value_fn'.*linesearch=None"),
    "contrib.dpsgd": (dict(learning_rate=RATE, l2_norm_clip=1.0, noise_multiplier=0.1, seed=0),
                      "per_example.*one gradient of the whole batch"),
    "contrib.sophia": ({"learning_rate": RATE}, "obj_fn must be provided.*hessian_diagonal_fn"),
    "contrib.sam": ({"optimizer": optax.sgd(0.1), "adv_optimizer": optax.sgd(0.1), "opaque_mode": True},
                    "grad_fn must be provided.*opaque_mode=False"),
}
# What each device does alone with its elements: their rows are slow, but for AdamW's.
ELEMENTWISE = {
    "adabelief", "adadelta", "adagrad", "adam", "adamax", "adamaxw", "adan", "amsgrad", "lion", "nadam", "nadamw",
    "optimistic_adam", "optimistic_adam_v2", "optimistic_gradient_descent", "radam", "rmsprop", "rprop", "sgd",
    "sign_sgd", "signum", "yogi", "contrib.acprop", "contrib.ademamix", "contrib.adopt", "contrib.cocob",
    "contrib.madgrad", "contrib.schedule_free", "contrib.schedule_free_sgd", "contrib.simplified_ademamix",
}
# What a state cannot shard over 8 devices: a few numbers that belong to no parameter, or to a row of a small one.
WHOLE = {
    "lbfgs": {"weights_memory": 4}, "contrib.muon": {"ns_coeffs": 3},
    "contrib.mechanize": {"r": 6, "m": 6, "v": 6, "s": 6}, "sm3": {"0": 5, "1": 7},
}
# Parts that optimizers are made of, and wrappers: test_optimizers.py has some of each.
PARTS = {
    "adaptive_grad_clip", "add_decayed_weights", "add_noise", "apply_every", "apply_if_finite", "centralize", "chain",
    "clip", "clip_by_block_rms", "clip_by_global_norm", "conditionally_mask", "conditionally_transform", "ema",
    "flatten", "freeze", "identity", "keep_params_nonnegative", "masked", "measure_with_ema", "monitor",
    "multi_transform", "named_chain", "normalize_by_update_norm", "partition", "selective_transform", "set_to_zero",
    "snapshot", "stateless", "stateless_with_tree_map", "trace", "with_extra_args_support", "zero_nans",
    "contrib.differentially_private_aggregate", "contrib.hutchinson_estimator_diag_hessian", "contrib.normalize",
    "contrib.reduce_on_plateau", "contrib.split_real_and_imaginary",
}
NO_TRANSFORMS = {
    "bias_correction", "matrix_inverse_pth_root", "sigmoid_binary_cross_entropy", "update_infinity_moment",
    "update_moment", "update_moment_per_elem_norm", "contrib.schedule_free_eval_params",
}


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8, use_bias=False)(nn.relu(nn.Dense(64)(x)))


def make(name):
    module, _, function = name.rpartition(".")
    return getattr(optax.contrib if module else optax, function)(**OPTIMIZERS[name])


def may_be_transforms(module, prefix):
    """Names of functions that return a GradientTransformation, or do not say what they return."""
    for name, value in vars(module).items():
        if name.startswith("_") or not callable(value) or inspect.isclass(value):
            continue
        module_of = getattr(value, "func", value).__module__  # nadam is a partial
        if module_of.startswith("optax"):
            returned = inspect.signature(value).return_annotation
            if returned is inspect.Signature.empty or "GradientTransformation" in getattr(returned, "__name__", ""):
                yield prefix + name


def test_every_optimizer_of_optax_is_in_the_table():
    found = {*may_be_transforms(optax, ""), *may_be_transforms(optax.contrib, "contrib.")}
    parts = PARTS | NO_TRANSFORMS | {name for name in found if name.split(".")[-1].startswith("scale_by_")} | {"scale"}
    assert found - parts == OPTIMIZERS.keys() | REFUSED.keys(), "classify what optax has added: table, parts or refused"
    assert PARTS | NO_TRANSFORMS <= found


@pytest.mark.grid
@pytest.mark.parametrize(("name", "stage"), [
    *(slow(name, 3) if name in ELEMENTWISE else (name, 3) for name in OPTIMIZERS),
    *(slow(name, 1) for name in [*OPTIMIZERS][::3])])
def test_updates_are_those_of_one_device(name, stage):
    whole, sharded = on_one_device(make(name)), on_shards(make(name), stage)
    check_same(sharded, whole)
    rows = [row for row in sharded.layout.placements() if row.name.startswith("opt_state") and math.prod(row.shape) > 1]
    replicated = {row.name.split("/")[-1]: row.shape[0] for row in sharded.layout.replicated()}
    assert replicated == WHOLE.get(name, {})
    assert all(row.device_bytes * 8 == row.stored_bytes for row in rows if row.name.split("/")[-1] not in replicated)


EXTREME = ("lamb", "lars")
"""The optimizers of extreme batches, which see norms of whole layers: trained with, at every stage."""


@functools.cache
def alone(name):
    return oracle(Model(), batches=BATCHES[:2], loss=classify, optimizer=make(name))


@weekly("stage", [3, 1, 2])
@weekly("name", EXTREME)
def test_trajectory_is_one_device(name, stage):
    one = alone(name)
    many = train(Model(), stage, 8, batches=BATCHES[:2], loss=classify, optimizer=make(name))
    moved = max(float(np.max(np.abs(one.params[leaf] - one.start[leaf]))) for leaf in one.params)
    assert moved > 1e-4  # else any two runs agree
    assert loss_difference(many, one) < 2e-6
    assert param_difference(many, one) < max(3e-7, 2e-5 * moved)
    layout, before = many.step.layout(BATCHES[0]), len(COMPILED)
    state = many.state
    for batch in BATCHES[2:]:
        state, _ = many.step(state, batch)
        for leaf, declared in zip(jax.tree.leaves(state), jax.tree.leaves(layout.state), strict=True):
            assert leaf.sharding.is_equivalent_to(declared.sharding, leaf.ndim)
        chex.assert_trees_all_equal_shapes_and_dtypes(state, layout.state)
    assert len(COMPILED) == before


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_step_cannot_run_is_refused_before_it_starts(name):
    arguments, message = REFUSED[name]
    module, _, function = name.rpartition(".")
    optimizer = getattr(optax.contrib if module else optax, function)(**arguments)
    step = zero_jax.make_zero_train_step(Model(), 3, loss=classify, optimizer=optimizer)
    with pytest.raises(ValueError, match="cannot run on what a train step gives its update.*" + message):
        step.init(jax.random.key(0), BATCHES[0])


def test_an_unknown_demand_is_told_as_it_is():
    def update(updates, state, params=None, *, temperature):
        return updates, state

    optimizer = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    with pytest.raises(ValueError, match="missing 1 required keyword-only argument: 'temperature'.*Compute what it"):
        zero_jax.make_zero_train_step(Model(), 3, loss=classify, optimizer=optimizer).layout(BATCHES[0])


@pytest.mark.parametrize(("update", "message"), [
    (lambda grads, state, params=None: (grads, {"mu": state["mu"].astype(jnp.bfloat16)}),
     r"state changes in its first step: mu is float32\[8\] before and bfloat16\[8\] after"),
    (lambda grads, state, params=None: (grads, {**state, "more": state["mu"]}), "more is absent before"),
    (lambda grads, state, params=None: (jax.tree.map(lambda g: g.mean(0), grads), state), "updates of parameters"),
], ids=["dtype", "leaf", "shape"])
def test_a_state_that_changes_is_refused(update, message):
    optimizer = optax.GradientTransformation(lambda params: {"mu": jnp.zeros(8)}, update)
    with pytest.raises(ValueError, match=message):
        zero_jax.make_zero_train_step(Model(), 3, loss=classify, optimizer=optimizer).layout(BATCHES[0])


def injected(schedule):
    return optax.inject_hyperparams(lambda learning_rate: optax.adamw(learning_rate, mu_dtype=jnp.bfloat16)
                                    )(learning_rate=schedule)


def test_a_rate_in_float32_is_refused_only_where_its_updates_are_stored_in_bfloat16():
    """An injected schedule makes float32 of bfloat16 updates; with stochastic rounding the update is float32 anyway."""
    optimizer = injected(optax.linear_schedule(0.0, 1e-3, 10))
    step = zero_jax.make_zero_train_step(Model(), 3, loss=classify, optimizer=optimizer, precision="bf16-stochastic")
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(step.layout(BATCHES[0]).state.params)} == {"bfloat16"}
    nearest = zero_jax.Precision(params="bfloat16", compute="bfloat16")
    with pytest.raises(ValueError, match="is bfloat16.* before and float32.* after. Cast them to the dtype"):
        zero_jax.make_zero_train_step(Model(), 3, loss=classify, optimizer=optimizer, precision=nearest
                                      ).layout(BATCHES[0])


def test_injected_numbers_keep_their_dtype_beside_stochastic_rounding():
    """The control: in bfloat16, which an optimizer of bfloat16 parameters makes of it, b2 is 1, and AdamW gives NaN."""
    optimizer = optax.inject_hyperparams(optax.adamw)(learning_rate=RATE, b2=0.999)
    runs = [train(Model(), 3, 8, batches=BATCHES, loss=classify, optimizer=optimizer, precision=precision)
            for precision in ("fp32", "bf16-stochastic", zero_jax.Precision(params="bfloat16", rounding="nearest"))]
    assert loss_difference(runs[1], runs[0]) < 5e-3 and not np.isfinite(runs[2].losses).all()
    state = runs[1].state.opt_state
    assert float(state.hyperparams["b2"]) == np.float32(0.999)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.inner_state) if leaf.ndim} == {jnp.dtype("bfloat16")}


@pytest.mark.slow
def test_a_state_of_numbers_beside_stochastic_rounding():
    """An `init` may return numbers of Python, which have no dtype."""
    def update(grads, state, params=None):
        return jax.tree.map(lambda grad: -state["rate"] * grad, grads), {**state, "count": state["count"] + 1}

    optimizer = optax.GradientTransformation(lambda params: {"rate": 0.1, "count": 0}, update)
    step = zero_jax.make_zero_train_step(Model(), 3, loss=classify, optimizer=optimizer, precision="bf16-stochastic")
    state, _ = step(step.init(jax.random.key(0), BATCHES[0]), BATCHES[0])
    assert float(state.opt_state["rate"]) == np.float32(0.1) and int(state.opt_state["count"]) == 1


@pytest.mark.parametrize("name", ["lamb", slow("lars")])
def test_a_batch_that_grows_compiles_once_for_each_size(name):
    step = zero_jax.make_zero_train_step(Model(), 3, loss=classify, optimizer=make(name))
    one = zero_jax.make_zero_train_step(
        Model(), 0, loss=classify, optimizer=make(name), mesh=zero_jax.make_mesh(1))
    sizes = [8, 16, 32, 32, 8, 16, 8]
    batches = [vector_batches(1, size=size)[0] for size in sizes]
    state, alone = (each.init(jax.random.key(0), batches[0]) for each in (step, one))
    compiled = []
    for batch in batches:
        before = len(COMPILED)
        state, metrics = step(state, batch)
        compiled.append(len(COMPILED) - before)
        alone, expected = one(alone, batch)
        assert abs(float(metrics["loss"]) / float(expected["loss"]) - 1) < 2e-6
    assert compiled == [1, 1, 1, 0, 0, 0, 0]


def of_parts(optimizer):
    """`optimizer` as it would be on each device's part of a leaf alone."""
    def parts(tree):
        return jax.tree.map(lambda leaf: [*jnp.array_split(leaf, 8)], tree)

    def update(grads, state, params=None):
        updates, state = optimizer.update(parts(grads), state, parts(params))
        return jax.tree.map(lambda grad, part: jnp.concatenate(part), grads, updates), state

    return optax.GradientTransformation(lambda params: optimizer.init(parts(params)), update)


def test_a_trust_ratio_of_one_shard_is_caught():
    """Negative control: LAMB whose norms are of one device's part of a layer has other updates and trajectories."""
    broken = train(Model(), 3, 8, batches=BATCHES[:2], loss=classify, optimizer=of_parts(make("lamb")))
    assert param_difference(broken, alone("lamb")) > 1e-4
    parts, whole = on_one_device(of_parts(make("lamb"))), on_one_device(make("lamb"))
    with pytest.raises(AssertionError, match="not close|differ"):
        check_same(dataclasses.replace(parts, state=whole.state), whole)


def test_a_state_that_differs_is_caught():
    """Negative control: the same parameters, beside a state of which one number is off."""
    whole = on_one_device(make("adam"))
    check_same(whole, whole)
    off = {name: leaf + 1e-3 * (name == "0/mu/uneven") for name, leaf in whole.state.items()}
    with pytest.raises(AssertionError):
        check_same(dataclasses.replace(whole, state=off), whole)
