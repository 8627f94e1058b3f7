"""What is assumed of JAX, of XLA's and libtpu's text and of Orbax's files: one quick check each, naming what to mend.

Run it first with a new release of any of them. None of these has a stable interface, and each has one module of
zero_jax that knows it. Tests marked "negative control" show for each group that a change would be found.
"""

import contextlib
import dataclasses
import functools
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.extend.core import primitives as jax_primitives
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import zero_jax
from zero_jax.checkpoint import array_files, orbax_store
from zero_jax.jaxpr import equations, primitives
from zero_jax.jaxpr.equations import primitive_of, trace
from zero_jax.planning.plan import refused_bytes
from zero_jax.sharding import gather, stored_optimizer
from zero_jax.sharding.mesh_axes import MeshAxes
from zero_jax.sharding.slices import on_one_slice
from zero_jax.sharding.stored_shape import identity_shape
from zero_jax.state import ZeroState
from zero_jax.transforms import gather_remat, reduce_dtype, scatter_calls
from zero_jax.xla import hlo, parser, replica_groups, schedule, shapes

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


def conv(x, w):
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def scan(x):
    consts = x * 2
    return jax.lax.scan(lambda carry, row: (carry + row, (carry * consts[0]).sum()), x[0], x, reverse=True)


@jax.custom_vjp
def named(x):
    return checkpoint_name(x * 2, "a name")


named.defvjp(lambda x: (named(x), None), lambda _, cotangent: (cotangent * 2,))


# Primitives and their parameters

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
    primitives.CONSTRAINT: (lambda x: gather.constrain(x, zero_jax.make_mesh(8), P("data")), X),
    primitives.PALLAS: (pl.pallas_call(lambda x, out: None, grid=(4, 2), out_shape=X), X),
    "transpose": (jnp.transpose, X), "reduce_sum": (jnp.sum, X), "copy": (jax.lax.copy_p.bind, X),
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
    "transforms/gather_remat.py": set(gather_remat._NEVER_SAVED) - {"stop_gradient"},  # among the samples
    "transforms/scatter_calls.py": set(scatter_calls._FOLLOWED),
    "transforms/reduce_dtype.py": {*reduce_dtype._MOVES, *reduce_dtype._SUMS},
    JAXPR: set(primitives.CALLS) - {"closed_call"},  # gone in JAX 0.12
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
    "rounds": (primitives.SCAN, primitives.num_rounds, 8),
    "grid": (primitives.PALLAS, primitives.num_rounds, 8),
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
    "reduction": ("reduce_sum", primitives.reduced_axes, (0, 1)),
    "scatter": (primitives.SCATTER_ADD, primitives.scatter_dims, ((1,), (0,), False)),
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


def edited(narrow, x):
    """Results of equations that the seam edits."""
    dot = trace(jnp.matmul, narrow, W.astype(jnp.bfloat16)).jaxpr.eqns[-1]
    wide = primitives.with_product_dtype(dot, jnp.float32, equations.variable_like(dot.outvars[0], jnp.float32))
    scatter = eqns(*SAMPLES[primitives.SCATTER_ADD])[primitives.SCATTER_ADD]
    closed = trace(scan, x)
    loop = next(eqn for eqn in closed.jaxpr.eqns if primitive_of(eqn) == primitives.SCAN)
    body = equations.jaxpr_to_fun(primitives.call_jaxpr(loop))
    retraced = closed.jaxpr.replace(eqns=[
        primitives.with_body(eqn, body) if eqn is loop else eqn for eqn in closed.jaxpr.eqns])
    return (*equations.bind_eqn(wide, [narrow, W.astype(jnp.bfloat16)]),
            *primitives.scatter_dropping(scatter, [x, jnp.array([[0], [1], [99]]), jnp.ones((3, 4))]),
            *primitives.reduce_all(eqns(jnp.sum, x)["reduce_sum"], jnp.ones((2, 3, 4))),
            *equations.jaxpr_to_fun(closed.replace(jaxpr=retraced))(x)), scan(x)


def test_edited_equations_compute():
    with mend(JAXPR):
        (product, scattered, total, *looped), expected = jax.jit(edited)(X.astype(jnp.bfloat16), X)
        assert product.dtype == jnp.float32 and (product == 4).all()
        np.testing.assert_array_equal(scattered.sum(1), [8, 8, *[4] * 6])  # the third update has no row
        assert total == 24
        jax.tree.map(np.testing.assert_allclose, tuple(looped), expected)


# Explicit axes

def on_axes(axis_type):
    mesh = jax.make_mesh((8,), ("data",), (axis_type,))
    return mesh, jax.device_put(np.ones((8, 4), np.float32), NamedSharding(mesh, P("data")))


def test_axes_are_part_of_an_arrays_type_and_moved_by_device_put():
    (explicit, typed), (auto, _) = map(on_axes, (AxisType.Explicit, AxisType.Auto))

    def on_auto(x):
        with jax.sharding.use_abstract_mesh(auto.abstract_mesh):
            total = gather.constrain(jax.device_put(x, NamedSharding(auto, P())) * 2, auto, P("data")).sum()
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
    "can only refer to Auto axes": (lambda x: gather.constrain(x, on_axes(AxisType.Explicit)[0], P("data")), None),
    "should match the": (lambda x: on_axes(AxisType.Explicit)[1] * 2, AxisType.Auto),
    "is not found in mesh": (lambda x: jax.lax.with_sharding_constraint(x, P("embed")), AxisType.Auto),
}


@pytest.mark.parametrize("said", SHARDINGS)
def test_what_jax_says_of_shardings_that_do_not_fit(said):
    fun, axis_type = SHARDINGS[said]
    with jax.set_mesh(on_axes(axis_type)[0]) if axis_type else contextlib.nullcontext(), mend(
            "sharding/auto_axes.py"), pytest.raises((ValueError, RuntimeError), match=said):
        trace(fun, jax.ShapeDtypeStruct((8, 4), jnp.float32))


# Markers, traces and policies

def param_use():
    mesh = zero_jax.make_mesh(4, tensor=2)
    return gather.ParamUse(MeshAxes.of(mesh), P("data", "tensor"), P("data", "tensor"), jnp.bfloat16, jnp.float32,
                           identity_shape((8, 4)))


def test_markers_of_a_parameter_are_visible_after_tracing():
    use = param_use()
    calls = [eqn for eqn in equations.all_eqns(trace(jax.grad(lambda x: use.read(*use.gather(x)).sum()), X).jaxpr)]
    with mend("sharding/gather.py"):
        names = [name for eqn in calls for name in primitives.checkpoint_names(eqn)]
        assert gather.REDUCED in names
        (scatter,) = [eqn for eqn in calls if primitives.jit_name(eqn) == gather.SCATTER]
        assert primitives.out_shardings(scatter)[0].spec == P("data", "tensor")
        forward = trace(lambda x: use.read(*use.gather(x)), X).jaxpr.eqns
        reads = [eqn for eqn in forward if primitive_of(eqn) == primitives.CUSTOM_VJP
                 and gather.GATHERED in primitives.checkpoint_names(eqn) and len(eqn.invars) == 2]
        assert len(reads) == 1 and gather.split_dim(reads[0]) == 1


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


# The compiled text of this backend

@functools.cache
def compiled_text():
    """A step in small: a stored parameter gathered in a loop, its gradient summed, the state updated in place."""
    mesh = zero_jax.make_mesh(8)
    stored, batch = NamedSharding(mesh, P("data")), jax.ShapeDtypeStruct((16, 64), jnp.float32, sharding=NamedSharding(
        mesh, P("data")))
    use = gather.ParamUse(MeshAxes.of(mesh), P("data"), P("data"), jnp.float32, jnp.float32, identity_shape((64, 64)))
    fields = dict.fromkeys((field.name for field in dataclasses.fields(ZeroState)), None)
    state = ZeroState(**fields | {"params": {"blocks": {"qkv": jax.ShapeDtypeStruct(
        (64, 64), jnp.float32, sharding=stored)}}})

    def step(state, batch):
        def loss(params):
            weight = use.read(*use.gather(params["blocks"]["qkv"]))
            return jax.lax.scan(lambda x, _: (jnp.tanh(x @ weight), None), batch, None, length=3)[0].sum()

        grads = jax.grad(loss)(state.params)
        params = jax.tree.map(lambda p, g: gather.constrain(p - g, mesh, P("data")), state.params, grads)
        return dataclasses.replace(state, params=params)

    return jax.jit(step, donate_argnums=0).lower(state, batch).compile().as_text()


def test_the_header_of_a_module():
    text = compiled_text()
    with mend(PARSER):
        module = parser.parse(text)
        assert module.header.startswith("HloModule") and module.num_devices == 8
    with mend("xla/shapes.py"):
        assert re.search(r"entry_computation_layout=\{\(f32\[8,64\]\{1,0\}, f32\[2,64\]\{1,0\}\)->", module.header)
        assert [number for _, number, _ in shapes.aliases(module.header)] == [0], module.header


def test_op_names_carry_the_arguments():
    text = compiled_text()
    with mend(PROVENANCE):
        assert re.search(r"""op_name="state\.params\[\\?'blocks\\?'\]\[\\?'qkv\\?'\]""", text)
        found = hlo.collectives(text)
        gathers = [c for c in found if c.kind == "all-gather" and gather.GATHER_SCOPE in c.op_name]
        assert gathers and all(c.serves == ("blocks/qkv",) for c in gathers)  # followed back to an input
        sums = [c for c in found if c.kind in ("all-reduce", "reduce-scatter")]
        assert sums and all(c.serves == ("blocks/qkv",) for c in sums)  # followed on to the output in its place
        assert all(sorted(c.group) == list(range(8)) for c in found)
    with mend(PARSER):
        assert all(re.search(r"gather\.py:\d+$", c.source) for c in gathers)


def test_loops_print_their_trip_count():
    with mend("xla/trip_count.py"):
        assert re.search(r'known_trip_count\W+n\W+3\b', compiled_text())


# Texts of other backends, in excerpts

GROUPS = {
    "listed": ("replica_groups={{0,1,2,3},{4,5,6,7}}", (0, 1, 2, 3)),
    "iota": ("replica_groups=[2,4]<=[8]", (0, 1, 2, 3)),
    "transposed iota": ("replica_groups=[4,2]<=[2,4]T(1,0)", (0, 4)),
    "mesh": ("replica_groups=mesh['data'=2,'tensor'=4] {'data'}", (0, 4)),
    "all": ("replica_groups={}", tuple(range(8))),
}


@pytest.mark.parametrize("notation", GROUPS)
def test_replica_groups(notation):
    text, group = GROUPS[notation]
    with mend("xla/replica_groups.py"):
        assert replica_groups.first_group(text, 8) == group


def test_another_notation_of_groups_is_found():
    """Negative control."""
    module = "xla/replica_groups.py"
    with pytest.raises(pytest.fail.Exception, match=f"mend zero_jax/{module}"), mend(module):
        assert replica_groups.first_group("replica_groups=<0,1,2,3>", 8) == (0, 1, 2, 3)


def test_permutes_of_gpus_quote_their_pairs():
    with mend("xla/replica_groups.py"):
        assert replica_groups.ring("source_target_pairs={{0,1},{1,2},{2,0}}") == (0, 1, 2)
        quoted = 'frontend_attributes={_xla_send_recv_source_target_pairs="{{0,1},{1,0}}"}'
        assert replica_groups.ring(quoted) == (0, 1)


MODULE = """HloModule step, is_scheduled=true, input_output_alias={ {0}: (1, {}, may-alias) }, num_partitions=8

ENTRY %main (param.0: f32[16,8], param.1: f32[2,8]) -> (f32[16,8]) {
  %param.0 = f32[16,8]{1,0:T(8,128)S(1)} parameter(0)
  %param.1 = f32[2,8]{1,0} parameter(1), metadata={op_name="state.params[\\'w\\']"}
BODY
}
"""
BODIES = {  # as compilers of GPUs and TPUs print an all-gather that overlaps with others
    "start and done": """\
  %s = (f32[2,8]{1,0}, f32[16,8]{1,0}) all-gather-start(%param.1), replica_groups=[1,8]<=[8], dimensions={0}
  %d = f32[16,8]{1,0} all-gather-done(%s)
  ROOT %t = (f32[16,8]{1,0}) tuple(%d)""",
    "at once": """\
  %d = f32[16,8]{1,0} all-gather(%param.1), replica_groups=[1,8]<=[8], dimensions={0}
  ROOT %t = (f32[16,8]{1,0}) tuple(%d)""",
}


@pytest.mark.parametrize("form", BODIES)
def test_an_all_gather_of_accelerators(form):
    text = MODULE.replace("BODY", BODIES[form])
    with mend("xla/collective.py"):
        (found,) = hlo.collectives(text)
        assert (found.kind, found.payload_bytes, found.serves) == ("all-gather", 16 * 8 * 4, ("w",))
        assert found.asynchronous == (form == "start and done")
    with mend("xla/shapes.py"):
        assert list(shapes.aliases(parser.parse(text).header)) == [((0,), 1, ())]
        array = shapes.arrays("f32[16,8]{1,0:T(8,128)S(1)}")[()]
        assert (array.tile, array.space) == ((8, 128), 1)


SCATTER = """%all-reduce-scatter (p: f32[16,8]) -> f32[2,8] {
  %p = f32[16,8]{1,0} parameter(0)
  %sum = f32[16,8]{1,0} all-reduce(%p), replica_groups=[1,8]<=[8], to_apply=%add
  %index = s32[] constant(0)
  ROOT %slice = f32[2,8]{1,0} dynamic-slice(%sum, %index, %index), dynamic_slice_sizes={2,8}
}

"""


def test_a_reduce_scatter_of_tpus():
    """A fusion in which an all-reduce is only sliced; negative control: one whose whole result is used."""
    fusion = "  ROOT %scatter = f32[2,8]{1,0} fusion(%param.0), kind=kCustom, calls=%all-reduce-scatter"
    header, rest = MODULE.replace("BODY", fusion).split("\n\n", 1)
    whole = SCATTER.replace("  ROOT", "  %all = f32[16,8]{1,0} add(%sum, %sum)\n  ROOT")
    with mend("xla/collective.py"):
        assert [c.kind for c in hlo.collectives(f"{header}\n\n{SCATTER}{rest}")] == ["reduce-scatter"]
        assert [c.kind for c in hlo.collectives(f"{header}\n\n{whole}{rest}")] == ["all-reduce"]


def test_text_that_is_no_module_is_refused():
    """Negative control: an instruction that the parser does not know leaves no module without an error."""
    with pytest.raises(ValueError, match="ENTRY"):
        schedule.schedule(MODULE.replace("ENTRY", "entry"))


def test_how_a_tpu_refuses_a_program():
    """Of libtpu's message; the one that XLA:GPU gives has no number."""
    with mend("planning/plan.py"):
        assert refused_bytes("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. It is estimated that the "
                             "total memory required for HLO temporaries (2.00M) exceeds available HBM (1.00M)") == 2**21
        assert refused_bytes("the needed memory is 2.00M") == 0  # negative control


# Orbax's files

@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint's folder, and what was beside it while it was written."""
    root = epath.Path(tmp_path_factory.mktemp("seam"))
    array = jax.device_put(jnp.arange(8 * 4096.0), NamedSharding(zero_jax.make_mesh(8), P("data")))
    writing = orbax_store.write(root / "3", {"params/w": array}, {"format": 1}, None)
    during = sorted(each.name for each in root.iterdir())
    writing.result()
    return root, during, array


def test_files_of_a_checkpoint(saved):
    root, during, array = saved
    path = root / "3"
    with mend("checkpoint/orbax_store.py"):
        assert (path / orbax_store._COMMITTED).exists() and orbax_store.committed(root) == [3]
        assert orbax_store.manifest_path(path).exists()
        for index in (path / "_CHECKPOINT_METADATA", path / "state" / "_METADATA", path / "state" / "_sharding"):
            assert index.exists(), index
        assert list((path / "state" / "array_metadatas").iterdir()) and orbax_store.broken_index(path) is None
        assert all(name == "3" or re.fullmatch(rf"3{orbax_store._TEMPORARY}.*", name) for name in during), during
        files = array_files.files_of(path, "params/w")
        assert files and all((path / file).exists() for file in files) and not array_files.files_of(path, "params/v")
        abstract = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
        np.testing.assert_array_equal(orbax_store.read(path, {"params/w": abstract})["params/w"], array)


def test_a_missing_or_broken_file_is_found(saved, tmp_path):
    """Negative control: without the commit file there is no checkpoint, and an index that is no JSON is named."""
    root, _, _ = saved
    copy = epath.Path(tmp_path) / "3"
    shutil.copytree(root / "3", copy)
    (copy / orbax_store._COMMITTED).unlink()
    (copy / "state" / "_METADATA").write_text("{")
    assert orbax_store.committed(copy.parent) == [] and orbax_store.present(copy.parent) == [3]
    assert orbax_store.broken_index(copy) == copy / "state" / "_METADATA"


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
