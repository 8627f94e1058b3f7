"""Equal equations are differentiated once; what is lowered is what it is without, to the scopes and source lines."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import primitives
from jax.interpreters import ad

from zero_jax.jaxpr import shared_calls
from zero_jax.jaxpr.equations import trace
from zero_jax.jaxpr.passes import with_jaxpr_passes
from zero_jax.jaxpr.shared_calls import with_shared_calls

X = jax.random.normal(jax.random.key(0), (4, 8))


def model(x):
    with jax.named_scope("first"):
        x = jnp.sin(x) * 2 + jnp.sin(x + 1) * x  # a source line that the test looks for
    with jax.named_scope("second"):
        x = jnp.where(x > 0, jnp.sin(x) * x, jnp.abs(x) ** 3) / jnp.array(3.0)
    x = jax.lax.scan(lambda h, row: (h + jnp.sin(row), jnp.sin(h)), x[0], x)[1]
    x = jax.checkpoint(lambda x: jnp.sin(x @ x.T))(x)
    return (x.astype(jnp.bfloat16) @ x.astype(jnp.bfloat16)).astype(jnp.float32).mean(), x


def constants(x):
    """Constants that are equal and are not the same, in equal equations."""
    return (jnp.arctan2(x * 0.0, x * -0.0) * jnp.maximum(x, np.float32(np.nan)) + x * 2 - x * 3).sum(), x


def replayed(fun, last=None):
    """Its gradient as a step takes it: of its jaxpr."""
    return jax.grad(with_jaxpr_passes(fun, last=last), has_aux=True)


def source(lowered):
    """The HLO with scopes and frames, but for sums of cotangents, whose frame is any summand's from JAX 0.12 on."""
    lines = lowered.as_text("hlo", debug_info=True).splitlines()
    return "\n".join(line for line in lines if "add_any" not in line)


@pytest.mark.parametrize("fun", [model, constants])
def test_what_is_lowered_is_the_same_to_the_source_lines(fun, monkeypatch):
    shared, plain = (jax.jit(replayed(fun, last)).lower(X) for last in (with_shared_calls, None))
    assert source(shared) == source(plain)
    if fun is model:
        lines, start = inspect.getsourcelines(model)
        line = start + next(i for i, text in enumerate(lines) if "looks for" in text)
        assert f'{__file__}":{line}:' in shared.as_text(debug_info=True) and "transpose(jvp(first))" in source(shared)
    else:  # constants that are told apart by their types alone
        shared_calls._call.cache_clear()
        monkeypatch.setattr(shared_calls, "_atom_kind", lambda atom: atom.aval)
        assert jax.jit(replayed(fun, with_shared_calls)).lower(X).as_text("hlo") != plain.as_text("hlo")
        shared_calls._call.cache_clear()


@pytest.mark.parametrize(("last", "rules"), [(with_shared_calls, 1), (None, 6)])
def test_equal_equations_are_differentiated_once(last, rules, monkeypatch):
    asked, rule = [], ad.primitive_jvps[primitives.tanh_p]
    monkeypatch.setitem(ad.primitive_jvps, primitives.tanh_p,
                        lambda *args, **kwargs: asked.append(1) or rule(*args, **kwargs))
    shared_calls._call.cache_clear()

    def fun(x):
        for layer in range(3):
            with jax.named_scope(f"layer_{layer}"):
                x = jnp.tanh(x) @ x.T @ x
        return x.sum(), x

    for _ in range(2):
        trace(replayed(fun, last), X)
    assert len(asked) == rules
