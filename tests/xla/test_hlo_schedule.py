"""The schedule as events: what runs between the start and the done of a collective, what it costs, whom it serves."""

import collections
import dataclasses

import numpy as np
import pytest
from support.covering import weekly
from support.programs import SMALL, program

from zero_jax.xla import cost, hlo, parser
from zero_jax.xla.events import Done, Loop, Start, Totals, Work, collectives, totals
from zero_jax.xla.schedule import schedule

N = 64
DOT = 2 * N**3  # FLOPs of a product of two f32[64,64]
ARRAY = N * N * 4
F32 = f"f32[{N},{N}]{{1,0}}"
RING = "source_target_pairs={{0,1},{1,0}}"


def module(*computations: str, head: str = "") -> str:
    return "\n\n".join([f"HloModule jit_f, is_scheduled=true, num_partitions=2{head}", *computations]) + "\n"


def computation(name: str, *lines: str) -> str:
    body = "\n".join(f"  {line}" for line in lines)
    return f"{name} () -> f32[] {{\n{body}\n}}"


def dot(name: str, left: str = "%p", right: str = "%p") -> str:
    return f"{name} = {F32} dot({left}, {right}), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}"


def start(name: str, operand: str = "%p") -> str:
    return f"{name} = ({F32}, {F32}, u32[], u32[]) collective-permute-start({operand}), channel_id=1, {RING}"


def done(name: str, operand: str) -> str:
    return f"{name} = {F32} collective-permute-done({operand})"


def spelt(events) -> str:
    """S and D for starts and dones, W for products, loops in brackets."""
    letters = {Start: "S", Done: "D"}
    return "".join(
        f"{event.trips}[{spelt(event.body)}]" if isinstance(event, Loop) else letters.get(type(event)) or "W"
        for event in events
        if not isinstance(event, Work) or event.flops
    )


def overlaps(text: str) -> dict[str, float]:
    """Products that are scheduled while each collective is under way."""
    return {c.name: c.overlapped_flops / DOT for c in hlo.collectives(text)}


P0 = f"%p = {F32} parameter(0)"


def test_two_in_flight():
    text = module(computation(
        "ENTRY %main", P0,
        start("%s"), dot("%w1"), start("%t"), dot("%w2"), done("%d", "%s"), dot("%w3"), dot("ROOT %w4"),
        done("%e", "%t")))  # fmt: skip
    events = schedule(text)
    assert spelt(events) == "SWSWDWWD"
    assert overlaps(text) == {"s": 2, "t": 3}
    first, second = collectives(events)
    ended = [event.collective for event in events if isinstance(event, Done)]
    assert ended[0] is first and ended[1] is second
    assert totals(events) == Totals({"f32": 4 * DOT}, 4 * 3 * ARRAY)
    assert [(each.overlapped_flops, each.overlapped_bytes) for each in (first, second)] == [
        (2 * DOT, 2 * 3 * ARRAY), (3 * DOT, 3 * 3 * ARRAY)]  # fmt: skip


def test_what_blocks_overlaps_nothing():
    whole = start("%s").replace("collective-permute-start", "collective-permute")
    text = module(computation("ENTRY %main", P0, whole, dot("ROOT %w")))
    assert spelt(schedule(text)) == "SDW" and overlaps(text) == {"s": 0}
    sync = start("%s") + ', backend_config={"is_sync":true}'
    text = module(computation("ENTRY %main", P0, sync, dot("%w"), done("ROOT %d", "%s")))
    assert spelt(schedule(text)) == "SDW" and overlaps(text) == {"s": 0}


def test_async_wrappers_in_flight():
    wrapped = [
        computation(f"%wrapped{i}", f"%q = {F32} parameter(0)",
                    f"ROOT %a{i} = {F32} all-to-all(%q), replica_groups={{}}, dimensions={{0}}")
        for i in (1, 2)
    ]  # fmt: skip

    def begin(i):
        return f"%s{i} = (({F32}), {F32}) async-start(%p), calls=%wrapped{i}"

    def end(i):
        return f"%d{i} = {F32} async-done(%u{i}), calls=%wrapped{i}"

    def step(i):
        return f"%u{i} = (({F32}), {F32}) async-update(%s{i}), calls=%wrapped{i}"

    text = module(*wrapped, computation(
        "ENTRY %main", P0, begin(1), dot("%w1"), begin(2), dot("%w2"), step(2), step(1), end(2), dot("ROOT %w3"),
        end(1)))  # fmt: skip
    assert spelt(schedule(text)) == "SWSWDWD"
    assert overlaps(text) == {"a1": 3, "a2": 1}


def test_a_fusion_on_another_stream_is_work():
    fused = computation("%fused", f"%q = {F32} parameter(0)", dot("ROOT %w", "%q", "%q"))
    text = module(fused, computation(
        "ENTRY %main", P0, start("%s"), f"%f = (({F32}), {F32}, u32[]) fusion-start(%p), kind=kLoop, calls=%fused",
        done("%d", "%s"), f"ROOT %g = {F32} fusion-done(%f)"))  # fmt: skip
    assert spelt(schedule(text)) == "SWD" and overlaps(text) == {"s": 1}
    assert totals(schedule(text)).hbm_bytes == 2 * ARRAY


def while_loop(body: list[str], root: str, trips: int) -> list[str]:
    state = f"(s32[], {F32}, ({F32}, {F32}, u32[], u32[]))"
    return [
        computation("%condition", f"%c = {state} parameter(0)", "%i = s32[] get-tuple-element(%c), index=0",
                    "%n = s32[] constant(3)", "ROOT %less = pred[] compare(%i, %n), direction=LT"),
        computation("%body", f"%c = {state} parameter(0)", f"%p = {F32} get-tuple-element(%c), index=1",
                    "%i = s32[] get-tuple-element(%c), index=0", *body, f"ROOT %r = {state} tuple(%i, %p, {root})"),
        computation(
            "ENTRY %main", P0, "%zero = s32[] constant(0)", start("%s0"), dot("%w0"),
            f"%init = {state} tuple(%zero, %p, %s0)",
            f"%loop = {state} while(%init), condition=%condition, body=%body, "
            f'backend_config={{"known_trip_count":{{"n":"{trips}"}}}}',
            f"%last = {F32} get-tuple-element(%loop), index=2", dot("%w9"), done("ROOT %d9", "%last")),
    ]  # fmt: skip


def test_work_of_a_loop_in_between_counts_as_often():
    carried = f"%k = ({F32}, {F32}, u32[], u32[]) get-tuple-element(%c), index=2"
    text = module(*while_loop([carried, dot("%w1")], "%k", 5))
    assert spelt(schedule(text)) == "SW5[W]WD"
    assert overlaps(text) == {"s0": 1 + 5 + 1}


def test_a_pipelined_loop():
    """Each iteration waits for what the one before has started; the last one is waited for behind the loop."""
    carried = f"%k = ({F32}, {F32}, u32[], u32[]) get-tuple-element(%c), index=2"
    lines = [carried, dot("%w1"), done("%d1", "%k"), dot("%w2"), start("%s1"), dot("%w3"), dot("%w4")]
    text = module(*while_loop(lines, "%s1", 5))
    events = schedule(text)
    loop = next(event for event in events if isinstance(event, Loop))
    assert [event.collective.name for event in loop.body if isinstance(event, Done)] == ["s0", "s1"]
    # %s0: %w0, and %w1 of the first iteration. %s1: %w3 and %w4, and %w1 of the next iteration.
    assert overlaps(text) == {"s0": 2, "s1": 3}
    assert [(c.name, c.count) for c in hlo.collectives(text)] == [("s0", 1), ("s1", 5)]


def test_the_branch_that_costs_most():
    branches = [
        computation("%light", f"%q = {F32} parameter(0)", dot("ROOT %w", "%q", "%q")),
        computation("%heavy", f"%q = {F32} parameter(0)", dot("%w", "%q", "%q"), dot("ROOT %v", "%q", "%w")),
        computation("%tiny", f"%q = {F32} parameter(0)", f"ROOT %m = {F32} negate(%q)"),
    ]
    text = module(*branches, computation(
        "ENTRY %main", P0, "%i = s32[] parameter(1)",
        f"ROOT %x = {F32} conditional(%i, %p, %p, %p), branch_computations={{%light, %heavy, %tiny}}"))  # fmt: skip
    assert spelt(schedule(text)) == "WW"


def test_tpu_fusions_that_carry_a_collective_overlap_it():
    """As v5e prints it. The convolution in the middle is one product; the buffers passed through move nothing."""
    vmem = f"f32[{N},{N}]{{1,0:T(8,128)S(1)}}"
    half = f"f32[{N // 2},{N}]{{1,0:T(8,128)S(1)}}"
    gather = f"{F32} all-gather(%a), channel_id=3, replica_groups={{}}, dimensions={{0}}, " + (
        'frontend_attributes={chain_id="0"}')  # fmt: skip
    state = f"({half}, {vmem})"
    first = computation("%first", f"%a = {half} parameter(0)", f"%g0 = {gather}",
                        f'ROOT %c0 = {state} custom-call(%g0), custom_call_target="AsyncCollectiveStart"')  # fmt: skip
    carry = computation(
        "%carry", f"%a = {half} parameter(0)", f"%b = {vmem} parameter(1)", f"%x = {F32} parameter(2)",
        f"%y = {F32} convolution(%x, %x), dim_labels=bf_io->bf", f"%g1 = {gather}",
        f"ROOT %t = ({F32}, {half}, {vmem}, {vmem}) tuple(%y, %a, %b, %g1)")  # fmt: skip
    last = computation(
        "%last", f"%a = {half} parameter(0)", f"%b = {vmem} parameter(1)", f"%g2 = {gather}",
        f'ROOT %c1 = {vmem} custom-call(%a, %b, %g2), custom_call_target="AsyncCollectiveDone"')  # fmt: skip
    text = module(first, carry, last, computation(
        "ENTRY %main", f"%q = {half} parameter(0)", f"%x = {F32} parameter(1)",
        f"%f0 = {state} fusion(%q), kind=kCustom, calls=%first",
        f"%a0 = {half} get-tuple-element(%f0), index=0", f"%b0 = {vmem} get-tuple-element(%f0), index=1",
        f"%f1 = ({F32}, {half}, {vmem}, {vmem}) fusion(%a0, %b0, %x), kind=kOutput, calls=%carry",
        dot("%w", "%x", "%x"),
        f"ROOT %f2 = {vmem} fusion(%a0, %b0), kind=kCustom, calls=%last"))  # fmt: skip
    events = schedule(text)
    assert spelt(events) == "SWWD" and overlaps(text) == {"g0": 2}
    assert [event.hbm_bytes for event in events if isinstance(event, Work)] == [2 * ARRAY, 3 * ARRAY]


def instruction_cost(*lines: str, fused: tuple[str, ...] = ()) -> tuple[dict, float]:
    """FLOPs and HBM bytes of the last of `lines`."""
    parsed = parser.parse(module(computation("%fused", *fused), computation("ENTRY %main", P0, *lines)))
    entry = parsed.computations["main"]
    frame, last = parser.Frame(entry, None, None), entry.instructions[entry.root]
    return dict(cost.flops(parsed, frame, last)), cost.hbm_bytes(parsed, frame, last)


FUSED = (f"%a = {F32} parameter(0)", "%i = s32[] parameter(1)")
INDEX = "%i = s32[] constant(3)"
FUSION = f"ROOT %f = {F32} fusion(%p, %i), kind=kLoop, calls=%fused"


@pytest.mark.parametrize(
    "lines, fused, expected",
    [
        ([f"ROOT %y = {F32} negate(%p)"], (), 2 * ARRAY),
        ([f"ROOT %y = f32[{N * N}]{{0}} bitcast(%p)"], (), 0),
        ([f"%t = ({F32}) tuple(%p)", f"ROOT %y = {F32} get-tuple-element(%t), index=0"], (), 0),
        (["%z = f32[] constant(0)", f"ROOT %y = {F32} broadcast(%z), dimensions={{}}"], (), 4 + ARRAY),
        # A slice reads what it takes, and an index.
        ([INDEX, "ROOT %y = f32[1,64]{1,0} dynamic-slice(%p, %i, %i)"], (), 2 * 256 + 2 * 4),
        (["%k = s32[8]{0} parameter(1)", "ROOT %y = f32[8,64]{1,0} gather(%p, %k)"], (), 2 * 8 * 256 + 32),
        # An update in place reads and writes the update.
        (["%u = f32[1,64]{1,0} parameter(1)", f"ROOT %y = {F32} dynamic-update-slice(%p, %u)"], (), 2 * 256),
        ([INDEX, FUSION], (*FUSED, "%s = f32[1,64]{1,0} dynamic-slice(%a, %i, %i)", f"ROOT %b = {F32} broadcast(%s)"),
         256 + 4 + ARRAY),
        ([INDEX, FUSION], (*FUSED, f"%c = {F32} copy(%a)", "%s = f32[1,64]{1,0} dynamic-slice(%c, %i, %i)",
                           f"ROOT %b = {F32} dynamic-update-slice(%a, %s, %i, %i)"), 256 + 4 + 256),
        # Read twice over is read whole, once.
        ([INDEX, FUSION], (*FUSED, "%s = f32[1,64]{1,0} slice(%a)", f"ROOT %b = {F32} add(%a, %a)"), 2 * ARRAY),
        # VMEM, host memory and semaphores are no HBM; S(1) without tiles is GPU's.
        (["ROOT %y = f32[64,64]{1,0:T(8,128)S(1)} negate(%p)"], (), ARRAY),
        (["ROOT %y = f32[64,64]{1,0:S(5)} copy(%p)"], (), ARRAY),
        (["ROOT %y = f32[64,64]{1,0:S(1)} copy(%p)"], (), 2 * ARRAY),
        ([f"ROOT %y = (f32[64,64]{{1,0:T(8,128)S(1)}}, {F32}, u32[]{{:S(2)}}) copy-start(%p)"], (), ARRAY),
        ([f"ROOT %y = (({F32}), f32[1,64]{{1,0}}, s32[]) slice-start(%p), slice={{[0:1], [0:64]}}"], (), 2 * 256),
        ([f"ROOT %y = {F32} all-reduce(%p), replica_groups={{}}, to_apply=%fused"], (), 0),
    ],
)  # fmt: skip
def test_hbm_bytes(lines, fused, expected):
    assert instruction_cost(*lines, fused=fused or ("ROOT %z = f32[] constant(0)",)) == ({}, expected)


@pytest.mark.parametrize(
    "line, expected",
    [
        ('%y = (f32[64,64], s8[99]) custom-call(%p, %p), custom_call_target="__cublas$gemm", backend_config={"gemm_'
         'backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}', {"f32": DOT}),
        ('%y = (f32[8,62,62,16], u8[0]) custom-call(%x, %k), window={size=3x3}, dim_labels=b01f_01io->b01f, '
         'custom_call_target="__cudnn$convForward"', {"bf16": 2 * 8 * 62 * 62 * 16 * 9 * 32}),
        ('%y = (bf16[8,64,64,32], u8[0]) custom-call(%o, %k), window={size=3x3}, dim_labels=b01f_01io->b01f, '
         'custom_call_target="__cudnn$convBackwardInput"', {"f32": 2 * 8 * 62 * 62 * 16 * 9 * 32}),
        ('%y = (bf16[3,3,32,16], u8[0]) custom-call(%x, %o), window={size=3x3}, dim_labels=b01f_01io->b01f, '
         'custom_call_target="__cudnn$convBackwardFilter"', {"bf16": 2 * 8 * 62 * 62 * 16 * 9 * 32}),
        ('%y = f32[64,64] custom-call(%p), custom_call_target="__cudnn$fmhaSoftmax"', {}),
        # v5e writes eight products as a convolution of stride 7 over a dim dilated by 8: one tap of 8 meets an element.
        ("%y = f32[8,64,32] convolution(%l, %r), window={size=8 stride=7 lhs_dilate=8}, dim_labels=0bf_0io->0bf",
         {"bf16": 8 * 2 * 64 * 32 * 128}),
        ("%y = f32[8,64,32] convolution(%l, %r), window={size=8 stride=8 pad=7_7 lhs_dilate=7 rhs_reversal=1}, "
         "dim_labels=0bf_0io->0bf", {"bf16": 8 * 2 * 64 * 32 * 128}),
    ],
)  # fmt: skip
def test_flops_of_what_small_programs_do_not_produce(line, expected):
    arrays = ("%x = bf16[8,64,64,32] parameter(1)", "%k = bf16[3,3,32,16] parameter(2)",
              "%o = f32[8,62,62,16] parameter(3)", "%l = bf16[8,64,128] parameter(4)",
              "%r = bf16[8,128,32] parameter(5)")  # fmt: skip
    assert instruction_cost(*arrays, f"ROOT {line}", fused=("ROOT %z = f32[] constant(0)",))[0] == expected


TARGETS = ("cpu", "h100", "v5e")


@pytest.mark.parametrize("target", TARGETS)
def test_flops_of_a_train_step(target):
    """Three times the forward products: 2 per weight of the blocks and token, 4 T² width of attention, the head."""
    c, tokens = SMALL, SMALL.max_length
    blocks = c.num_layers * (2 * tokens * 12 * c.width**2 + 4 * tokens**2 * c.width)
    assert sum(totals(program(f"{target} stage 3").schedule).flops.values()) == 3 * (
        blocks + 2 * tokens * c.vocab_size * c.width)  # fmt: skip


@pytest.mark.parametrize("target", TARGETS)
def test_every_start_of_a_train_step_has_its_done(target):
    def check(events):
        under_way = []
        for event in events:
            if isinstance(event, Start):
                under_way.append(event.collective)
            elif isinstance(event, Done):
                assert any(event.collective is c for c in under_way)
                under_way = [c for c in under_way if c is not event.collective]
            elif isinstance(event, Loop):
                assert event.known and event.trips == SMALL.num_layers
                check(event.body)
        assert not under_way

    check(program(f"{target} stage 3").schedule)


@weekly("target, stage", [("h100", 3), ("v5e", 3), ("cpu", 3), ("h100", 0), ("v5e", 2)], default=2)
def test_whom_the_collectives_of_a_train_step_serve(target, stage):
    found = program(f"{target} stage {stage}")
    sizes = found.sizes
    served = collections.defaultdict(set)
    for c in found.collectives:
        large = [int(np.prod(dims)) for _, dims in c.shapes if np.prod(dims) > 8]
        assert bool(c.serves) == bool(large), c  # all but the loss and the norm of the gradients
        if c.kind in ("all-gather", "reduce-scatter") and len(c.serves) == len(large):  # one leaf, one array
            assert not [name for name, size in zip(c.serves, large, strict=True) if sizes[name] % size], c
        served["gathered" if c.kind == "all-gather" else "reduced"] |= set(c.serves)
    assert served["reduced"] == set(sizes)
    matrices = {name for name in sizes if name.endswith(("kernel", "embedding"))}
    assert served["gathered"] >= matrices if stage else not served["gathered"]


def test_whom_is_read_from_the_inputs_names():
    def text(op_name, alias=", input_output_alias={ {}: (0, {}, may-alias) }"):
        reduced = f"%r = {F32} all-reduce(%g), replica_groups={{}}, to_apply=%fused"
        return module(
            computation("%fused", "ROOT %z = f32[] constant(0)"),
            computation("ENTRY %main", f'{P0}, metadata={{op_name="{op_name}"}}', dot("%g"), reduced,
                        f"ROOT %n = {F32} subtract(%p, %r)"), head=alias)  # fmt: skip

    for op_name, name in {
        r"state.params[\'blocks\'][\'qkv\'][\'kernel\']": ("blocks/qkv/kernel",),
        "state.weights['wte'][0].value": ("wte/0/value",),
        "params['w']": ("w",),
        "state.opt_state[0].mu['w']": (),
        "batch['inputs']": (),
    }.items():
        assert hlo.collectives(text(op_name))[0].serves == name
        assert hlo.collectives(text(op_name, ""))[0].serves == name  # by the parameter it is subtracted from


@pytest.mark.parametrize("merging, merged, name", [
    ("concatenate(%l, %r)", True, "layer/reduce_sum"), ("concatenate(%l, %r)", True, ""), ("add(%l, %r)", False, "")])
def test_a_merged_all_reduce_is_that_of_its_arrays(merging, merged, name):
    """XLA:GPU flattens and concatenates small ones, and drops where they are from; a fusion that computes stays one.

    What is known of a smaller one says nothing of the largest.
    """
    size = 80 if merged else 64
    concatenated = ["%l = f32[64]{0} parameter(0)", f"%r = f32[{size - 64 or 64}]{{0}} parameter(1)",
                    f"ROOT %c = f32[{size}]{{0}} {merging}" + (", dimensions={0}" if merged else "")]
    (found,) = hlo.collectives(module(
        computation("%fused", *concatenated),
        computation("%sum", "ROOT %z = f32[] constant(0)"),
        computation("ENTRY %main",
                    "%a = f32[8,8]{1,0} parameter(0)" + bool(name) * f", metadata={{op_name=\"{name}\"}}",
                    f"%b = f32[{size - 64 or 64}]{{0}} parameter(1), metadata={{op_name=\"layer/bias\"}}",
                    "%flat = f32[64]{0} bitcast(%a)",
                    f"%f = f32[{size}]{{0}} fusion(%flat, %b), kind=kLoop, calls=%fused",
                    f"ROOT %s = f32[{size}]{{0}} all-reduce(%f), replica_groups={{}}, to_apply=%sum" + (
                        ', metadata={op_name="layer/(reduce_sum:bias)"}' if name else ""))))  # jaxlib 0.12
    assert found.payload_bytes == 4 * size
    if merged:
        assert (found.shapes, found.op_name) == ((("f32", (8, 8)), ("f32", (16,))), name)
    else:
        assert (found.shapes, found.op_name) == ((("f32", (64,)),), "")


@pytest.mark.parametrize("kind, copied, expected", [
    ("reduce-scatter", "", "zero_scatter/w"), ("reduce-scatter", "step/while", "zero_scatter/w"),
    ("all-reduce", "", ""), ("all-gather", "", ""), ("all-gather", "step/while", "step/while")])
def test_a_reduction_without_a_name_is_that_of_what_it_sends(kind, copied, expected):
    """XLA:TPU copies what it sends within a product, with the loop's name or none. Others have their own, or none."""
    (found,) = hlo.collectives(module(
        computation("%sum", "ROOT %z = f32[] constant(0)"),
        computation("ENTRY %main", f'{P0}, metadata={{op_name="x"}}',
                    dot("%g") + ', metadata={op_name="zero_scatter/w"}',
                    f"%c = {F32} copy(%g)" + bool(copied) * f', metadata={{op_name="{copied}"}}',
                    f"ROOT %s = {F32} {kind}(%c), replica_groups={{}}" + (
                        ", to_apply=%sum" * ("reduce" in kind) + ", dimensions={0}" * (kind != "all-reduce")))))
    assert found.op_name == expected


def test_overlap_is_a_field_of_every_collective():
    fields = {field.name for field in dataclasses.fields(hlo.Collective)}
    assert {"serves", "overlapped_flops", "overlapped_bytes"} <= fields
