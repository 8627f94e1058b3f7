"""Notations of collectives, groups and loops that small programs do not produce."""

import pytest

from zero_jax.xla import hlo, replica_groups


def module(*computations: str, partitions: int = 8) -> str:
    head = f"HloModule jit_f, is_scheduled=true, num_partitions={partitions}\n"
    return "\n\n".join([head, *computations]) + "\n"


def entry(*lines: str, arguments: str = "%p = f32[8,128]{1,0} parameter(0)") -> str:
    body = "\n".join(f"  {line}" for line in (arguments, *lines))
    return f"ENTRY %main (p: f32[8,128]) -> f32[8,128] {{\n{body}\n}}"


SUM = """%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}"""


@pytest.mark.parametrize(
    "groups, first",
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", (0, 1)),
        ("{{0,2,5,7},{4,1,6,3}}", (0, 2, 5, 7)),
        ("{}", tuple(range(8))),
        ("[2,4]<=[8]", (0, 1, 2, 3)),
        ("[2,4]<=[4,2]T(1,0)", (0, 2, 4, 6)),
        ("[4,2]<=[2,2,2]T(0,2,1)", (0, 2)),
        ("[8]<=[8]", tuple(range(8))),
        ("mesh['data'=8] {'data'}", tuple(range(8))),
        ("mesh['a'=2,'b'=4] {'a'}", (0, 4)),
        ("mesh['a'=2,'b'=2,'c'=2] {'c','a'}", (0, 4, 1, 5)),
        ("mesh['axis_0'=2,'axis_1'=1,'axis_2'=4] {'axis_0'}", (0, 4)),
        (
            "mesh['axis_0'=4,'axis_1'=1,'axis_2'=2], device_ids=([4,2]T(1,0)) {'axis_0'}",
            (0, 4, 1, 5),
        ),
        ("mesh['a'=4], device_ids=(3,1,2,0) {'a'}", (3, 1, 2, 0)),
        ("mesh['a'=8] {'a':(1)2}", (0, 4)),
        ("mesh['a'=8] {'a':(2)4}", (0, 1, 2, 3)),
    ],
)
def test_replica_groups(groups, first):
    attributes = f", channel_id=1, replica_groups={groups}, dimensions={{0}}"
    assert replica_groups.first_group(attributes, 8) == first


def test_text_that_is_not_hlo_is_refused():
    with pytest.raises(ValueError, match="ENTRY"):
        hlo.collectives("all-gather(")
    with pytest.raises(ValueError, match="all-gathers.*known: all-gather"):
        hlo.communication_bytes(module(entry()), kinds=["all-gathers"])


def test_starts_and_dones_of_either_age_count_once():
    """0.10 prints `f32[] all-reduce-start`, 0.12 `((f32[]), f32[])`; the operands say the same."""
    for shape in ("f32[8,128]{1,0}", "((f32[8,128]{1,0}), f32[8,128]{1,0})"):
        text = module(
            SUM,
            entry(
                f"%s = {shape} all-reduce-start(%p), replica_groups={{}}, to_apply=%sum, "
                'metadata={op_name="f/psum" source_file="a.py" source_line=7}',
                "ROOT %d = f32[8,128]{1,0} all-reduce-done(%s)",
            ),
        )
        (collective,) = hlo.collectives(text)
        assert (collective.kind, collective.payload_bytes, collective.group_size) == ("all-reduce", 4096, 8)
        assert collective.asynchronous and (collective.op_name, collective.source) == ("f/psum", "a.py:7")
        assert hlo.communication_bytes(text) == 2 * 7 / 8 * 4096


def test_async_wrapper():
    """The generic form: start, update and done may all name the computation."""
    wrapped = """%wrapped (q: f32[8,128]) -> f32[1,128] {
  %q = f32[8,128]{1,0} parameter(0)
  ROOT %rs = f32[1,128]{1,0} reduce-scatter(%q), replica_groups={}, dimensions={0}, to_apply=%sum
}"""
    text = module(
        SUM,
        wrapped,
        entry(
            "%s = ((f32[8,128]{1,0}), f32[1,128]{1,0}) async-start(%p), calls=%wrapped",
            "%u = ((f32[8,128]{1,0}), f32[1,128]{1,0}) async-update(%s), calls=%wrapped",
            "ROOT %d = f32[1,128]{1,0} async-done(%u), calls=%wrapped",
        ),
    )
    (collective,) = hlo.collectives(text)
    assert (collective.kind, collective.communication_bytes) == ("reduce-scatter", 7 / 8 * 4096)
    assert collective.asynchronous and collective.computation == "wrapped"
    text = text.replace("async-start(%p),", 'async-start(%p), backend_config={"is_sync":true},')
    assert not hlo.collectives(text)[0].asynchronous


def test_tpu_fusions_that_carry_a_gather():
    """v5e: one all-gather, printed in three fusions of one chain, that a custom call starts."""
    gather = (
        "f32[64,128]{1,0:T(8,128)} all-gather(%q), channel_id=3, replica_groups=mesh['data'=8] "
        "{'data'}, dimensions={0}, frontend_attributes={chain_id=\"0\"}"
    )
    head = "(q: f32[8,128]) -> f32[64,128] {\n  %q = f32[8,128]{1,0:T(8,128)S(1)} parameter(0)\n"
    start = (
        f"%start {head}  %g0 = {gather}\n  ROOT %c = (f32[8,128]{{1,0}}, f32[64,128]{{1,0}}) "
        'custom-call(%g0), custom_call_target="AsyncCollectiveStart"\n}'
    )
    carry = f"%async_collective_fusion.1 {head}  ROOT %g1 = {gather}\n}}"
    done = (
        f"%done {head}  %g2 = {gather}\n  ROOT %c2 = f32[64,128]{{1,0}} "
        'custom-call(%q, %g2), custom_call_target="AsyncCollectiveDone"\n}'
    )
    calls = [
        f"%f{i} = f32[64,128]{{1,0}} fusion(%p), kind=kCustom, calls=%{name}"
        for i, name in enumerate(["start", "async_collective_fusion.1", "done"])
    ]
    (collective,) = hlo.collectives(module(start, carry, done, entry(*calls)))
    assert collective.asynchronous and collective.shapes == (("f32", (64, 128)),)
    # Negative control: without their chain they are three gathers.
    text = module(start, carry, done, entry(*calls)).replace("chain_id", "other_id")
    assert len(hlo.collectives(text)) == 3


def test_permutes():
    pairs = "{{0,1},{1,2},{2,3},{3,0}}"
    text = module(
        entry(
            "%i = f32[2]{0} slice(%p)",
            f"%a = f32[8,128]{{1,0}} collective-permute(%p), source_target_pairs={pairs}",
            "%b = f32[8,128]{1,0} collective-permute(%p), source_target_pairs={{0,0},{1,1}}",
            f"%c = (f32[8,128]{{1,0}}, f32[2]{{0}}) collective-permute(%p, %i), "
            f"source_target_pairs={pairs}",
            "%d = f32[8,128]{1,0} collective-permute(%p, %p, %i, %i), "
            f"source_target_pairs={pairs}, slice_sizes={{{{2,128}}}}",
            "%t = token[] after-all()",
            "%e = (f32[8,128]{1,0}, u32[], token[]) send(%p, %t), channel_id=2, "
            f'frontend_attributes={{_xla_send_recv_source_target_pairs="{pairs}"}}',
            "%h = (f32[8,128]{1,0}, u32[], token[]) send(%p, %t), is_host_transfer=true",
        )
    )
    permutes = {c.name: c for c in hlo.collectives(text)}
    assert {c.kind for c in permutes.values()} == {"collective-permute"}
    assert {name: c.communication_bytes for name, c in permutes.items()} == {
        "a": 4096, "b": 0, "c": 4104, "d": 1024, "e": 4096,
    }  # fmt: skip
    assert permutes["a"].group == permutes["e"].group == (0, 1, 2, 3)


def test_a_name_stack_cannot_imitate_attributes():
    name = "replica_groups={{0,1}}, calls=%sum, body=%main, known_trip_count) ("
    text = module(
        entry(
            "%g = f32[32,128]{1,0} all-gather(f32[8,128]{1,0:T(8,128)} %p), dimensions={0}, "
            f'metadata={{op_name="{name}"}}, replica_groups=[2,4]<=[8]'
        )
    )
    (collective,) = hlo.collectives(text)
    assert collective.shapes == (("f32", (32, 128)),) and collective.op_name == name


def loop(start: int, step: str, test: str, hoisted: int | str = 0, config: str = "") -> str:
    """A while loop as TPU prints it: no trip count, the counter at tuple index 1 of 3."""
    state = "(f32[8,128]{1,0}, s32[], s32[])"
    body = f"""%body (s: {state}) -> {state} {{
  %s = {state} parameter(0)
  %x = f32[8,128]{{1,0}} get-tuple-element(%s), index=0
  %i = s32[]{{:T(128)}} get-tuple-element(%s), index=1
  %n = s32[] get-tuple-element(%s), index=2
  %one = s32[] constant(1)
  %two = s32[] constant(2)
  %i6 = s32[]{{:S(6)}} copy(%i)
  %next = s32[] {step}
  %y = f32[8,128]{{1,0}} all-reduce(%x), replica_groups={{}}, to_apply=%sum
  ROOT %r = {state} tuple(%y, %next, %n)
}}"""
    less = """%less (a: s32[], b: s32[]) -> pred[] {
  %a = s32[] parameter(0)
  %b = s32[] parameter(1)
  ROOT %lt = pred[] compare(%a, %b), direction=LT
}"""
    condition = f"""%condition (s: {state}) -> pred[] {{
  %s = {state} parameter(0)
  %i = s32[] get-tuple-element(%s), index=1
  %n = s32[] get-tuple-element(%s), index=2
  %eight = s32[] constant(8)
  ROOT %go = pred[] {test}
}}"""
    return module(
        SUM, less, body, condition,
        entry(
            f"%start = s32[] constant({start})",
            f"%hoisted = s32[] constant({hoisted})",
            f"%init = {state} tuple(%p, %start, %hoisted)",
            f"ROOT %w = {state} while(%init), condition=%condition, body=%body{config}",
        ),
    )  # fmt: skip


@pytest.mark.parametrize(
    "start, step, test, trips",
    [
        (0, "add(%i6, %one)", "compare(%i, %eight), direction=LT", 8),
        (0, "add(%one, %i6)", "compare(%eight, %i), direction=GT", 8),
        (3, "add(%i6, %two)", "compare(%i, %eight), direction=LT", 3),
        (0, "add(%i6, %one)", "compare(%i, %eight), direction=LE", 9),
        (0, "add(%i6, %two)", "compare(%i, %eight), direction=NE", 4),
        (12, "subtract(%i6, %one)", "compare(%i, %eight), direction=GT", 4),
        (9, "add(%i6, %one)", "compare(%i, %eight), direction=LT", 0),
        (0, "add(%i6, %one)", "fusion(%i, %eight), kind=kLoop, calls=%less", 8),
        (0, "add(%i6, %one)", "compare(%i, %n), direction=LT", 5),
        (0, "add(%i6, %n)", "compare(%i, %eight), direction=LT", 2),
        (0, "multiply(%i6, %two)", "compare(%i, %eight), direction=LT", None),
        (0, "subtract(%i6, %one)", "compare(%i, %eight), direction=LT", None),
        (0, "add(%i6, %one)", "is-finite(%i)", None),
    ],
)
def test_trip_count_from_the_condition(start, step, test, trips):
    (collective,) = hlo.collectives(loop(start, step, test, hoisted=5))
    assert (collective.count, collective.count_known) == (1 if trips is None else trips, trips is not None)


def test_a_printed_trip_count_goes_first():
    for config in (
        ', backend_config={"known_trip_count":{"n":"12"}}',
        ', backend_config="{\\"known_trip_count\\":{\\"n\\":\\"12\\"}}"',
    ):
        text = loop(0, "add(%i6, %one)", "compare(%i, %eight), direction=LT", config=config)
        assert hlo.collectives(text)[0].count == 12
