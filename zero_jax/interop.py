"""A model's parameters as tensors in safetensors files: rules between our names and a file's, reading and writing."""

import dataclasses
import functools
import gc
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zero_jax.cluster import on_host
from zero_jax.initial import restarted
from zero_jax.layout import Layout
from zero_jax.model_choice import ModelChoice
from zero_jax.processes import all_or_none, is_first
from zero_jax.safetensors_file import DTYPES, Piece, Tensor, check_target, find_tensors, write_tensors
from zero_jax.state import ZeroState
from zero_jax.stored_part import stored_part
from zero_jax.tensor_names import OWN, Names, Parts
from zero_jax.tree import named_leaves
from zero_jax.view import View, natural

VARIABLES = "variables/"
"""Before the names of what a model owns beside parameters."""

MAX_FILE_BYTES = 5 << 30
"""Of tensors in one exported file; more are written as several with an index."""


def import_params(path: Path | str, step: Any, state: ZeroState, batch: Any, *, names: Names = OWN) -> ZeroState:
    """`state`, which is donated, with the parameters of a file, and with the optimizer's first state for these.

    Each device's part is read by itself, as it is stored, so that host memory holds no more than one shard at a time.

    Args:
      path: a safetensors file, an index of such files, or a folder with one.
      step: a `ZeroTrainStep`.
      state: of that step, before its first step.
      batch: as the step takes it, or abstract.
      names: rules between the names of the model and those of the file.

    Floating dtypes are converted to those of the state. Raises ValueError for a tensor that is missing, that nothing
    asks for, or whose shape or kind of dtype is another, before anything is read and with `state` as it was.
    """
    layout = step.layout(batch)
    parts = _parts({name: (view.shape, like.dtype) for (name, view), (_, like) in zip(
        _named(layout.views), _named(layout.state), strict=True)}, names)

    def found() -> dict[str, Tensor]:
        tensors = _unprefixed(path, find_tensors(Path(path)), names)
        _check(path, parts, layout, tensors, names)
        return tensors

    tensors = all_or_none(found)
    made = []
    for (name, leaf), (_, view), (_, like) in zip(_named(state), _named(layout.views), _named(layout.state),
                                                  strict=True):
        if name in parts:
            leaf.delete()
            leaf = _read_leaf(path, view, like, parts[name], tensors)
        made.append(leaf)
    params, frozen, variables = jax.tree.unflatten(jax.tree.structure(_trees(state)), made)
    return restarted(
        state, params, optimizer=step.optimizer, layout=layout, frozen=frozen, variables=variables)


def export_params(path: Path | str, state: ZeroState, layout: Layout, *, names: Names = OWN, dtype: Any = None,
                  ema: bool = False, max_file_bytes: int = MAX_FILE_BYTES) -> list[Path]:
    """Writes the parameters of `state`, whole and in their true shapes, as safetensors; returns the paths.

    One leaf at a time is fetched, so that host memory holds no more than the largest. Every process must call this;
    the first one writes, and the others return no paths.

    Args:
      path: of the file, `*.safetensors`; see `safetensors_file.write_tensors` for more than one.
      state: live, of any stage.
      layout: of its step.
      names: rules between the names of the model and those of the file. What is no parameter is written where a rule
        fits it; random keys never are.
      dtype: of floating tensors, as "float32" or "bfloat16"; None: as they are stored.
      ema: write the moving average in place of the parameters.
      max_file_bytes: of tensors in one file.

    Raises ValueError for a path that cannot be written, a dtype that the format lacks, two leaves of one name, and
    `ema` of a state without one.
    """
    if ema and state.ema is None:
        raise ValueError("ema=True: this state keeps no moving average. Export its parameters.")
    chosen = dataclasses.replace(state, params=state.ema) if ema else state
    leaves = {name: (leaf, view) for (name, leaf), (_, view) in zip(_named(chosen), _named(layout.views), strict=True)}
    return _export(Path(path), leaves, names, dtype, max_file_bytes)


def export_tree(path: Path | str, params: Any, variables: Any = None, *, names: Names = OWN, dtype: Any = None,
                max_file_bytes: int = MAX_FILE_BYTES) -> list[Path]:
    """`export_params` for trees of parameters and variables in true shapes, as `Checkpoints.load_params` gives."""
    leaves = [*named_leaves(params), *((VARIABLES + name, leaf) for name, leaf in named_leaves(variables))]
    return _export(Path(path), {name: (leaf, natural(leaf.shape)) for name, leaf in leaves}, names, dtype,
                   max_file_bytes)


def _export(path: Path, leaves: Mapping[str, tuple[jax.Array, View]], names: Names, dtype: Any, max_file_bytes: int
            ) -> list[Path]:
    """Writes `leaves`, as they are stored and with their views; see `export_params`."""
    dtype = None if dtype is None else np.dtype(dtype)
    if dtype is not None and (dtype not in DTYPES.values() or not jnp.issubdtype(dtype, jnp.floating)):
        raise ValueError(f"dtype={dtype} is no floating dtype of the format: give float32 or bfloat16.")
    parts = _parts({name: (view.shape, leaf.dtype) for name, (leaf, view) in leaves.items()}, names)
    all_or_none(lambda: check_target(path) if is_first() else None)
    held: dict[str, list[np.ndarray]] = {}  # the tensors of one leaf

    def tensor(name: str, number: int, kind: np.dtype) -> np.ndarray:
        if name not in held:
            held.clear()
            gc.collect()  # an array that was fetched may be part of a cycle
            leaf, view = leaves[name]
            held[name] = parts[name].split(view.load(on_host(leaf)))
        return held[name][number].astype(kind, copy=False)

    pieces = []
    for name, each in parts.items():
        stored = np.dtype(leaves[name][0].dtype)
        kind = dtype if dtype is not None and jnp.issubdtype(stored, jnp.floating) else stored
        pieces += [Piece(names.written(of), kind, each.tensor_shape, functools.partial(tensor, name, number, kind))
                   for number, of in enumerate(each.names)]
    if is_first():
        return write_tensors(path, pieces, max_file_bytes=max_file_bytes, metadata={"format": "pt"})
    for piece in pieces:
        piece.value()  # fetching is a collective
    return []


def names_in(path: Path, layout: Layout, choice: ModelChoice) -> Names:
    """The names that a file has: Hugging Face's where none is of the model's own and its module tells those."""
    own = {name for name, _ in _named(layout.views)}
    if choice.names is None or own & find_tensors(path).keys():
        return OWN
    return Names(**choice.names(choice.config))


def _trees(state: ZeroState) -> tuple[Any, Any, Any]:
    return state.params, state.frozen, state.variables


def _named(state: ZeroState) -> list[tuple[str, Any]]:
    """What belongs to the model, by name."""
    params, frozen, variables = map(named_leaves, _trees(state))
    return [*params, *frozen, *((VARIABLES + name, leaf) for name, leaf in variables)]


def _parts(leaves: Mapping[str, tuple[tuple[int, ...], Any]], names: Names) -> dict[str, Parts]:
    """Where each leaf (true shape, dtype) lies in a file; without random keys, and variables that no rule fits."""
    found: dict[str, Parts] = {}
    for name, (shape, dtype) in leaves.items():
        fits = not name.startswith(VARIABLES) or any(re.fullmatch(rule.leaf, name) for rule in names.rules)
        if fits and not jnp.issubdtype(dtype, jax.dtypes.prng_key):
            found[name] = names.parts(name, shape)
    owners: dict[str, str] = {}
    for name, parts in found.items():
        for tensor in parts.names:
            if owners.setdefault(tensor, name) != name:
                raise ValueError(f"The rules give {owners[tensor]} and {name} the same tensor {tensor!r}.")
    return found


def _unprefixed(path: Path | str, tensors: Mapping[str, Tensor], names: Names) -> dict[str, Tensor]:
    """`tensors` by their names without prefix, and without those that are ignored."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        short = name.removeprefix(names.prefix)
        if short in found:
            raise ValueError(f"{path} has both {found[short].name!r} and {name!r}.")
        if not any(re.fullmatch(pattern, short) for pattern in names.ignored):
            found[short] = tensor
    return found


def _check(path: Path | str, parts: Mapping[str, Parts], layout: Layout, tensors: Mapping[str, Tensor], names: Names
           ) -> None:
    """Raises ValueError unless `tensors` are those of the model, in shape and kind of dtype."""
    dtypes = {name: np.dtype(like.dtype) for name, like in _named(layout.state) if name in parts}
    wanted = {tensor: (name, each) for name, each in parts.items() for tensor in each.names}
    missing, extra = sorted(wanted.keys() - tensors), sorted(tensors.keys() - wanted - names.tied.keys())
    if missing or extra:
        what = [f"{how} {len(some)} ({', '.join(some[:4])}{', ...' * (len(some) > 4)})"
                for how, some in (("lacks", missing), ("has beside", extra)) if some]
        raise ValueError(f"{path} {' and '.join(what)} of the {len(wanted)} tensors that the model has: give the "
                         "file of a model of this kind and depth, or names=... that fit it.")
    for tensor, (name, each) in wanted.items():
        found = tensors[tensor]
        if found.shape != each.tensor_shape:
            raise ValueError(f"{path}: tensor {found.name!r} has shape {found.shape}, and {name} of the model takes "
                             f"{each.tensor_shape}: give the file of a model of these sizes.")
        floating = [jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > 1 for dtype in (found.dtype, dtypes[name])]
        if found.dtype != dtypes[name] and not all(floating):
            raise ValueError(f"{path}: tensor {found.name!r} has dtype {found.dtype}, and {name} of the model has "
                             f"{dtypes[name]}: only float64, float32, float16 and bfloat16 are converted.")
    for copy, original in names.tied.items():
        if copy in tensors and not _equal(tensors[copy], tensors[original]):
            raise ValueError(f"{path}: tensor {tensors[copy].name!r} differs from {tensors[original].name!r}, and this "
                             "model has one parameter for both.")


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same bits, read a few rows at a time."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    rows = range(0, one.shape[0], 1024) if one.shape else [0]
    blocks = [(slice(row, row + 1024),) if one.shape else () for row in rows]
    return all(one.read(block).tobytes() == other.read(block).tobytes() for block in blocks)


def _read_leaf(path: Path | str, view: View, like: jax.ShapeDtypeStruct, parts: Parts, tensors: Mapping[str, Tensor]
               ) -> jax.Array:
    """The leaf as it is stored, each device's part read by itself; what several devices hold is read once."""
    read: dict[Any, np.ndarray] = {}

    def true_part(index: tuple[slice, ...]) -> np.ndarray:
        value = parts.read(tensors, index)
        with np.errstate(over="ignore"):
            made = value.astype(like.dtype, copy=False)
        if value.dtype != like.dtype and np.isinf(made).any() and not np.isinf(value).any():
            raise ValueError(f"{path}: {parts.names[0]!r} holds {float(np.abs(value).max()):g}, which {like.dtype} has "
                             "no room for: choose another precision.")
        return made

    def part(index: Any) -> np.ndarray:
        spans = tuple(way.indices(size)[:2] for way, size in zip(index, like.shape, strict=True))
        if spans not in read:
            read[spans] = stored_part(view, spans, like.dtype, true_part)
        return read[spans]

    return jax.make_array_from_callback(like.shape, like.sharding, part)
