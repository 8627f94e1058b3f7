"""Losses that differentiate the model by its parameters themselves, beside a plain loop: gradient penalties, vjp."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from support.beside_plain_loop import compare, squares, up_front, vectors
from support.covering import weekly
from support.oracle import slow

import zero_jax
from zero_jax.frontends import trace_access
from zero_jax.frontends.param_flow import mark_read
from zero_jax.gather import gather

WIDTH = 67


class Linear(nnx.Module):
    def __init__(self, rngs):
        self.first, self.last = nnx.Linear(16, WIDTH, rngs=rngs), nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.tanh(self.first(x)))


def penalised(model, batch):
    """By the norm of the gradient of what it is added to."""
    value, gradient = nnx.value_and_grad(squares)(model, batch)
    return value + 0.1 * optax.tree.norm(gradient)


def penalised_examples(model, batch):
    """By the mean norm of the gradient of each example."""
    def one(model, x, y):
        return nnx.grad(squares)(model, {"x": x, "y": y})

    grads = nnx.vmap(one, in_axes=(None, 0, 0))(model, batch["x"], batch["y"])
    return squares(model, batch) + 0.01 * jnp.mean(jax.vmap(optax.tree.norm)(grads))


class Dense(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(nn.tanh(nn.Dense(WIDTH)(x)))


def derived(model, batch):
    """By the gradient at the inputs, from a function that has that of the parameters too."""
    out, pullback = nn.vjp(lambda model, x: model(x), model, batch["x"])
    _, at_inputs = pullback(jnp.ones_like(out))
    return jnp.mean((out - batch["y"]) ** 2) + jnp.mean(at_inputs**2)


class Descent(nn.Module):
    """A layer that goes down the gradient of an energy, and reads that of its parameters."""

    @nn.compact
    def __call__(self, x, _):
        energy, pullback = nn.vjp(lambda dense, x: jnp.sum(nn.tanh(dense(x))), nn.Dense(WIDTH), x)
        of_params, of_inputs = pullback(jnp.ones_like(energy))
        return x - 0.1 * of_inputs + 0.01 * sum(leaf.mean() for leaf in jax.tree.leaves(of_params)), None


class Descents(nn.Module):
    @nn.compact
    def __call__(self, x):
        layers = nn.scan(Descent, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return nn.Dense(1)(layers()(x, None)[0])


CASES = {"penalty": (Linear, penalised), "examples": (Linear, penalised_examples), "vjp": (Dense(), derived),
         "vjp in a loop": (Descents(), squares)}


@pytest.mark.grid
@pytest.mark.parametrize("stage, name", [
    row if row == (3, "penalty") else slow(*row) for row in [
        (stage, name) for name in CASES for stage in (2, 3)]])
def test_a_loss_that_differentiates_by_parameters(stage, name):
    model, loss = CASES[name]
    compare(model, stage, vectors(16)[:2], loss=loss)


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize("name", ["penalty", "vjp"])
def test_so_in_bfloat16(name):
    model, loss = CASES[name]
    if isinstance(model, nn.Module):
        compare(model, 3, vectors(16)[:2], loss=loss, precision="bf16", dtype=jnp.bfloat16, tolerance=2e-2)
    else:
        compare(model, 3, vectors(16)[:2], loss=loss, precision="bf16", tolerance=5e-2)


class Coder(nn.Module):
    """Two methods, with modules in a list."""

    def setup(self):
        self.down, self.up = [nn.Dense(WIDTH), nn.Dense(8)], nn.Dense(1)

    def encode(self, x):
        return self.down[1](nn.tanh(self.down[0](x)))

    def decode(self, z):
        return self.up(z)

    def __call__(self, x):
        return self.decode(self.encode(x))


class Scaled(nn.Module):
    """Initialised by the values that it is first called with."""

    @nn.compact
    def __call__(self, x):
        scale = self.param("scale", lambda key: 1 / x.std(0))
        return Dense()(x * scale[None])


def adapted(model, batch):
    """MAML: the loss at parameters that went a step down its gradient."""
    module, variables = model.unbind()

    def loss(params):
        return jnp.mean((module.apply({"params": params}, batch["x"]) - batch["y"]) ** 2)

    params = variables["params"]
    return loss(jax.tree.map(lambda param, grad: param - 0.1 * grad, params, jax.grad(loss)(params)))


def laplacian(model, batch):
    module, variables = model.unbind()
    hessian = jax.vmap(jax.hessian(lambda x: module.apply(variables, x[None])[0, 0]))(batch["x"])
    return jnp.mean(jnp.trace(hessian, axis1=1, axis2=2) ** 2) + squares(model, batch)


def decayed(model, batch):
    """A penalty that reads all parameters before the model is called."""
    return 1e-3 * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(model.variables["params"])) + squares(model, batch)


def decayed_kernel(model, batch):
    return 1e-3 * jnp.sum(model.variables["params"]["Dense_0"]["kernel"] ** 2) + squares(model, batch)


def relaxed(model, batch):
    """Calls the model within `lax.scan` first."""
    out, _ = jax.lax.scan(lambda x, _: (x + 0.1 * model(x), None), batch["x"], length=3)
    return jnp.mean((out - batch["y"]) ** 2)


def mapped(model, batch):
    out = jax.lax.map(lambda x: model.decode(model.encode(x)), batch["x"])
    return jnp.mean((out - batch["y"]) ** 2)


def in_parts(model, batch):
    """Calls modules within the model, under `jax.checkpoint`."""
    out = jax.checkpoint(lambda x: model.up(model.down[1](nn.tanh(model.down[0](x)))))(batch["x"])
    return jnp.mean((out - batch["y"]) ** 2)


BEFORE = {"MAML": (Dense(), adapted), "laplacian": (Dense(), laplacian), "penalty": (Dense(), decayed),
          "penalty by name": (Dense(), decayed_kernel), "scan": (Dense(), relaxed), "map": (Coder(), mapped),
          "checkpoint": (Coder(), in_parts), "values of the batch": (Scaled(), decayed)}


@pytest.mark.grid
@weekly("name", [
    name if name in ("MAML", "penalty by name", "map") else slow(name) for name in BEFORE], default=2)
def test_a_loss_that_needs_variables_before_it_calls_the_model(name):
    """It starts from what the module's own `init` makes, which another key (the control) does not."""
    model, loss = BEFORE[name]
    batches = vectors(16)[:2]
    step, _ = compare(model, 3, batches, loss=loss)
    for seed, same in ((0, True), (1, False)):
        key = jax.random.fold_in(jax.random.split(jax.random.key(seed))[0], 0)
        own = jax.tree.leaves(model.init(key, batches[0]["x"])["params"])
        found = jax.tree.leaves(step.params(step.init(jax.random.key(0), batches[0])))
        assert all(jnp.allclose(a, b, rtol=1e-6) for a, b in zip(found, own, strict=True)) == same


@pytest.mark.parametrize("loss, error, told", [
    (lambda model, batch: squares(model, {"x": batch["x"][:, :3], "y": jnp.ones((3, 4)) @ jnp.ones(3)}),
     TypeError, "dot_general"),
    (lambda model, batch: model.variables["params"]["Nowhere"].sum() + squares(model, batch), KeyError, "Nowhere"),
    (lambda model, batch: squares(model, {"x": batch["inputs"]}), ValueError, "reads batch\\['inputs'\\]")])
def test_what_is_wrong_with_a_loss_is_raised_as_it_is(loss, error, told):
    with pytest.raises(error, match=told):
        zero_jax.make_zero_train_step(Dense(), 3, loss=loss).init(jax.random.key(0), vectors(16)[0])


def test_a_derivative_by_what_has_an_adapter_is_refused():
    """It would be that of the base and of each factor, and not of the weight that the model has."""
    def step_of(name):
        return zero_jax.make_zero_train_step(zero_jax.lora(Linear, rank=1, targets=[name]), 3, loss=last_alone)

    def last_alone(model, batch):
        gradient = nnx.grad(squares, argnums=nnx.DiffState(0, nnx.PathContains("last")))(model, batch)
        return squares(model, batch) + optax.tree.norm(gradient)

    with pytest.raises(ValueError, match="differentiates the model by last/kernel, .*leave it out of the targets"):
        step_of("last/kernel").layout(vectors(16)[0])
    step_of("first/kernel").layout(vectors(16)[0])  # negative control


def test_a_read_that_is_differentiated_once_is_caught(monkeypatch):
    """Negative control: without its reads a derivative of the first one is zero."""
    monkeypatch.setattr(gather, "_READ", gather._LAST_READ)
    with pytest.raises(AssertionError):
        compare(Dense(), 3, vectors(16)[:2], loss=derived)


@pytest.mark.slow
def test_a_gradient_with_its_padding_is_caught(monkeypatch):
    """Negative control: a mean over a gradient that is stored padded, were its parameter not gathered up front."""
    step, _ = compare(Descents(), 3, vectors(16)[:1])
    assert up_front(step) == ["ScanDescent_0/Dense_0/bias"]
    monkeypatch.setattr(trace_access, "mark_read", lambda *args: mark_read(*args[:3], lambda: None))
    with pytest.raises(AssertionError):
        compare(Descents(), 3, vectors(16)[:1])
