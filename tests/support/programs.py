"""The matrix: train steps compiled for targets, each once per test run, whichever worker asks first.

Compiling a step is 4 to 10 CPU seconds, and many claims are made of one program: what it sends and in which dtype,
where in the schedule, whom it serves, what it holds, and that its contract is kept. A test names a row of `PROGRAMS`;
the first one that does compiles it and leaves its text and its numbers for all workers (support/once.py).
"""

import contextlib
import dataclasses
import functools
import os
import pickle
import types
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import zero_jax
from models import gpt2, gpt2_nnx, resnet
from support.flat import flat_step
from support.once import one_at_a_time
from support.program_controls import (
    annotated,
    flat,
    in_one_chunk,
    in_tiles_of_8,
    kept,
    partitioned,
    uncoded,
    with_queue,
)
from support.targets import mesh_of
from support.workloads import FLAVOURS, classify_images
from zero_jax.step.compiled import CompiledStep
from zero_jax.tree import named_leaves
from zero_jax.xla.devices import compiled_for

EMITTERS = {"xla_cpu_use_fusion_emitters": True} if "fusion_emitters=false" in os.environ["XLA_FLAGS"] else {}
"""Programs of simulated devices are compiled as users compile them: what tests/conftest.py leaves out adds a loop."""


@dataclasses.dataclass(frozen=True)
class Program(CompiledStep):
    """A compiled step whose layout is left out, so that it can be stored: `PROGRAMS[name].make()` gives it.

    Attributes:
        contract: of the step as the library makes it, also where the program is a negative control.
        sizes: elements of each parameter, by name.
        state_bytes: of the state, per device.
    """

    sizes: dict[str, int]
    state_bytes: int

    @property
    def num_params(self) -> int:
        return sum(self.sizes.values())

    @property
    def _simulated_host_bytes(self) -> int:
        return 0  # no row has a state in host memory

    def sent(self, *kinds: str, in_loop: bool | None = None) -> float:
        """Bytes that each device sends in collectives of these kinds, or of all; `in_loop`: in loops, or outside."""
        return sum(each.communication_bytes * each.count for each in self.collectives
                   if (not kinds or each.kind in kinds) and in_loop in (None, each.in_loop))


@dataclasses.dataclass(frozen=True)
class Row:
    """A step to compile: the arguments of `make_zero_train_step`, and what changes the program.

    Attributes:
        target: "cpu", or a target topology.
        stage: ZeRO's.
        model: a Flax model; default: `SMALL`, in Linen.
        sizes: of the mesh, as `make_mesh` takes them.
        batch: examples on each device, and their length.
        global_batch: examples in all, where that is no multiple of the devices.
        change: what makes the program a negative control.
        options: the rest.
    """

    target: str
    stage: int
    model: Any = None
    sizes: dict[str, Any] = dataclasses.field(default_factory=dict)
    batch: tuple[int, int] = (1, 32)
    global_batch: int | None = None
    change: Callable[[Any, Any], contextlib.AbstractContextManager[None]] | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def make(self) -> tuple[Any, Any]:
        """(step, abstract batch); nothing is traced or compiled."""
        mesh = mesh_of(self.target, **self.sizes)
        model = Replicated(mesh) if self.model is Replicated else self.model or LINEN
        options = {"precision": "bf16", "optimizer": ADAMW} | self.options
        step = flat_step(model, self.stage, mesh=mesh, **options)
        rows, length = self.global_batch or self.batch[0] * mesh.size, self.batch[1]
        if options.get("loss") is classify_images:
            return step, {"images": jax.ShapeDtypeStruct((rows, 16, 16, 3), jnp.float32),
                          "labels": jax.ShapeDtypeStruct((rows,), jnp.int32)}
        return step, {name: jax.ShapeDtypeStruct((rows, length), jnp.int32) for name in ("inputs", "targets")}

    def compile(self) -> Program:
        step, batch = self.make()
        layout, promised = step.layout(batch), step.contract(batch)
        with self.change(step, batch) if self.change else contextlib.nullcontext():
            options = step.programs.compiler_options | (EMITTERS if self.target == "cpu" else {})
            compiled = compiled_for(step.lower(batch), step.mesh.devices.flat[0], options)
        memory = compiled.memory_analysis()
        numbers = {name: getattr(memory, name) for name in dir(memory) if name.endswith("_in_bytes")}
        sizes = {name: leaf.size for name, leaf in named_leaves(layout.state.params)}
        return Program(compiled.as_text(), types.SimpleNamespace(**numbers), None, promised, sizes, layout.device_bytes)


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


ADAMW = optax.adamw(1e-3)
SMALL = gpt2.Config(2, 256, 4, vocab_size=2048, max_length=32)
UNROLLED = dataclasses.replace(SMALL, scan_layers=False)
REMAT = dataclasses.replace(SMALL, remat=True)
UNEVEN = gpt2.Config(2, 500, 10, vocab_size=2047, max_length=64)  # no dim of its matrices divides by 8
MERGED = dataclasses.replace(gpt2.PRESETS["1.5b"], num_layers=2, vocab_size=512, max_length=64)
WIDE = gpt2.Config(8, 768, 12, vocab_size=512, max_length=512, remat=True)
WIDE_ON_V5P = dataclasses.replace(WIDE, num_layers=4, width=512, num_heads=4)
DEEP = gpt2.Config(4, 512, 8, vocab_size=512, max_length=16)
LARGE_LEAVES = gpt2.Config(4, 512, 4, vocab_size=8192, max_length=32)  # of several chunks on TPUs at stages 1 and 2
LINEN, NNX = gpt2.build(SMALL), gpt2_nnx.build(SMALL)
REDUCE_FP32 = {"precision": zero_jax.Precision(params="float32", compute="bfloat16", reduce="float32")}
FP32 = {"precision": "fp32"}
H100, V5E, V5P = "h100:8", "v5e:2x4", "v5p:2x2x2"
OVERLAP_OR_NOT: tuple[tuple[str, dict[str, Any]], ...] = ("", {}), (", no overlap", {"overlap": False})


def gpt2_row(target, stage, flavour="linen", config=SMALL, **changes) -> Row:
    return Row(target, stage, FLAVOURS[flavour](config), **changes)


def deep(layers, flavour="linen", remat=False, **changes) -> Row:
    """Of 16 tokens on each device: next to no activations."""
    config = dataclasses.replace(DEEP, num_layers=layers, remat=remat)
    return gpt2_row(H100, 3, flavour, config, **({"batch": (1, 16)} | changes))


def active(layers, **changes) -> gpt2.Config:
    """Whose memory peaks in the backward pass, with activations and gathered weights."""
    return gpt2.Config(layers, 256, 8, vocab_size=512, max_length=64, **changes)


def accumulated(target, stage, reduce, **changes) -> Row:
    return Row(target, stage, batch=(8, 32), **{"options": {"accumulate": 8, "reduce": reduce}} | changes)


def quantized(target, stage, data=(2, 4), model=None, change=None, gradients=("int4", "int8"), **options) -> Row:
    communication = zero_jax.Communication(weights="int8", gradients=gradients, block=64)
    return Row(target, stage, model, {"data": data}, change=change, options={"communication": communication} | options)


def gathered_once(target, reduce, **options) -> Row:
    sizes = {"data": (2, 4)} if options else {}
    return accumulated(target, 3, reduce, sizes=sizes, options={
        "accumulate": 8, "reduce": reduce, "gather": "step", **options})


BESIDE_PREFETCH: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "accumulated": ({}, {"accumulate": 2}),
    "hpZ": ({"data": (2, 4)}, {"hpz_axes": "data_1"}),
    "int8": ({}, {"communication": zero_jax.Communication(weights="int8", gradients="int8", block=64)}),
}
"""What may be asked for beside prefetch: sizes of the mesh, and options."""


def with_prefetch(target: str, name: str, *, prefetch: bool) -> Row:
    """Of four layers; as many tokens in a microbatch as without."""
    sizes, options = BESIDE_PREFETCH[name]
    rows, length = 16, 512
    return gpt2_row(target, 3, config=WIDE_ON_V5P, sizes=sizes, batch=(rows * options.get("accumulate", 1), length),
                    options={"prefetch": prefetch, **options})


PROGRAMS: dict[str, Row] = {
    **{f"v5p stage 3, {name}{', prefetch' * prefetch}": with_prefetch(V5P, name, prefetch=prefetch)
       for name in BESIDE_PREFETCH for prefetch in (False, True)},
    # Eight H100s: the stages and what negates them.
    **{f"h100 stage {stage}": Row(H100, stage) for stage in range(4)},
    **{f"h100 stage 3, 8 layers{name}": Row(H100, 3, gpt2.build(WIDE), batch=(4, 512), options=options)
       for name, options in OVERLAP_OR_NOT},
    **{f"h100 stage 3, 4 layers unrolled{', combined' * bool(size)}": Row(
        H100, 3, gpt2.build(dataclasses.replace(WIDE, num_layers=4, scan_layers=False)), batch=(4, 512),
        options={"combine_bytes": size}) for size in (None, 30 * 2**20)},  # XLA's own threshold
    "h100 stage 3, annotated": Row(H100, 3, change=annotated),
    "h100 stage 3, kept": Row(H100, 3, change=kept),
    "h100 stage 3, padded after the sum": Row(H100, 3, gpt2.build(UNEVEN), change=partitioned),
    "h100 stage 3, activations everywhere": Row(H100, 3, Replicated, batch=(1, 64), change=partitioned),
    "h100 stage 3, read in a loop": Row(H100, 3, Recurrent(), batch=(1, 16), change=partitioned),
    # Ways to write the model.
    **{f"h100 stage 3, {flavour}{'' if scanned else ' unrolled'}{' remat' if remat else ''}":
       gpt2_row(H100, 3, flavour, dataclasses.replace(SMALL, scan_layers=scanned, remat=remat))
       for flavour in FLAVOURS for scanned in (True, False) for remat in (False, True)
       if (flavour, scanned, remat) != ("linen", True, False)},
    **{f"h100 stage {stage}, frozen kernels": Row(H100, stage, options={"frozen": ("blocks/.*kernel",)})
       for stage in (2, 3)},
    "h100 stage 2, nnx": Row(H100, 2, NNX),
    # Precisions.
    "h100 stage 0, reduce fp32": Row(H100, 0, options=REDUCE_FP32),
    "h100 stage 2, reduce fp32": Row(H100, 2, options=REDUCE_FP32),
    "h100 stage 3, reduce fp32": gpt2_row(
        H100, 3, config=dataclasses.replace(REMAT, scan_layers=False), options=REDUCE_FP32),
    "h100 stage 1, fp32": Row(H100, 1, options=FP32),
    "h100 stage 3, fp32": Row(H100, 3, options=FP32),
    "h100 stage 3, float8": Row(H100, 3, options={"precision": "bf16-fp8"}),
    **{f"h100 stage 3, {precision}": Row(H100, 3, NNX, options={"precision": precision, "optimizer": None})
       for precision in ("fp16", "bf16-stochastic")},
    # Meshes and shapes.
    "h100 stage 3, factored hybrid": Row(H100, 3, sizes={"data": (2, 2), "replica": 2}),
    "h100 stage 1, uneven": Row("h100:4", 1, gpt2.build(UNEVEN), {"data": 3}),
    "h100 stage 1, merged": Row("h100:16x8", 1, gpt2.build(MERGED)),  # whose weights XLA:GPU could not tile as slices
    "h100 stage 3, uneven": Row(H100, 3, gpt2_nnx.build(UNEVEN)),
    # Quantised.
    **{f"{name}, quantised": row for name, row in {
        "cpu stage 3": quantized("cpu", 3, model=NNX, hpz_axes="data_1", gradients=("int8", "fp4")),
        "h100 stage 3": quantized("h100:2x8", 3, (2, 8)),
        "h100 stage 3, hpZ": quantized("h100:2x8", 3, (2, 8), hpz_axes="data_1", gradients=("int8", "fp4")),
        "h100 stage 2": quantized(H100, 2),
        "h100 stage 3, unrolled": quantized(H100, 3, model=gpt2_nnx.build(UNROLLED)),
        "h100 stage 3, odd": quantized("h100:3x8", 3, (3, 8), model=gpt2.build(UNEVEN)),
        "h100 stage 3, 5 x 5": quantized("h100:5x8", 3, (5, 5)),
        "v5e stage 3": quantized(V5E, 3, gradients="fp4"),
        "v5p stage 3": quantized(V5P, 3, (4, 2)),
        "v6e stage 3": quantized("v6e:2x4", 3)}.items()},
    "h100 stage 2, quantised, uncoded": quantized(H100, 2, change=uncoded),
    # TPUs.
    **{f"v5e stage {stage}": Row(V5E, stage) for stage in (1, 2, 3)},
    **{f"v5e stage 3, 4 layers{name}": gpt2_row(
        V5E, 3, config=dataclasses.replace(WIDE, num_layers=4, width=512, num_heads=4), batch=(1, 256),
        options=options) for name, options in OVERLAP_OR_NOT},
    "v5e stage 2, reduce fp32": Row(V5E, 2, options=REDUCE_FP32),
    "v5e stage 3, reduce fp32": Row(V5E, 3, options=REDUCE_FP32),
    "v5e stage 2, fp32": Row(V5E, 2, options=FP32),
    "v5e stage 3, fp32": Row(V5E, 3, NNX, options=FP32 | {"optimizer": None}),
    "v5e stage 3, bf16-stochastic": Row(V5E, 3, NNX, options={"precision": "bf16-stochastic", "optimizer": None}),
    "v5e stage 3, nnx unrolled": Row(V5E, 3, gpt2_nnx.build(UNROLLED)),
    "v5e stage 3, uneven": Row(V5E, 3, gpt2.build(UNEVEN)),
    "v5p stage 1, uneven": Row(V5P, 1, gpt2.build(UNEVEN)),
    "v6e stage 3, uneven": Row("v6e:2x4", 3, gpt2.build(UNEVEN)),
    "v5e stage 3, conv": Row(V5E, 3, resnet.build(resnet.Config((1, 1), width=16, num_classes=8)),
                             options={"loss": classify_images}),
    "v5p stage 1, reduce fp32": Row(V5P, 1, options=REDUCE_FP32),
    **{f"v5p stage {stage}": gpt2_row(V5P, stage, config=REMAT) for stage in (2, 3)},
    **{f"{chip} stage 2, large{name}": gpt2_row(target, 2, config=LARGE_LEAVES, options=options)
       for chip, target in (("v5p", V5P), ("v6e", "v6e:2x4"))
       for name, options in (*OVERLAP_OR_NOT, (", fp32", FP32))},
    "v5p stage 3, no overlap": gpt2_row(V5P, 3, config=REMAT, options={"overlap": False}),
    **{f"v5p stage 3, 4 layers{', prefetch' * prefetch}": gpt2_row(
        V5P, 3, config=WIDE_ON_V5P, batch=(16, 512),
        options={"prefetch": prefetch})
       for prefetch in (False, True)},
    **{f"v5p stage 3, 6 small layers unrolled{', queued' * queued}": gpt2_row(
        V5P, 3, config=gpt2.Config(6, 256, 4, vocab_size=512, max_length=32, scan_layers=False),
        change=with_queue if queued else None) for queued in (False, True)},
    **{f"{chip} stage 3, width 1600{name * bool(change)}": gpt2_row(
        target, 3, config=gpt2.Config(2, 1600, 25, vocab_size=512, max_length=64, remat=True), batch=(1, 64),
        options={"overlap": "auto" if chip == "v5p" else False}, change=change) for chip, target, name, change in (
            ("v5p", V5P, ", tiles of 8", in_tiles_of_8), ("v5e", V5E, ", whole", in_one_chunk))
       for change in (None, change)},
    **{f"v5e stage 3, 4 layers of width 1600{', flat' * bool(change)}": gpt2_row(
        V5E, 3, config=gpt2.Config(4, 1600, 25, vocab_size=512, max_length=256, remat=True), batch=(8, 256),
        change=change) for change in (None, flat)},
    **{f"v5e stage 2, 4 layers{name}": gpt2_row(
        V5E, 2, config=gpt2.Config(4, 1024, 8, vocab_size=512, max_length=256, remat=True), batch=(8, 256),
        options=options) for name, options in OVERLAP_OR_NOT},
    "v6e stage 3": Row("v6e:2x4", 3),
    **{f"{name} stage 3, gathered in forward": gpt2_row(target, 3, config=REMAT, options={"gather": "forward"})
       for name, target in (("h100", H100), ("v5p", V5P), ("v6e", "v6e:2x4"))},
    "h100 stage 3, remat": gpt2_row(H100, 3, config=REMAT),
    "v5p stage 3, hybrid": Row(V5P, 3, NNX, {"data": 4, "replica": 2}),
    "v5p stage 3, annotated": Row(V5P, 3, change=annotated),
    "v5p stage 3, flat slice": Row(V5P, 3, sizes={"data": 8}),
    "v5p stage 3, activations everywhere": Row(V5P, 3, Replicated, batch=(1, 64), change=partitioned),
    "v5p stage 3, read in a loop": Row(V5P, 3, Recurrent(), batch=(1, 16), change=partitioned),
    # Simulated devices.
    "cpu stage 0, nnx": Row("cpu", 0, NNX),
    "cpu stage 2, nnx unrolled": Row("cpu", 2, gpt2_nnx.build(UNROLLED)),
    "cpu stage 3": Row("cpu", 3),
    "cpu stage 3, factored": Row("cpu", 3, sizes={"data": (2, 4)}),
    "cpu stage 3, hybrid fp32": Row("cpu", 3, sizes={"data": (2, 2), "replica": 2}, options=FP32),
    "cpu stage 3, uneven": Row("cpu", 3, gpt2.build(dataclasses.replace(UNEVEN, remat=True))),
    "cpu stage 3, read in a loop": Row("cpu", 3, Recurrent(), batch=(1, 16), change=partitioned),
    # Depth: what grows with it.
    **{f"h100 stage 3, {layers} layers": deep(layers) for layers in (4, 12)},
    **{f"h100 stage 3, {layers} layers {flavour}{' remat' if remat else ''}": deep(layers, flavour, remat)
       for layers in (24, 48) for flavour, remat in (("linen", True), ("nnx", False))},
    **{f"h100 stage 3, {layers} layers, kept": deep(layers, change=kept) for layers in (12, 24, 48)},
    "h100 stage 3, 24 layers, annotated": deep(24, remat=True, change=annotated),
    # Activations: what they are at the peak.
    "h100 stage 3, 8 layers of 64 tokens": gpt2_row(H100, 3, config=active(8), batch=(1, 64)),
    "cpu stage 3, 4 layers of 64 tokens": gpt2_row("cpu", 3, config=active(4), batch=(1, 64)),
    "cpu stage 3, 4 layers of 2 x 64 tokens": gpt2_row("cpu", 3, config=active(4), batch=(2, 64)),
    "cpu stage 3, 4 layers of 64 tokens remat": gpt2_row("cpu", 3, config=active(4, remat=True), batch=(1, 64)),
    # Microbatches.
    **{f"{name} stage {stage}, reduced {reduce}": accumulated(target, stage, reduce)
       for name, target in (("h100", H100), ("v5e", V5E)) for stage in (2, 3) for reduce in ("every", "once")},
    **{f"{name} stage 3, gathered once, reduced {reduce}": gathered_once(target, reduce)
       for name, target in (("h100", H100), ("v5e", V5E)) for reduce in ("every", "once")},
    "h100 stage 3, gathered once inside the node": gathered_once("h100:2x4", "every", hpz_axes="data_1"),
}


@functools.cache
def program(name: str) -> Program:
    """The row of `PROGRAMS` as compiled, in this run by one worker only."""
    return compiled_once(name, PROGRAMS[name])


def compiled_once(name: str, row: Row) -> Program:
    """`row` as compiled; what has the same `name` must be the same row. Skips the test where there is no compiler."""
    mesh_of(row.target)
    with one_at_a_time(name) as path:
        if path.exists():
            return pickle.loads(path.read_bytes())
        compiled = row.compile()
        path.write_bytes(pickle.dumps(compiled))
        return compiled


def asynchronous(name):
    """Share of the bytes that are sent asynchronously."""
    found = program(name)
    return sum(c.communication_bytes * c.count for c in found.collectives if c.asynchronous) / found.sent()


def beside_products(name, kind="all-gather"):
    """Share of the bytes of gathers, or of another kind, in loops between whose start and end a product runs."""
    found = [c for c in program(name).collectives if c.kind == kind and c.in_loop]
    sent = [c.communication_bytes * c.count for c in found]
    return sum(size for c, size in zip(found, sent, strict=True) if c.overlapped_flops) / sum(sent)
