"""Files from anywhere: what is huge, deep, endless or full of control characters is refused in seconds, in short."""

import json
import os
import time
from pathlib import Path

import numpy as np
import pytest

from zero_jax.checkpoint.integrity import read_manifest
from zero_jax.checkpoint.manifest import parse
from zero_jax.data.corpus import open_tokens
from zero_jax.errors import MAX_MESSAGE, UsageError
from zero_jax.interop.safetensors_file import find_tensors
from zero_jax.xla.targets import target_of

SECONDS = 4.0  # of CPU; 2 where nothing else runs
LONG = "\x1b[2J" + "a" * 10_000_000


def safetensors(header):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text


def npy(header):
    return b"\x93NUMPY\x01\x00\x76\x00" + header.ljust(117) + b"\n"


def tensor(**changes):
    return {"dtype": "F32", "shape": [0], "data_offsets": [0, 0], **changes}


EMPTY = dict.fromkeys(map(str, range(200_000)), tensor())
FILES = {
    "a.safetensors": {
        "200,000 empty tensors": safetensors(EMPTY),
        "a long name": safetensors({LONG: tensor(dtype="F33")}),
        "a long dtype": safetensors({"a": tensor(dtype=LONG)}),
        "a name, no row": safetensors({LONG: 3}),
        "many dims": safetensors({"a": tensor(shape=[1] * 100_000)}),
        "sizes of many digits": safetensors({"a": tensor(shape=[2**62] * 60)}),
        "many wrong offsets": safetensors({"a": tensor(data_offsets=[0] * 1_000_000)}),
        "nested lists": safetensors(b'{"a":' + b"[" * 1_000_000),
        "nested dicts": safetensors(b'{"a":' * 200_000),
        "a long number": safetensors(b'{"a":' + b"9" * 1_000_000 + b"}"),
    },
    "a.safetensors.index.json": {
        "a long name": json.dumps({"weight_map": {"a": LONG}}).encode(),
        "nested": b"[" * 1_000_000,
        "many files": json.dumps({"weight_map": {f"{n}": f"{n}.safetensors" for n in range(200_000)}}).encode(),
    },
    "chip.toml": {
        "nested": b"a = " + b"[" * 30_000,
        "deep keys": b"a." * 30_000 + b"a = 1",
        "deep tables": b"[" + b"a." * 30_000 + b"a]",
        "a long name": b'"\\u001b' + b"a" * 60_000 + b'" = 1',
        "a long value": b'name = "' + b"a" * 60_000 + b'"',
        "large": b"#" * 10_000_000,
        "a long number": b"a = " + b"9" * 60_000,
        "no date": b"a = 2024-13-45",
        "no text": b"\xff\xfe",
    },
    "a.npy": {
        "no header": b"\x93NUMPY\x01\x00" + b"\xff\xff" + b"(" * 70_000,
        "nested": b"\x93NUMPY\x02\x00" + (100_000).to_bytes(4, "little") + b"[" * 100_000,
        "objects": npy(b"{'descr': '|O', 'fortran_order': False, 'shape': (3,), }"),
        "huge": npy(b"{'descr': '<i8', 'fortran_order': False, 'shape': (9" + b"0" * 50 + b",), }"),
        "negative": npy(b"{'descr': '<i8', 'fortran_order': False, 'shape': (-3,), }"),
        "of another type": npy(b"{'descr': 3, 'fortran_order': 3, 'shape': 'a', }"),
    },
    "a.bin": {"odd": b"123"},
}
READ = {".npy": open_tokens, ".bin": open_tokens, ".toml": lambda path: target_of(f"{path}:8")}


def read(path: Path):
    return READ.get(path.suffix, find_tensors)(path)


def refused(call, *args):
    started = time.process_time()
    with pytest.raises(UsageError) as caught:
        call(*args)
    assert time.process_time() - started < SECONDS
    message = str(caught.value)
    assert len(message) <= MAX_MESSAGE and message.replace("\n", "").isprintable()


@pytest.mark.parametrize(("name", "what"), [(name, what) for name, files in FILES.items() for what in files])
def test_files(name, what, tmp_path):
    (tmp_path / name).write_bytes(FILES[name][what])
    refused(read, tmp_path / name)


@pytest.mark.parametrize("name", FILES)
def test_pipes_folders_and_devices(name, tmp_path):
    os.mkfifo(tmp_path / name)
    refused(read, tmp_path / name)
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("/dev/zero")
    refused(read, tmp_path / name)
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    refused(read, tmp_path / name)


MANIFESTS = {
    "a long name": {"leaves": {LONG: {}}}, "a long kind": {"kind": LONG}, "many leaves": {
        "leaves": {f"params/{number}": None for number in range(200_000)}},
    "another version": {"format": LONG},
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests(name):
    from zero_jax.checkpoint.manifest import FORMAT
    from zero_jax.files import sealed

    body = {"step": 1, "kind": "state", "leaves": {}, "run": {}, "data": None,
            "config": None, "versions": {}, **MANIFESTS[name]}
    refused(parse, json.dumps({"manifest": sealed(FORMAT, body)}), "manifest")
    if name == "a long kind":
        refused(parse, json.dumps({"manifest": body | {"checksum": LONG}}), "manifest")


@pytest.mark.parametrize("text", [b"[" * 10**6, b'{"manifest":' * 10**5, b"", b"\xff", b"9" * 10**6])
def test_what_is_no_manifest(text):
    refused(parse, text, "manifest")


def test_a_manifest_that_is_a_pipe(tmp_path):
    from etils import epath

    from zero_jax.checkpoint.orbax_store import is_ours, manifest_path

    path = epath.Path(tmp_path / "1")
    Path(manifest_path(path)).parent.mkdir(parents=True)
    os.mkfifo(manifest_path(path))
    refused(is_ours, path)
    refused(read_manifest, path)


def test_what_is_large_and_right_is_read(tmp_path):
    """Negative control."""
    some = {name: EMPTY[name] for name in [*EMPTY][:10_000]}
    (tmp_path / "a.safetensors").write_bytes(safetensors(some))
    assert find_tensors(tmp_path / "a.safetensors").keys() == some.keys()
    np.save(tmp_path / "a.npy", np.arange(10, dtype=np.uint16))
    assert len(open_tokens(tmp_path / "a.npy")) == 10
