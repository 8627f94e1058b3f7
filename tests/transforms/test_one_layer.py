"""One layer of a stack that a traced program makes: the bits of the stack, and nothing larger than a layer."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zero_jax.jaxpr.equations import all_eqns, primitive_of, trace
from zero_jax.jaxpr.one_layer import NotByLayer, one_layer
from zero_jax.jaxpr.passes import without_calls

KEY, LAYERS, SHAPE = jax.random.key(0), 5, (16, 24)


def drawn(key):
    """Exact, so that no compiler contracts a product and a sum in one program alone."""
    return jax.random.bits(key, SHAPE).astype(jnp.float32) * 2.0**-32


def scanned(key):
    """As Linen: keys are split before the loop, through which activations are carried."""
    def layer(x, key):
        kernel = drawn(jax.random.fold_in(key, 7))
        return jnp.tanh(x @ kernel @ kernel.T), kernel

    return jax.lax.scan(layer, jnp.ones((3, SHAPE[0])), jax.random.split(key, LAYERS))[1]


def checkpointed(key):
    """As Linen with remat: all that a round makes is the result of one call."""
    @jax.checkpoint
    def layer(x, key):
        kernel = drawn(key)
        return jnp.tanh(x @ kernel @ kernel.T), kernel

    return jax.lax.scan(layer, jnp.ones((3, SHAPE[0])), jax.random.split(key, LAYERS))[1]


def vmapped(key):
    """As NNX, whose streams count."""
    return jax.vmap(lambda key, count: drawn(jax.random.fold_in(key, count)) * 0.5)(
        jax.random.split(key, LAYERS), jnp.zeros(LAYERS, jnp.uint32))


def carried_key(key):
    def layer(carry, _):
        key, count, x = carry
        kernel = drawn(jax.random.fold_in(key, count))
        return (jax.random.split(key)[0], count + 1, x @ kernel @ kernel.T), kernel

    return jax.lax.scan(layer, (key, jnp.int32(3), jnp.ones((3, SHAPE[0]))), None, length=LAYERS)[1]


def backwards(key):
    return jax.lax.scan(lambda key, scale: (jax.random.split(key)[0], drawn(key) * scale), key,
                        jnp.arange(LAYERS, dtype=jnp.float32), reverse=True)[1]


def fixed_carry(key):
    return jax.lax.scan(lambda key, at: (key, drawn(jax.random.fold_in(key, at))), key, jnp.arange(LAYERS))[1]


def tiled(key):
    return jnp.broadcast_to(drawn(key), (LAYERS, *SHAPE))


def ramps(key):
    return jnp.broadcast_to(jnp.arange(LAYERS)[:, None, None] * 1.0, (LAYERS, *SHAPE)) * drawn(key)[None]


def shaped(key):
    keys = jax.random.split(key, LAYERS)
    flat = jax.vmap(lambda key: drawn(key).reshape(-1))(keys)
    return jnp.transpose(flat.reshape(LAYERS, *SHAPE), (0, 2, 1)).astype(jnp.bfloat16)


def layers_of(fun):
    """(A function of a layer's number that makes it, the program that makes all of them)."""
    closed = without_calls(trace(fun, KEY))
    (key,), (out,) = closed.jaxpr.invars, closed.jaxpr.outvars
    return lambda index: one_layer(closed, out, index, {key: KEY}, {}), closed


def largest(closed):
    return max(var.aval.size for eqn in all_eqns(closed.jaxpr) for var in eqn.outvars)


def zeros(key):
    return jnp.zeros((LAYERS, *SHAPE))


@pytest.mark.parametrize("fun", [scanned, checkpointed, vmapped, carried_key, backwards, fixed_carry, tiled, ramps,
                                 shaped, zeros], ids=lambda fun: fun.__name__)
def test_a_layer_has_the_bits_of_the_stack_and_nothing_larger_is_computed(fun):
    layer, closed = layers_of(fun)
    whole, row = np.asarray(jax.jit(fun)(KEY)), jax.jit(layer)
    found = [np.asarray(row(index)) for index in range(LAYERS)]
    for index in range(LAYERS):
        assert found[index].tobytes() == whole[index].tobytes() and found[index].dtype == whole.dtype
    size = SHAPE[0] * SHAPE[1]
    one = trace(layer, jnp.int32(0))
    assert largest(one) <= size < largest(closed) == LAYERS * size
    # What is carried on from layer to layer is not computed, but for keys and counters.
    assert not any(primitive_of(eqn) in ("dot_general", "tanh") for eqn in all_eqns(one.jaxpr))


def test_another_layer_or_key_is_other_bits():
    """The control of the test above."""
    layer, _ = layers_of(scanned)
    whole = np.asarray(jax.jit(scanned)(KEY))
    assert np.asarray(jax.jit(layer)(1)).tobytes() != whole[0].tobytes()
    assert np.asarray(jax.jit(layer)(0)).tobytes() != np.asarray(jax.jit(scanned)(jax.random.key(1)))[0].tobytes()


def test_of_a_loop_of_linens():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return x + nn.Dense(16, kernel_init=nn.initializers.orthogonal())(nn.Dense(8)(x)), None

    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)()(x, None)[0]

    def init(key):
        return jax.tree.leaves(Stack().init(key, jnp.ones((2, 16))))

    closed, whole = without_calls(trace(init, KEY)), jax.jit(init)(KEY)
    for out, stack in zip(closed.jaxpr.outvars, whole, strict=True):
        row = jax.jit(lambda index, out=out: one_layer(closed, out, index, {closed.jaxpr.invars[0]: KEY}, {}))
        assert [np.asarray(row(index)).tobytes() for index in range(LAYERS)] == [
            np.asarray(layer).tobytes() for layer in stack]


def follows(key):
    return jax.lax.scan(lambda x, _: (jnp.tanh(x), x), drawn(key), None, length=LAYERS)[1]


@pytest.mark.parametrize("fun, why", [
    (lambda key: jax.random.normal(key, (LAYERS, *SHAPE)), "is drawn from one key for all layers"),
    (follows, "follows from the layers before it"),
    (lambda key: jnp.sort(scanned(key), axis=0), "is made by an operation on all layers at once .sort"),
    (lambda key: jnp.moveaxis(scanned(key), 2, 0), "is made with its layers along another dim"),
    (lambda key: scanned(key) / jnp.linalg.norm(vmapped(key)), r"reads an array of \(\) whole"),
    (lambda key: jax.vmap(drawn)(jax.random.split(jax.random.wrap_key_data(jnp.tile(jax.random.key_data(key), 2),
                                                                           impl="rbg"), LAYERS)),
     "is drawn from keys of key<rbg> together"),
    (lambda key: scanned(key).reshape(LAYERS * SHAPE[0], SHAPE[1]), "is reshaped across layers")])
def test_what_cannot_be_made_by_layer_says_why(fun, why):
    layer, _ = layers_of(fun)
    with pytest.raises(NotByLayer, match=why):
        jax.eval_shape(layer, 0)
