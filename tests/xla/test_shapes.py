"""The parser of HLO shapes: dtypes, dims, tuples, layouts, tiles and memory spaces."""

import pytest

from zero_jax.xla.parser import Instruction
from zero_jax.xla.shapes import Array, aliases, arrays, shape_bytes


@pytest.mark.parametrize(
    "shape, size",
    [
        ("bf16[8,128]{1,0:T(8,128)(2,1)S(1)}", 2048),
        ("(f32[2]{0}, (s8[3]{0}, pred[5]{0}), /*index=2*/u32[]{:S(2)})", 8 + 3 + 5 + 4),
        ("f8e4m3fn[16]{0}", 16),
        ("f8e8m0fnu[16]{0}", 16),
        ("s4[7]{0}", 4),
        ("u4[8]{0:E(4)}", 4),
        ("c64[2]{0}", 16),
        ("f16[<=8,2]{1,0}", 32),
        ("token[]", 0),
    ],
)
def test_shape_bytes(shape, size):
    assert sum(array.dense_bytes for array in arrays(shape).values()) == size


def test_unknown_dtype_is_named():
    with pytest.raises(ValueError, match="q7"):
        shape_bytes("q7", (2,))


def test_every_part_of_an_array():
    (array,) = arrays("bf16[3,200]{0,1:T(8,128)(2,1)S(1)}").values()
    assert array == Array("bf16", (3, 200), minor_to_major=(0, 1), tile=(8, 128), space=1)
    assert (array.shape, array.size, array.dense_bytes) == (("bf16", (3, 200)), 600, 1200)
    assert array.bytes == 128 * 200 * 2  # the most minor dim is padded to 128, the next to 8
    assert array.bytes != arrays("bf16[3,200]{1,0:T(8,128)(2,1)}")[()].bytes == 8 * 256 * 2


@pytest.mark.parametrize("text, in_hbm", [
    ("f32[8,128]{1,0}", True), ("f32[8,128]{1,0:T(8,128)}", True), ("f32[8,128]", True),
    ("f32[8,128]{1,0:S(1)}", True),  # GPU: memory for collectives
    ("f32[8,128]{1,0:T(8,128)S(1)}", False), ("s32[]{:T(128)S(6)}", False),  # TPU: VMEM and scalar memory
    ("s32[]{:T(128)S(1)}", False), ("f32[8,128]{1,0:S(5)}", False), ("f32[8,128]{1,0:T(8,128)S(5)}", False)])
def test_what_is_in_hbm(text, in_hbm):
    assert arrays(text)[()].in_hbm == in_hbm


def test_paths_in_nested_tuples():
    text = "(f32[2]{0}, (s32[], (bf16[4]{0}, token[])), /*index=2*/pred[<=7])"
    assert {path: array.shape for path, array in arrays(text).items()} == {
        (0,): ("f32", (2,)), (1, 0): ("s32", ()), (1, 1, 0): ("bf16", (4,)), (1, 1, 1): ("token", ()),
        (2,): ("pred", (7,))}
    assert Instruction("x", "tuple", text, "").shapes == tuple(array.shape for array in arrays(text).values())
    assert dict(arrays("()")) == {}


def test_arrays_are_shared_and_cannot_be_changed():
    parsed = arrays("f32[2]{0}")
    assert arrays("f32[2]{0}") is parsed
    with pytest.raises(TypeError):
        parsed[()] = parsed[()]  # pyright: ignore[reportIndexIssue]


def test_aliases():
    header = "HloModule jit_f, input_output_alias={ {0}: (0, {}, may-alias), {1, 2}: (3, {4}, must-alias) }, entry=..."
    assert list(aliases(header)) == [((0,), 0, ()), ((1, 2), 3, (4,))]
    assert list(aliases("{{}: (1, {})}")) == [((), 1, ())] and not list(aliases("{}"))
