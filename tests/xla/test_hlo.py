"""What the compilers of three backends emit for programs whose communication bytes are known."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zero_jax.xla import devices as xla_devices
from zero_jax.xla import hlo

CPU, H100, V5E = TARGETS = ("cpu", "h100:8", "v5e:2x4")
SHARE = 7 / 8  # (N-1)/N of 8 devices
BIG = 1024 * 256 * 4  # bytes of f32[1024,256]
LAYERS, WIDTH = 4, 512

pytestmark = pytest.mark.parametrize("target", TARGETS)


def mesh_of(target: str, **axes: int) -> Mesh:
    if target != CPU and (extra := xla_devices.missing_compiler(target)):
        pytest.skip(f"needs {extra}")
    devices = jax.devices() if target == CPU else xla_devices.target_devices(target)
    return Mesh(np.array(devices).reshape(tuple(axes.values())), tuple(axes))


def compiled(fn, mesh: Mesh, *args, out=None) -> str:
    """Scheduled HLO of `fn` on `args` = (shape, spec[, dtype])."""
    shapes = [
        jax.ShapeDtypeStruct(shape, *(dtype or [jnp.float32]), sharding=NamedSharding(mesh, spec))
        for shape, spec, *dtype in args
    ]
    options = xla_devices.compiler_options(mesh.devices.flat[0])
    jitted = jax.jit(fn) if out is None else jax.jit(fn, out_shardings=out)
    return jitted.lower(*shapes).compile(compiler_options=options).as_text()


def manual(fn, mesh: Mesh, in_specs, out_specs):
    return jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def gather(x, axis="data"):
    return jax.lax.all_gather(x, axis, tiled=True) * 2


def scatter(x, axis="data"):
    return jax.lax.psum_scatter(x * 2, axis, tiled=True)


def swap(x):
    return jax.lax.all_to_all(x * 2, "data", 1, 0, tiled=True)


def rotate(x):
    return jax.lax.ppermute(x * 2, "data", [(i, (i + 1) % 8) for i in range(8)])


@pytest.mark.parametrize(
    "fn, in_spec, out_spec, kind, payload, sent",
    [
        (gather, P("data"), P(), "all-gather", BIG, SHARE * BIG),
        (scatter, P(), P("data"), "reduce-scatter", BIG, SHARE * BIG),
        (lambda x: jax.lax.psum(x * 2, "data"), P(), P(), "all-reduce", BIG, 2 * SHARE * BIG),
        (swap, P("data"), P("data"), "all-to-all", BIG / 8, SHARE * BIG / 8),
        (rotate, P("data"), P("data"), "collective-permute", BIG / 8, BIG / 8),
    ],
    ids=["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute"],
)
def test_one_collective(target, fn, in_spec, out_spec, kind, payload, sent):
    mesh = mesh_of(target, data=8)
    text = compiled(manual(fn, mesh, in_spec, out_spec), mesh, ((1024, 256), in_spec))
    (collective,) = hlo.collectives(text)
    assert (collective.kind, collective.payload_bytes, collective.communication_bytes) == (kind, payload, sent)
    assert sorted(collective.group) == list(range(8)) and collective.dtypes == ("f32",)
    assert (collective.count, collective.count_known, collective.in_loop) == (1, True, False)
    assert "shard_map" in collective.op_name and re.search(r"test_hlo\.py:\d+$", collective.source)
    assert hlo.communication_bytes(text) == hlo.communication_bytes(text, kinds=[kind]) == sent
    assert hlo.communication_bytes(text, kinds=set(hlo.KINDS) - {kind}) == 0


def test_a_ragged_all_to_all_sends_rows(target):
    """And not where they are written, nor offsets and sizes."""
    if target == CPU:
        pytest.skip("XLA:CPU has none")
    mesh = mesh_of(target, data=8)

    def exchange(*operands):
        return jax.lax.ragged_all_to_all(*operands, axis_name="data")

    def sent(rows, room):
        text = compiled(manual(exchange, mesh, (P("data"),) * 6, P("data")), mesh, ((rows, 256), P("data")),
                        ((room, 256), P("data")), *[((64,), P("data"), jnp.int32)] * 4)
        return hlo.communication_bytes(text, kinds=["ragged-all-to-all"])

    assert sent(1024, 1024) == sent(1024, 2048) == SHARE * BIG / 8
    assert sent(2048, 2048) == 2 * SHARE * BIG / 8  # negative control


@pytest.mark.parametrize("axis, group", [("a", (0, 4)), ("b", (0, 1, 2, 3))])
def test_one_axis_of_two(target, axis, group):
    mesh = mesh_of(target, a=2, b=4)
    share = (len(group) - 1) / len(group)
    fn = functools.partial(gather, axis=axis)
    text = compiled(manual(fn, mesh, P(axis), P()), mesh, ((1024, 256), P(axis)))
    (collective,) = hlo.collectives(text)
    assert (collective.group, collective.communication_bytes) == (group, share * BIG)
    fn = functools.partial(scatter, axis=axis)
    text = compiled(manual(fn, mesh, P(), P(axis)), mesh, ((1024, 256), P()))
    (collective,) = hlo.collectives(text)
    assert (collective.group, collective.communication_bytes) == (group, share * BIG)


def test_combined_operands(target):
    """XLA makes one tuple-shaped collective of several: all leaves count, the instruction once."""
    mesh = mesh_of(target, data=8)

    def fn(x, y):
        return gather(x), gather(y), jax.lax.psum(x * 2, "data"), jax.lax.psum(y * 3, "data")

    text = compiled(
        manual(fn, mesh, P("data"), P()), mesh, ((1024, 256), P("data")), ((512, 256), P("data"))
    )
    assert hlo.communication_bytes(text, kinds=["all-gather"]) == SHARE * 1.5 * BIG
    assert hlo.communication_bytes(text, kinds=["all-reduce"]) == 2 * SHARE * 1.5 * BIG / 8
    gathers = [c for c in hlo.collectives(text) if c.kind == "all-gather"]
    if target == H100:
        assert [c.shapes for c in gathers] == [(("f32", (1024, 256)), ("f32", (512, 256)))]
        assert gathers[0].asynchronous
    assert len([c for c in hlo.collectives(text) if c.kind == "all-reduce"]) == 1


def zero3_text(target: str) -> str:
    """Gather at use in a rematerialised, scanned stack of two matrices a layer."""
    mesh = mesh_of(target, data=8)
    stored, shard, whole, batch = (
        NamedSharding(mesh, spec)
        for spec in (P(None, "data", None), P("data", None), P(None, None), P("data"))
    )
    constrain = jax.lax.with_sharding_constraint

    @jax.custom_vjp
    def use(w):
        return constrain(constrain(constrain(w, shard).astype(jnp.bfloat16), shard), whole)

    use.defvjp(lambda w: (use(w), None), lambda _, g: (constrain(g, shard).astype(jnp.float32),))

    @jax.checkpoint
    def layer(x, pair):
        return constrain(x + jnp.tanh(x @ use(pair[0])) @ use(pair[1]), batch), None

    def step(weights, x):
        def loss(weights):
            return (jax.lax.scan(layer, x, weights)[0].astype(jnp.float32) ** 2).mean()

        value, grads = jax.value_and_grad(loss)(weights)
        return value, jax.tree.map(jnp.subtract, weights, grads)

    weight = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32, sharding=stored)
    x = jax.ShapeDtypeStruct((8192, WIDTH), jnp.bfloat16, sharding=batch)
    jitted = jax.jit(step, out_shardings=(None, (stored, stored)))
    options = xla_devices.compiler_options(mesh.devices.flat[0])
    return jitted.lower((weight, weight), x).compile(compiler_options=options).as_text()


def test_zero3_scan(target):
    text = zero3_text(target)
    matrices = 2 * LAYERS * WIDTH * WIDTH
    width = 4 if target == CPU else 2  # CPU has no bf16 matmul: it converts before sending
    gathers = [c for c in hlo.collectives(text) if c.kind == "all-gather"]
    assert {c.count for c in gathers} == {LAYERS}
    assert hlo.communication_bytes(text, kinds=["all-gather"]) == 2 * SHARE * matrices * width
    scattered = hlo.communication_bytes(text, kinds=["reduce-scatter", "collective-permute", "all-reduce"])
    scattered -= 2 * SHARE * 4  # the loss
    ideal = SHARE * matrices * width
    if target == H100:
        assert scattered == ideal
        assert any(c.asynchronous for c in gathers)
    elif target == CPU:
        assert scattered == 2 * ideal  # all-reduce and slice, and it stays an all-reduce
        assert {c.kind for c in hlo.collectives(text)} == {"all-gather", "all-reduce"}
    else:
        # Two half rings of permutes, unrolled by two: 9 shards a gradient instead of 7.
        rings = [c for c in hlo.collectives(text) if c.kind == "collective-permute"]
        assert scattered == pytest.approx(ideal * 9 / 7)
        assert {c.count for c in rings} == {LAYERS, 2 * LAYERS} and "known_trip" not in text
        # One gather travels through several fusions and counts once.
        assert text.count('chain_id="0"') > 1
        assert sum(c.asynchronous for c in gathers) == 1


def test_scattered_gradients(target):
    """Replicated weights, sharded gradients: one collective of three leaves, printed in 3 notations."""
    mesh = mesh_of(target, data=8)
    shard = NamedSharding(mesh, P("data"))

    def step(weights, x):
        def loss(weights):
            return (functools.reduce(lambda x, w: jnp.tanh(x @ w), weights, x) ** 2).mean()

        return jax.grad(loss)(weights)

    weights = [((WIDTH, WIDTH), P())] * 3
    text = compiled(
        lambda a, b, c, x: step((a, b, c), x), mesh, *weights, ((8192, WIDTH), P("data")),
        out=(shard,) * 3,
    )  # fmt: skip
    (collective,) = hlo.collectives(text)
    assert collective.payload_bytes == 3 * WIDTH * WIDTH * 4 and len(collective.shapes) == 3
    assert collective.kind == ("all-reduce" if target == CPU else "reduce-scatter")
    assert collective.op_name and collective.source
    if target == V5E:
        assert "calls=%all-reduce-scatter" in text and " reduce-scatter(" not in text
