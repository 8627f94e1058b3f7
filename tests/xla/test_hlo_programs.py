"""Small programs whose collectives and FLOPs are counted by hand, compiled by the compilers of four chips.

A count is what one device does in one run. Payloads that a backend combines or splits are compared as sums.
"""

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support.covering import weekly

from zero_jax.xla import devices as xla_devices
from zero_jax.xla import hlo, replica_groups
from zero_jax.xla.events import totals
from zero_jax.xla.schedule import schedule

CPU, H100, V5E, V5P = TARGETS = ("cpu", "h100:8", "v5e:2x4", "v5p:2x2x2")
F32, BF16 = 4, 2
K = 1024
REPLICATED = P()


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """`fn` under shard_map, or under jit where `outs` is a sharding to produce.

    Attributes:
        fn: what is compiled.
        args: `(shape, spec[, dtype])` of the arguments; shapes are global.
        outs: specs of the results.
        wire: what crosses it by hand: `(kind, dtype, axes, runs)` -> payload bytes of one run, or for each target.
        flops: FLOPs of one device by hand.
        axes: the mesh.
        auto: whether jit finds the collectives.
        known: whether the trip counts are static.
    """

    fn: Callable
    args: tuple
    outs: object
    wire: dict | Callable[[str], dict] = dataclasses.field(default_factory=dict)
    flops: float = 0.0
    axes: tuple[tuple[str, int], ...] = (("d", 8),)
    auto: bool = False
    known: bool = True

    def hand(self, target: str) -> dict:
        return self.wire(target) if callable(self.wire) else self.wire


@functools.cache
def mesh_of(target: str, axes: tuple[tuple[str, int], ...], backwards: bool = False) -> Mesh:
    if target != CPU and (extra := xla_devices.missing_compiler(target)):
        pytest.skip(f"needs {extra}")
    devices = list(jax.devices() if target == CPU else xla_devices.target_devices(target))[:: -1 if backwards else 1]
    return Mesh(np.array(devices).reshape([size for _, size in axes]), [name for name, _ in axes])


@functools.cache
def compiled(program: Program, target: str, backwards: bool = False) -> str:
    mesh = mesh_of(target, program.axes, backwards)
    shapes = [
        jax.ShapeDtypeStruct(shape, *(dtype or [jnp.float32]), sharding=NamedSharding(mesh, spec))
        for shape, spec, *dtype in program.args
    ]
    if program.auto:
        outs = jax.tree.map(lambda s: NamedSharding(mesh, s), program.outs, is_leaf=lambda s: isinstance(s, P))
        jitted = jax.jit(program.fn, out_shardings=outs)
    else:
        specs = tuple(spec for _, spec, *_ in program.args)
        mapped = jax.shard_map(program.fn, mesh=mesh, in_specs=specs, out_specs=program.outs, check_vma=False)
        jitted = jax.jit(mapped)
    options = xla_devices.compiler_options(mesh.devices.flat[0])
    return jitted.lower(*shapes).compile(compiler_options=options).as_text()


def gather(x, axis="d", dim=0):
    return lax.all_gather(x, axis, axis=dim, tiled=True)


def layers(x, ws):
    """A scan of gathers and products."""
    return lax.scan(lambda x, w: (jnp.tanh(x @ gather(w)), None), x, ws)[0]


def nested(x, ws):
    return lax.scan(lambda x, ws: (layers(x, ws), None), x, ws)[0]


def until_small(x):
    return lax.while_loop(lambda x: x.sum() < 3, lambda x: lax.psum(x, "d"), x)


def branches(flag, x):
    return lax.cond(flag, lambda x: lax.psum(x, "d")[:1], lambda x: gather(x)[:1] * 3, x)


def tensor_parallel(x, w, v):
    return lax.psum(jnp.tanh(x @ w) @ v, "d")


def fully_sharded(x, w):
    return jnp.tanh(x @ gather(w))


def data_parallel(w, x):
    return jax.grad(lambda w: (jnp.tanh(x @ w).astype(jnp.float32) ** 2).mean())(w)


def behind(x, v, w):
    """The gather of w may hide behind the product of x and v."""
    return jnp.tanh(x @ v) @ gather(w)


def ahead(x, ws):
    """A loop that gathers what the next iteration multiplies by."""

    def body(carry, w):
        return (jnp.tanh(carry[0] @ carry[1]), gather(w)), None

    x, v = lax.scan(body, (x, x), ws)[0]
    return x @ v


def image(x, w, padding, **more):
    return lax.conv_general_dilated(x, w, (1, 1), padding, dimension_numbers=("NHWC", "HWIO", "NHWC"), **more)


def bf16(shape, spec=REPLICATED):
    return shape, spec, jnp.bfloat16


SQUARE = K * K * F32  # bytes of f32[1024,1024]
CUBE = (("a", 2), ("b", 2), ("c", 2))
GRID = (("a", 2), ("b", 4))
ROWS, WHOLE = ((K, K), P("d")), ((K, K), P())


def halves(kind: str, elements: int, runs: int) -> Callable[[str], dict]:
    """bfloat16, which the CPU compiler widens before it sends it."""

    def wire(target):
        wide = target == CPU
        return {(kind, "f32" if wide else "bf16", ("d",), runs): elements * (F32 if wide else BF16)}

    return wire


def scattered(target: str) -> dict:
    """A v5p of eight chips prefers to reduce all of a small array and slice it."""
    return {("all-reduce" if target == V5P else "reduce-scatter", "f32", ("d",), 1): SQUARE}


PROGRAMS = {
    "all-gather": Program(lambda x: gather(x) * 2, (ROWS,), P(), {("all-gather", "f32", ("d",), 1): SQUARE}),
    "all-gather bf16": Program(
        lambda x: gather(x) * 2, (bf16((K, K), P("d")),), P(), halves("all-gather", K * K, 1)),
    "all-gather dim 1": Program(
        lambda x: gather(x, dim=1) * 2, (((K, K), P(None, "d")),), P(), {("all-gather", "f32", ("d",), 1): SQUARE}),
    "all-reduce": Program(lambda x: lax.psum(x * 2, "d"), (WHOLE,), P(), {("all-reduce", "f32", ("d",), 1): SQUARE}),
    "reduce-scatter": Program(
        lambda x: lax.psum_scatter(x * 2, "d", tiled=True), (WHOLE,), P("d"), scattered),
    "all-to-all": Program(
        lambda x: lax.all_to_all(x * 2, "d", 1, 0, tiled=True), (ROWS,), P("d"),
        {("all-to-all", "f32", ("d",), 1): SQUARE / 8}),
    "permute": Program(
        lambda x: lax.ppermute(x * 2, "d", [(i, (i + 1) % 8) for i in range(8)]), (ROWS,), P("d"),
        {("collective-permute", "f32", ("d",), 1): SQUARE / 8}),
    "two leaves": Program(
        lambda x, y: (gather(x) * 2, gather(y) * 3), (ROWS, ((512, 512), P("d"))), (P(), P()),
        {("all-gather", "f32", ("d",), 1): SQUARE + 512 * 512 * F32}),
    "two sums": Program(
        lambda x, y: lax.psum((x * 2, y * 3), "d"), (WHOLE, ((512, 512), P())), (P(), P()),
        {("all-reduce", "f32", ("d",), 1): SQUARE + 512 * 512 * F32}),
    "inner axis": Program(
        lambda x: gather(x, "b") * 2, (((K, K), P("b")),), P(), {("all-gather", "f32", ("b",), 1): SQUARE}, axes=GRID),
    "outer axis": Program(
        lambda x: lax.psum(x * 2, "a"), (WHOLE,), P(), {("all-reduce", "f32", ("a",), 1): SQUARE}, axes=GRID),
    "outer of three": Program(
        lambda x: gather(x, ("a", "c")) * 2, (((K, K), P(("a", "c"))),), P(),
        {("all-gather", "f32", ("a", "c"), 1): SQUARE}, axes=CUBE),
    "axis after axis": Program(
        lambda x: lax.psum(gather(x, "b") * 2, "a"), (((K, K), P("b")),), P(),
        {("all-gather", "f32", ("b",), 1): SQUARE, ("all-reduce", "f32", ("a",), 1): SQUARE}, axes=GRID),
    "scan of gathers": Program(
        layers, (bf16((64, 256)), bf16((6, 256, 256), P(None, "d"))), P(),
        halves("all-gather", 256 * 256, 6), 6 * 2 * 64 * 256 * 256),
    "nested scans": Program(
        nested, (bf16((64, 256)), bf16((3, 5, 256, 256), P(None, None, "d"))), P(),
        halves("all-gather", 256 * 256, 15), 15 * 2 * 64 * 256 * 256),
    "while": Program(until_small, (ROWS,), P("d"), {("all-reduce", "f32", ("d",), 1): SQUARE / 8}, known=False),
    "cond": Program(branches, (((), P(), jnp.bool_), ROWS), P(), {("all-gather", "f32", ("d",), 1): SQUARE}),
    "tensor parallel": Program(
        tensor_parallel, (((64, 256), P()), ((256, 512), P(None, "d")), ((512, 256), P("d"))), P(),
        {("all-reduce", "f32", ("d",), 1): 64 * 256 * F32}, 2 * (2 * 64 * 256 * 64)),
    "fully sharded": Program(
        fully_sharded, (bf16((64, 512)), bf16((512, 512), P("d"))), P(),
        halves("all-gather", 512 * 512, 1), 2 * 64 * 512 * 512),
    # The forward product, and one for the gradient of w.
    "data parallel": Program(
        data_parallel, (((512, 512), P()), ((K, 512), P("d"))), P(),
        {("all-reduce", "f32", ("d",), 1): 512 * 512 * F32}, 2 * (2 * 128 * 512 * 512), auto=True),
    "behind": Program(
        behind, (bf16((K, K)), bf16((K, K)), bf16((K, K), P("d"))), P(), halves("all-gather", K * K, 1),
        2 * (2 * K**3)),
    "ahead": Program(
        ahead, (bf16((K, K)), bf16((4, K, K), P(None, "d"))), P(), halves("all-gather", K * K, 4), 5 * (2 * K**3)),
    "matmul": Program(jnp.matmul, (bf16((128, 512)), bf16((512, 256))), P(), flops=2 * 128 * 512 * 256),
    "matmul f32": Program(jnp.matmul, (((128, 512), P()), ((512, 256), P())), P(), flops=2 * 128 * 512 * 256),
    "large matmul": Program(
        jnp.matmul, (((2048, 2048), P()), ((2048, 2048), P())), P(), flops=2 * 2048**3),
    "transposed matmul": Program(
        lambda x, y: jnp.einsum("ki,jk->ij", x, y), (bf16((512, 128)), bf16((256, 512))), P(),
        flops=2 * 128 * 512 * 256),
    "batched matmul": Program(
        lambda x, y: jnp.einsum("bik,bkj->bij", x, y), (bf16((16, 128, 64)), bf16((16, 64, 128))), P(),
        flops=16 * 2 * 128 * 64 * 128),
    "attention scores": Program(
        lambda q, k: jnp.einsum("bthd,bshd->bhts", q, k), (bf16((2, 128, 4, 64)), bf16((2, 128, 4, 64))), P(),
        flops=2 * 4 * 2 * 128 * 128 * 64),
    "scan of matmuls": Program(
        lambda x, w: lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0], (bf16((64, 256)), bf16((7, 256, 256))),
        P(), flops=7 * 2 * 64 * 256 * 256),
    "no product": Program(lambda x: jnp.tanh(x).sum(0), (WHOLE,), P()),
    # 3 x 3 taps on 8 x 8 pixels: 6 x 6 places within, and in each dim 2 x 2 + 6 x 3 = 22 taps that meet a pixel.
    "convolution": Program(
        lambda x, w: image(x, w, "VALID"), (((128, 8, 8, 32), P()), ((3, 3, 32, 64), P())), P(),
        flops=2 * 128 * 6 * 6 * 9 * 32 * 64),
    "padded convolution": Program(
        lambda x, w: image(x, w, "SAME"), (((128, 8, 8, 32), P()), ((3, 3, 32, 64), P())), P(),
        flops=2 * 128 * 22 * 22 * 32 * 64),
}  # fmt: skip


def test_each_backend_has_twelve_programs_with_collectives():
    for target in TARGETS:
        assert len([name for name, program in PROGRAMS.items() if program.hand(target)]) >= 12


def read(text: str, axes) -> tuple[Counter, bool]:
    """What crosses the wire, in the terms of `Program.wire`, and whether all counts are known."""
    found, collectives = Counter(), hlo.collectives(text)
    for c in collectives:
        for dtype, dims in c.shapes:
            size = np.prod(dims) * {"f32": F32, "bf16": BF16}[dtype]
            found[c.kind, dtype, c.axes(dict(axes)), c.count] += size
        assert c.payload_bytes == sum(np.prod(d) * {"f32": F32, "bf16": BF16}[t] for t, d in c.shapes)
    return found, all(c.count_known for c in collectives)


def differences(found: dict, hand: dict) -> list[str]:
    """One line for each row in which two counts differ."""
    return [
        f"{key}: read {found.get(key, 0):.0f}, counted {hand.get(key, 0):.0f} bytes"
        for key in sorted({*found, *hand})
        if found.get(key, 0) != hand.get(key, 0)
    ]


@pytest.mark.parametrize("name", PROGRAMS)
@weekly("target", TARGETS, default=3)
def test_the_reader_agrees_with_the_hand_count(target, name):
    program = PROGRAMS[name]
    text = compiled(program, target)
    found, known = read(text, program.axes)
    assert not differences(found, program.hand(target))
    assert known == program.known
    assert sum(totals(schedule(text)).flops.values()) == program.flops


@pytest.mark.parametrize("name", ["behind", "ahead"])
@pytest.mark.parametrize("target", TARGETS)
def test_a_gather_overlaps_one_product(target, name):
    """A GPU runs it beside the product, and a v5e within it; CPU and v5p wait for it."""
    (found,) = hlo.collectives(compiled(PROGRAMS[name], target))
    assert found.asynchronous == (target in (H100, V5E))
    assert found.overlapped_flops == (2 * K**3 if found.asynchronous else 0)


@pytest.mark.parametrize("target", TARGETS)
def test_hbm_bytes_of_a_product(target):
    """Each operand and the result once, be it straight or by way of TPU's VMEM; the gather's bytes are wire bytes."""
    moved = totals(schedule(compiled(PROGRAMS["large matmul"], target))).hbm_bytes
    assert moved == 3 * 2048**2 * F32


@pytest.mark.parametrize("name", ["inner axis", "outer axis", "outer of three", "axis after axis"])
@pytest.mark.parametrize("target", TARGETS)
def test_groups_number_the_places_in_the_mesh_and_not_the_devices(target, name):
    """The mesh of the devices in reverse order has the same groups."""
    program = PROGRAMS[name]
    assert mesh_of(target, program.axes).devices.flat[0] != mesh_of(target, program.axes, True).devices.flat[0]
    assert not differences(read(compiled(program, target, True), program.axes)[0], program.hand(target))


@pytest.mark.parametrize("target", TARGETS)
def test_a_wrong_count_is_found(target):
    """Negative controls: of the program, and of the comparison."""
    program = PROGRAMS["nested scans"]
    text, hand = compiled(program, target), program.hand(target)
    found, _ = read(text, program.axes)
    (collective,) = hlo.collectives(text)
    # Who counts lines sees one gather where fifteen run.
    lines = len(re.findall(r" all-gather(?:-start)?\(", text))
    assert lines * collective.communication_bytes == hlo.communication_bytes(text) / 15
    ((kind, dtype, axes, runs), payload) = next(iter(hand.items()))
    for wrong in (
        {(kind, dtype, axes, 1): payload},
        {(kind, dtype, ("x",), runs): payload},
        {("all-reduce", dtype, axes, runs): payload},
        {(kind, dtype, axes, runs): payload - 1},
        {**hand, ("all-reduce", "f32", axes, 1): 4},
        {},
    ):
        assert differences(found, wrong)


@pytest.mark.parametrize(
    "group, axes",
    [
        ((), ()),
        ((5,), ()),
        ((0, 1, 2, 3), ("b",)),
        ((1, 5), ("a",)),
        (tuple(range(8)), ("a", "b")),
        ((0, 2), ("b",)),  # half of an axis
        ((0, 5), ("a", "b")),  # a diagonal
        ((0, 1, 2, 3, 7, 6, 5, 4), ("a", "b")),  # a ring
    ],
)
def test_mesh_axes(group, axes):
    assert replica_groups.mesh_axes(group, {"a": 2, "b": 4}) == axes
    assert replica_groups.mesh_axes(group, {"a": 2, "one": 1, "b": 4}) == axes


@pytest.mark.parametrize(("group", "order"), [
    ((0, 4), ("a",)), ((4, 5, 6, 7), ("b",)), (tuple(range(8)), ("a", "b")), ((0, 4, 1, 5, 2, 6, 3, 7), ("b", "a")),
    ((0, 1), ()), ((3, 2, 1, 0), ()), ((0, 4, 1, 5, 3, 7, 2, 6), ()), ((5,), ())])
def test_order_of_the_axes_of_a_group(group, order):
    """The major one first; none of a part of an axis, and of devices in another order."""
    assert replica_groups.group_order(group, {"a": 2, "one": 1, "b": 4}) == order
