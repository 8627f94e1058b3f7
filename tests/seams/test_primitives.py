"""What passes assume of JAX's primitives and their parameters."""


import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.extend.core import primitives as jax_primitives
from jax.sharding import PartitionSpec as P
from support.seams import JAXPR, W, X, eqns, mend, named

import zero_jax
from zero_jax.jaxpr import equations, primitives
from zero_jax.jaxpr.equations import primitive_of, trace
from zero_jax.layout import stored_optimizer
from zero_jax.sharding.mesh import constrain
from zero_jax.transforms import gather_again


def conv(x, w):
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def scan(x):
    consts = x * 2
    return jax.lax.scan(lambda carry, row: (carry + row, (carry * consts[0]).sum()), x[0], x, reverse=True)


SAMPLES = {
    primitives.SCAN: (scan, X), primitives.COND: (lambda x: jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x), X),
    primitives.JIT: (jax.jit(jnp.sin), X), primitives.REMAT: (jax.checkpoint(jnp.sin), X),
    primitives.CUSTOM_VJP: (named, X), primitives.NAME: (lambda x: checkpoint_name(x, "a name"), X),
    primitives.CONVERT: (lambda x: x.astype(jnp.bfloat16), X), primitives.DOT: (jnp.matmul, X, W),
    primitives.CONV: (conv, jnp.ones((2, 4, 4, 3)), jnp.ones((3, 3, 3, 5))),
    primitives.GATHER_ROWS: (lambda x: x[jnp.arange(3)], X),
    primitives.SCATTER_ADD: (lambda x: x.at[jnp.arange(3)].add(1.0), X),
    primitives.SHARD_MAP: (lambda x: jax.shard_map(
        jnp.sin, mesh=zero_jax.make_mesh(8), in_specs=P("data"), out_specs=P("data"))(x), X),
    primitives.CONSTRAINT: (lambda x: constrain(x, zero_jax.make_mesh(8), P("data")), X),
    primitives.PALLAS: (pl.pallas_call(lambda x, out: None, grid=(4, 2), out_shape=X), X),
    "transpose": (jnp.transpose, X), "reduce_sum": (jnp.sum, X), "copy": (jax.lax.copy_p.bind, X),
    primitives.RESHAPE: (lambda x: x.reshape(-1), X), primitives.SQUEEZE: (lambda x: jax.lax.squeeze(x[None], [0]), X),
    primitives.RANDOM_BITS: (lambda key: jax.random.bits(key, (4,)), jax.random.key(0)),
    primitives.RANDOM_WRAP: (lambda key: jax.random.bits(key, (4,)), jax.random.PRNGKey(0)),
    "stop_gradient": (jax.lax.stop_gradient, X),
    "broadcast_in_dim": (lambda x: jnp.broadcast_to(x, (2, 8, 4)), X),
    "add_any": (jax.grad(lambda x: (jnp.sin(x) * jnp.cos(x)).sum()), X),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_primitives_have_the_names_by_which_passes_know_them(name):
    fun, *args = SAMPLES[name]
    with mend(JAXPR):
        assert name in eqns(fun, *args), f"no {name!r} in {sorted(eqns(fun, *args))}"


TABLES = {
    "sharding/stored_optimizer.py": {
        *primitives.ELEMENTWISE, primitives.BROADCAST, primitives.IOTA, *stored_optimizer._NEUTRAL},
    "transforms/gather_again.py": set(gather_again.NEVER_SAVED) - {"stop_gradient"},  # among the samples
    JAXPR: set(primitives.CALLS) - {"closed_call", "eval_jaxpr"},  # the one until JAX 0.12, the other since
}


@pytest.mark.parametrize("module", TABLES)
def test_tables_name_primitives_that_there_are(module):
    known = {getattr(jax_primitives, name).name for name in dir(jax_primitives) if name.endswith("_p")}
    with mend(module):
        assert not TABLES[module] - known, f"no primitives of JAX {jax.__version__}: {sorted(TABLES[module] - known)}"


def read(name, accessor):
    fun, *args = SAMPLES[name]
    return accessor(eqns(fun, *args)[name])


ACCESSORS = {  # primitive: what the seam reads of its sample, and what that is
    "scan": (primitives.SCAN, primitives.Scan.of, primitives.Scan(1, 1, 8, True, 1)),
    "iterations": (primitives.SCAN, primitives.num_iterations, 8),
    "grid": (primitives.PALLAS, primitives.num_iterations, 8),
    "body": (primitives.SCAN, lambda eqn: len(primitives.call_jaxpr(eqn).jaxpr.invars), 3),
    "branches": (primitives.COND, lambda eqn: len(primitives.branches(eqn)), 2),
    "jit": (primitives.JIT, primitives.jit_name, "sin"),
    "call": (primitives.JIT, lambda eqn: len(primitives.call_jaxpr(eqn).jaxpr.eqns), 1),
    "remat": (primitives.REMAT, primitives.Checkpoint.of, primitives.Checkpoint(None, True, False)),
    "rematerialised": (primitives.REMAT, lambda eqn: len(primitives.call_jaxpr(eqn).jaxpr.eqns), 1),
    "name": (primitives.NAME, primitives.checkpoint_names, ("a name",)),
    "marker in a custom_vjp_call": (primitives.CUSTOM_VJP, primitives.checkpoint_names, ("a name",)),
    "dot": (primitives.DOT, primitives.dot_dims, (((1,), (0,)), ((), ()))),
    "conv": (primitives.CONV, primitives.conv_dims, ((0, 3, 1, 2), (3, 2, 0, 1), 1)),
    "transpose": ("transpose", primitives.permutation, (1, 0)),
    "broadcast": ("broadcast_in_dim", primitives.broadcast_dims, (1, 2)),
    "squeeze": ("squeeze", primitives.squeezed_dims, (0,)),
    "reduction": ("reduce_sum", primitives.reduced_axes, (0, 1)),
    "shard_map": (primitives.SHARD_MAP, primitives.in_specs, (P("data"),)),
    "manual body": (primitives.SHARD_MAP, lambda eqn: len(primitives.call_jaxpr(eqn).jaxpr.eqns), 1),
}


@pytest.mark.parametrize("what", ACCESSORS)
def test_parameters_of_primitives(what):
    name, accessor, expected = ACCESSORS[what]
    with mend(JAXPR):
        assert read(name, accessor) == expected


@pytest.mark.parametrize("what", sorted(set(ACCESSORS) - {"name", "jit"}))
def test_a_renamed_parameter_is_found(what):
    """Negative control: the sample's equation with every parameter renamed."""
    name, accessor, _ = ACCESSORS[what]

    def renamed(eqn):
        return accessor(eqn.replace(params={f"new_{key}": value for key, value in eqn.params.items()}))

    with pytest.raises(pytest.fail.Exception, match="mend zero_jax/jaxpr/primitives.py.*KeyError"), mend(JAXPR):
        read(name, renamed)


def edited(x):
    """Results of equations that the seam edits."""
    closed = trace(scan, x)
    loop = next(eqn for eqn in closed.jaxpr.eqns if primitive_of(eqn) == primitives.SCAN)
    body = equations.jaxpr_to_fun(primitives.call_jaxpr(loop))
    retraced = closed.jaxpr.replace(eqns=[
        primitives.with_body(eqn, body) if eqn is loop else eqn for eqn in closed.jaxpr.eqns])
    return (*primitives.reduce_all(eqns(jnp.sum, x)["reduce_sum"], jnp.ones((2, 3, 4))),
            *equations.jaxpr_to_fun(closed.replace(jaxpr=retraced))(x)), scan(x)


def test_edited_equations_compute():
    with mend(JAXPR):
        (total, *looped), expected = jax.jit(edited)(X)
        assert total == 24
        jax.tree.map(np.testing.assert_allclose, tuple(looped), expected)


def test_an_empty_array_in_host_memory():
    closed = trace(lambda: primitives.empty_on_host((3, 5), jnp.float32))
    (out,) = closed.jaxpr.outvars
    assert equations.is_on_host_atom(out) and (out.aval.shape, out.aval.dtype) == ((3, 5), jnp.float32)
    assert not any(eqn.primitive.name == "device_put" for eqn in closed.jaxpr.eqns)  # of zeros made on the device


def test_the_operands_that_a_jit_of_the_trace_donates():
    with mend(JAXPR):
        jaxpr = trace(lambda x, w: jnp.sin(jax.jit(jnp.matmul, donate_argnums=1)(x, w)), X, W).jaxpr
        assert [primitives.donated_inputs(eqn) for eqn in jaxpr.eqns] == [[jaxpr.invars[1]], []]
