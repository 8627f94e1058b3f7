"""Functions of parameters: adapters, variables beside the parameters, checkpoints, plans and DiLoCo."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from frontends.test_functional import BATCHES, OPTIMIZER, loss, make, plain
from support.covering import weekly
from support.normed_net import losses_of

import zero_jax
from zero_jax.contract.verify import check
from zero_jax.planning.plan import examine
from zero_jax.tree import merge


def with_adapters(base, adapters):
    """The parameters of `make` with W + A B in the place of the stacked layers' weight and of the output's."""
    out = dataclasses.replace(base["out"][0], weight=base["out"][0].weight + adapters["out"][0] @ adapters["out"][1])
    layers = dataclasses.replace(base["layers"][0], weight=base["layers"][0].weight
                                 + adapters["layers"][0] @ adapters["layers"][1])
    return {**base, "layers": [layers], "out": (out, base["out"][1])}


@weekly("stage, options", [(3, {"accumulate": 2}), (3, {}), (2, {}), (0, {})], ids=str)
def test_adapters_by_rule_have_the_numbers_of_a_plain_loop_over_them(stage, options):
    """Control: the loop over all parameters has others, and the base does not change."""
    base = make(jax.random.key(1))
    step = zero_jax.make_zero_train_step(params=zero_jax.lora(base, 4, "all-linear"), loss=loss, stage=stage,
                                         optimizer=OPTIMIZER, **options)
    state = step.init(jax.random.key(0), BATCHES[0])
    stored = step.params(state)
    adapters = {"layers": tuple(stored["layers"]["0"][f"weight_lora_{side}"] for side in "ab"),
                "out": tuple(stored["out"]["0"][f"weight_lora_{side}"] for side in "ab")}
    assert adapters["layers"][0].shape == (4, 32, 4) and adapters["out"][1].shape == (4, 64)
    wanted, losses = plain(adapters, BATCHES, lambda adapters, batch: loss(with_adapters(base, adapters), batch))
    found, state = losses_of(step, state, BATCHES)
    np.testing.assert_allclose(found, losses, rtol=5e-6)
    assert not np.allclose(plain(base, BATCHES)[1], losses, rtol=1e-3)
    merged = zero_jax.merge_lora(step, state)
    assert jax.tree.structure(merged) == jax.tree.structure(base)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=5e-5), merged,
                 with_adapters(base, wanted))
    np.testing.assert_array_equal(merged["embed"], base["embed"])
    if stage == 3 and not options:
        assert step.layout().reads["layers/0/weight_lora_a"].stacked == (0,)
        step.verify(BATCHES[0])


@pytest.mark.slow
def test_a_quantised_base_and_adapters_with_dropout():
    """Control: without dropout two steps from one state on one batch have the same loss."""
    def run(**options):
        step = zero_jax.make_zero_train_step(params=zero_jax.lora(make, 4, ("layers/0/weight",), **options), loss=loss,
                                             stage=3, optimizer=optax.sgd(0.0))
        state = step.init(jax.random.key(0), BATCHES[0])
        return step, losses_of(step, state, BATCHES[:1] * 2)[0]

    step, one = run(base="int8")
    assert "layers/0/weight_codes" in step.layout().reads and one[0] == pytest.approx(run()[1][0], rel=2e-3)
    # B is zero at the start, so that dropout shows where it is not.
    base = make(jax.random.key(1))
    for dropout in (0.0, 0.5):
        step = zero_jax.make_zero_train_step(params=zero_jax.lora(base, 4, "all-linear", dropout=dropout), loss=loss,
                                             stage=3, optimizer=optax.sgd(1.0))
        _, state = losses_of(step, step.init(jax.random.key(0), BATCHES[0]), BATCHES[:2])
        step = zero_jax.make_zero_train_step(params=zero_jax.lora(base, 4, "all-linear", dropout=dropout), loss=loss,
                                             stage=3, optimizer=optax.sgd(0.0))
        moved = jax.device_get(merge(state.params, state.frozen))
        losses, _ = losses_of(step, step.with_params(step.init(jax.random.key(0), BATCHES[0]), moved), BATCHES[:1] * 2)
        assert (losses[0] == losses[1]) == (dropout == 0.0)


def normalised(params, variables, batch):
    """Batch normalisation with a running mean: returns (loss, new variables)."""
    x = params["embed"][batch["inputs"]]
    mean = x.mean((0, 1))
    new = {"norm": {"mean": 0.9 * variables["norm"]["mean"] + 0.1 * mean, "count": variables["norm"]["count"] + 1}}
    logits = (x - mean[None, None]) @ params["out"] + jnp.sum(0.01 * variables["norm"]["mean"])
    value = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()
    return (value, {"seen": new["norm"]["count"]}), new


def variables_of(rng=None):
    return {"norm": {"mean": jnp.zeros(32), "count": jnp.zeros((), jnp.int32)}}


@weekly("stage", [3, 0])
@pytest.mark.parametrize("given", [variables_of, variables_of()], ids=["made", "values"])
def test_variables_are_handed_on(stage, given):
    """Control: the same loop, whose variables stay as they were."""
    params = {"embed": make(jax.random.key(1))["embed"], "out": make(jax.random.key(1))["out"][0].weight}
    variables, opt_state, losses = variables_of(), OPTIMIZER.init(params), []
    start = params
    for batch in BATCHES:
        (value, ((_, seen), variables)), grads = jax.value_and_grad(
            lambda p: (lambda out: (out[0][0], out))(normalised(p, variables, batch)), has_aux=True)(params)  # noqa: B023
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        params, losses = optax.apply_updates(params, updates), [*losses, float(value)]
    step = zero_jax.make_zero_train_step(params=start, variables=given, loss=normalised, stage=stage,
                                         optimizer=OPTIMIZER)
    found, state = losses_of(step, step.init(jax.random.key(0), BATCHES[0]), BATCHES)
    np.testing.assert_allclose(found, losses, rtol=5e-6)
    np.testing.assert_allclose(state.variables["norm"]["mean"], variables["norm"]["mean"], rtol=2e-5, atol=1e-7)
    assert int(state.variables["norm"]["count"]) == len(BATCHES) == int(seen["seen"])
    assert float(jnp.abs(state.variables["norm"]["mean"]).max()) > 1e-4  # and not as they were
    value = step.evaluator(lambda model, batch: model.variables["norm"]["count"] + 0 * model.params["out"].sum())(
        state, BATCHES[0])
    assert value == len(BATCHES)


@pytest.mark.parametrize("changes, message", [
    ({"loss": lambda params, batch: 0.0}, r"called as loss\(params, variables, batch\)"),
    ({"variables": jnp.zeros(3)}, "give a dict of arrays"),
    ({"variables": {"a": jax.ShapeDtypeStruct((3,), jnp.float32)}}, "give a dict of arrays"),
    ({"loss": lambda params, variables, batch: params["w"].sum()}, "returned no pair"),
    ({"loss": lambda params, variables, batch: (params["w"].sum(), {})}, "other variables than it got"),
])
def test_variables_that_are_not_are_refused(changes, message):
    arguments = {"params": {"w": jnp.ones(8)}, "variables": {"a": jnp.zeros(3)}, "stage": 3,
                 "loss": lambda params, variables, batch: (params["w"].sum(), variables)}
    with pytest.raises(zero_jax.UsageError, match=message):
        zero_jax.make_zero_train_step(**(arguments | changes)).init(jax.random.key(0), BATCHES[0])
    zero_jax.make_zero_train_step(**arguments).init(jax.random.key(0), BATCHES[0])


def test_an_error_of_a_function_is_its_own():
    """Control: the same error of a Flax model's loss is explained as one of a model that is called with parameters."""
    def wrong(params, batch):
        return params["w"].sum() + None

    with pytest.raises(TypeError) as raised:
        zero_jax.make_zero_train_step(params={"w": jnp.ones(8)}, loss=wrong).init(jax.random.key(0), BATCHES[0])
    assert "NoneType" in str(raised.value)
    with pytest.raises(zero_jax.UsageError, match="and not as loss"):
        zero_jax.make_zero_train_step(nn.Dense(4), loss=wrong).init(jax.random.key(0), BATCHES[0])


def test_checkpoints_hold_parameters_and_variables(tmp_path):
    """Control: a state that took another step."""
    def new():
        return zero_jax.make_zero_train_step(
            params={"embed": make(jax.random.key(1))["embed"], "out": jnp.ones((32, 64))}, variables=variables_of,
            loss=normalised, stage=3, optimizer=OPTIMIZER)

    step = new()
    _, state = losses_of(step, step.init(jax.random.key(0), BATCHES[0]), BATCHES)
    with zero_jax.Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(step, state, data={"position": 3})
        other = new()
        restored = checkpoints.restore(other, BATCHES[0])
    (again, after), (want, _) = losses_of(other, restored.state, BATCHES), losses_of(step, state, BATCHES)
    assert again == want and int(after.variables["norm"]["count"]) == 6
    assert losses_of(other, after, BATCHES)[0] != want


def test_a_plan_and_a_contract_are_those_of_its_parameters():
    """Control: stage 0 holds eight times as much state."""
    def made(stage):
        return zero_jax.make_zero_train_step(params=make, loss=loss, stage=stage, optimizer=OPTIMIZER,
                                             mesh=zero_jax.make_mesh(8))

    plans = {stage: examine(made(stage), BATCHES[0]) for stage in (0, 3)}
    assert plans[3].layout.num_params == sum(leaf.size for leaf in jax.tree.leaves(make(jax.random.key(0))))
    assert plans[0].layout.device_bytes > 7 * plans[3].layout.device_bytes
    text = made(0).compiled_step(BATCHES[0]).text
    assert check(text, made(0).contract(BATCHES[0])).violations == ()
    assert check(text, made(3).contract(BATCHES[0])).violations


def test_diloco_of_functions_has_the_numbers_of_slices_that_average():
    """Control: slices that never average."""
    params, sgd = make(jax.random.key(1)), optax.sgd(0.1)
    step = zero_jax.make_zero_train_step(params=params, loss=loss, stage=3, optimizer=sgd,
                                         mesh=zero_jax.make_mesh(replica=2))
    diloco = zero_jax.make_diloco_step(step, every=2, learning_rate=1.0, momentum=0.0)
    state, found = diloco.init(jax.random.key(0), BATCHES[0]), []
    slices, losses, gradient = [params, params], [], jax.jit(jax.value_and_grad(loss))
    for number, batch in enumerate([*BATCHES, BATCHES[0]]):
        state, metrics = diloco(state, batch)
        found.append(np.asarray(metrics["loss"]))
        halves = [jax.tree.map(lambda leaf, half=half: np.split(leaf, 2)[half], batch) for half in (0, 1)]
        values, grads = zip(*map(gradient, slices, halves), strict=True)
        slices = [jax.tree.map(lambda p, g: p - 0.1 * g, *each) for each in zip(slices, grads, strict=True)]
        losses.append(values)
        if number == 1:
            apart = slices
            slices = [jax.tree.map(lambda *each: sum(each) / 2, *slices)] * 2
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    assert not np.allclose(losses[2][0], loss(apart[0], halves[0]), rtol=1e-6)
    assert jax.tree.structure(diloco.params(state)) == jax.tree.structure(params)
