"""What is assumed of traces: markers, named calls, policies and the variables of NNX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from support.seams import JAXPR, X, mend, named

import zero_jax
from zero_jax.gather import gather
from zero_jax.jaxpr import equations, primitives
from zero_jax.jaxpr.equations import trace
from zero_jax.jaxpr.named_call import named_call, set_read, watched_identity
from zero_jax.sharding.mesh_axes import MeshAxes
from zero_jax.sharding.stored_shape import identity_shape


def param_use():
    mesh = zero_jax.make_mesh(4, tensor=2)
    return gather.ParamUse(MeshAxes.of(mesh), P("data", "tensor"), P("data", "tensor"), jnp.bfloat16, jnp.float32,
                           identity_shape((8, 4)))


def test_markers_of_a_parameter_are_visible_after_tracing():
    use = param_use()
    calls = [eqn for eqn in equations.all_eqns(trace(jax.grad(lambda x: use.read(*use.gather(x)).sum()), X).jaxpr)]
    with mend("gather/gather.py"):
        names = [name for eqn in calls for name in primitives.checkpoint_names(eqn)]
        assert gather.REDUCED in names
        (scatter,) = [eqn for eqn in calls if primitives.jit_name(eqn) == gather.SCATTER]
        assert primitives.out_shardings(scatter)[0].spec == P("data", "tensor")
        mapped = jax.vmap(lambda x: use.read(*use.gather(x)))
        for forward, array, dim in ((lambda x: use.read(*use.gather(x)), X, 1), (mapped, X[None], 2)):
            reads = [eqn for eqn in trace(forward, array).jaxpr.eqns
                     if gather.GATHERED in primitives.checkpoint_names(eqn) and len(eqn.invars) == 2]
            assert len(reads) == 1 and gather.split_dim(reads[0]) == dim


def test_a_program_is_called_by_name_and_copied_into_scopes():
    closed = trace(jax.named_call(lambda x: (x.sum(), 2 * x), name="inside"), X)
    with mend("jaxpr/equations.py"):
        called = trace(lambda x: equations.call_of(closed, [x], "a_name"), X)
        (call,) = called.jaxpr.eqns
        assert primitives.jit_name(call) == "a_name" and primitives.call_jaxpr(call) is closed
        np.testing.assert_array_equal(jax.jit(lambda x: equations.call_of(closed, [x], "a_name")[1])(X), 2 * X)
        (other,) = trace(jax.named_call(jnp.sin, name="outside"), X).jaxpr.eqns
        assert equations.scope_of(equations.in_scope_of(closed.jaxpr.eqns[0], other)) == "outside/inside"


def test_a_named_call_has_its_rules():
    double = named_call("zero_double", lambda x, by: x * by)
    read, last_read = (named_call(name, lambda carrier, x, by: x) for name in ("zero_test_read", "zero_test_last"))
    for each, last in ((read, False), (last_read, True)):
        set_read(each, named_call(f"{each.name}_tangent", lambda x, by: x * by), lambda cotangent, by: cotangent * by,
                 last=last)

    def fun(x):
        return read.bind(x, double.bind(jax.lax.stop_gradient(x), use=3.0, names=("a name",)), use=5.0, names=())

    with mend("jaxpr/named_call.py"):
        eqns = trace(fun, X).jaxpr.eqns
        assert ("a name",) in map(primitives.checkpoint_names, eqns)
        assert trace(jax.jit(fun), X).out_avals == trace(fun, X).out_avals
        for out in (fun(X), jax.jit(fun)(X), jax.vmap(fun)(X)):
            np.testing.assert_array_equal(out, 3 * X)
        for grad in (jax.grad(lambda x: fun(x).sum()), jax.jit(jax.grad(lambda x: jax.checkpoint(fun)(x).sum()))):
            np.testing.assert_array_equal(grad(X), 5 * jnp.ones_like(X))
        np.testing.assert_array_equal(jax.jvp(fun, (X,), (X,))[1], 5 * X)
        assert not jax.grad(lambda x: double.bind(x, use=3.0, names=()).sum())(X).any()
        for each, again in ((read, 5 * jnp.ones_like(X)), (last_read, jnp.zeros_like(X))):
            def differentiated(x, each=each):
                return jax.jvp(lambda x: each.bind(x, jax.lax.stop_gradient(x), use=5.0, names=()), (x,), (X,))[0].sum()
            np.testing.assert_array_equal(jax.grad(differentiated)(X), again)


def test_an_inner_derivative_is_told_through_loops_and_maps():
    told, watch = [], watched_identity("watch")

    def body(carry, x, on_derivative):
        return carry + jax.jit(lambda x: watch.bind(x, on_derivative=on_derivative))(x).sum(), None

    def fun(x, name):
        return jax.lax.scan(functools.partial(body, on_derivative=lambda: told.append(name)), 0.0, x)[0]

    with mend("jaxpr/named_call.py"):
        trace(lambda x: fun(x, "not differentiated"), X)
        trace(jax.vmap(jax.grad(lambda x: fun(x, "differentiated"))), jnp.stack([X, X]))
        assert set(told) == {"differentiated"}


def test_a_checkpoint_policy_is_asked_with_names_and_calls():
    asked = []

    def policy(primitive, *avals, **params):
        asked.append((primitive.name, primitives.policy_names(primitive, params), [aval.shape for aval in avals]))
        return False

    trace(jax.grad(jax.checkpoint(lambda x: jnp.sin(checkpoint_name(named(x), "outer")).sum(), policy=policy)), X)
    with mend(JAXPR):
        assert (primitives.NAME, ("outer",), [(8, 4)]) in asked
        assert any(name == primitives.CUSTOM_VJP and names == ("a name",) for name, names, _ in asked)


def test_a_trace_equals_itself_and_no_other():
    outer, inner = [], []

    def fun(x):
        outer.extend([equations.current_trace(), equations.current_trace()])
        return jax.lax.scan(lambda carry, row: (inner.append(equations.current_trace()) or carry, row), 0, x)

    trace(fun, X)
    with mend("jaxpr/equations.py"):
        assert outer[0] == outer[1] and outer[0] != inner[0]




def test_nnx_variables_keep_their_class_and_are_read_through_get_value():
    reads = []

    class Listening(nnx.Param):
        def get_value(self, **index):
            reads.append("index" in index)
            return super().get_value(**index)

    with mend("frontends/nnx.py"):
        module = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
        graphdef, state = nnx.split(module)
        state["kernel"] = state["kernel"].replace(X[:4])
        object.__setattr__(state["kernel"], "__class__", Listening)
        merged = nnx.merge(graphdef, state)
        assert type(merged.kernel) is Listening and isinstance(merged.kernel, nnx.Param)
        assert merged.kernel[(jnp.arange(2),)].shape == (2, 4) and merged.kernel[...].shape == (4, 4)
        assert reads == [True, True]
        assert "astype" not in vars(nnx.Variable)  # else it would not go through __getattr__
