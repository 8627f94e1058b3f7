"""The safetensors format: headers checked before any tensor is read, slices read, files written in order. No JAX.

A file is the length of a header (8 bytes, little endian), the header (JSON), and the tensors without gaps. Nothing in
it is executed. The `safetensors` library writes only tensors that are all in memory at once, hence this implementation.
"""

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from zero_jax.errors import UsageError, few, named
from zero_jax.files import open_regular

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype("<i8"), "I32": np.dtype("<i4"), "I16": np.dtype("<i2"), "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"), "U32": np.dtype("<u4"), "U16": np.dtype("<u2"), "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"), "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn), "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2)}

MAX_HEADER_BYTES = 100_000_000
"""The limit of the `safetensors` library."""

MAX_TENSORS = 100_000
"""Of one file: more are no model, and 200,000 would take seconds to check. The largest published models have as many
in hundreds of files."""

MAX_DIMS = 64
"""Of an array in NumPy."""

SUFFIX, INDEX_SUFFIX = ".safetensors", ".safetensors.index.json"


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor in a file, without its values. offset: in bytes, from the start of the file."""

    file: Path
    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int

    def read(self, index: tuple[Any, ...] = ()) -> np.ndarray:
        """A copy of the slice `index` (slices, integers or an integer array, as in NumPy); nothing else is read."""
        if not math.prod(self.shape):
            return np.empty(self.shape, self.dtype)[index]
        # A new mapping each time: closing it releases the pages that were read.
        return np.array(np.memmap(self.file, self.dtype, "r", self.offset, self.shape)[index])


def find_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, of the files that an index (`*.safetensors.index.json`) names, or of a folder with one.

    Only headers are read. Raises ValueError for a file that is missing, truncated, or contradicts its header.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        inside = [path / f"model{suffix}" for suffix in (SUFFIX, INDEX_SUFFIX) if (path / f"model{suffix}").exists()]
        if len(inside) != 1:
            raise UsageError(f"{path} has {'both' if inside else 'neither'} model{SUFFIX} {'and' if inside else 'nor'} "
                             f"model{INDEX_SUFFIX}: name the file.")
        path = inside[0]
    if path.suffix == ".json":
        return _read_index(path)
    return read_header(path)[0]


def read_header(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(The tensors of one file by name, its metadata). Raises ValueError for anything but a complete safetensors file.

    Every size in the header is checked against the file.
    """
    with _readable(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise UsageError(f"{path} is not a safetensors file, or is truncated: it has {size:,} bytes, and its first "
                             f"eight announce a header of {length:,}. Other formats (pickles among them) are never "
                             "opened.")
        text = file.read(length)
    if (number := text.count(b'"data_offsets"')) > MAX_TENSORS:  # before they are parsed, which would take a second
        raise UsageError(f"{path}: the header names {number:,} tensors, and a file has at most {MAX_TENSORS:,}: split "
                         "it, with an index.")
    header = _json_object(path, text)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise UsageError(f"{path}: __metadata__ of the header is not a mapping of strings.")
    tensors, start = {name: _tensor(path, name, row, 8 + length) for name, row in header.items()}, 8 + length
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.offset, _bytes(tensor))):
        if tensor.offset != start:
            raise UsageError(f"{path}: tensor {named(tensor.name)} begins at byte {tensor.offset:,} of the file, and "
                             f"the one before it ends at {start:,}: the file is damaged.")
        start += _bytes(tensor)
    if start != size:
        raise UsageError(f"{path} is truncated or damaged: its header describes {start:,} bytes, and it has {size:,}. "
                         "Copy or download it again.")
    return tensors, metadata


def _bytes(tensor: Tensor) -> int:
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def _tensor(path: Path, name: str, row: Any, start: int) -> Tensor:
    """One entry of a header as a tensor; raises ValueError where it is invalid."""
    if not isinstance(row, dict) or row.keys() != {"dtype", "shape", "data_offsets"}:
        raise UsageError(f"{path}: the header's entry of {named(name)} does not consist of dtype, shape and "
                         "data_offsets.")
    dtype, shape, offsets = row["dtype"], row["shape"], row["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise UsageError(f"{path}: tensor {named(name)} has dtype {named(dtype)}; supported are {', '.join(DTYPES)}.")
    for what, sizes in (("shape", shape), ("data_offsets", offsets)):
        if not isinstance(sizes, list) or any(type(size) is not int or not 0 <= size < 2**63 for size in sizes):
            raise UsageError(f"{path}: {what}={named(sizes)} of tensor {named(name)} is not a list of sizes.")
    if len(shape) > MAX_DIMS:
        raise UsageError(f"{path}: tensor {named(name)} has {len(shape):,} dims, and an array has at most {MAX_DIMS}.")
    needed = math.prod(shape) * DTYPES[dtype].itemsize
    if len(offsets) != 2 or offsets[1] - offsets[0] != needed:
        raise UsageError(f"{path}: tensor {named(name)}, {dtype} {tuple(shape)}, takes {needed:,} bytes, and "
                         f"data_offsets={named(offsets)} span another number.")
    return Tensor(path, name, DTYPES[dtype], tuple(shape), start + offsets[0])


def _read_index(path: Path) -> dict[str, Tensor]:
    """The tensors of all files of an index, which must be in its folder."""
    with _readable(path) as file:
        if os.fstat(file.fileno()).st_size > MAX_HEADER_BYTES:
            raise UsageError(f"{path} has more than {MAX_HEADER_BYTES:,} bytes, and is not an index of safetensors "
                             "files.")
        names = _json_object(path, file.read()).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise UsageError(f"{path} has no weight_map from names of tensors to names of files.")
    tensors: dict[str, Tensor] = {}
    for name in sorted(set(names.values())):
        if name != Path(name).name or "\\" in name or not name.endswith(SUFFIX):
            raise UsageError(f"{path} names the file {named(name)}, and only safetensors files beside it are opened.")
        listed = {tensor for tensor, file in names.items() if file == name}
        inside, _ = read_header(path.with_name(name))
        if listed != inside.keys():
            raise UsageError(f"{path} and {name} differ in tensors {few(sorted(listed ^ inside.keys()))}: "
                             f"{len(listed)} of them by the index, {len(inside)} by the file.")
        tensors |= inside
    return tensors


def _json_object(path: Path, text: bytes) -> dict[str, Any]:
    def once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        row = dict(pairs)
        if len(row) != len(pairs):
            raise UsageError("a name occurs twice")
        return row

    try:
        value = json.loads(text, object_pairs_hook=once_each)
    except (ValueError, RecursionError) as error:  # not UTF-8 or not JSON, too
        raise UsageError(f"{path} is not a safetensors file or index: its JSON cannot be read ({error}).") from error
    if not isinstance(value, dict):
        raise UsageError(f"{path} is not a safetensors file or index: its JSON is not an object.")
    return value


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[BinaryIO]:
    try:
        file = open_regular(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}): name a {SUFFIX} file, an index of such files "
                         f"(*{INDEX_SUFFIX}) or a folder with one.") from error
    with file:
        yield file


@dataclasses.dataclass(frozen=True)
class Output:
    """A tensor to be written: its name, dtype and shape, and a function that returns it when its turn comes."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    value: Callable[[], np.ndarray]

    @property
    def bytes(self) -> int:
        """Its size in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_tensors(path: Path, outputs: Sequence[Output], *, max_file_bytes: int, metadata: Mapping[str, str]
                  ) -> list[Path]:
    """Writes `outputs` in their order, each computed when the one before it is on disk; returns the paths.

    One file at `path` (`*.safetensors`), or, where that would have more than `max_file_bytes` of tensors, files
    `*-00001-of-00003.safetensors` of at most that (one tensor at least) and the index `*.safetensors.index.json`. Each
    appears complete or not at all, the index last. Raises ValueError for a path that cannot be written, or if a single
    file would be left beside an index, or the reverse.
    """
    path = Path(path)
    index = path.with_name(path.stem + INDEX_SUFFIX)
    files = _cut(outputs, max_file_bytes)
    check_target(path, many=len(files) > 1)
    if len(files) == 1:
        _write_file(path, files[0], metadata)
        return [path]
    written, names = [], {}
    for number, part in enumerate(files, 1):
        written.append(path.with_name(f"{path.stem}-{number:05d}-of-{len(files):05d}{SUFFIX}"))
        _write_file(written[-1], part, metadata, index)
        names |= {output.name: written[-1].name for output in part}
    contents = {"metadata": {"total_size": sum(output.bytes for output in outputs)}, "weight_map": names}
    with _replacing(index) as file:
        file.write(json.dumps(contents, indent=1).encode())
    return [*written, index]


def check_target(path: Path, *, many: bool | None = None, new: bool = False) -> None:
    """Raises ValueError for a `path` that tensors cannot be written to, as `many` files or one (None: either).

    new: also where there is a file or an index, which would be replaced.
    """
    index = path.with_name(path.stem + INDEX_SUFFIX)
    if path.suffix != SUFFIX:
        raise UsageError(f"out={path} does not end in {SUFFIX}.")
    for other, wrong in ((path, many is True), (index, many is False)):
        if wrong and other.exists():
            raise UsageError(f"{other} exists, and {index if many else path} is to be written, which would make it "
                             "ambiguous which to read: remove it, or choose another name.")
    for other in (path, index) if new else ():
        if other.is_file():
            raise UsageError(f"{other} exists, and is not replaced: remove it, or give another --out.")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK) or path.is_dir():
        raise UsageError(f"out={path} cannot be written: {path.parent} must be a writable folder, and {path} must not "
                         "be a folder.")


def _cut(outputs: Sequence[Output], max_file_bytes: int) -> list[list[Output]]:
    """`outputs` in groups of at most that many bytes each; a larger output is a group of its own."""
    files: list[list[Output]] = [[]]
    for output in outputs:
        if files[-1] and sum(other.bytes for other in files[-1]) + output.bytes > max_file_bytes:
            files.append([])
        files[-1].append(output)
    return files


def _write_file(path: Path, outputs: Sequence[Output], metadata: Mapping[str, str], index: Path | None = None) -> None:
    codes, end = {dtype: code for code, dtype in DTYPES.items()}, 0
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    for output in outputs:
        header[output.name] = {"dtype": codes[output.dtype], "shape": list(output.shape),
                              "data_offsets": [end, end + output.bytes]}
        end += output.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with _replacing(path, index) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for output in outputs:
            value = np.asarray(output.value(), output.dtype, order="C")
            assert value.shape == output.shape, (output.name, value.shape, output.shape)
            file.write(value.reshape(-1).view(np.uint8).data)


@contextlib.contextmanager
def _replacing(path: Path, index: Path | None = None) -> Iterator[BinaryIO]:
    """A temporary file that replaces `path` when all of it is on disk, and is removed if anything fails before.

    An earlier `index`, which would then name tensors of two exports, is removed first.
    Raises UsageError where it cannot be written, as to a full disk.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if index is not None:
            index.unlink(missing_ok=True)
        temporary.replace(path)
    except OSError as error:
        if error.filename not in (None, str(temporary)):
            raise  # of another file
        raise UsageError(f"{path} cannot be written ({error.strerror}): free space, or give another place.") from error
    finally:
        temporary.unlink(missing_ok=True)
