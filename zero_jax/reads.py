"""How a model reads each of its parameters: found by tracing it, never by names."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax

from zero_jax.tree import named_leaves


@dataclasses.dataclass(frozen=True)
class Read:
    """What tracing told of one parameter.

    stacked: dims over which a loop or map of the model's own runs, so that it reads slices; count: how many
    times it is read; on_entry: the module reads it in a way that cannot be intercepted, so it is gathered
    when the model is entered.
    """

    stacked: tuple[int, ...] = ()
    count: int = 1
    on_entry: bool = False


@dataclasses.dataclass(frozen=True)
class Recorder:
    """Stands where a `gather.Use` will stand and notes with which of its dims a parameter is read."""

    name: str
    dims: tuple[int, ...]
    seen: list[tuple[str, tuple[int, ...]]] = dataclasses.field(compare=False)

    def drop_dim(self, index: int) -> "Recorder":
        """As `Use.drop_dim`."""
        return dataclasses.replace(self, dims=self.dims[:index] + self.dims[index + 1:])

    def add_dim(self, index: int) -> "Recorder":
        """As `Use.add_dim`; -1 marks a dim that the stored parameter does not have."""
        return dataclasses.replace(self, dims=(*self.dims[:index], -1, *self.dims[index:]))

    def gather(self, value: jax.Array) -> tuple[jax.Array, jax.Array]:
        """As `Use.gather`: the array as it is."""
        return value, value

    def read(self, carrier: jax.Array, gathered: jax.Array) -> jax.Array:
        """As `Use.read`: notes one reading."""
        self.seen.append((self.name, self.dims))
        return gathered


def trace_reads(run: Callable[..., Any], args: tuple[Any, ...], on_entry: frozenset[str]) -> dict[str, Read]:
    """Traces `run(uses, *args)`, a `Recorder` for each leaf of the parameters `args[0]`: how each leaf is read."""
    params = args[0]
    seen: list[tuple[str, tuple[int, ...]]] = []
    leaves = named_leaves(params)
    recorders = [Recorder(name, tuple(range(leaf.ndim)), seen) for name, leaf in leaves]
    jax.eval_shape(functools.partial(run, jax.tree.unflatten(jax.tree.structure(params), recorders)), *args)
    reads = {}
    for name, leaf in leaves:
        dims = {kept for reader, kept in seen if reader == name}
        kept = set(range(leaf.ndim)).intersection(*dims) if dims else set(range(leaf.ndim))
        reads[name] = Read(
            stacked=tuple(d for d in range(leaf.ndim) if d not in kept),
            count=sum(reader == name for reader, _ in seen), on_entry=name in on_entry)
    return reads


def smallest_plain(works: Callable[[frozenset[str]], bool], names: list[str]) -> frozenset[str]:
    """The fewest of `names` with which `works`, given that it does with all of them, by bisection."""

    def needed(candidates: list[str], others: frozenset[str]) -> frozenset[str]:
        if works(others):
            return frozenset()
        if len(candidates) == 1:
            return frozenset(candidates)
        half = math.ceil(len(candidates) / 2)
        left = needed(candidates[:half], others | frozenset(candidates[half:]))
        return left | needed(candidates[half:], others | left)

    return needed(names, frozenset())
