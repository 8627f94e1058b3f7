"""No gathered parameter passes from forward to backward, whatever a model does with it; the gradient stays the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import zero_jax
from zero_jax.gather.gather import ParamUse
from zero_jax.jaxpr.equations import is_literal, trace
from zero_jax.jaxpr.passes import with_jaxpr_passes
from zero_jax.sharding.mesh_axes import MeshAxes
from zero_jax.sharding.stored_shape import identity_shape
from zero_jax.transforms.gather_again import gather_again, is_backward_barrier, value_and_grad

W, X = jax.random.normal(jax.random.key(0), (16, 16)), jax.random.normal(jax.random.key(1), (3, 16))


@jax.custom_vjp
def product(x, w):
    return x @ w


product.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, ct: (ct @ kept[1].T, kept[0].T @ ct))

PROGRAMS = {
    "product": lambda x, w: x @ w,
    "derived": lambda x, w: x @ (w / jnp.linalg.norm(w)).T,
    "call": lambda x, w: jax.jit(lambda x, w: jnp.tanh(x @ jnp.sin(w)))(x, w),
    "branch": lambda x, w: jax.lax.cond(x.sum() > 0, lambda x, w: x @ jnp.sin(w), lambda x, w: x * w[:1], x, w),
    "switch": lambda x, w: jax.lax.switch(2, [lambda x, w: x, lambda x, w: x @ w, lambda x, w: jnp.cos(x) @ w.T], x, w),
    "loop": lambda x, w: jax.lax.scan(lambda h, _: (jnp.tanh(h @ w.T), None), x, None, 3)[0],
    "scanned": lambda x, w: jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, jnp.stack([w, 2 * w]))[0],
    "checkpoint": lambda x, w: jax.checkpoint(lambda x, w: jnp.tanh(x @ w))(x, w),
    "custom_vjp": product,
    "vmap": lambda x, w: jax.vmap(jnp.dot, (0, None))(x, w),
}


def loss(program):
    """Of a model that reads `w` as a step does, twice."""
    use = ParamUse(MeshAxes.of(zero_jax.make_mesh(8)), P("data"), P("data"), jnp.dtype("float32"), jnp.dtype("float32"),
                   identity_shape(W.shape))

    def fun(w, x):
        gathered = use.gather(w)
        x = PROGRAMS[program](x, use.read(*gathered))
        x = jnp.sin(x) @ use.read(*gathered)
        return x.mean(), x

    return fun


def saved_weights(fun):
    """Operands of the barrier between forward and backward that are as large as the weight, and not what is stored."""
    jaxpr = trace(fun, W, X).jaxpr
    (barrier,) = [eqn for eqn in jaxpr.eqns if is_backward_barrier(eqn)]
    return [atom for atom in barrier.invars
            if not is_literal(atom) and atom not in jaxpr.invars and atom.aval.size >= W.size]


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_gathered_parameter_is_saved(program):
    plain = value_and_grad(loss(program), argnums=(0,), barrier=True)
    assert saved_weights(plain), "the control: without the pass some are"
    assert not saved_weights(with_jaxpr_passes(plain, gather_again))


def test_gradients_are_those_of_the_plain_programs():
    def plain_loss(program):
        return lambda w: (jnp.sin(PROGRAMS[program](X, w)) @ w).mean()

    def gradients(w, x):
        edited = {program: with_jaxpr_passes(value_and_grad(loss(program), argnums=(0,), barrier=True), gather_again)
                  for program in PROGRAMS}
        return {program: fun(w, x)[1][0] for program, fun in edited.items()}

    expected = jax.jit(lambda w: {program: jax.grad(plain_loss(program))(w) for program in PROGRAMS})(W)
    jax.tree.map(lambda grad, like: np.testing.assert_allclose(grad, like, rtol=1e-5, atol=1e-6),
                 jax.jit(gradients)(W, X), expected)
    assert not np.allclose(expected["product"], expected["derived"], rtol=1e-3)
