"""`step.verify`: what this library compiles keeps its contract, and programs that send more are told what and where.

The programs come from the real H100 and TPU compilers, and from XLA:CPU for eight simulated devices.
"""

import dataclasses
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import slow
from test_resnet import classify

import zero_jax
from models import gpt2, gpt2_nnx, resnet
from zero_jax import contract, hardware

SMALL = gpt2.Config(2, 256, 4, vocab_size=2048, max_length=64)
LARGE = gpt2.Config(2, 2048, 16, vocab_size=8192, max_length=64)
CONV = resnet.Config((1, 1), width=16, num_classes=8)
BF16_FP32 = zero_jax.Precision(params="float32", compute="bfloat16", reduce="float32")


def mesh_of(target, **options):
    if target == "cpu":
        return zero_jax.make_mesh(**options)
    if extra := hardware.missing_compiler(target):
        pytest.skip(f"needs {extra}")
    return zero_jax.make_mesh(devices=hardware.describe(target), **options)


def step_of(model, stage, target, mesh=None, *, length=64, precision="bf16", loss=None):
    """(step, batch): of tokens, or of images where there is a loss; one example for each device."""
    mesh = mesh_of(target, **mesh or {})
    step = zero_jax.make_zero_train_step(
        model, stage, mesh=mesh, precision=precision, loss=loss, optimizer=optax.adamw(1e-3))
    if loss is not None:
        return step, {"images": jax.ShapeDtypeStruct((mesh.size, 16, 16, 3), jnp.float32),
                      "labels": jax.ShapeDtypeStruct((mesh.size,), jnp.int32)}
    return step, {name: jax.ShapeDtypeStruct((mesh.size, length), jnp.int32) for name in ("inputs", "targets")}


UNROLLED = dataclasses.replace(SMALL, scan_layers=False)
REMAT = dataclasses.replace(SMALL, remat=True)
LINEN, NNX = gpt2.build(SMALL), gpt2_nnx.build(SMALL)
UNEVEN = gpt2.Config(2, 500, 10, vocab_size=2047, max_length=64)  # no dim of its matrices divides by 8
KEPT = {
    "cpu, stage 0, NNX": (NNX, 0, "cpu", {}),
    "cpu, stage 2, NNX unrolled": (gpt2_nnx.build(UNROLLED), 2, "cpu", {}),
    "cpu, stage 3, factored": (LINEN, 3, "cpu", {"mesh": {"data": (2, 4)}}),
    "cpu, stage 3, hybrid fp32": (LINEN, 3, "cpu", {"mesh": {"data": (2, 2), "replica": 2}, "precision": "fp32"}),
    "h100, stage 0": (LINEN, 0, "h100:8", {}),
    "h100, stage 1, fp32": (LINEN, 1, "h100:8", {"precision": "fp32"}),
    "h100, stage 2, NNX": (NNX, 2, "h100:8", {}),
    "h100, stage 3, unrolled with remat": (
        gpt2.build(dataclasses.replace(REMAT, scan_layers=False)), 3, "h100:8", {"precision": BF16_FP32}),
    "h100, stage 3, factored hybrid": (LINEN, 3, "h100:8", {"mesh": {"data": (2, 2), "replica": 2}}),
    "h100, stage 1, uneven": (gpt2.build(UNEVEN), 1, "h100:4", {"mesh": {"data": 3}}),
    "h100, stage 1, merged": (  # whose weights XLA:GPU could not tile as slices
        gpt2.build(dataclasses.replace(gpt2.PRESETS["1.5b"], num_layers=2, vocab_size=512, max_length=64)), 1,
        "h100:16x8", {}),
    "h100, stage 3, uneven NNX": (gpt2_nnx.build(UNEVEN), 3, "h100:8", {}),
    "cpu, stage 3, uneven": (gpt2.build(dataclasses.replace(UNEVEN, remat=True)), 3, "cpu", {}),
    "v5e, stage 3, uneven": (gpt2.build(UNEVEN), 3, "v5e:2x4", {}),
    "v5e, stage 2, fp32": (LINEN, 2, "v5e:2x4", {"precision": "fp32"}),
    "v5e, stage 3, NNX unrolled": (gpt2_nnx.build(UNROLLED), 3, "v5e:2x4", {}),
    "v5e, stage 3, conv": (resnet.build(CONV), 3, "v5e:2x4", {"loss": classify}),
    "v5p, stage 1, reduce float32": (LINEN, 1, "v5p:2x2x2", {"precision": BF16_FP32}),
    "v5p, stage 3": (gpt2.build(REMAT), 3, "v5p:2x2x2", {}),
    "v5p, stage 3, hybrid": (NNX, 3, "v5p:2x2x2", {"mesh": {"data": 4, "replica": 2}}),
}


LONG = ("v5e, stage 3, uneven", "h100, stage 1, uneven", "v5e, stage 3, conv")


@pytest.mark.parametrize("name", [slow(name) if name in LONG else name for name in KEPT])
def test_contract_is_kept(name):
    model, stage, target, options = KEPT[name]
    step, batch = step_of(model, stage, target, **options)
    report = step.verify(batch)
    assert not report.violations and report.wire_bytes > 0
    assert report.contract.stage == stage and report.contract.mesh == dict(step.mesh.shape)
    gather, reduce, _ = report.kept
    assert bool(gather.collectives) == (stage > 0) and reduce.collectives
    assert reduce.wire_bytes > (0.75 if target == "cpu" else 0.98) * reduce.promise.wire_bytes


POINTS = {"h100:16x8": (1, 3), "h100:128x8": (2, 3), "v6e:16x16": (3,), "v5e:16x16": (1, 3), "v5p:4x4x8": (1, 3),
          "v5p:8x8x16": (2, 3)}


@pytest.mark.slow
@pytest.mark.parametrize(("target", "stage"), [(target, stage) for target in POINTS for stage in POINTS[target]])
def test_contract_is_kept_on_many_devices(target, stage):
    """And gathers are gathers, and sums are scattered: no all-reduce as large as a parameter."""
    step, batch = step_of(gpt2.build(LARGE), stage, target)
    report = step.verify(batch)
    psi = sum(leaf.size for leaf in jax.tree.leaves(step.layout(batch).state.params))
    assert psi > 1e8
    gather, *others = report.kept
    assert all(c.kind == "all-gather" for c in gather.collectives if c.payload_bytes > LARGE.width * 128)
    reduced = [c for kept in others for c in kept.collectives if c.kind == "all-reduce"]
    assert sum(c.payload_bytes * c.count for c in (*reduced, *(
        c for c in gather.collectives if c.kind == "all-reduce"))) < 0.01 * 2 * psi
    assert report.wire_bytes < 1.05 * step.stage.wire * 2 * psi


class Replicated(nn.Module):
    """Whose activations every device is told to hold whole."""

    mesh: jax.sharding.Mesh

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(2048, 256)(tokens)
        x = jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, P()))
        return nn.Dense(2048)(x + nn.Dense(256)(nn.gelu(nn.Dense(1024)(x))))


class Recurrent(nn.Module):
    """Whose weights are read at each of the tokens."""

    @nn.compact
    def __call__(self, tokens):
        return nn.Dense(2048)(nn.RNN(nn.LSTMCell(256))(nn.Embed(2048, 256)(tokens)))


def annotated(target):
    """A program that differs from the step in one thing: parameters are divided by annotation alone."""
    step, batch = step_of(LINEN, 3, target)
    layout, promised = step.layout(batch), step.contract(batch)
    step._layout = dataclasses.replace(layout, uses=jax.tree.map(lambda _: None, layout.state.params))
    return step.compile(batch).as_text(), promised


def program(step, batch):
    return step.compile(batch).as_text(), step.contract(batch)


BROKEN = {  # what is compiled, the kind of the collective that is named, what is named of its origin, and the advice
    "annotated": (annotated, r"all-to-all|all-gather", r"blocks/|wte", "not see read"),
    "padded after the sum": (
        lambda target: program(*step_of(gpt2.build(UNEVEN), 3, target)), "all-reduce", "blocks", "In a loop"),
    "flat slice": (
        lambda target: program(*step_of(LINEN, 3, target, {"data": 8})), "all-reduce", "blocks/down", "make_mesh"),
    "activations everywhere": (
        lambda target: program(*step_of(Replicated(mesh_of(target)), 3, target)), "all-gather", "Embed_0",
        "sharding constraint in the model"),
    "read in a loop": (
        lambda target: program(*step_of(Recurrent(), 3, target, length=16)), "all-gather|all-reduce", "LSTMCell_0",
        "Read it before the loop"),
}


@pytest.mark.parametrize(("name", "target"), [
    ("annotated", "h100:8"), slow("annotated", "v5p:2x2x2"), ("flat slice", "v5p:2x2x2"),
    ("padded after the sum", "h100:8"),
    ("activations everywhere", "h100:8"), slow("activations everywhere", "v5p:2x2x2"), ("read in a loop", "h100:8"),
    slow("read in a loop", "v5p:2x2x2"), ("read in a loop", "cpu")])
def test_what_breaks_a_contract_is_told(name, target, monkeypatch):
    """Negative controls: the operation, its bytes, where it comes from, and what to do."""
    if name == "padded after the sum":  # as the partitioner does it
        monkeypatch.setattr("zero_jax.gradients.scatter_parts", lambda jaxpr, **_: jaxpr)
    make, kind, origin, advice = BROKEN[name]
    with pytest.raises(contract.ContractError) as error:
        contract.verify(*make(target))
    told = str(error.value)
    lines = [line for line in told.splitlines() if re.search(rf"BROKEN: .*({kind}) of \w+\[", line)]
    assert any(re.search(r"[\d,]{6,} bytes per step.* from \S.*", line) and re.search(origin, line) and advice in line
               for line in lines), told
    assert all(re.search(r"\(\S+\.py:\d+\)", line) for line in lines), told


def test_a_smaller_promise_is_broken():
    """Negative control: each promise counts."""
    step, batch = step_of(LINEN, 3, "h100:8")
    text, promised = step.compile(batch).as_text(), step.contract(batch)
    assert not contract.check(text, promised).violations
    for i, told in enumerate(("parameters are gathered", "gradients are reduced")):
        promises = list(promised.promises)
        promises[i] = dataclasses.replace(promises[i], wire_bytes=0.8 * promises[i].wire_bytes)
        (line,) = contract.check(text, dataclasses.replace(promised, promises=tuple(promises))).violations
        assert told in line
    gather, *rest = promised.promises
    elsewhere = dataclasses.replace(promised, promises=(dataclasses.replace(gather, axes=()), *rest))
    assert any("gathered over data, not only over no axis" in line
               for line in contract.check(text, elsewhere).violations)
