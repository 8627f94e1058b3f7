"""A model's parameters from and to safetensors files, sharded on the way in, gathered leaf by leaf on the way out."""

import collections
import dataclasses
import functools
import gc
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zero_jax.arguments import check_matched, check_path, patterns, shown, whole
from zero_jax.distributed.agreement import all_or_none, is_first
from zero_jax.distributed.initialize import on_host
from zero_jax.errors import UsageError
from zero_jax.interop.model_config import check_config
from zero_jax.interop.naming import OWN, Names, Parts
from zero_jax.interop.safetensors_file import DTYPES, Output, Tensor, check_target, find_tensors, write_tensors
from zero_jax.layout.layout import Layout
from zero_jax.sharding.auto_axes import in_any_context
from zero_jax.sharding.shard_reader import UnreadLeaf
from zero_jax.sharding.stored_shape import StoredShape, identity_shape
from zero_jax.state import ZeroState
from zero_jax.step.call_checks import check_is_state, check_step
from zero_jax.step.start import with_values
from zero_jax.tree import named_leaves
from zero_jax.typing import PRNGKey

VARIABLES = "variables/"
"""Prefix of the names of variables that are not parameters, such as batch statistics."""

MAX_FILE_BYTES = 5 << 30
"""Of tensors in one exported file; more are written as several files with an index."""


@in_any_context
def init_from_file(path: Path | str, step: Any, rng: PRNGKey, batch: Any, *, names: Names = OWN,
                   new: Sequence[str] = ()) -> ZeroState:
    """`step.init` with the parameters of a file, which are read straight into their shards: none are drawn first.

    new: as `import_params` takes it; where there are some, all parameters are drawn first.

    With adapters (`zero_jax.lora`) the file is that of the model, and the adapters are new; a quantised base is encoded
    from the file layer by layer: one layer of one kernel is in floats at a time, on one device. Arguments, memory
    and errors as `import_params`; rng: as `step.init` takes it.
    """
    check_path("init_from_file: path", path)
    check_step(step)
    if new:
        return import_params(path, step, step.init(rng, batch), batch, names=names, new=new)
    return step.init(rng, batch, params=_unread(path, step, step.layout(batch), names))


@in_any_context
def import_params(path: Path | str, step: Any, state: ZeroState, batch: Any, *, names: Names = OWN,
                  new: Sequence[str] = ()) -> ZeroState:
    """`state` with the parameters of a file and a freshly initialised optimizer state for them; donates `state`.

    Each device's shard is read separately and leaves one after another, so that the host holds at most the shards of
    one leaf that its own devices store. Of a step with adapters the base is read, and the adapters are new ones.

    Args:
      path: a safetensors file, an index of such files, or a folder with one.
      step: the `ZeroTrainStep` of `state`.
      state: as `step.init` returned it, before its first step.
      batch: as the step takes it, or abstract.
      names: rules that map the names of the model to those of the file.
      new: patterns, searched in names of parameters that keep the values of `state`, as "^head/" for a head of other
        classes; what the file has of them is not looked at. The host holds all of them whole.

    Returns: a state with the shardings of `step.layout(batch)`; floating dtypes are converted to those of the state.
    Raises ValueError for a tensor that is missing, unexpected, or of another shape or kind of dtype, before anything is
    read and with `state` unchanged.
    """
    check_path("import_params: path", path)
    check_step(step, state)
    layout = step.layout(batch)
    values: dict[str, Any] = _unread(path, step, layout, names, new)
    for (name, leaf), (_, shape) in zip(model_leaves(state), model_leaves(layout.stored_shapes), strict=True):
        if _is_new(name, new):
            values[name.removeprefix(VARIABLES)] = LogicalLeaf.stored(leaf, shape).fetch()
    jax.tree.map(lambda leaf: leaf.delete(), (state.params, state.frozen))
    state = dataclasses.replace(state, params=layout.state.params, frozen=layout.state.frozen)
    values = values if step.lora is None else step.lora.stored_values(values, state.rng)
    return with_values(state, values, layout=layout, optimizer=step.optimizer)


@in_any_context
def export_params(path: Path | str, state: ZeroState, layout: Layout, *, names: Names = OWN, dtype: Any = None,
                  ema: bool = False, max_file_bytes: int = MAX_FILE_BYTES) -> list[Path]:
    """Writes the parameters of `state`, gathered and in their logical shapes, as safetensors; returns the paths.

    Leaves are gathered one at a time, so that host memory never exceeds the largest. Every process must call this; the
    first one writes, and the others return an empty list.

    Args:
      path: of the file, `*.safetensors`; see `safetensors_file.write_tensors` for more than one.
      state: of any stage; it is not donated.
      layout: of its step.
      names: rules that map the names of the model to those of the file. Variables other than parameters are written
        where a rule matches; PRNG keys never are.
      dtype: of floating tensors, as "float32" or "bfloat16"; None: as they are stored.
      ema: write the moving average in place of the parameters.
      max_file_bytes: of tensors in one file.

    Raises ValueError for a path that cannot be written, a dtype that the format lacks, two leaves of one name, and
    `ema` of a state without one.
    """
    check_path("export_params: path", path)
    check_is_state(state)
    if not isinstance(layout, Layout):
        raise UsageError(f"layout is a {type(layout).__name__}: give step.layout().")
    if ema and state.ema is None:
        raise UsageError("ema=True: this state has no moving average. Make the step with ema=..., or export the "
                         "parameters.")
    chosen = dataclasses.replace(state, params=state.ema) if ema else state
    leaves = {name: LogicalLeaf.stored(leaf, shape) for (name, leaf), (_, shape) in zip(
        model_leaves(chosen), model_leaves(layout.stored_shapes), strict=True)}
    return export_leaves(Path(path), leaves, names, dtype, max_file_bytes)


def export_tree(path: Path | str, params: Any, variables: Any = None, *, names: Names = OWN, dtype: Any = None,
                max_file_bytes: int = MAX_FILE_BYTES) -> list[Path]:
    """`export_params` for trees of parameters and variables in logical shapes, as `Checkpoints.load_params` returns."""
    leaves = [*named_leaves(params), *((VARIABLES + name, leaf) for name, leaf in named_leaves(variables))]
    return export_leaves(Path(path), {name: LogicalLeaf.stored(leaf, identity_shape(leaf.shape))
                                      for name, leaf in leaves}, names, dtype, max_file_bytes)


@dataclasses.dataclass(frozen=True)
class LogicalLeaf:
    """A leaf of the model that is fetched when it is written. fetch: its value, in a collective of all processes."""

    shape: tuple[int, ...]
    dtype: Any
    fetch: Callable[[], np.ndarray]

    @classmethod
    def stored(cls, leaf: jax.Array, shape: StoredShape) -> "LogicalLeaf":
        """Of an array that is stored in `shape`."""
        return cls(shape.shape, leaf.dtype, lambda: shape.load(on_host(leaf)))


def export_leaves(path: Path, leaves: Mapping[str, LogicalLeaf], names: Names, dtype: Any, max_file_bytes: int
                  ) -> list[Path]:
    """Writes `leaves`, fetched one after another; see `export_params`."""
    whole("max_file_bytes", max_file_bytes, 1)
    dtype = floating_dtype(dtype)
    parts = parts_of({name: (leaf.shape, leaf.dtype) for name, leaf in leaves.items()}, names)
    all_or_none(lambda: check_target(path) if is_first() else None)
    gathered: dict[str, list[np.ndarray]] = {}  # the tensors of one leaf

    def tensor(name: str, number: int, kind: np.dtype) -> np.ndarray:
        if name not in gathered:
            gathered.clear()
            gc.collect(1)  # the array that was fetched before may be part of a reference cycle, a young one
            gathered[name] = parts[name].split(leaves[name].fetch())
        return gathered[name][number].astype(kind, copy=False)

    outputs = []
    for name, each in parts.items():
        stored = np.dtype(leaves[name].dtype)
        kind = dtype if dtype is not None and jnp.issubdtype(stored, jnp.floating) else stored
        if kind not in DTYPES.values():
            raise UsageError(f"{name} is of {kind}, which the format lacks: write an Orbax checkpoint (export --format "
                             "orbax).")
        outputs += [Output(names.written(of), kind, each.tensor_shape, functools.partial(tensor, name, number, kind))
                   for number, of in enumerate(each.names)]
    ungathered = collections.deque(outputs)

    def gather_next() -> np.ndarray:
        return ungathered.popleft().value()

    def gather_rest() -> list[Path]:
        while ungathered:
            gather_next()
        return []

    def write() -> list[Path]:
        in_turn = [dataclasses.replace(output, value=gather_next) for output in outputs]
        try:
            return write_tensors(path, in_turn, max_file_bytes=max_file_bytes, metadata=names.metadata)
        except Exception:
            gather_rest()  # a collective: the others wait in it
            raise

    return all_or_none(write if is_first() else gather_rest)


def floating_dtype(dtype: Any) -> np.dtype | None:
    """`dtype` of an exported file; None stays. Raises ValueError for what is no floating dtype of the format."""
    try:
        asked, dtype = dtype, None if dtype is None else np.dtype(dtype)
    except TypeError:
        raise UsageError(f"dtype={shown(dtype)} is no dtype: give float32 or bfloat16.") from None
    if dtype is not None and (dtype not in DTYPES.values() or not jnp.issubdtype(dtype, jnp.floating)):
        raise UsageError(f"dtype={asked} is not a floating dtype of the format: give float32 or bfloat16.")
    return dtype


def file_leaves(step: Any, layout: Layout) -> dict[str, tuple[tuple[int, ...], Any]]:
    """(logical shape, dtype) of each leaf of the model itself, which are what files hold; adapters are none of it."""
    leaves = {name: (shape.shape, like.dtype) for (name, shape), (_, like) in zip(
        model_leaves(layout.stored_shapes), model_leaves(layout.state), strict=True)}
    for composed in () if step.lora is None else step.lora.composition:
        stored = [leaves.pop(name) for name in composed.part_names]
        leaves[composed.name] = stored[0] if composed.part_names[0] == composed.name else (
            composed.like.shape, composed.like.dtype)
    return leaves


def _is_new(name: str, new: Sequence[str]) -> bool:
    return any(re.search(pattern, name) for pattern in new)


def _unread(path: Path | str, step: Any, layout: Layout, names: Names, new: Sequence[str] = ()
            ) -> dict[str, UnreadLeaf]:
    """What a file has of the model of `step`, by name, once it is known to fit; without what is `new`."""
    new = patterns("new", new, "^head/")
    leaves = file_leaves(step, layout)
    every = parts_of(leaves, names)
    check_matched("new", new, every)
    if new and step.lora is not None:
        raise UsageError(f"new={shown(new)}: with adapters, which alone are trained, these parameters would stay as "
                         "they are drawn: train without adapters.")
    parts = {name: each for name, each in every.items() if not _is_new(name, new)}
    ignored = {tensor for name in every.keys() - parts.keys() for tensor in every[name].names}

    def checked_tensors() -> dict[str, Tensor]:
        tensors = {name: tensor for name, tensor in named_tensors(path, find_tensors(Path(path)), names).items()
                   if name not in ignored}
        check_tensors(path, parts, {name: np.dtype(leaves[name][1]) for name in parts}, tensors, names)
        return tensors

    tensors = all_or_none(checked_tensors)
    return {name.removeprefix(VARIABLES): UnreadLeaf(
        f"{path}: {each.names[0]!r}", each.shape, tensors[each.names[0]].dtype,
        lambda each=each: functools.partial(each.read, tensors)) for name, each in parts.items()}


def model_leaves(state: ZeroState) -> list[tuple[str, Any]]:
    """(name, leaf) of parameters, frozen parameters and variables, which together are the model."""
    variables = [(VARIABLES + name, leaf) for name, leaf in named_leaves(state.variables)]
    return [*named_leaves(state.params), *named_leaves(state.frozen), *variables]


def parts_of(leaves: Mapping[str, tuple[tuple[int, ...], Any]], names: Names) -> dict[str, Parts]:
    """The tensors of each leaf (logical shape, dtype), without PRNG keys and variables that no rule matches."""
    all_parts: dict[str, Parts] = {}
    for name, (shape, dtype) in leaves.items():
        fits = not name.startswith(VARIABLES) or any(re.fullmatch(rule.leaf, name) for rule in names.rules)
        if fits and not jnp.issubdtype(dtype, jax.dtypes.prng_key):
            all_parts[name] = names.parts(name, shape)
    owners: dict[str, str] = {}
    for name, parts in all_parts.items():
        for tensor in parts.names:
            if owners.setdefault(tensor, name) != name:
                raise UsageError(f"The rules give {owners[tensor]} and {name} the same tensor {tensor!r}.")
    return all_parts


def named_tensors(path: Path | str, tensors: Mapping[str, Tensor], names: Names) -> dict[str, Tensor]:
    """`tensors` by the names that the rules know; ignored ones are left out."""
    by_name: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        short = names.known_as(name)
        if short in by_name:
            raise UsageError(f"{path} has both {by_name[short].name!r} and {name!r}.")
        if not any(re.fullmatch(pattern, short) for pattern in names.ignored):
            by_name[short] = tensor
    return by_name


def check_tensors(path: Path | str, parts: Mapping[str, Parts], dtypes: Mapping[str, np.dtype],
                  tensors: Mapping[str, Tensor], names: Names) -> None:
    """Raises ValueError unless `tensors` are those of the model, each with its shape and kind of dtype.

    Their config.json must be that of `names`. parts, dtypes: of each leaf.
    """
    check_config(Path(path).expanduser(), names.config, "this model", (each.file for each in tensors.values()))
    wanted = {tensor: (name, each) for name, each in parts.items() for tensor in each.names}
    missing, extra = sorted(wanted.keys() - tensors), sorted(tensors.keys() - wanted - names.tied.keys())
    if missing or extra:
        what = [f"{how} {len(some)} ({', '.join(some[:4])}{', ...' * (len(some) > 4)})"
                for how, some in (("lacks", missing), ("has in addition", extra)) if some]
        raise UsageError(f"{path} {' and '.join(what)} of the {len(wanted)} tensors that the model has: give the file "
                         "of a model of this kind and depth, or names=... that fit it.")
    for tensor, (name, each) in wanted.items():
        in_file = tensors[tensor]
        if in_file.shape != each.tensor_shape:
            raise UsageError(f"{path}: tensor {in_file.name!r} has shape {in_file.shape}, and {name} of the model "
                             f"takes {each.tensor_shape}: give the file of a model of these sizes.")
        floating = [jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > 1
                    for dtype in (in_file.dtype, dtypes[name])]
        if in_file.dtype != dtypes[name] and not all(floating):
            raise UsageError(f"{path}: tensor {in_file.name!r} has dtype {in_file.dtype}, and {name} of the model has "
                             f"{dtypes[name]}: only float64, float32, float16 and bfloat16 are converted.")
    for copy, original in names.tied.items():
        if copy in tensors and not _equal(tensors[copy], tensors[original]):
            raise UsageError(f"{path}: tensor {tensors[copy].name!r} differs from {tensors[original].name!r}, and this "
                             "model has one parameter for both.")


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are bitwise equal, read 1024 rows at a time."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    rows = range(0, one.shape[0], 1024) if one.shape else [0]
    blocks = [(slice(row, row + 1024),) if one.shape else () for row in rows]
    return all(one.read(block).tobytes() == other.read(block).tobytes() for block in blocks)


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
    outputs = []
    for name, each in parts.items():
        stored = reduce(jnp.promote_types, [tensors[tensor].dtype for tensor in each.names])
        kind = dtype if dtype is not None and jnp.issubdtype(stored, jnp.floating) else stored
        (own,) = OWN.parts(name, each.shape).names
        outputs.append(Output(own, kind, each.shape, partial(_leaf, source, each, tensors, kind)))
    return write_tensors(out, outputs, max_file_bytes=max_file_bytes, metadata=names.metadata)


def _leaf(source: Path, parts: Parts, tensors: Mapping[str, Tensor], kind: np.dtype) -> np.ndarray:
    value = parts.read(tensors, tuple(slice(0, size) for size in parts.shape))
    with np.errstate(over="ignore"):
        converted = value.astype(kind, copy=False)
    if value.dtype != kind and np.isinf(converted).any() and not np.isinf(value).any():
        raise UsageError(f"{source}: {parts.names[0]!r} holds {float(np.abs(value).max()):g}, beyond the range of "
                         f"{kind}: choose another dtype.")
    return converted
