"""A checkpoint in another library's names as a safetensors file in ours, leaf by leaf; no state and no device."""

from collections.abc import Mapping
from functools import partial, reduce
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from zero_jax.errors import UsageError
from zero_jax.interop.naming import OWN, Names, Parts
from zero_jax.interop.params_io import MAX_FILE_BYTES, check_tensors, floating_dtype, named_tensors, parts_of
from zero_jax.interop.safetensors_file import Piece, Tensor, find_tensors, write_tensors


def convert_tensors(source: Path, out: Path, leaves: Mapping[str, Any], *, names: Names, dtype: Any = None,
                    max_file_bytes: int = MAX_FILE_BYTES) -> list[Path]:
    """Writes the parameters of `source` under our names, which `import_params` takes without rules; returns the paths.

    The host holds one leaf at a time.

    Args:
      source: a safetensors file, an index of such files, or a folder with one.
      out: the file, `*.safetensors`; above `max_file_bytes` several files and an index.
      leaves: arrays, concrete or abstract, by our names, in their logical shapes.
      names: rules that map our names to those in `source`.
      dtype: of floating tensors; None: as in `source`.
      max_file_bytes: of tensors in one file.

    Raises ValueError for tensors that are missing, unexpected, of another shape or kind of dtype, and values beyond the
    range of `dtype`, the former before anything is written.
    """
    dtype = floating_dtype(dtype)
    parts = parts_of({name: (leaf.shape, leaf.dtype) for name, leaf in leaves.items()}, names)
    tensors = named_tensors(source, find_tensors(source), names)
    check_tensors(source, parts, {name: np.dtype(leaves[name].dtype) for name in parts}, tensors, names)
    pieces = []
    for name, each in parts.items():
        stored = reduce(jnp.promote_types, [tensors[tensor].dtype for tensor in each.names])
        kind = dtype if dtype is not None and jnp.issubdtype(stored, jnp.floating) else stored
        (own,) = OWN.parts(name, each.shape).names
        pieces.append(Piece(own, kind, each.shape, partial(_leaf, source, each, tensors, kind)))
    return write_tensors(out, pieces, max_file_bytes=max_file_bytes, metadata=names.metadata)


def _leaf(source: Path, parts: Parts, tensors: Mapping[str, Tensor], kind: np.dtype) -> np.ndarray:
    value = parts.read(tensors, tuple(slice(0, size) for size in parts.shape))
    with np.errstate(over="ignore"):
        converted = value.astype(kind, copy=False)
    if value.dtype != kind and np.isinf(converted).any() and not np.isinf(value).any():
        raise UsageError(f"{source}: {parts.names[0]!r} holds {float(np.abs(value).max()):g}, beyond the range of "
                         f"{kind}: choose another dtype.")
    return converted
