"""What is assumed of the types of arrays, Explicit axes, memories and mapped shard_maps."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support.seams import X, mend

import zero_jax
from zero_jax.jaxpr import equations, primitives
from zero_jax.jaxpr.equations import primitive_of, trace
from zero_jax.layout.slices import on_one_slice
from zero_jax.sharding.mesh import constrain
from zero_jax.sharding.mesh_axes import MeshAxes


def on_axes(axis_type):
    mesh = jax.make_mesh((8,), ("data",), (axis_type,))
    return mesh, jax.device_put(np.ones((8, 4), np.float32), NamedSharding(mesh, P("data")))


def test_axes_are_part_of_an_arrays_type_and_moved_by_device_put():
    (explicit, typed), (auto, _) = map(on_axes, (AxisType.Explicit, AxisType.Auto))

    def on_auto(x):
        with jax.sharding.use_abstract_mesh(auto.abstract_mesh):
            total = constrain(jax.device_put(x, NamedSharding(auto, P())) * 2, auto, P("data")).sum()
        return jax.sharding.reshard(total, NamedSharding(jax.sharding.get_abstract_mesh(), P())) + 1

    with mend("sharding/auto_axes.py"):
        assert jax.typeof(typed).sharding.mesh.axis_types == (AxisType.Explicit,)
        assert jax.sharding.get_abstract_mesh().empty and not jax.typeof(X).sharding.mesh.axis_types
        with jax.set_mesh(explicit):
            assert jax.jit(on_auto)(typed) == 65


@pytest.mark.parametrize("slices", ["replica", ""])
def test_the_body_of_a_mapped_shard_map_has_a_slice_of_size_one(slices):
    """Control: of axes without slices the body has the dim that `jax.vmap` adds."""
    axes = dataclasses.replace(MeshAxes.of(zero_jax.make_mesh(replica=2)).of_slices(), slices=slices)

    def body(x):
        return jax.lax.psum_scatter(jnp.sin(x), "data", scatter_dimension=0, tiled=True)

    def scattered(x):
        return jax.shard_map(on_one_slice(body, axes), mesh=axes.mesh, in_specs=P(), out_specs=P("data"),
                             check_vma=False)(x)

    x = np.arange(16, dtype=np.float32).reshape(2, 8)
    with mend("sharding/slices.py"):
        mapped = jax.jit(jax.vmap(scattered, spmd_axis_name="replica"))
        np.testing.assert_allclose(mapped(x), 4 * np.sin(x), rtol=1e-6)
        assert mapped.lower(x).compile().output_shardings.spec == P("replica", "data")
        assert ("f32[8] = sin" in str(jax.make_jaxpr(mapped)(x))) == bool(slices)


SHARDINGS = {
    "not under a mesh context": (lambda x: jax.sharding.reshard(x, P("data")), None),
    "requires a non-empty mesh": (lambda x: jax.lax.with_sharding_constraint(x, P("data")), None),
    "mesh cannot be empty": (lambda x: jax.shard_map(jnp.sin, in_specs=P("data"), out_specs=P("data"))(x), None),
    "of type Auto or Manual": (lambda x: jax.sharding.reshard(x, P("data")), AxisType.Auto),
    "can only refer to Auto axes": (lambda x: constrain(x, on_axes(AxisType.Explicit)[0], P("data")), None),
    "should match the": (lambda x: on_axes(AxisType.Explicit)[1] * 2, AxisType.Auto),
    "is not found in mesh": (lambda x: jax.lax.with_sharding_constraint(x, P("embed")), AxisType.Auto),
}


@pytest.mark.parametrize("said", SHARDINGS)
def test_what_jax_says_of_shardings_that_do_not_fit(said):
    fun, axis_type = SHARDINGS[said]
    with jax.set_mesh(on_axes(axis_type)[0]) if axis_type else contextlib.nullcontext(), mend(
            "sharding/auto_axes.py"), pytest.raises((ValueError, RuntimeError), match=said):
        trace(fun, jax.ShapeDtypeStruct((8, 4), jnp.float32))




def test_memories_are_part_of_an_arrays_type_and_checkpoints_leave_arguments_out_of_their_barrier():
    on_host = jax.typeof(jax.device_put(jnp.ones((4, 2)), jax.memory.Space.Host))

    def loss(stack, x):
        def body(x, layer):
            return jnp.sin(x * jax.device_put(layer, jax.memory.Space.Device).sum()), None
        return jax.lax.scan(body, x, stack)[0]

    checkpointed = jax.checkpoint(loss, prevent_cse=(False, True))
    with mend("jaxpr/equations.py"):
        assert on_host.memory_space == jax.memory.Space.Host
        jaxpr = jax.make_jaxpr(jax.grad(checkpointed, argnums=1))(on_host, jnp.ones(()))
        (remat,) = [eqn for eqn in jaxpr.jaxpr.eqns if primitive_of(eqn) == primitives.REMAT]
        assert [equations.is_on_host_atom(atom) for atom in remat.invars].count(True) == 1
        assert [apart for apart, atom in zip(remat.params["prevent_cse"], remat.invars, strict=True)
                if equations.is_on_host_atom(atom)] == [False]
