"""FLOPs of the kernels behind custom calls, from lines of compiled programs; calls that nobody knows are named."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas.ops.tpu import flash_attention
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support.targets import mesh_of

from zero_jax import Remat
from zero_jax.jaxpr import primitives
from zero_jax.jaxpr.equations import all_eqns, primitive_of
from zero_jax.planning.flops import traced_flops
from zero_jax.xla.events import opaque_calls, totals
from zero_jax.xla.schedule import schedule
from zero_jax.xla.targets import target_of
from zero_jax.xla.timing import predict

B, HEADS, SEQ, DIM = 2, 16, 1024, 64
PRODUCT = 2 * B * HEADS * SEQ * SEQ * DIM  # of all queries with all keys
ARRAY = f"bf16[{B},{SEQ},{HEADS},{DIM}]"
BY_HEAD = f"bf16[{B},{HEADS},{SEQ},{DIM}]"
# As XLA of jax 0.10.2 writes them for h100:8, shortened.
CUDNN = (
    f"%fmha = ({ARRAY}{{3,1,2,0}}, f32[2,16,1024]{{2,1,0}}, u8[0]{{0}}) custom-call(%p, %p, %p), "
    'custom_call_target="__cudnn$fmhaSoftmax", metadata={op_name="jit(f)/custom_partitioning"}, '
    'backend_config={"cudnn_fmha_backend_config": {"algorithm": {"algo_id": "0"}, "intermediate_tensor_shape": '
    '{"element_type": "BF16", "dimensions": ["2", "16", "1024", "1024"], "tuple_shapes": []}, '
    '"is_flash_attention": true, "mask_type": "CAUSAL", "dropout_rate": 0.0, "sliding_window_length": 0}}'
)
PALLAS = (  # TPU breaks the line behind the name of the metadata
    f"%splash_mha_dkv_no_residuals.1 = ({BY_HEAD}, {BY_HEAD}) custom-call(%m, %h, %h, %h), "
    'custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={\n'
    '"xprof_metadata":"{\\"block_q_dkv\\": 128, \\"block_kv_dkv\\": 128, \\"use_fused_bwd_kernel\\": false}"\n'
    '}}, metadata={op_name="jit(f)/splash/pallas_call"}, backend_config={"custom_call_config":{"body":"TUz="}}'
)


def events(line: str):
    text = "\n".join([
        "HloModule jit_f, is_scheduled=true, num_partitions=1", "",
        "ENTRY %main () -> f32[] {", f"  %p = {ARRAY} parameter(0)", "  %m = s8[1,8,8] parameter(1)",
        f"  %h = {BY_HEAD} parameter(2)",
        f"  {line}", "  ROOT %c = f32[] constant(0)", "}", ""])
    return schedule(text)


def flops(line: str) -> dict[str, float]:
    return totals(events(line)).flops


def test_what_sets_the_rate():
    """Attention by head dim, direction and length; products by whether their rows fill 16 bytes."""
    def rate(line):
        work = next(event for event in events(line) if event.flops)
        return work.kernel, work.length

    assert rate(CUDNN) == ("64 forward", SEQ)
    assert rate(CUDNN.replace("fmhaSoftmax", "fmhaSoftmaxBackward")) == ("64 backward", SEQ)
    assert rate(PALLAS) == ("64 backward", SEQ) and rate(PALLAS.replace("mha_dkv", "mha_fwd")) == ("64 forward", SEQ)
    dot = ("%d = bf16[16,16]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={1}\n"
           "  ROOT %c = f32[] constant(0)\n}\n")
    for row, kernel in (("bf16[16,64]{1,0}", ""), ("bf16[16,57]{1,0}", "odd"), ("bf16[16,57]{0,1}", ""),
                        ("f32[16,57]{1,0}", "")):
        text = f"HloModule m, is_scheduled=true\n\nENTRY %main () -> f32[] {{\n  %a = {row} parameter(0)\n  {dot}"
        assert [work.kernel for work in schedule(text) if work.flops] == [kernel]


CAUSAL = (SEQ + 1) / (2 * SEQ)


@pytest.mark.parametrize("change, products", [
    ((), 2 * CAUSAL),
    (('"CAUSAL"', '"NO_MASK"'), 2),
    (('"CAUSAL"', '"PADDING_CAUSAL"'), 2 * CAUSAL),
    (("fmhaSoftmax", "fmhaSoftmaxBackward"), 5 * CAUSAL),
    (('length": 0', 'length": 1'), 2 / SEQ),  # each sees itself alone
    (('length": 0', 'length": 1024'), 2 * CAUSAL),
    (('"1024", "1024"', '"512", "1024"'), 2 * 512 * 513 / 2 / SEQ**2),
])
def test_attention_of_cudnn_counts_what_its_mask_leaves(change, products):
    assert flops(CUDNN.replace(*change) if change else CUDNN) == {"bf16": pytest.approx(products * PRODUCT)}


@pytest.mark.parametrize("change, products", [
    ((), 4),
    (("kernel\\\\\": false", "kernel\\\\\": true"), 5),  # the fused kernel's gradient of the queries
    (("jit(.)f(.)/splash", "zero_causal"), 4 * 9 / 16),  # of 8 x 8 blocks, those up to the diagonal
    (("mha_dkv", "mqa_dq"), 3), (("mha_dkv_no", "mha_fwd"), 2),
    (('"body":"TUz="', '"body":"TUz=","cost_estimate":{"flops":"12","transcendentals":"7"}'), 12),
])
def test_pallas_kernels_count_by_their_estimate_or_else_by_their_name(change, products):
    text = re.sub(*change, PALLAS) if change else PALLAS
    assert flops(text) == {"bf16": products * (1 if products == 12 else PRODUCT)}


def test_an_instruction_over_several_lines_keeps_its_metadata():
    work = next(each for each in events(PALLAS) if each.opcode == "custom-call")
    assert work.op_name == "jit(f)/splash/pallas_call"


@pytest.mark.parametrize("line, named", [
    (CUDNN, []), (PALLAS, []),
    (CUDNN.replace("__cudnn$fmhaSoftmax", "cusolver_getrf_ffi"), ["cusolver_getrf_ffi"]),
    (CUDNN.replace("intermediate_tensor_shape", "unknown_shape"), ["__cudnn$fmhaSoftmax"]),
    (PALLAS.replace("%splash_mha_dkv_no_residuals", "%my_kernel"), ["tpu_custom_call"]),
    (CUDNN.replace("__cudnn$fmhaSoftmax", "__cub$DeviceRadixSort"), []),  # moves bytes, which are counted
    (CUDNN.replace("__cudnn$fmhaSoftmax", "PrepareAsyncCallStart"), []),  # of a collective on v5p's SparseCores
])
def test_calls_that_nobody_knows_are_named(line, named):
    assert [call.opaque for call in opaque_calls(events(line))] == named
    target = target_of("h100:1")
    timing = predict(events(line), target, [(0, 0)], tokens=1, model_flops=1.0)
    assert [each.split(" ")[0] for each in timing.uncounted] == named


def test_flops_of_a_traced_pallas_kernel_are_those_of_its_grid():
    array = jax.ShapeDtypeStruct((B, HEADS, SEQ, 128), jnp.bfloat16)
    traced = jax.make_jaxpr(flash_attention.flash_attention)(array, array, array)
    assert traced_flops(traced) == 2 * PRODUCT * 128 / DIM


def flash(q, k, v):
    return flash_attention.flash_attention(q, k, v)


def splash(q, k, v):
    mask = splash_attention_mask.MultiHeadMask([splash_attention_mask.FullMask((SEQ, SEQ))] * HEADS)
    return jax.vmap(splash_attention_kernel.make_splash_mha_single_device(mask))(q, k, v)


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize("attention", [flash, splash])
def test_kernels_in_a_compiled_program_are_counted(attention):
    mesh = mesh_of("v5e:2x4")

    def loss(*qkv):
        mapped = jax.shard_map(attention, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
        return mapped(*qkv).astype(jnp.float32).sum()

    array = jax.ShapeDtypeStruct((8 * B, HEADS, SEQ, 128), jnp.bfloat16, sharding=NamedSharding(mesh, P("data")))
    compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(array, array, array).compile()
    program = schedule(compiled.as_text())
    assert not list(opaque_calls(program))
    products = totals(program).flops["bf16"] / (PRODUCT * 128 / DIM)
    assert products == pytest.approx(9, rel=0.01)  # two forward; three and four in two kernels backward


def test_remat_of_dots_computes_no_attention_kernel_twice():
    array = jax.ShapeDtypeStruct((1, 2, 256, 128), jnp.bfloat16)

    def forward_kernels(policy):
        def loss(x):
            return flash(x * 2, x, x).astype(jnp.float32).sum()

        jaxpr = jax.make_jaxpr(jax.grad(jax.checkpoint(loss, policy=Remat(policy).saveable)))(array)
        kernels = [eqn for eqn in all_eqns(jaxpr.jaxpr) if primitive_of(eqn) == primitives.PALLAS]
        return len(kernels) - 2  # less those of the gradients

    assert forward_kernels("dots") == 1
    assert forward_kernels("full") == 2
