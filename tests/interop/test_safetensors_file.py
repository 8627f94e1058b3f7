"""The format beside its own library, and each way in which a file can be wrong."""

import functools
import json
import resource
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy as safetensors_numpy

from zero_jax.errors import UsageError
from zero_jax.interop.safetensors_file import DTYPES, Output, find_tensors, read_header, write_tensors

ARRAYS = {"a": np.arange(12, dtype=np.float32).reshape(3, 4), "b": np.array(7, np.int64),
          "c": np.ones((0, 5), np.float16), "d": np.array([True, False, True])}


def outputs(arrays=ARRAYS):
    return [Output(name, value.dtype, value.shape, lambda value=value: value) for name, value in arrays.items()]


def write(path: Path, header, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_what_its_library_writes_is_read(tmp_path):
    safetensors_numpy.save_file(ARRAYS, tmp_path / "x.safetensors", metadata={"format": "pt"})
    found = find_tensors(tmp_path / "x.safetensors")
    assert found.keys() == ARRAYS.keys()
    for name, value in ARRAYS.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape)
        np.testing.assert_array_equal(found[name].read(), value)
    np.testing.assert_array_equal(found["a"].read((slice(1, 3), np.array([3, 0]))), ARRAYS["a"][1:3][:, [3, 0]])


def test_what_is_written_its_library_reads(tmp_path):
    arrays = ARRAYS | {"e": np.arange(3).astype(ml_dtypes.bfloat16), "f": np.arange(6.0).reshape(2, 3).T}
    (path,) = write_tensors(tmp_path / "x.safetensors", outputs(arrays), max_file_bytes=1 << 20,
                            metadata={"format": "pt"})
    read = safetensors_numpy.load_file(path)
    assert read.keys() == arrays.keys()
    for name, value in arrays.items():
        assert read[name].dtype == value.dtype
        np.testing.assert_array_equal(read[name], value)
        np.testing.assert_array_equal(find_tensors(path)[name].read(), value)


@pytest.mark.parametrize("code", sorted(DTYPES))
def test_dtypes_are_those_of_the_format(tmp_path, code):
    sizes = {"F8_E4M3": 1, "F8_E5M2": 1, "BOOL": 1, "BF16": 2}
    size = sizes.get(code) or int(code[1:]) // 8
    assert DTYPES[code].itemsize == size
    found, _ = read_header(write(tmp_path / "x.safetensors", {"x": entry(code, (3,), (0, 3 * size))}, bytes(3 * size)))
    np.testing.assert_array_equal(found["x"].read().astype(np.float32), np.zeros(3))


def test_many_files_and_their_index(tmp_path):
    arrays = {name: np.full((4,), i, np.float32) for i, name in enumerate("uvwxy")}
    *files, index = write_tensors(tmp_path / "m.safetensors", outputs(arrays), max_file_bytes=32, metadata={})
    assert [file.name for file in files] == [f"m-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert [path.name for path in tmp_path.iterdir() if path not in (*files, index)] == []
    assert json.loads(index.read_text())["metadata"] == {"total_size": 80}
    found = find_tensors(index)
    assert {name: found[name].read().tolist() for name in found} == {n: v.tolist() for n, v in arrays.items()}
    with pytest.raises(ValueError, match="ambiguous which to read"):
        write_tensors(tmp_path / "m.safetensors", outputs(arrays), max_file_bytes=100, metadata={})
    index.rename(tmp_path / "model.safetensors.index.json")
    assert find_tensors(tmp_path).keys() == arrays.keys()
    files[1].write_bytes(files[2].read_bytes())
    with pytest.raises(ValueError, match="differ in tensors w, x, y: 2 of them by the index, 1 by the file"):
        find_tensors(tmp_path)


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/x.safetensors", "a/x.safetensors", "..\\x.safetensors",
                                  "x.bin", "", ".."])
def test_an_index_opens_only_files_beside_it(tmp_path, name):
    inner = tmp_path / "folder"
    inner.mkdir()
    safetensors_numpy.save_file({"t": np.ones(2)}, tmp_path / "x.safetensors")
    safetensors_numpy.save_file({"t": np.ones(2)}, inner / "x.safetensors")
    index = inner / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"t": name}}))
    with pytest.raises(ValueError, match="only safetensors files beside it are opened"):
        find_tensors(index)
    index.write_text(json.dumps({"weight_map": {"t": "x.safetensors"}}))
    assert find_tensors(index).keys() == {"t"}


def test_a_write_that_fails_leaves_what_was_there(tmp_path):
    path = tmp_path / "x.safetensors"
    write_tensors(path, outputs(), max_file_bytes=10**6, metadata={})
    before = path.read_bytes()

    def fail():
        raise RuntimeError("lost")

    broken = [*outputs(), Output("z", np.dtype(np.float32), (2,), fail)]
    with pytest.raises(RuntimeError, match="lost"):
        write_tensors(path, broken, max_file_bytes=10**6, metadata={})
    assert path.read_bytes() == before and [*tmp_path.iterdir()] == [path]


def test_files_of_two_exports_are_not_read_as_one(tmp_path):
    """Of several files some are replaced when a write fails: there is no index of them then."""
    def write(value, fails_at=None):
        def number(name):
            if name == fails_at:
                raise RuntimeError("lost")
            return np.full(4, value, np.float32)

        parts = [Output(name, np.dtype(np.float32), (4,), functools.partial(number, name)) for name in "uv"]
        return write_tensors(tmp_path / "m.safetensors", parts, max_file_bytes=16, metadata={})[-1]

    index = write(1)
    with pytest.raises(RuntimeError, match="lost"):
        write(2, fails_at="u")
    assert [tensor.read()[0] for tensor in find_tensors(index).values()] == [1, 1]  # the control: nothing is replaced
    with pytest.raises(RuntimeError, match="lost"):
        write(2, fails_at="v")
    with pytest.raises(ValueError, match="cannot be read"):
        find_tensors(index)
    assert [tensor.read()[0] for tensor in find_tensors(write(3)).values()] == [3, 3]


@pytest.mark.parametrize(("out", "message"), [("x.bin", "does not end in"), ("no/x.safetensors", "cannot be written")])
def test_a_path_that_cannot_be_written(tmp_path, out, message):
    with pytest.raises(ValueError, match=message):
        write_tensors(tmp_path / out, outputs(), max_file_bytes=10**6, metadata={})


BROKEN = {
    "empty": (lambda p: p.write_bytes(b""), "it has 0 bytes"),
    "a zip": (lambda p: p.write_bytes(b"PK\x03\x04" + b"\0" * 4 + b"x" * 99), "is not a safetensors file"),
    "huge header": (lambda p: write(p, {}, length=2**63), "a header of 9,223,372,036,854,775,808"),
    "header beyond the file": (lambda p: write(p, {}, length=3), "has 10 bytes, and its first eight .* header of 3"),
    "no JSON": (lambda p: write(p, b"not JSON"), "its JSON cannot be read"),
    "no UTF-8": (lambda p: write(p, b'{"\xff": 1}'), "its JSON cannot be read"),
    "nested": (lambda p: write(p, b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}"), "its JSON cannot be read"),
    "a list": (lambda p: write(p, []), "is not an object"),
    "twice": (lambda p: write(p, b'{"x": {}, "x": {}}'), "a name occurs twice"),
    "metadata": (lambda p: write(p, {"__metadata__": {"x": 1}}), "__metadata__"),
    "entry": (lambda p: write(p, {"x": [1]}), "does not consist of dtype, shape and data_offsets"),
    "dtype": (lambda p: write(p, {"x": entry("F33")}), "'x' has dtype 'F33'; supported are F64"),
    "dtype list": (lambda p: write(p, {"x": entry(["F32"])}), r"has dtype \['F32'\]"),
    "shape": (lambda p: write(p, {"x": entry(shape=(-2,))}), r"shape=\[-2\] of tensor 'x' is not a list of sizes"),
    "bool shape": (lambda p: write(p, {"x": entry(shape=(True,))}), "is not a list of sizes"),
    "offsets": (lambda p: write(p, {"x": entry(offsets=(0, 7))}, b"0" * 7), r"takes 8 bytes, .* data_offsets=\[0, 7\]"),
    "backwards": (lambda p: write(p, {"x": entry(offsets=(8, 0))}), "span another number"),
    "overflow": (lambda p: write(p, {"x": entry(shape=(2**62, 4))}), "takes 73,786,976,294,838,206,464 bytes"),
    "overlap": (lambda p: write(p, {"x": entry(), "y": entry()}, b"0" * 8), "'y' begins at byte"),
    "hole": (lambda p: write(p, {"x": entry(offsets=(8, 16))}, b"0" * 16), "'x' begins at byte"),
    "truncated": (lambda p: write(p, {"x": entry()}, b"0" * 5), "its header describes 77 bytes, and it has 74"),
    "too long": (lambda p: write(p, {"x": entry()}, b"0" * 9), "its header describes 77 bytes, and it has 78"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_has_one_message_and_its_path(tmp_path, name):
    make, message = BROKEN[name]
    path = tmp_path / "x.safetensors"
    make(path)
    with pytest.raises(ValueError, match=message) as error:
        read_header(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)
    whole = write(path, {"x": entry()}, b"0" * 8)
    assert read_header(whole)[0]["x"].shape == (2,)


def test_what_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="cannot be read .No such file"):
        find_tensors(tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match="has neither"):
        find_tensors(tmp_path)
    (tmp_path / "x.index.json").write_text('{"weight_map": {}}')
    with pytest.raises(ValueError, match="no weight_map"):
        find_tensors(tmp_path / "x.index.json")


def test_a_file_that_cannot_be_written_whole_is_told_and_leaves_nothing(tmp_path):
    value = np.zeros(10_000, np.float32)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))  # as a disk that is full
    try:
        with pytest.raises(UsageError, match=r"x.safetensors cannot be written \(File too large\): free space, or"):
            write_tensors(tmp_path / "x.safetensors", outputs({"a": value}), max_file_bytes=1 << 20, metadata={})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not [*tmp_path.iterdir()]

    def fails():
        raise FileNotFoundError(2, "gone", "another")

    with pytest.raises(FileNotFoundError):  # negative control: not of this file
        write_tensors(tmp_path / "x.safetensors", [Output("a", value.dtype, value.shape, fails)],
                      max_file_bytes=1 << 20, metadata={})
