"""What the tests of seams share: an error that names the module to mend, and equations by primitive."""

import contextlib

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from zero_jax.jaxpr import equations
from zero_jax.jaxpr.equations import primitive_of, trace

JAXPR, PROVENANCE, PARSER = "jaxpr/primitives.py", "xla/provenance.py", "xla/parser.py"


@contextlib.contextmanager
def mend(module):
    """Fails with the name of the module to mend if what stands under it raises or is not true."""
    try:
        yield
    except Exception as error:
        pytest.fail(f"mend zero_jax/{module}: what it assumes no longer holds: {type(error).__name__}: {error}")


X, W = jnp.ones((8, 4)), jnp.ones((4, 6))


def eqns(fun, *args):
    """The equations of `fun(*args)`, also those within others, by the name of their primitive; the last of each."""
    return {primitive_of(eqn): eqn for eqn in equations.all_eqns(trace(fun, *args).jaxpr)}


@jax.custom_vjp
def named(x):
    return checkpoint_name(x * 2, "a name")


named.defvjp(lambda x: (named(x), None), lambda _, cotangent: (cotangent * 2,))
