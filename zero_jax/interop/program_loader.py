"""Loads and runs the programs of this folder: `python load.py` prints what there is; `load(folder)` from Python.

It needs jax, and flatbuffers, with which jax.export reads programs: pip install jax flatbuffers. `zero-jax export
--format programs` copies this file into each folder that it writes; it imports nothing of zero_jax.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

FORMAT, VERSION = "zero_jax programs", 2
MAX_JSON_BYTES, MAX_PROGRAM_BYTES = 100_000_000, 1 << 31
"""Of a manifest or a header of tensors (the limit of the safetensors library), and of a program, a flatbuffer."""

_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
           "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8",
           "BOOL": "bool", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}


@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values of the tokens so far, `used` of them in each row."""

    arrays: Any
    used: int


class Programs:
    """The programs of a folder with its weights: `call` for any, `forward`, `decode` and `generate` for models of text.

    manifest: what the folder says of itself. weights: arrays by name. A shape is compiled when it first appears.
    """

    def __init__(self, manifest: dict[str, Any], exported: dict[str, Any], weights: dict[str, jax.Array]):
        self.manifest, self.exported, self.weights = manifest, exported, weights
        self._calls = {name: jax.jit(program.call, donate_argnums=1 if name == "decode" else ())
                       for name, program in exported.items()}

    def call(self, name: str, *args: Any) -> Any:
        """The program `name` of the weights and `args`, whose shapes and dtypes the manifest tells."""
        if name not in self._calls:
            raise ValueError(f"no program {name!r} here: there is {', '.join(sorted(self._calls))}.")
        return self._calls[name](self.weights, *args)

    def forward(self, *inputs: Any) -> jax.Array:
        """Logits, float32, of what the model is called with: of tokens (batch, length) they are (batch, length, vocab).

        Other inputs, such as images, are given as the manifest tells them.
        """
        expected = self.exported["forward"].in_avals[len(self.weights):]
        if len(inputs) != len(expected):
            raise ValueError(f"forward takes {len(expected)} inputs, and {len(inputs)} were given.")
        return self.call("forward", *(
            self._checked(each, 0, leaf) if leaf.ndim == 2 and jnp.issubdtype(leaf.dtype, jnp.integer)
            else jnp.asarray(each, leaf.dtype) for each, leaf in zip(inputs, expected, strict=True)))

    def new_cache(self, batch: int) -> Cache:
        """An empty cache for `batch` rows."""
        if "decode" not in self.exported:
            raise ValueError("this folder has no program 'decode': its model has no cache of keys and values.")
        program = self.exported["decode"]
        (_, cache, _), _ = jax.tree.unflatten(program.in_tree, program.in_avals)

        def zeros(leaf: Any) -> jax.Array:
            return jnp.zeros([dim if isinstance(dim, int) else batch for dim in leaf.shape], leaf.dtype)

        return Cache(jax.tree.map(zeros, cache), 0)

    def decode(self, cache: Cache, tokens: Any) -> tuple[jax.Array, Cache]:
        """Logits (batch, new, vocab) of `tokens`, int (batch, new), that follow those in `cache`, and the next cache.

        `cache` is donated: use the returned one. Raises ValueError for more tokens than the model's max_length.
        """
        tokens = self._checked(tokens, cache.used, self.exported["decode"].in_avals[-1])
        logits, arrays = self.call("decode", cache.arrays, tokens)
        return logits, Cache(arrays, cache.used + tokens.shape[1])

    def generate(self, prompts: Any, num_tokens: int, *, temperature: float = 0.0, seed: int = 0) -> np.ndarray:
        """`num_tokens` more tokens for each row of `prompts`, int (batch, length): int32 (batch, num_tokens).

        temperature: 0 takes the most likely token each time; otherwise it divides the logits of the draw.
        """
        if isinstance(num_tokens, bool) or not isinstance(num_tokens, (int, np.integer)) or num_tokens < 1:
            raise ValueError(f"num_tokens={num_tokens!r}: give a whole number of at least 1.")
        if not 0 <= temperature < float("inf"):
            raise ValueError(f"temperature={temperature!r}: give 0 or more; below 0 the least likely token would win.")
        prompts = self._checked(prompts, 0)
        self._check_length(prompts.shape[1] + num_tokens)
        cache, found = self.new_cache(prompts.shape[0]), []
        length, size = prompts.shape[1], self.exported["decode"].in_avals[-1].shape[1]
        size = size if isinstance(size, int) else length  # an integer where it was exported with --seq-len
        *before, tokens = (prompts[:, start : start + size] for start in range(0, length, size))
        for part in before:
            _, cache = self.decode(cache, part)
        for key in jax.random.split(jax.random.key(seed), num_tokens):
            logits, cache = self.decode(cache, tokens)
            last = logits[:, -1]
            chosen = jax.random.categorical(key, last / temperature) if temperature else last.argmax(-1)
            tokens = chosen[:, None].astype(jnp.int32)
            found.append(tokens)
        return np.asarray(jnp.concatenate(found, axis=1))

    def _checked(self, tokens: Any, used: int, taken: Any = None) -> jax.Array:
        tokens = np.asarray(tokens)
        if tokens.ndim != 2 or not tokens.size or not np.issubdtype(tokens.dtype, np.integer):
            raise ValueError(f"tokens are {tokens.dtype} of shape {tokens.shape}: give integers (batch, length).")
        vocab = self.manifest["model"].get("vocab_size")
        if vocab is not None and not 0 <= tokens.min() <= tokens.max() < vocab:
            raise ValueError(f"tokens are from {tokens.min()} to {tokens.max()}, and vocab_size is {vocab}.")
        self._check_length(used + tokens.shape[1])
        if taken is not None and any(
                isinstance(dim, int) and dim != size for dim, size in zip(taken.shape, tokens.shape, strict=True)):
            raise ValueError(f"tokens are of shape {tokens.shape}, and this program was exported for {taken.shape}.")
        return jnp.asarray(tokens, jnp.int32)

    def _check_length(self, length: int) -> None:
        longest = self.manifest["model"].get("max_length")
        if longest is not None and length > longest:
            raise ValueError(f"{length} tokens are more than max_length={longest} of the model.")


def load(folder: Path | str, *, place: Callable[[str, np.ndarray], jax.Array] | None = None) -> Programs:
    """The programs of `folder`.

    place: makes a device array of a weight, from its name and its value, as with a sharding over several devices;
    None: the default device. Raises ValueError for a folder that is not one, and for a file that is not as it was
    written: the manifest has a SHA-256 of every other file, and of itself. They find damage; they are no signature.
    """
    folder = Path(folder)
    path = folder / "manifest.json"
    if not path.is_file():
        raise ValueError(f"{folder} has no manifest.json: give a folder that zero-jax export --format programs wrote.")
    manifest = _json_object(path, _read(path, MAX_JSON_BYTES))
    if manifest.get("format") != FORMAT or manifest.get("version") != VERSION:
        raise ValueError(f"{path} is of format {str(manifest.get('format'))[:80]!r}, version "
                         f"{str(manifest.get('version'))[:80]}, and this loader reads {FORMAT!r}, version {VERSION}: "
                         "use the load.py of that folder.")
    if manifest.get("sha256") != manifest_digest(manifest):
        raise ValueError(f"{path} is damaged: it is not what was written.")
    with _as_written(path):
        programs = {name: _checked_file(folder, entry) for name, entry in manifest["programs"].items()}
        files = [_checked_file(folder, entry) for entry in manifest["weights"]]
        number = manifest["num_weights"] if files else 0
        _ = manifest["model"].get("vocab_size")
    put, exported, weights = place or (lambda name, value: jax.device_put(value)), {}, {}
    for name, path in programs.items():
        data = bytearray(_read(path, MAX_PROGRAM_BYTES))
        try:
            exported[name] = export.deserialize(data)
        except Exception as error:  # of flatbuffers, of MLIR
            raise ValueError(f"{path} is no program that jax {jax.__version__} reads ({str(error)[:200]}).") from error
    for path in files:
        weights |= {name: put(name, value) for name, value in _read_tensors(path)}
    if len(weights) != number:
        raise ValueError(f"{folder} has {len(weights)} weights, and its manifest.json says {number}.")
    return Programs(manifest, exported, weights)


def file_digest(path: Path) -> str:
    """The SHA-256 of a file, hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def manifest_digest(manifest: dict[str, Any]) -> str:
    """The SHA-256 of a manifest but for its field `sha256`."""
    rest = {name: value for name, value in manifest.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


@contextlib.contextmanager
def _as_written(path: Path) -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not as zero_jax writes it ({type(error).__name__}: {str(error)[:80]}).") from error


def _checked_file(folder: Path, entry: dict[str, Any]) -> Path:
    """The path of an entry of the manifest; raises ValueError unless it is a file of `folder` as it was written."""
    name = entry["file"]
    if name != Path(name).name or "\\" in name or "\0" in name:
        raise ValueError(f"{folder}/manifest.json names the file {name[:80]!r}, and only files of its folder are read.")
    path = folder / name
    if not path.is_file():  # nor a pipe or a device, which could block
        raise ValueError(f"{path} is missing, or no file: copy the folder again.")
    if file_digest(path) != entry["sha256"]:
        raise ValueError(f"{path} is damaged: it is not what was written.")
    return path


def _read(path: Path, most: int) -> bytes:
    if (size := path.stat().st_size) > most:
        raise ValueError(f"{path} has {size:,} bytes, and such a file has at most {most:,}.")
    return path.read_bytes()


def _json_object(path: Path, text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:  # not UTF-8, too
        raise ValueError(f"{path} is damaged: its JSON cannot be read ({error}).") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} is damaged: its JSON is no object.")
    return value


def _read_tensors(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a safetensors file: eight bytes with the length of a JSON header, that header, their bytes."""
    whole = path.stat().st_size
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if whole < 8 or size > min(MAX_JSON_BYTES, whole - 8):
            raise ValueError(f"{path} announces a header of {size:,} bytes, and has {whole:,}: it is damaged, or no "
                             "safetensors file.")
        header = _json_object(path, file.read(size))
    data = np.memmap(path, np.uint8, "r", offset=8 + size) if whole > 8 + size else np.empty(0, np.uint8)
    for name, tensor in header.items():
        if name != "__metadata__":
            with _as_written(path):
                (start, end), shape = tensor["data_offsets"], tensor["shape"]
                dtype = jnp.dtype(_DTYPES[tensor["dtype"]])
                if not (0 <= start <= end <= len(data) and all(type(dim) is int and dim >= 0 for dim in shape)
                        and math.prod(shape) * dtype.itemsize == end - start):
                    raise ValueError(f"{path}: the shape or place of {name[:80]!r} does not fit the file.")
                raw = data[start:end].tobytes()  # a copy: device arrays may alias what they are made of
            yield name, np.frombuffer(raw, dtype).reshape(shape)


if __name__ == "__main__":
    programs = load(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent)
    for name, each in programs.manifest["programs"].items():
        print(f"{name}: {', '.join(each['arguments'])} -> {', '.join(each['results'])}")
    print(f"{len(programs.weights)} weights, {sum(each.nbytes for each in programs.weights.values()):,} bytes")
