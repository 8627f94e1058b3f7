"""What readers assume of XLA's text: of this backend compiled, of others in excerpts."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support.seams import PARSER, PROVENANCE, mend

import zero_jax
from zero_jax.gather import gather
from zero_jax.jaxpr.passes import with_jaxpr_passes
from zero_jax.planning.plan import refused_bytes
from zero_jax.sharding.mesh import constrain
from zero_jax.sharding.mesh_axes import MeshAxes
from zero_jax.sharding.stored_shape import identity_shape
from zero_jax.state import ZeroState
from zero_jax.views.in_parts import local_view
from zero_jax.xla import hlo, parser, replica_groups, schedule, shapes


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

    def loss(params, batch):
        weight = use.read(*use.gather(params["blocks"]["qkv"]))
        return jax.lax.scan(lambda x, _: (jnp.tanh(x @ weight), None), batch, None, length=3)[0].sum()

    gradient = with_jaxpr_passes(
        jax.grad(loss), last=lambda closed: local_view(closed, use.axes, [P("data"), P("data")], [P("data")]))

    def step(state, batch):
        grads = gradient(state.params, batch)
        params = jax.tree.map(lambda p, g: constrain(p - g, mesh, P("data")), state.params, grads)
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
