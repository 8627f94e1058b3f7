"""Slices of host memory in loops: the walk that XLA:GPU copies by, beside the index of the program."""

import functools
import importlib.metadata

import jax
import jax.numpy as jnp
import pytest

from zero_jax.contract.violations import slice_violations
from zero_jax.xla import devices as xla_devices
from zero_jax.xla.host_copies import ANNOTATOR, copy_options
from zero_jax.xla.host_slices import host_slices

PROGRAM = """HloModule jit_step, num_partitions=1

%sliced (p0: bf16[6,2,8], p1: s32[], p2: s32[]) -> bf16[1,2,8] {{
  %p0 = bf16[6,2,8]{{2,1,0:S(5)}} parameter(0)
  %p1 = s32[] parameter(1)
  %p2 = s32[] parameter(2)
  %slice = bf16[1,2,8]{{2,1,0}} dynamic-slice(%p0, %p1, %p2, %p2), dynamic_slice_sizes={{1,2,8}}, metadata={{op_name="a/b" source_file="m.py" source_line=7}}, backend_config={{{walk}}}
  ROOT %copied = bf16[1,2,8]{{2,1,0}} copy(%slice)
}}

%reversed (q: s32[]) -> s32[] {{
  %q = s32[] parameter(0)
  %five = s32[] constant(5)
  ROOT %minus = s32[] subtract(%five, %q)
}}

%body (b: (s32[], bf16[6,2,8], bf16[1,2,8], s32[], s32[])) -> (s32[], bf16[6,2,8], bf16[1,2,8], s32[], s32[]) {{
  %b = (s32[], bf16[6,2,8]{{2,1,0:S(5)}}, bf16[1,2,8]{{2,1,0}}, s32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%b), index=0
  %data = s32[] get-tuple-element(%b), index=3
  %ahead = s32[] get-tuple-element(%b), index=4
  %four = s32[] constant(4)
  %after = s32[] subtract(%four, %i)
  %more = s32[] multiply(%data, %i)
  %one = s32[] constant(1)
  %zero = s32[] constant(0)
  %host = bf16[6,2,8]{{2,1,0:S(5)}} get-tuple-element(%b), index=1
  %back = s32[] fusion(%i), kind=kLoop, calls=%reversed
  %two = s32[] constant(2)
  %down = s32[] constant(-1)
  %sign = s32[] sign(%i)
  %other = pred[] compare(%sign, %one), direction=NE
  %rest = s32[] remainder(%i, %two)
  %left = pred[] compare(%rest, %zero), direction=NE
  %both = pred[] and(%other, %left)
  %quotient = s32[] divide(%i, %two)
  %less = s32[] add(%quotient, %down)
  %floor = s32[] select(%both, %less, %quotient)
  %twice = s32[] multiply(%floor, %two)
  %blocks = s32[] add(%twice, %rest)
  %size = s32[] negate(%i)
  %positive = s32[] negate(%size)
  %half = s32[] shift-right-logical(%positive, %one)
  %evens = s32[] shift-left(%half, %one)
  %odd = s32[] and(%positive, %one)
  %bits = s32[] add(%evens, %odd)
  %start = ((bf16[6,2,8]{{2,1,0:S(5)}}, s32[], s32[]), bf16[1,2,8]{{2,1,0}}, u32[]) fusion-start(%host, %{index}, %zero), kind=kCustom, calls=%sliced
  %done = bf16[1,2,8]{{2,1,0}} fusion-done(%start)
  %next = s32[] add(%i, %one)
  ROOT %out = (s32[], bf16[6,2,8]{{2,1,0:S(5)}}, bf16[1,2,8]{{2,1,0}}, s32[], s32[]) tuple(%next, %host, %done, %more, %after)
}}

%cond (c: (s32[], bf16[6,2,8], bf16[1,2,8], s32[], s32[])) -> pred[] {{
  %c = (s32[], bf16[6,2,8]{{2,1,0:S(5)}}, bf16[1,2,8]{{2,1,0}}, s32[], s32[]) parameter(0)
  %j = s32[] get-tuple-element(%c), index=0
  %six = s32[] constant(6)
  ROOT %less = pred[] compare(%j, %six), direction=LT
}}

ENTRY %main (x: bf16[6,2,8], y: bf16[1,2,8], n: s32[]) -> (s32[], bf16[6,2,8], bf16[1,2,8], s32[], s32[]) {{
  %x = bf16[6,2,8]{{2,1,0:S(5)}} parameter(0)
  %y = bf16[1,2,8]{{2,1,0}} parameter(1)
  %n = s32[] parameter(2)
  %nought = s32[] constant(0)
  %last = s32[] constant(5)
  %first = (s32[], bf16[6,2,8]{{2,1,0:S(5)}}, bf16[1,2,8]{{2,1,0}}, s32[], s32[]) tuple(%nought, %x, %y, %n, %last)
  ROOT %loop = (s32[], bf16[6,2,8]{{2,1,0:S(5)}}, bf16[1,2,8]{{2,1,0}}, s32[], s32[]) while(%first), condition=%cond, body=%body
}}
"""  # noqa: E501 (lines of a compiled program)


def sliced(index, walk, *, nested=False):
    """The slice of a program whose loop reads row `index` by `walk`, written as jaxlib 0.12 does where nested.

    index: "i", "back", "ahead" (the row that the iteration before has computed), "floor" (i // 2), "blocks" (2 (i // 2)
    + i % 2, as the update of states counts), "bits" (the same by shifts) or "data", which data decides.
    """
    text = ""
    if walk is not None:
        text = f'"byte_offset":"{walk[0]}","byte_stride":"{walk[1]}"'
        text = f'"byte_offset":"0","byte_stride":"0","linear":{{{text}}}' if nested else text
        text = f'"dynamic_slice_config":{{"loop_index":"0",{text}}}'
    (found,) = host_slices(PROGRAM.format(index=index, walk=text))
    return found


@pytest.mark.parametrize("index, walk, is_right", [
    ("i", (0, 32), True), ("i", None, True), ("back", (160, -32), True), ("back", None, True), ("data", None, True),
    ("ahead", (160, -32), True), ("ahead", (0, 0), False), ("blocks", (0, 32), True), ("blocks", (32, 32), False),
    ("bits", (0, 32), True), ("bits", (0, 64), False), ("floor", None, True), ("floor", (0, 32), False),
    ("back", (0, 32), False),  # what jaxlib 0.10.2 writes
    ("ahead", (128, -32), False),  # what jaxlib 0.12.0.1 writes of such: the counter's rows
    ("i", (160, -32), False), ("i", (0, 64), False), ("i", (32, 32), False), ("data", (0, 32), False)])
def test_a_walk_is_held_against_the_index(index, walk, is_right):
    offsets = tuple(range(0, 192, 32))
    for nested in (False, True):
        found = sliced(index, walk, nested=nested)
        assert found.is_right == is_right and found.walk == walk and not found.writes
        assert found.offsets == {"i": offsets, "back": offsets[::-1], "ahead": offsets[::-1], "data": None,
                                 "blocks": offsets, "bits": offsets, "floor": (0, 0, 32, 32, 64, 64)}[index]


def test_what_is_told():
    (line,) = slice_violations([sliced("back", (0, 32)), sliced("back", (160, -32))])
    assert line.startswith("slice reads from the host's memory by an index that begins at bytes 160, 128, 96, ..., "
                           "with a walk from byte 0 in steps of 32; from a/b (m.py:7). The GPU copies by the walk")
    assert f"XLA_FLAGS=--xla_disable_hlo_passes={ANNOTATOR}" in line
    (line,) = slice_violations([sliced("data", (0, 32))])
    assert "an index that cannot be followed" in line


def test_options(monkeypatch):
    if extra := xla_devices.missing_compiler("h100:8"):
        pytest.skip(f"needs {extra}")
    device = xla_devices.target_devices("h100:8")[0]
    assert copy_options(jax.devices()[0], engines=True) == copy_options(jax.devices()[0], engines=False) == {}
    monkeypatch.setenv("XLA_FLAGS", "--xla_foo=1 --xla_disable_hlo_passes=a,b")
    assert copy_options(device, engines=False) == {"xla_disable_hlo_passes": f"a,b,{ANNOTATOR}"}
    monkeypatch.setenv("XLA_FLAGS", "")
    assert copy_options(device, engines=False) == {"xla_disable_hlo_passes": ANNOTATOR}


def test_residuals_on_the_host_are_read_by_their_index():
    """A scan's residuals, compiled for an H100. Negative control: jaxlib 0.10 is wrong without the option."""
    if extra := xla_devices.missing_compiler("h100:8"):
        pytest.skip(f"needs {extra}")
    device = xla_devices.target_devices("h100:8")[0]
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=["x"], offload_src="device",
        offload_dst="pinned_host")

    def loss(x, kernels):
        @functools.partial(jax.checkpoint, policy=policy)
        def layer(x, kernel):
            return jnp.tanh(jax.ad_checkpoint.checkpoint_name(x, "x") @ kernel), None

        return jnp.sum(jax.lax.scan(layer, x, kernels)[0])

    sharding = jax.sharding.SingleDeviceSharding(device)
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding) for shape in ((64, 128), (6, 128, 128))]
    lowered = jax.jit(jax.grad(loss, argnums=1)).lower(*shapes)
    options = copy_options(device, engines=False)
    found = host_slices(xla_devices.compiled_for(lowered, device, options).as_text())
    assert {each.writes for each in found} == {True, False} and all(each.is_right for each in found)
    starts = sorted(each.offsets[0] for each in found)
    assert starts == [0, 5 * 64 * 128 * 4]
    if importlib.metadata.version("jaxlib").startswith("0.10."):
        wrong = host_slices(xla_devices.compiled_for(lowered, device, {}).as_text())
        assert [each.is_right for each in wrong if not each.writes] == [False]
