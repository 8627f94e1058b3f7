"""Communication beside compute: SparseCores by default, prefetch when asked for; refused where nothing would change."""

import dataclasses
import io
import types

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from support.flat import flat_step
from support.programs import BESIDE_PREFETCH, asynchronous, beside_products, program
from support.targets import mesh_of

import zero_jax
from models import gpt2
from zero_jax.cli.planning.plan_report import plan_tables
from zero_jax.planning.plan import examine
from zero_jax.xla.devices import compiled_for
from zero_jax.xla.events import collectives
from zero_jax.xla.overlap import overlap_options, reduction_options
from zero_jax.xla.schedule import schedule
from zero_jax.xla.targets import target_of

CONFIG = gpt2.Config(2, 256, 4, vocab_size=2048, max_length=16)


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize("gathers", ["", ", gathered in forward"])
@pytest.mark.parametrize("chip", ["v5p", "v6e"])
def test_the_sparse_cores_send_while_the_tensor_cores_compute(chip, gathers):
    """The bytes stay the paper's; in this small program a quarter or more are sent beside a product."""
    found = program(f"{chip} stage 3{gathers}")
    assert not found.report.violations
    assert asynchronous(f"{chip} stage 3{gathers}") >= {"v5p": 0.98, "v6e": 0.97}[chip]
    beside = sum(c.communication_bytes * c.count for c in found.collectives if c.overlapped_flops)
    assert beside > 0.25 * found.sent()


@pytest.mark.slow
def test_without_it_everything_blocks():
    """The control, and the bytes."""
    assert asynchronous("v5p stage 3, no overlap") < 0.01
    with_it, without = program("v5p stage 3"), program("v5p stage 3, no overlap")
    assert with_it.sent() == pytest.approx(without.sent(), rel=0.01)


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize("chip", ["v5p", "v6e"])
def test_the_sparse_cores_send_codes(chip):
    """Weights and gradients of int8 are as asynchronous as those of bf16.

    The control is the same program with its gathers as bytes and without the option for all-to-alls: both block.
    """
    assert asynchronous(f"{chip} stage 3, quantised") > 0.95
    sent = {c.kind: set(c.dtypes) for c in program(f"{chip} stage 3, quantised").collectives if c.payload_bytes > 2**14}
    assert sent["all-to-all"] == {"u8"} and sent["all-gather"] == {"u32"}


def codes_of(target, dtype, options):
    """Whether a gather and an all-to-all of codes in a loop are asynchronous."""
    mesh = mesh_of(target)
    split = P(mesh.axis_names)

    def round_of(x, codes):
        for axis in reversed(mesh.axis_names):
            codes = jax.lax.all_gather(codes, axis, tiled=True)
        x = jnp.tanh(x @ codes.reshape(512, 512).astype(x.dtype))
        own = (x * 100).astype(jnp.uint8).reshape(mesh.size, -1)
        return x, jax.lax.all_to_all(own, mesh.axis_names, 0, 0, tiled=True)

    loop = jax.shard_map(lambda x, codes: jax.lax.scan(round_of, x, codes), mesh=mesh, check_vma=False,
                         in_specs=(split, P(None, *split)), out_specs=(split, P(None, *split)))
    like = [jax.ShapeDtypeStruct(shape, kind, sharding=NamedSharding(mesh, spec)) for shape, kind, spec in (
        ((8 * 2048, 512), jnp.bfloat16, split), ((3, 512 * 512), dtype, P(None, *split)))]
    compiled = compiled_for(jax.jit(loop).lower(*like), mesh.devices.flat[0], options)
    found = collectives(schedule(compiled.as_text()))
    return tuple(all(each.asynchronous for each in found if each.kind == kind) for kind in ("all-gather", "all-to-all"))


@pytest.mark.slow
def test_why_codes_are_gathered_as_words():
    """XLA for v5p gathers bytes with collectives that block; where it no longer does, drop `as_words`."""
    device = mesh_of("v5p:2x2x2").devices.flat[0]
    assert codes_of("v5p:2x2x2", jnp.uint32, overlap_options(device, True, codes=True)) == (True, True)
    assert codes_of("v5p:2x2x2", jnp.uint8, overlap_options(device, True)) == (False, False)


def test_all_to_alls_of_a_model_are_left_where_they_compile():
    """The option is for codes: libtpu fails for what the partitioner makes of some models.

    Such a program is tests/contract/test_verify.py's of annotated arrays on v5p.
    """
    mesh = mesh_of("v5p:2x2x2")
    device, option = mesh.devices.flat[0], "xla_tpu_enable_sparse_core_collective_offload_dense_all_to_all"
    assert [option in overlap_options(device, True, codes=codes) for codes in (False, True)] == [False, True]
    for model_codes in ({}, {"communication": zero_jax.Communication(weights="int8")},
                        {"communication": zero_jax.Communication(gradients="int8")}):
        expected = getattr(model_codes.get("communication"), "gradients", None) is not None
        assert (option in layout("v5p:2x2x2", **model_codes).overlap_note) == expected


@pytest.mark.slow
def test_a_gpu_gathers_for_the_next_layer():
    """Every gather of a loop has a product beside it, what is sent is the same, and memory grows by some layers.

    The control is the step without: there a layer waits for its own gathers.
    """
    name, without = "h100 stage 3, 8 layers", "h100 stage 3, 8 layers, no overlap"
    ahead, plain = program(name), program(without)
    assert not ahead.report.violations
    assert asynchronous(name) > 0.95  # the first layer's gather has nothing before it
    assert beside_products(name) > 0.99 > beside_products(without) + 0.3
    assert ahead.sent() == pytest.approx(plain.sent(), rel=1e-3)
    layer = 2 * 12 * 768**2
    assert ahead.memory.temp_size_in_bytes - plain.memory.temp_size_in_bytes < 4 * layer


@pytest.mark.slow
def test_a_gpu_reduces_beside_products_in_an_unrolled_model():
    """The control is what XLA combines by itself: all reductions, which then come last."""
    def beside(name):
        found = [c for c in program(name).collectives if c.kind == "reduce-scatter"]
        return sum(c.communication_bytes for c in found if c.overlapped_flops) / sum(
            c.communication_bytes for c in found)

    name = "h100 stage 3, 4 layers unrolled"
    parts, one = program(name), program(f"{name}, combined")
    assert not parts.report.violations and parts.sent() == pytest.approx(one.sent(), rel=1e-3)
    assert beside(name) > 0.4
    assert beside(f"{name}, combined") < 0.05


@pytest.mark.slow
def test_a_tpu_gathers_no_whole_model_that_no_loop_runs_over():
    """The control lets gathers start while others are sent: then all do, before the first product."""
    found, queued = (program(f"v5p stage 3, 6 small layers unrolled{which}") for which in ("", ", queued"))
    assert not found.report.violations
    assert any("in device memory" in each or "gathered" in each for each in queued.report.violations)
    assert found.memory.peak_memory_in_bytes < 0.9 * queued.memory.peak_memory_in_bytes
    assert asynchronous("v5p stage 3, 6 small layers unrolled") > 0.9


@pytest.mark.slow
def test_options_of_models_that_no_loop_runs_over():
    """On GPUs reductions in parts, unless their size or no overlap is asked for; on TPUs no queue, where it gathers.

    Iterations of loops in pairs.
    """
    unrolled, queue = dataclasses.replace(CONFIG, scan_layers=False), "queuing_in_lhs=True"
    parts = "xla_gpu_reduce_scatter_combine_threshold_bytes=4194304"
    for stage in (1, 2, 3):
        assert parts in layout("h100:8", stage, unrolled).overlap_note
        assert "while_loop_double_buffering" in (note := layout("h100:8", stage, CONFIG).overlap_note)
        assert parts not in note
    for options in ({"stage": 0}, {"combine_bytes": 2**20}, {"overlap": False},
                    {"communication": zero_jax.Communication(gradients="int8")}):
        assert not layout(**{"target": "h100:8", "model": unrolled} | options).overlap_note
    assert reduction_options(mesh_of("h100:8").devices.flat[0], 128) == {parts.partition("=")[0]: 2**19}
    for stage, model, queued in ((3, unrolled, False), (3, CONFIG, True), (2, unrolled, True)):
        assert (queue in layout("v5p:2x2x2", stage, model).overlap_note) == queued


@pytest.mark.slow
def test_a_tpu_gathers_for_the_next_layer_and_reduces_behind_the_one_before():
    """More of the bytes of loops have a product beside them, and none are added. The control is the step without."""
    ahead, plain = program("v5p stage 3, 4 layers, prefetch"), program("v5p stage 3, 4 layers")
    assert not ahead.report.violations
    assert asynchronous("v5p stage 3, 4 layers, prefetch") > 0.98
    found = [{kind: beside_products(f"v5p stage 3, 4 layers{which}", kind) for kind in ("all-gather", "reduce-scatter")}
             for which in (", prefetch", "")]
    assert all(found[0][kind] > found[1][kind] + 0.1 for kind in found[0]), found
    assert ahead.sent() == pytest.approx(plain.sent(), rel=1e-3)


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize("name", BESIDE_PREFETCH)
def test_prefetch_takes_effect_beside_other_options(name):
    """More bytes are sent beside products, and the contract is kept. The control is the step without prefetch."""
    ahead, plain = (program(f"v5p stage 3, {name}{which}") for which in (", prefetch", ""))
    assert not ahead.report.violations and not plain.report.violations
    beside = [sum(c.communication_bytes * c.count for c in each.collectives if c.asynchronous and c.overlapped_flops)
              / each.sent() for each in (ahead, plain)]
    assert beside[0] > beside[1] + 0.1, beside
    assert ahead.sent() == pytest.approx(plain.sent(), rel=0.01)
    assert ahead.memory.temp_size_in_bytes < 1.25 * plain.memory.temp_size_in_bytes


@pytest.mark.parametrize("options, told", [
    ({"prefetch": 1}, "prefetch=1: give True or False"),
    ({"target": "v5e:2x4", "prefetch": True}, "changes nothing on 'TPU v5 lite'.*compilers for TPU v5p and v6e"),
    ({"target": "", "prefetch": True}, "changes nothing on 'cpu'"), ({"prefetch": True}, "changes nothing on 'NVIDIA"),
    ({"target": "v5p:2x2x2", "prefetch": True, "model": dataclasses.replace(CONFIG, scan_layers=False)},
     "no loop of this model")])
def test_where_nothing_can_be_gathered_ahead_it_is_refused(options, told):
    with pytest.raises(zero_jax.UsageError, match=told):
        layout(**{"target": "h100:8"} | options)


@pytest.mark.parametrize(("target", "reason"), [
    ("h100:8", "overlaps communication with compute by itself"),
    ("tpu7x:2x2x2", "by itself"), ("v4:2x2x2", "makes no collective asynchronous")])
def test_where_it_changes_nothing_it_is_refused(target, reason):
    told = f"overlap=True changes nothing on .*{reason}.*for TPU v5e, v5p and v6e"
    with pytest.raises(zero_jax.UsageError, match=told):
        overlap_options(mesh_of(target).devices.flat[0], True)


@pytest.mark.parametrize("target", ["h100:8", "v4:2x2x2", "tpu7x:2x2x2", ""])
def test_elsewhere_the_default_changes_nothing(target):
    """What the next tests find on v5e, v5p and v6e is the control."""
    mesh = mesh_of(target) if target else zero_jax.make_mesh(8)
    assert overlap_options(mesh.devices.flat[0], "auto") == {}


@pytest.mark.parametrize("names", [
    ("TPU v5", "TPU v5p"), ("TPU v6 lite", "TPU v6e"), ("TPU v5 lite", "TPU v5e")])
def test_live_and_described_chips_get_the_same_options(names):
    """Whichever of its names a chip reports; other kinds have none to begin with."""
    chips = [types.SimpleNamespace(device_kind=name, platform="tpu") for name in names]
    described, live = (overlap_options(chip, "auto") for chip in chips)
    assert described == live == overlap_options(chips[0], True) and described


def layout(target, stage=3, model=CONFIG, **options):
    mesh = mesh_of(target) if target else zero_jax.make_mesh(8)
    step = flat_step(gpt2.build(model), stage, mesh=mesh, precision="bf16", **options)
    return step.layout({name: jax.ShapeDtypeStruct((8, 16), jnp.int32) for name in ("inputs", "targets")})


def test_the_layout_tells_the_options():
    told = "collectives run beside compute by XLA's options: xla_tpu_"
    assert told in layout("v5p:2x2x2").describe()
    assert "xla_gpu_enable_pipelined_all_gather=True" in layout("h100:8").describe()
    pipelined, told_by_default = "xla_tpu_enable_ici_ag_pipelining=True", layout("v5p:2x2x2").describe()
    assert pipelined in layout("v5p:2x2x2", prefetch=True).describe() and pipelined not in told_by_default
    one_device = zero_jax.make_zero_train_step(gpt2.build(CONFIG), 3, mesh=zero_jax.make_mesh(
        devices=mesh_of("v5p:2x2x2").devices.flat[:1]))
    assert not one_device.layout(
        {name: jax.ShapeDtypeStruct((8, 16), jnp.int32) for name in ("inputs", "targets")}).overlap_note
    for target in ("v5p:2x2x2", "h100:8"):
        assert told not in layout(target, overlap=False).describe()


@pytest.mark.slow
def test_a_plan_tells_what_it_changes():
    """The same step is compiled twice; where overlap is not asked for, once."""
    batch = {name: jax.ShapeDtypeStruct((8, 16), jnp.int32) for name in ("inputs", "targets")}
    made, plain = (zero_jax.plan(gpt2.build(CONFIG), 3, "v5p:2x2x2", batch, precision="bf16",
                                 communication=zero_jax.Communication(overlap=overlap)) for overlap in (True, False))
    assert plain.overlap is None and made.overlap is not None
    assert made.overlap.seconds == pytest.approx((plain.timing.seconds, made.timing.seconds), rel=0.01)
    exposed = [sum(each.timing.exposed_seconds.values()) for each in (plain, made)]
    assert made.overlap.exposed_seconds == pytest.approx(tuple(exposed), rel=0.01)
    assert made.overlap.temporaries[0] != made.overlap.temporaries[1]
    shown = io.StringIO()
    Console(file=shown, width=200).print(plan_tables(made))
    assert "exposed communication, seconds" in shown.getvalue()


@pytest.mark.slow
def test_gathers_that_come_last_go_to_the_sparse_cores():
    """At stages 1 and 2 in chunks of the old weights, which is for TPUs that are asked to overlap."""
    layouts = [layout("v5p:2x2x2", stage) for stage in (1, 2, 3)]
    assert all("offload_all_gather=True" in each.overlap_note for each in layouts)
    assert [each.gathers_in_chunks for each in layouts] == [True, True, False]
    assert [layout("v5e:2x4", stage).gathers_in_chunks for stage in (1, 2, 3)] == [True, True, False]
    for target, stage, options in (
            ("v5p:2x2x2", 0, {}), ("v5p:2x2x2", 2, {"overlap": False}), ("v5e:2x4", 2, {"overlap": False}),
            ("v5e:2x4", 0, {}), ("h100:8", 2, {})):
        assert not layout(target, stage, **options).gathers_in_chunks


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize(("chip", "precision"), [("v5p", ""), ("v5p", ", fp32"), ("v6e", "")])
def test_whole_weights_are_sent_while_the_next_are_updated(chip, precision):
    """The bytes stay those of the control, which blocks; in float32 it is the parameters that are gathered."""
    found, control = program(f"{chip} stage 2, large{precision}"), program(f"{chip} stage 2, large, no overlap")
    assert not found.report.violations
    assert found.sent() == pytest.approx(control.sent() * (2 if precision else 1), rel=0.01)
    assert asynchronous(f"{chip} stage 2, large{precision}") >= {"v5p": 0.98, "v6e": 0.97}[chip]
    assert asynchronous(f"{chip} stage 2, large, no overlap") < 0.01


def test_what_does_not_fit_is_told_to_do_without():
    """Of what is too large to be compiled at all."""
    batch = {name: jax.ShapeDtypeStruct((8, 16), jnp.int32) for name in ("inputs", "targets")}
    for overlap in ("auto", False):
        step = flat_step(gpt2.build(CONFIG), 3, mesh=mesh_of("v5p:2x2x2"), overlap=overlap)
        told = examine(step, batch, target_of("v5p:2x2x2"), memory_bytes=1).advice
        assert told and any("overlap=False" in line for line in told) == bool(overlap)


def test_a_mapping_changes_the_options():
    device = mesh_of("v5p:2x2x2").devices.flat[0]
    own, name = overlap_options(device, True), "xla_tpu_enable_async_collective_fusion"
    assert own[name] is True and overlap_options(device, {name: False, "xla_x": 1}) == {**own, name: False, "xla_x": 1}
    assert overlap_options(device, False) == {}


def test_gpus_take_a_mapping_in_the_place_of_what_loops_are_compiled_with():
    name = "xla_gpu_enable_while_loop_double_buffering"
    by_default, asked = (layout("h100:8", **options).overlap_note for options in ({}, {"overlap": {name: False}}))
    assert f"{name}=True" in by_default and f"{name}=False" in asked and f"{name}=True" not in asked


def test_other_tpus_take_a_mapping_and_other_devices_do_not():
    asked = {"xla_tpu_enable_async_collective_fusion_fuse_kloop_fusions": True}
    assert overlap_options(mesh_of("v4:2x2x2").devices.flat[0], asked) == asked
    with pytest.raises(zero_jax.UsageError, match="changes nothing on 'cpu'"):
        overlap_options(jax.devices()[0], asked)
    with pytest.raises(zero_jax.UsageError, match="changes nothing on 'TPU v4'"):
        overlap_options(mesh_of("v4:2x2x2").devices.flat[0], {})


@pytest.mark.slow
def test_temporaries_are_laid_out_by_the_better_search():
    """The control takes the first layout that fits, as XLA does by itself; all else is the same."""
    found = {}
    for overlap in ("auto", {"xla_tpu_buffer_assignment_enable_fast_merge_fallback": True}):
        model = gpt2.build(gpt2.Config(6, 2048, 16, vocab_size=8192, max_length=1024, remat=True))
        step = flat_step(model, 3, mesh=mesh_of("v6e:2x4"), precision="bf16", overlap=overlap)
        tokens = jax.ShapeDtypeStruct((32, 1024), jnp.int32)
        program = step.compiled_step({"inputs": tokens, "targets": tokens})
        found[str(overlap)] = program.memory.temp_size_in_bytes, program.memory.peak_memory_in_bytes
        assert not program.report.violations
    (better, alive), (first, same) = found.values()
    assert better < 0.95 * first and alive == same
