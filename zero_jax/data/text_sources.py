"""Documents from files: plain text, JSON lines, Parquet and array_record. Only the last imports JAX, by grain."""

import codecs
import glob
import hashlib
import itertools
import json
import os
import re
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from zero_jax.data import extras
from zero_jax.data.remote_files import is_remote, readable, remote_files
from zero_jax.errors import UsageError, few, named, printable
from zero_jax.files import open_regular

FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".array_record": "array_record",
           ".arrayrecord": "array_record", ".arrow": "parquet"}
"""By the end of a file's name; any other file is plain text, which is one document.

An Arrow stream, as `save_to_disk` of Hugging Face `datasets` writes it, has columns and rows as Parquet has.
"""

_ABOUT_DATASETS = ("dataset_info.json", "state.json")

_SKIPPED_DIRS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
"""Of Python's own library."""

HEAD_LINES, HEAD_BYTES, MAX_LINE_BYTES = 100, 8192, 1 << 28


_COMPRESSED = re.compile(rb"\x1f\x8b\x08|BZh[1-9]1AY&SY|\xfd7zXZ\0|\x28\xb5\x2f\xfd|PK\x03\x04|\x04\x22M\x18")
"""How files of gzip, bzip2, xz, zstd, zip and lz4 begin."""


def format_of(path: str | Path) -> str:
    """jsonl, parquet, array_record or text."""
    return FORMATS.get(Path(path).suffix.lower(), "text")


def files_of(name: str) -> list[Any]:
    """The files that a name stands for: itself, those that a glob matches, or all of a folder but other binaries.

    Paths, or `RemoteFile`s for gs://, in order; hidden and empty ones of a folder are left out. Raises ValueError where
    there are none.
    """
    if is_remote(name):
        return [*remote_files(name)]
    path = Path(name).expanduser()
    if (path / "dataset_dict.json").is_file():
        splits = sorted(each.name for each in path.iterdir() if each.is_dir())
        raise UsageError(f"{path} has the splits {few(splits)} of a dataset: name one of them, as {path / splits[0]}, "
                         "and another one to evaluate on." if splits else f"{path} has no splits: write it again.")
    if path.is_dir():
        files = [file for file in sorted(files_below(path)) if format_of(file) != "text" or not is_binary(file)]
        if any(file.suffix.lower() == ".arrow" for file in files):
            files = [file for file in files if file.name not in _ABOUT_DATASETS]
    else:
        files = matching(path)
    if not files:
        raise UsageError(f"data: {name}: no file with text: give files, folders or globs of text, .jsonl, .parquet or "
                         ".array_record.")
    return files


def has_documents(name: str) -> bool:
    """Whether a file, or any that a folder or a glob stands for, is of a format with documents: no plain text.

    Names alone are looked at, and no file is read. Of a name that stands for nothing, what its end says.
    """
    if is_remote(name):
        return True  # it is Parquet
    path = Path(name).expanduser()
    if path.is_dir():
        return any(format_of(file) != "text" for file in files_below(path))
    return format_of(path) != "text" or any(format_of(file) != "text" for file in matching(path))


def files_below(folder: Path) -> Iterator[Path]:
    """The files that `folder` stands for, in no order: those below it that are neither hidden nor empty."""
    return (file for file in folder.rglob("*") if file.is_file() and file.stat().st_size > 0
            and not any(part[0] == "." for part in file.relative_to(folder).parts))


def matching(path: Path) -> list[Path]:
    """`path`, where it is a file; else the files that it matches as a glob, sorted."""
    return [path] if path.is_file() else [
        file for file in map(Path, sorted(glob.glob(str(path), recursive=True))) if file.is_file()]


def python_folder() -> Path:
    """Where the library of the running Python is."""
    return Path(sysconfig.get_paths()["stdlib"])


def python_files() -> list[Path]:
    """The files of Python's own library, in order of their paths; without tests and installed packages."""
    root, files = python_folder(), []
    for folder, folders, names in os.walk(root):
        folders[:] = set(folders) - _SKIPPED_DIRS  # not walked: installed packages are most of the files
        files += [Path(folder, name) for name in names
                  if name.endswith(".py") and not name.startswith("_sysconfigdata")]
    if not files:
        raise UsageError(f"no Python source in {root} (a zipped library?); name text files instead")
    return sorted(files)


def read_documents(names: str | Iterable[str], *, field: str = "text") -> Iterator[str]:
    """The documents of files, folders and globs, one name or several, or of "python", its own library.

    The files of a name come in the order of a hash of their names, so that what is held out at the end is not
    alphabetical. A file that several names stand for is read once.

    A text file is one document; so is the text in `field` of each line of JSON lines and each row of Parquet, and each
    record of an array_record (UTF-8). Empty ones are left out. Bytes of Python's library that are no UTF-8 are U+FFFD.

    Raises ValueError, with the byte, line or row, for what is no UTF-8 or JSON, lacks the field or has no text in it.
    """
    readers = {"jsonl": _jsonl, "parquet": _parquet, "array_record": _array_record, "text": _text}
    seen: set[Path] = set()
    for name in [names] if isinstance(names, str) else names:
        python = name == "python"
        for path in unseen(_shuffled(python_files() if python else files_of(name)), seen):
            reader = _replaced_text if python else readers[format_of(path)]
            yield from filter(None, reader(path, field))


def unseen(files: Iterable[Path], seen: set[Path]) -> Iterator[Path]:
    """Those of `files` whose true paths are not in `seen`, which gets them.

    Read twice, a file could be in the training and in the held-out part.
    """
    for path in files:
        true = path.resolve()
        if true not in seen:
            seen.add(true)
            yield path


def _shuffled(files: Iterable[Path]) -> list[Path]:
    return sorted(files, key=lambda file: hashlib.sha256(os.fsencode(file.name)).digest())


def check_file(path: Path, *, field: str = "text") -> None:
    """Raises ValueError for what the start of a file shows: the first lines, or what a Parquet file says of itself."""
    kind = format_of(path)
    if not is_remote(path):
        check_not_compressed(path)
    if kind == "text" and is_binary(path):
        raise UsageError(f"{path} is no text in UTF-8, since it has zero bytes: convert it (iconv -f utf-16 -t utf-8), "
                         "or name other files.")
    if kind == "text":
        _decoded(_head(path, HEAD_BYTES), path, final=False)
    elif kind == "jsonl":
        for _ in itertools.islice(_jsonl(path, field), HEAD_LINES):
            pass
    elif kind == "parquet":
        _check_column(path, field)
    elif kind == "array_record":
        extras.check_installed("grain", str(path))


def check_not_compressed(path: Path) -> None:
    """Raises ValueError for a compressed file, whose bytes would be taken for those of the text."""
    if _COMPRESSED.match(_head(path, 10)):
        raise UsageError(f"{path} is compressed: unpack it first (gzip -dk, zstd -dk, unzip).")


def is_binary(path: Path) -> bool:
    """Whether a file has a zero byte at its beginning. Raises ValueError where it cannot be read."""
    return b"\0" in _head(path, HEAD_BYTES)


def _head(path: Path, number: int) -> bytes:
    """The first `number` bytes of a file. Raises ValueError where it cannot be read."""
    try:
        with open_regular(path) as file:
            return file.read(number)
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}): change its permissions, or leave it out."
                         ) from error


def _text(path: Path, field: str) -> Iterator[str]:
    with open_regular(path) as file:
        yield _decoded(file.read(), path)


def _replaced_text(path: Path, field: str) -> Iterator[str]:
    yield path.read_bytes().decode("utf-8", errors="replace")


def _decoded(content: bytes, path: Path, *, final: bool = True) -> str:
    """The text of a file, or without `final` of its beginning, which may end within a character."""
    try:
        return codecs.utf_8_decode(content, "strict", final)[0]
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is no text in UTF-8: its byte {error.start:,} is 0x{content[error.start]:02x}. "
                         "Convert it (iconv -f latin1 -t utf-8, if that is its encoding; iconv -f utf-8 -t utf-8 -c "
                         "leaves such bytes out), or name other files.") from error


def json_rows(path: Path, example: str = "prompt") -> Iterator[tuple[str, dict[str, Any]]]:
    """(where it is, the object) of each line that is not empty; example: a field, for the message about what is none.

    Raises ValueError, with the line, for what is no JSON object.
    """
    with open_regular(path) as file:
        for number in itertools.count(1):
            line = file.readline(MAX_LINE_BYTES)
            if not line:
                return
            if line.strip():
                where = f"{path}, line {number}"
                yield where, _object(line, where, f'{{"{example}": "..."}}')


def _jsonl(path: Path, field: str) -> Iterator[str]:
    for where, row in json_rows(path, field):
        if field not in row:
            raise UsageError(f"{where}: it has no field {named(field)}, but {few(row)}: {_mend(row)}.")
        yield _as_text(row[field], field, where)


def _object(line: bytes, where: str, example: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: it is no JSON ({printable(str(error))}): each line is an object such as {example}."
                         ) from error
    if not isinstance(row, dict):
        raise UsageError(f"{where}: it is no object, as {example} is one.")
    return row


def _mend(names: Iterable[str]) -> str:
    """What to give for rows of these fields, none of which is the text."""
    names = set(names)
    if {"chosen", "rejected"} <= names:
        return "they are preferences, so give objective=preferences, or name the one with the text as text_field"
    if "messages" in names or {"prompt", "completion"} <= names:
        return "they are instructions, so give objective=instruct, or name the one with the text as text_field"
    return "name the one with the text as text_field"


def _as_text(value: Any, field: str, where: str) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{where}: {named(field)} is {type(value).__name__} and no text: name the field with the text "
                         "as text_field, or leave such rows out.")
    return utf8(value)


def utf8(text: str) -> str:
    """`text` with U+FFFD for each lone surrogate, which JSON can spell and UTF-8 cannot."""
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")


def parquet_rows(path: Any, columns: list[str] | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where it is, the values by column) of each row, without those that are null; columns: None: all.

    Raises ValueError for what is no Parquet file, has no rows, or is damaged.
    """
    pyarrow, row = extras.load("pyarrow", str(path)), 0
    try:
        with readable(path):
            for batch in _record_batches(path, columns):
                for values in batch.to_pylist():
                    row += 1
                    yield f"{path}, row {row}", _without_nulls(values)
    except (pyarrow.ArrowException, OSError) as error:
        raise UsageError(f"{path} is damaged after row {row} ({printable(str(error))}): write or copy it again."
                         ) from error


def _without_nulls(value: Any) -> Any:
    """`value` without null fields of objects, at any depth: a Parquet file has every field in every row."""
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _record_batches(path: Path, columns: list[str] | None) -> Iterator[Any]:
    """The record batches of a Parquet file, or of an Arrow stream, with `columns` alone where they are named."""
    if path.suffix.lower() != ".arrow":
        file = open_parquet(path)
        for group in range(file.num_row_groups):  # which alone is in memory
            yield from file.iter_batches(batch_size=1024, row_groups=[group], columns=columns)
        return
    rows = 0
    for batch in _open_arrow(path):
        rows += batch.num_rows
        yield batch if columns is None else batch.select(columns)
    if not rows:
        raise UsageError(f"{path}: the file has no rows: leave it out, or give one with text.")


def _open_arrow(path: Path) -> Any:
    pyarrow = extras.load("pyarrow", str(path))
    ipc = extras.load("pyarrow.ipc", str(path))
    try:
        return ipc.open_stream(pyarrow.memory_map(str(path)))
    except (pyarrow.ArrowException, OSError) as error:
        raise UsageError(f"{path} is no whole Arrow stream ({printable(str(error))}): write or copy it again."
                         ) from error


def open_parquet(path: Any) -> Any:
    """A Parquet file whose footer is read, on a disk or in an object store; raises UsageError for none, and no rows."""
    pyarrow = extras.load("pyarrow", str(path))
    parquet = extras.load("pyarrow.parquet", str(path))
    try:
        with readable(path):
            file = parquet.ParquetFile(path.opened() if is_remote(path) else path)
            _ = file.schema_arrow
    except (pyarrow.ArrowException, OSError) as error:
        raise UsageError(f"{path} is no whole Parquet file ({printable(str(error))}): write or copy it again."
                         ) from error
    if not file.metadata.num_rows:
        raise UsageError(f"{path}: the file has no rows: leave it out, or give one with text.")
    return file


def _check_column(path: Path, field: str) -> None:
    """Raises ValueError unless a Parquet file has text in the column `field`."""
    pyarrow = extras.load("pyarrow", str(path))
    schema = _open_arrow(path).schema if path.suffix.lower() == ".arrow" else open_parquet(path).schema_arrow
    if field not in schema.names:
        raise UsageError(f"{path}: it has no column {named(field)}, but {few(schema.names)}: {_mend(schema.names)}.")
    kind = schema.field(field).type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind) or pyarrow.types.is_dictionary(kind)):
        raise UsageError(f"{path}: the column {named(field)} is of type {kind} and no text: name the one with the text "
                         "as text_field.")


def _parquet(path: Path, field: str) -> Iterator[str]:
    _check_column(path, field)
    for where, row in parquet_rows(path, [field]):
        yield _as_text(row.get(field), field, where)


def _array_record(path: Path, field: str) -> Iterator[str]:
    sources = extras.load("grain.sources", str(path))
    try:
        records: Sequence[bytes] = sources.ArrayRecordDataSource([str(path)])
        number = len(records)
    except Exception as error:  # of the C++ library: ValueError, RuntimeError and others
        raise UsageError(f"{path} is no array_record file ({printable(str(error))}): write or copy it again."
                         ) from error
    for i in range(number):
        try:
            text = records[i].decode("utf-8")
        except Exception as error:
            raise UsageError(f"{path}, record {i + 1}: it is damaged or no UTF-8 ({printable(str(error))}): each "
                             "record is a text.") from error
        yield text
