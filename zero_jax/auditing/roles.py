"""Which inputs of a step are parameters, optimizer state and batch: by flow, names and shapes."""

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

PARAMS, OPTIMIZER, BATCH, OTHER = "params", "optimizer", "batch", "other"
_PARAM_NAMES = {"params", "param", "model", "weights", "variables", "parameters"}
_OPTIMIZER_NAMES = {"opt_state", "optimizer", "optimizer_state", "opt", "mu", "nu", "ema", "trace", "momentum", "count"}

Selector = str | Callable[[str], bool]
"""Which inputs: the beginning of their labels, as `state.params`, or a function of the label."""


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array of the arguments.

    Attributes:
        label: as JAX writes it: `params['block']['kernel']`.
        shape: of the whole array.
        dtype: of its elements.
        sharding: where it is stored; None if unknown.
        donated: whether the caller gives its memory away.
        output: number of the output that replaces it; None if none does.
        role: "params", "optimizer", "batch" or "other".
    """

    label: str
    shape: tuple[int, ...]
    dtype: Any
    sharding: Any
    donated: bool
    output: int | None = None
    role: str = OTHER

    @property
    def size(self) -> int:
        """Number of elements of the whole array."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Of the whole array."""
        return self.size * jnp.dtype(self.dtype).itemsize if not jnp.issubdtype(self.dtype, jax.dtypes.prng_key) else 0

    @property
    def num_shards(self) -> int:
        """Into how many parts its sharding cuts it."""
        if self.sharding is None or not self.size:
            return 1
        return self.size // max(1, math.prod(self.sharding.shard_shape(self.shape)))

    @property
    def device_bytes(self) -> int:
        """Bytes of one device."""
        return self.bytes // self.num_shards

    @property
    def axes(self) -> frozenset[str]:
        """The mesh axes that cut it; none if it is replicated, or has no `NamedSharding`."""
        if not isinstance(self.sharding, NamedSharding):
            return frozenset()
        names: set[str] = set()
        for entry in self.sharding.spec:
            names |= {entry} if isinstance(entry, str) else set(entry or ())
        return frozenset(name for name in names if self.sharding.mesh.shape[name] > 1)


def with_roles(leaves: Sequence[Leaf], outputs: Sequence[tuple[str, tuple[int, ...], Any]], *,
               params: Selector | None = None, batch: Selector | None = None) -> list[Leaf]:
    """`leaves` with their outputs and roles.

    State is what an output replaces: an argument whose arrays, in order, are in the outputs with the same shapes. Of
    the state, parameters are what is named so; without names, of arrays of equal shape and last key the one with the
    shortest path. The rest of the arguments is the batch, but for keys and scalars.

    Args:
        leaves: of the arguments, in order.
        outputs: (label, shape, dtype) of each output, in order.
        params: which inputs are parameters, in place of the rule.
        batch: which inputs are the batch, in place of the rule.
    """
    replaced = _replaced(leaves, outputs)
    state = [number for number in range(len(leaves)) if number in replaced]
    named_params = _params_of(leaves, state) if params is None else set()
    result = []
    for number, leaf in enumerate(leaves):
        if params is not None and _matches(params, leaf.label):
            role = PARAMS
        elif batch is not None and _matches(batch, leaf.label):
            role = BATCH
        elif number in replaced:
            role = PARAMS if number in named_params else OPTIMIZER
        elif params is None and _PARAM_NAMES.intersection(path_of(leaf.label)) and _is_float(leaf):
            role = PARAMS  # frozen: no output replaces it
        else:
            is_data = batch is None and len(leaf.shape) > 0 and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            is_key = leaf.shape == (2,) and leaf.dtype == jnp.uint32
            role = BATCH if is_data and not is_key else OTHER
        result.append(dataclasses.replace(leaf, output=replaced.get(number), role=role))
    return result


def _matches(selector: Selector, label: str) -> bool:
    return label.startswith(selector) if isinstance(selector, str) else bool(selector(label))


def path_of(label: str) -> tuple[str, ...]:
    """The keys of a label: `opt[0].mu['w']` -> opt, 0, mu, w."""
    return tuple(re.findall(r"[^\[\]'\".]+", label))


def _is_float(leaf: Leaf) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def _replaced(leaves: Sequence[Leaf], outputs: Sequence[tuple[str, tuple[int, ...], Any]]) -> dict[int, int]:
    """Numbers of the inputs that outputs replace, with the number of the output."""
    groups: dict[str, list[int]] = {}
    for number, leaf in enumerate(leaves):
        groups.setdefault(path_of(leaf.label)[0] if path_of(leaf.label) else "", []).append(number)
    kinds = [(shape, str(dtype)) for _, shape, dtype in outputs]
    found: dict[int, int] = {}
    for numbers in groups.values():
        wanted = [(leaves[number].shape, str(leaves[number].dtype)) for number in numbers]
        taken = set(found.values())
        for start in range(len(kinds) - len(wanted) + 1):
            places = range(start, start + len(wanted))
            same_keys = all(_same_key(leaves[number].label, outputs[place][0])
                            for number, place in zip(numbers, places, strict=True))
            if kinds[start:start + len(wanted)] == wanted and same_keys and not taken & set(places):
                found.update(zip(numbers, places, strict=True))
                break
    return found


def _same_key(label: str, output: str) -> bool:
    """Whether the last keys agree, as far as both have names: outputs of a tuple have only numbers."""
    ours, theirs = path_of(label), path_of(output)
    if len(ours) < 2 or not theirs or theirs[-1].isdecimal():
        return True
    return ours[-1] == theirs[-1]


def _params_of(leaves: Sequence[Leaf], state: Sequence[int]) -> set[int]:
    paths = {number: path_of(leaves[number].label) for number in state if _is_float(leaves[number])}
    paths = {number: path for number, path in paths.items() if _OPTIMIZER_NAMES.isdisjoint(path)}
    if named := {number for number, path in paths.items() if _PARAM_NAMES.intersection(path)}:
        return named
    paths = {number: path for number, path in paths.items() if leaves[number].shape}
    first: dict[tuple[Any, ...], tuple[int, int]] = {}
    for number, path in paths.items():
        key, rank = (leaves[number].shape, path[-1:] if len(path) > 1 else ()), (len(path), number)
        first[key] = min(rank, first.get(key, rank))
    # Arrays of one shape and key (as of each layer) are all parameters where their paths are as short as the first's.
    depth = max((length for length, _ in first.values()), default=0)
    roots = {paths[number][:1] for _, number in first.values()}
    root = next((each for number in state if (each := path_of(leaves[number].label)[:1]) in roots), ())
    return {number for number, path in paths.items() if path[:1] == root and len(path) <= depth}
