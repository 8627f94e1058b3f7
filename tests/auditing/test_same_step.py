"""The audit's "the same at stage 3 here": of a loss that is given, and of our steps at lower stages."""

import jax
import jax.numpy as jnp
import optax
import pytest
from support.audited_steps import HIDDEN, LAYERS, ROWS, TOKENS, WHOLE, WIDTH, mesh_of_8, scanned, shape
from support.targets import target_devices

import zero_jax

PARAMS = LAYERS * 2 * WIDTH * HIDDEN


def loss(params, batch):
    """That of `scanned()`, without shardings."""
    def layer(x, w):
        return x + jax.nn.relu(x @ w["up"].astype(x.dtype)) @ w["down"].astype(x.dtype), None

    x, _ = jax.lax.scan(jax.checkpoint(layer), batch.astype(jnp.bfloat16), params)
    return (x.astype(jnp.float32) ** 2).mean()


def audited(target, **options):
    if target:
        target_devices(target)  # skips where its compiler is not installed
    step = scanned(target=target, **{name: options.pop(name) for name in ("params", "moments") if name in options})
    return zero_jax.audit(step.jitted, *step.shapes, **step.options, **options)


def test_a_given_loss_is_compiled_at_stage_3_for_the_same_target():
    """Control: the step whose state is whole holds eight times as much, and ours is the same beside it."""
    clean = audited("h100:8", loss=loss)
    sick = audited("h100:8", params=WHOLE, moments=WHOLE, loss=loss)
    for report in (clean, sick):
        ours = report.stage_3
        assert ours.to_json()["stage"] == 3 and ours.findings == ()
        assert ours.program.platform == "gpu" and ours.program.num_devices == 8
        assert ours.sent_bytes == pytest.approx(10.5 * PARAMS / 2, rel=0.01)  # 3 x 2 bytes x 7/8
        assert ours.memory()["params"] == 4 * PARAMS / 8 and ours.memory()["optimizer"] == pytest.approx(PARAMS, 1e-3)
        assert f"the same at stage 3 here: sends {ours.sent_bytes / 2**20:,.1f} MiB" in str(report)
    assert clean.sent_bytes == pytest.approx(clean.stage_3.sent_bytes, rel=0.01)
    assert sick.memory()["params"] == 8 * sick.stage_3.memory()["params"]
    assert "The same at stage 3 here" in sick.to_html()


def test_without_a_loss_nothing_is_compared():
    report = audited(None)
    assert report.stage_3 is None and report.to_json()["stage_3"] is None and "stage 3 here" not in str(report)


def test_a_step_of_ours_has_its_own_loss():
    """Control: at stage 3 there is nothing to compare."""
    def reports():
        for stage in (0, 3):
            step = zero_jax.make_zero_train_step(
                params={"w": jnp.ones((512, 512))}, stage=stage, mesh=zero_jax.make_mesh(8),
                loss=lambda params, batch: ((batch @ params["w"]) ** 2).mean())
            yield zero_jax.audit(step, jax.ShapeDtypeStruct((64, 512), jnp.float32))

    zero, three = reports()
    assert three.stage_3 is None
    assert zero.memory()["params"] == 8 * zero.stage_3.memory()["params"] == 8 * three.memory()["params"]


def test_a_batch_of_several_arguments_and_sgd():
    """The optimizer has as much state as the audited one; control: Adam's moments."""
    def same(optimizer):
        mesh = mesh_of_8()
        params = {"w": shape(mesh, (512, 512), ROWS)}
        state = jax.tree.map(lambda leaf: shape(mesh, leaf.shape, ROWS if leaf.ndim else WHOLE, leaf.dtype),
                             jax.eval_shape(optimizer.init, params))

        def step(params, opt_state, x, y):
            value, grads = jax.value_and_grad(of)(params, x, y)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, value

        batch = shape(mesh, (TOKENS // 1024, 512), jax.sharding.PartitionSpec("data"))
        return zero_jax.audit(jax.jit(step, donate_argnums=(0, 1)), params, state, batch, batch, loss=of).stage_3

    def of(params, x, y):
        return ((x @ params["w"] - y) ** 2).mean()

    assert same(optax.sgd(0.1)).memory().get("optimizer", 0) < 100
    assert same(optax.adam(0.1)).memory()["optimizer"] == pytest.approx(2 * 4 * 512 * 512 / 8, abs=16)


def test_parameters_in_several_arguments_are_refused():
    mesh = mesh_of_8()
    weights = shape(mesh, (512, 512), ROWS)

    def step(a, b, x):
        grads = jax.grad(lambda a, b: ((x @ a @ b) ** 2).mean(), (0, 1))(a, b)
        return a - grads[0], b - grads[1], x.sum()

    with pytest.raises(zero_jax.UsageError, match="the parameters are 2 arguments"):
        zero_jax.audit(jax.jit(step), weights, weights, shape(mesh, (64, 512)), loss=loss,
                       params=lambda label: label in "ab")
