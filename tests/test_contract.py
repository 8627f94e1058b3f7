"""What crosses the wire, read from programs that the real H100 and TPU compilers scheduled.

psi is the number of parameters; a full ring sends (N-1)/N of a buffer, so theory is 2 psi (N-1)/N elements of the
compute dtype per step at stages 1 and 2 and 3 psi (N-1)/N at stage 3.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from oracle import slow

import zero_jax
from models import gpt2, gpt2_nnx
from zero_jax import hardware, hlo

TARGETS = ["h100:8", "v5e:2x4"]
CONFIG = gpt2.Config(4, 512, 8, vocab_size=8192, max_length=64)
BF16 = 2


@dataclasses.dataclass(frozen=True)
class Program:
    collectives: list
    psi: int

    def over_psi(self, *kinds):
        """Wire bytes of these kinds (default: all) in units of psi elements of bfloat16 on a ring."""
        chosen = [c for c in self.collectives if not kinds or c.kind in kinds]
        return sum(c.wire_bytes * c.count for c in chosen) / (self.psi * BF16 * 7 / 8)


def described(target):
    if extra := hardware.missing_compiler(target):
        pytest.skip(f"needs zero-jax[{extra}]")
    return zero_jax.make_mesh(devices=hardware.describe(target))


@functools.cache
def program(target, stage, flavour="linen", config=CONFIG, precision="bf16", variant="zero", length=64):
    mesh = described(target)
    step = zero_jax.make_zero_train_step(
        {"linen": gpt2, "nnx": gpt2_nnx}[flavour].build(config), stage, mesh=mesh, precision=precision,
        optimizer=optax.adamw(1e-3))
    batch = {name: jax.ShapeDtypeStruct((8, length), jnp.int32) for name in ("inputs", "targets")}
    layout = step.layout(batch)
    if variant == "annotated":  # the same layout, and nothing but jit
        step._layout = dataclasses.replace(layout, uses=jax.tree.map(lambda _: None, layout.state.params))
    if variant == "kept":  # gathered at use, and kept for backward
        step._layout = dataclasses.replace(layout, stage=dataclasses.replace(layout.stage, shards_params=False))
    compiled = step.lower(batch).compile(compiler_options=hardware.compiler_options(mesh.devices.flat[0]))
    psi = sum(leaf.size for leaf in jax.tree.leaves(layout.state.params))
    return Program(hlo.collectives(compiled.as_text()), psi)


def broken_promises(program, stage, config=CONFIG):
    """What the stage's contract says of a program: an empty list, or what is wrong with it."""
    found = []
    expected = {1: 2, 2: 2, 3: 3}[stage]
    if abs(program.over_psi() / expected - 1) > 0.02:
        found.append(f"{program.over_psi():.3f} psi on the wire, not {expected}")
    if abs(program.over_psi("all-gather") - (expected - 1)) > 0.02:
        found.append(f"{program.over_psi('all-gather'):.3f} psi gathered, not {expected - 1}")
    scattered = [c for c in program.collectives if c.kind == "reduce-scatter"]
    in_loop = sum(c.wire_bytes * c.count for c in scattered if c.in_loop) / (config.num_block_params * BF16 * 7 / 8)
    if abs(in_loop - 1) > 0.02:
        found.append(f"{in_loop:.3f} of the blocks' gradients scattered in the backward loop, not all")
    for collective in program.collectives:
        if collective.kind in ("all-gather", "reduce-scatter"):
            continue
        share = collective.payload_bytes * collective.count / (program.psi * BF16)
        if share > 0.01:
            found.append(f"{collective.kind} of {collective.shapes}: {share:.3f} psi")
    return found


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("target", TARGETS)
def test_wire_is_the_papers(target, stage):
    assert not broken_promises(program(target, stage), stage)


@pytest.mark.parametrize("flavour, scanned, remat", [
    row if row in {("linen", True, True), ("nnx", False, False)} else slow(*row)
    for row in itertools.product(("linen", "nnx"), (True, False), (True, False))])
def test_wire_of_every_way_to_write_the_model(flavour, scanned, remat):
    config = dataclasses.replace(CONFIG, scan_layers=scanned, remat=remat)
    found = broken_promises(program("h100:8", 3, flavour, config), 3)
    assert not [line for line in found if scanned or "loop" not in line]


@pytest.mark.parametrize("variant", ["annotated", "kept"])
def test_the_contract_tells_other_programs(variant):
    """Negative controls: plain annotation, and a gather whose result is kept for backward."""
    assert broken_promises(program("h100:8", 3, variant=variant), 3)


def test_stage_1_is_already_stage_2():
    """One program: gradients are scattered where backward reaches them (zero_jax/stages.py says why)."""
    moved = [[(c.kind, c.shapes, c.count) for c in program("h100:8", stage).collectives] for stage in (1, 2, 3)]
    assert moved[0] == moved[1] != moved[2]


def test_stage_0_all_reduces():
    found = program("h100:8", 0)
    assert not [c for c in found.collectives if c.kind in ("all-gather", "reduce-scatter")]
    assert found.over_psi("all-reduce") >= 1.99


@pytest.mark.parametrize("reduce", [None, "float32"])
@pytest.mark.parametrize("stage", [slow(2), 3])
@pytest.mark.parametrize("target", TARGETS)
def test_gradients_are_reduced_in_the_dtype_asked_for(target, stage, reduce):
    precision = zero_jax.Precision(params="float32", compute="bfloat16", reduce=reduce)
    scattered = [c for c in program(target, stage, precision=precision).collectives if c.kind == "reduce-scatter"]
    matrices = {dtype for c in scattered for dtype, dims in c.shapes if np.prod(dims) >= CONFIG.width**2}
    assert matrices == ({"bf16"} if reduce is None else {"f32"})


def test_stage_0_reduces_in_the_dtype_asked_for():
    precision = zero_jax.Precision(params="float32", compute="bfloat16", reduce="float32")
    reduced = [c for c in program("h100:8", 0, precision=precision).collectives if c.kind == "all-reduce"]
    assert {dtype for c in reduced for dtype, dims in c.shapes if np.prod(dims) >= CONFIG.width**2} == {"f32"}


def test_the_cast_happens_on_the_shard():
    gathered = [c for c in program("h100:8", 3).collectives if c.kind == "all-gather"]
    assert {dtype for c in gathered for dtype in c.dtypes} == {"bf16"}
    wide = [c for c in program("h100:8", 3, precision="fp32").collectives if c.kind == "all-gather"]
    assert {dtype for c in wide for dtype in c.dtypes} == {"f32"}  # the setting, and not the backend, decides


@pytest.mark.slow
@pytest.mark.parametrize("stage, preset", [slow(2, "124m"), (3, "124m"), slow(2, "1.5b"), slow(3, "1.5b")])
def test_wire_of_the_papers_model(preset, stage):
    """GPT-2 as it is, vocabulary of 50257 included, with 1024 tokens on each of eight H100s."""
    config = gpt2.PRESETS[preset]
    assert not broken_promises(program("h100:8", stage, config=config, length=1024), stage, config)
