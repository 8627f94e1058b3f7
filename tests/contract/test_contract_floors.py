"""A stage that does not do its work: each way that `verify` names, on the library's own programs and on controls.

A control changes one thing: the layout, the list of collectives, or a pass that the program is made with.
"""

import dataclasses
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support.oracle import slow
from support.program_controls import partitioned
from support.programs import PROGRAMS, program
from support.targets import mesh_of

import zero_jax
from zero_jax.contract import verify as contract
from zero_jax.contract.memory import gathered_limit, state_budget
from zero_jax.sharding.partition import SMALL_LEAF
from zero_jax.step.compiled import CompiledStep
from zero_jax.xla.shapes import shape_bytes

CONTROLS = ("annotated", "kept", "padded after the sum", "activations everywhere", "flat slice",
            "read in a loop", "uncoded", "tiles of 8", "whole", "transposed", "queued", ", flat")
DEFAULT = ("h100 stage 2", "h100 stage 3", "h100 stage 3, fp32", "v5e stage 3")


@pytest.mark.grid
@pytest.mark.parametrize("name", [
    name if name in DEFAULT else slow(name) for name in PROGRAMS if not name.endswith(CONTROLS)])
def test_no_program_of_the_matrix_does_less_than_its_stage(name):
    assert not program(name).report.violations


def squares(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def vectors(width, rows=64):
    return {"x": jax.ShapeDtypeStruct((rows, width), jnp.float32), "y": jax.ShapeDtypeStruct((rows, 1), jnp.float32)}


def violations(name, change):
    """What breaks the contract of a program of the matrix, each of whose collectives `change` replaces by others."""
    found = program(name)
    return contract.check([new for c in found.collectives for new in change(c)], found.contract).violations


# The state: from the layout alone.


class Wide(nn.Module):
    """A large matrix, and `vectors` of 1024 elements each."""

    vectors: int = 0

    @nn.compact
    def __call__(self, x):
        for i in range(self.vectors):
            x = x + self.param(f"vector_{i}", nn.initializers.ones, (1024,)).mean()
        return nn.Dense(1)(nn.Dense(1024)(x))


def stored_whole(layout, chosen):
    """`layout` with the leaves of its state replicated whose name is `chosen`."""
    def put(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return leaf.update(sharding=NamedSharding(layout.mesh, P())) if chosen(name) else leaf

    return dataclasses.replace(layout, state=jax.tree_util.tree_map_with_path(put, layout.state))


@pytest.mark.parametrize("stage, leaf", [
    (1, "opt_state/0/mu/Dense_1/kernel"), (2, "opt_state/0/nu/Dense_1/kernel"), (3, "params/Dense_1/kernel")])
def test_a_leaf_that_stays_replicated_is_named(stage, leaf):
    step = zero_jax.make_zero_train_step(
        Wide(), stage, mesh=zero_jax.make_mesh(8), loss=squares, optimizer=optax.adam(1e-3))
    layout = step.layout(vectors(64))
    assert not state_budget(layout).replicated
    lines = contract.check([], contract.contract_of(stored_whole(layout, lambda name: name == leaf))).violations
    (line,) = (line for line in lines if "stays replicated" in line)
    assert line.startswith(leaf) and f"float32[64, 1024] is stored 8 times, {64 * 1024 * 4:,} bytes" in line


def test_small_leaves_may_stay_whole_and_many_of_them_may_not():
    """One vector is 4 KiB; forty, with their moments, are more than a hundredth of the state."""
    step = zero_jax.make_zero_train_step(
        Wide(40), 3, mesh=zero_jax.make_mesh(8), loss=squares, optimizer=optax.adam(1e-3))
    layout = step.layout(vectors(64))

    def state_lines(chosen):
        whole = stored_whole(layout, chosen)
        assert not state_budget(whole).replicated and 1024 * 4 <= SMALL_LEAF
        return [line for line in contract.check([], contract.contract_of(whole)).violations if "bytes of state" in line]

    assert not state_lines(lambda name: name == "params/vector_3")
    (line,) = state_lines(lambda name: "vector" in name)
    assert "vector_" in line and "bytes too many" in line


# Gradients.


class Typed(nn.Module):
    """Modules that compute in bfloat16 and keep their parameters in float32, as Flax's users do."""

    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = nn.gelu(nn.Dense(512, dtype=jnp.bfloat16)(x))
        return nn.Dense(1, dtype=jnp.bfloat16)(x)


@pytest.fixture
def typed():
    """(report, report where XLA partitions, which all-reduces gradients that are cast behind the sum)."""
    def report():
        step = zero_jax.make_zero_train_step(Typed(), 3, mesh=mesh_of("h100:8"), loss=squares)
        return step.compiled_step(vectors(512)).report

    kept = report()
    with partitioned():
        return kept, report()


def test_whole_gradients_of_half_the_bits_are_told(typed):
    """2 x 2 bytes of an all-reduce are the 4 that are promised of a reduce-scatter in float32."""
    kept, broken = typed
    assert not kept.violations
    reduce = broken.results[1]
    assert reduce.communication_bytes <= 1.01 * reduce.budget.communication_bytes
    text = str(broken)
    assert "sent to all-reduce whole gradients, which stage 3 scatters" in text
    assert "A cast stands between the product" in text
    assert "summed in 16 bits, 32 are declared" in text and "Precision(reduce=...)" in text


def scattered(collective):
    """What it scatters of more than the 2^14 bytes on each of 8 devices of which a TPU's contract asks nothing."""
    shapes = [shape for shape in collective.shapes if shape_bytes(*shape) > 2**17]
    return shapes if collective.kind == "reduce-scatter" else []


@pytest.mark.grid
@pytest.mark.parametrize("name", ["h100 stage 3", slow("v5e stage 3"), slow("h100 stage 2")])
def test_one_gradient_of_many_is_all_reduced(name):
    """Few enough for the bytes to pass."""
    of_least, least = min(((c, shape) for c in program(name).collectives for shape in scattered(c)),
                          key=lambda found: shape_bytes(*found[1]) * found[0].count)

    def change(c):
        if c == of_least:
            yield dataclasses.replace(c, kind="all-reduce", shapes=(least,), payload_bytes=shape_bytes(*least))
            at = c.shapes.index(least)
            c = dataclasses.replace(c, shapes=c.shapes[:at] + c.shapes[at + 1:],
                                    payload_bytes=c.payload_bytes - shape_bytes(*least))
        if c.shapes:
            yield c

    lines = violations(name, change)
    assert lines and all("all-reduce" in line for line in lines)
    assert not violations(name, lambda c: (c,))


@pytest.mark.parametrize("name", [
    "h100 stage 3, fp32", slow("h100 stage 3, reduce fp32"), slow("v5p stage 1, reduce fp32")])
def test_a_narrow_sum_is_told(name):
    def change(c):
        shapes = tuple(("bf16", dims) for _, dims in c.shapes)
        yield dataclasses.replace(c, shapes=shapes) if c.kind == "reduce-scatter" else c

    assert any("summed in 16 bits, 32 are declared" in line for line in violations(name, change))


@pytest.mark.parametrize("name", ["h100 stage 2", "h100 stage 3", "cpu stage 3", slow("v5e stage 3")])
def test_gradients_that_are_not_reduced_are_told(name):
    """All of them, then only the large ones of one layer."""
    kinds = ("all-reduce", "reduce-scatter", "collective-permute")
    lines = violations(name, lambda c: () if c.kind in kinds else (c,))
    assert any("elements of gradients are reduced" in line and "nothing is sent for" in line for line in lines)

    def some(c):
        missing = c.kind in kinds and any("wte" in served for served in c.serves)
        return () if missing else (c,)

    assert any("elements of gradients are reduced" in line for line in violations(name, some))


# Parameters.


@pytest.mark.parametrize("name", ["h100 stage 2", "h100 stage 3", "cpu stage 3", slow("v5e stage 3")])
def test_parameters_that_are_not_gathered_are_told(name):
    (line,) = (line for line in violations(name, lambda c: () if c.kind == "all-gather" else (c,))
               if "elements of parameters are gathered" in line)
    assert ("read without a gather" if "3" in name.split("stage")[1] else "does not reach the others") in line


def test_parameters_that_the_loss_does_not_reach_are_no_fault():
    """Read by the model, so that the layout counts on them, and dropped by XLA with the output that they make."""
    class Pooled(nn.Module):
        @nn.compact
        def __call__(self, x):
            nn.Dense(128, name="pooler")(x)
            return nn.Dense(1)(nn.Dense(256)(x))

    step = zero_jax.make_zero_train_step(Pooled(), 3, mesh=zero_jax.make_mesh(8), loss=squares)
    found = step.compiled_step(vectors(256))
    assert found.layout.reads["pooler/kernel"].count
    assert not any("pooler" in served for c in found.collectives for served in c.serves)
    found.verify()


class SmallRecurrent(nn.Module):
    """A recurrent cell that is small beside the rest: gathered in every step of time it costs no twentieth more."""

    @nn.compact
    def __call__(self, x):
        x = nn.RNN(nn.SimpleCell(64))(nn.Dense(256)(x).reshape(x.shape[0], 4, 64))
        return nn.Dense(1)(nn.gelu(nn.Dense(2048)(nn.gelu(nn.Dense(1024)(jnp.asarray(x)[:, -1])))))


def test_a_small_parameter_that_is_sent_in_a_loop_is_told():
    """The bytes pass. XLA:CPU moves the gathers out of the loop, and leaves the sums in it."""
    def report():
        step = zero_jax.make_zero_train_step(SmallRecurrent(), 3, mesh=zero_jax.make_mesh(8), loss=squares)
        return step.compiled_step(vectors(1024)).report

    assert not report().violations
    with partitioned():
        broken = report()
    assert any("is reduced in a loop, 4 times a step" in line and "SimpleCell" in line and "Read it before" in line
               for line in broken.violations), str(broken)
    assert not any("are promised" in line for line in broken.violations)


@pytest.mark.parametrize(("name", "param", "rows"), [
    ("h100 stage 2", "wpe/embedding", 32), ("h100 stage 3", "wpe/embedding", 32),
    slow("v5e stage 3", "wte/embedding", 512)])  # a fourth of it: as one axis of the slice gathers it
def test_a_gather_in_a_loop_is_told(name, param, rows):
    """Of a parameter that no loop takes slices of, small enough for the bytes to pass."""
    found = program(name)
    gather = next(c for c in found.collectives if c.kind == "all-gather" and not c.in_loop)
    repeated = dataclasses.replace(gather, shapes=(("bf16", (rows, 256)),), payload_bytes=rows * 512, in_loop=True,
                                   count=3, serves=(param,))
    (line,) = contract.check([*found.collectives, repeated], found.contract).violations
    assert f"{param} is gathered in a loop, 3 times a step" in line


@pytest.mark.parametrize("name", ["h100 stage 3, 12 layers, kept", slow("h100 stage 3, 48 layers, kept")])
def test_a_model_that_is_kept_whole_is_told(name):
    (line,) = (line for line in program(name).report.violations if "in memory at one time" in line)
    assert "kept from the forward to the backward pass" in line


def test_memory_is_looked_at_only_where_it_could_hold_so_much():
    found = program("h100 stage 3, 12 layers, kept")
    limit = gathered_limit(found.collectives, found.contract)
    memory = dataclasses.make_dataclass("Memory", ["temp_size_in_bytes"])
    scarce = CompiledStep("no program", memory(int(limit)), found.layout, found.contract)
    scarce.__dict__["collectives"] = found.collectives
    assert scarce.gathered_bytes == 0 < limit
    assert gathered_limit([], program("h100 stage 2").contract) == math.inf
