"""A traced program in pieces computes what it does as one, and keeps out of memory what only loops read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zero_jax.jaxpr.cut import cut_at_loops
from zero_jax.jaxpr.equations import jaxpr_to_fun, run_eqns, trace, value_of
from zero_jax.jaxpr.primitives import call_jaxpr
from zero_jax.jaxpr.rounds import Rounds, Straight

X = jnp.linspace(0.0, 1.0, 8).reshape(2, 4)
W = jnp.linspace(-1.0, 1.0, 48).reshape(3, 4, 4)


def is_saved(aval):
    return aval.shape == (2, 4)


def run(cut, *args, given=(), kept=()):
    """What the pieces compute, one after another; saved stacks are Python lists, and all else has to be in memory."""
    jaxpr = cut.closed.jaxpr
    saved = {jaxpr.invars[number]: dict(enumerate(args[number])) for number in given}
    memory = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*cut.closed.consts, *args), strict=True))
    for number in given:
        del memory[jaxpr.invars[number]]
    for piece, last in zip(cut.pieces, cut.last_reads(), strict=True):
        inner = {var: memory[var] for var in piece.inputs}
        outs = straight(piece, inner) if isinstance(piece, Straight) else rounds(piece, inner, saved)
        memory |= dict(zip(piece.outputs, outs, strict=True))
        for var in last.difference(jaxpr.invars):
            del memory[var]
    for number in kept:
        rows = saved[cut.outvars[number]]
        memory[cut.outvars[number]] = jnp.stack([rows[index] for index in sorted(rows)])
    return [value_of(atom, memory) for atom in cut.outvars]


def straight(piece, inner):
    run_eqns(piece.eqns, inner)
    return [inner[var] for var in piece.outputs]


def rounds(piece, inner, saved):
    run_eqns(piece.before, inner)
    body, carried, made = jaxpr_to_fun(call_jaxpr(piece.eqn)), piece.scan.num_carry, {}
    carry = [value_of(atom, inner) for atom in piece.carry]
    for index in piece.order:
        outs = body(*(value_of(atom, inner) for atom in piece.consts), *carry, *piece.in_order(
            [value_of(stack, inner)[index] for stack in piece.stacks], [saved[each][index] for each in piece.fetches]))
        carry, made[index] = outs[:carried], outs[carried:]
        for stack, at in zip(piece.saves, piece.saved, strict=True):
            saved.setdefault(stack, {})[index] = made[index][at]
    parts = [piece.without_saved(made[index]) for index in sorted(made)]
    return [*carry, *(jnp.stack(each) for each in zip(*parts, strict=True))]


def layers(w, x):
    return jax.lax.scan(jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None)), x, w)[0]


def loss(w, x):
    return (layers(w, x) ** 2).sum()


def twice(w, x):
    called = jax.jit(layers)
    return (called(w, called(w, x) * 2.0) ** 2).sum()


def masked(w, x):
    mask = jnp.broadcast_to(jnp.arange(4)[None, :] < 3, (2**10, 4))

    def body(x, w):
        return jnp.tanh(x @ w) * jnp.where(mask, 1.0, 0.5)[:2], None

    return (jax.lax.scan(jax.checkpoint(body), x, w)[0] ** 2).sum()


def with_barrier(w, x):
    value, pull = jax.vjp(loss, w, x)
    pull, w = jax.lax.optimization_barrier((pull, w))
    return value, pull(1.0), w.sum()


@pytest.mark.parametrize("fun, loops, of_saved", [
    (jax.value_and_grad(loss), 2, 1), (jax.jit(jax.value_and_grad(loss)), 2, 1), (jax.value_and_grad(twice), 4, 2),
    (jax.value_and_grad(masked), 2, 1), (with_barrier, 2, 1)])
def test_pieces_compute_what_the_program_does(fun, loops, of_saved):
    closed = trace(fun, W, X)
    cut = cut_at_loops(closed, is_saved)
    found = [piece for piece in cut.pieces if isinstance(piece, Rounds)]
    assert len(found) == loops and sum(len(piece.saves) for piece in found) == of_saved
    assert sum(len(piece.fetches) for piece in found) == of_saved
    for wanted, out in zip(jaxpr_to_fun(closed)(W, X), run(cut, W, X), strict=True):
        np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-7)
    # No stack of what is saved is in memory, and no mask that layers can compute.
    given = [var.aval for piece in cut.pieces for var in (*piece.inputs, *piece.outputs)]
    assert not any(aval.shape in ((3, 2, 4), (2**10, 4)) for aval in given)


def test_what_is_not_saved():
    def read_whole(w, x):
        x, stack = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), x), x, w)
        return x, stack.sum()

    def returned(w, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), x), x, w)

    for fun in (read_whole, returned, lambda w, x: x @ w[0]):
        assert cut_at_loops(trace(fun, W, X), is_saved).pieces == ()
    assert cut_at_loops(trace(jax.value_and_grad(loss), W, X), lambda aval: False).pieces == ()


def test_what_is_small_or_made_of_much_is_given():
    def fun(w, x):
        shift = x.sum() * jnp.ones(4)  # small
        wide = jnp.tanh(jnp.ones((64, 64)) @ jnp.ones((64, 64))) + 1.0  # follows from a product

        def body(x, w):
            return jnp.tanh(x @ w) + shift[None] + (jnp.tile(x, (1, 16)) @ wide)[:, :4], None

        return (jax.lax.scan(jax.checkpoint(body), x, w)[0] ** 2).sum()

    cut = cut_at_loops(trace(jax.value_and_grad(fun), W, X), is_saved)
    shapes = {var.aval.shape for piece in cut.pieces if isinstance(piece, Rounds) for var in piece.reads}
    assert {(1, 4), (64, 64)} <= shapes


def with_norm(w, x, scale):
    """The loss, the norm of its gradient by `w`, a sum of that in another dtype, and the gradient."""
    value, grad = jax.value_and_grad(loss)(w, x)
    wide = grad.astype(jnp.bfloat16) / scale.astype(jnp.bfloat16)
    return value, jnp.sqrt(jnp.sum(grad**2 + jnp.zeros(grad.shape) ** 2)), wide.sum(), grad


def test_parameters_are_given_and_gradients_kept_layer_by_layer():
    args = W, X, jnp.float32(4.0)
    closed = trace(with_norm, *args)
    cut = cut_at_loops(closed, lambda aval: False, given=[0], kept=[3])
    forward, backward = (piece for piece in cut.pieces if isinstance(piece, Rounds))
    stacks = {var.aval.shape for var in cut.in_memory if var.aval.ndim == 3}
    assert stacks == {(3, 2, 4)}, "of activations, which here are in memory, and of no parameters or gradients"
    assert forward.fetches == backward.fetches == [closed.jaxpr.invars[0]] and backward.saves == [cut.outvars[3]]
    assert sum(var.aval.shape == (3,) for var in backward.stacked) == 2  # a sum for each layer
    for wanted, out in zip(jaxpr_to_fun(closed)(*args), run(cut, *args, given=[0], kept=[3]), strict=True):
        np.testing.assert_allclose(out, wanted, rtol=2e-2 if wanted.dtype == jnp.bfloat16 else 1e-5, atol=1e-6)


@pytest.mark.parametrize("make", [
    lambda grad: grad.sum(0), lambda grad: grad[0], lambda grad: grad - grad.mean(), lambda grad: grad / grad.sum(),
    lambda grad: jnp.stack([grad * 2.0, jnp.full(grad.shape, jnp.sum(grad * 2.0))])])
def test_a_gradient_of_which_more_than_sums_are_made_is_in_memory(make):
    def fun(w, x):
        grad = jax.grad(loss)(w, x)
        return make(grad), grad

    cut = cut_at_loops(trace(fun, W, X), lambda aval: False, given=[0], kept=[1])
    assert cut.outvars[1] in cut.in_memory


def test_what_sums_are_made_of_may_be_a_result():
    def fun(w, x):
        twice = jax.grad(loss)(w, x) * 2.0
        return twice, twice.sum(), jax.grad(loss)(w, x)

    closed = trace(fun, W, X)
    cut = cut_at_loops(closed, lambda aval: False, kept=[2])
    for wanted, out in zip(jaxpr_to_fun(closed)(W, X), run(cut, W, X, kept=[2]), strict=True):
        np.testing.assert_allclose(out, wanted, rtol=1e-5)


def test_a_parameter_that_is_read_whole_is_in_memory():
    cut = cut_at_loops(trace(lambda w, x: loss(w, x) + w.sum(), W, X), is_saved, given=[0])
    assert not cut.pieces or cut.closed.jaxpr.invars[0] in cut.in_memory
