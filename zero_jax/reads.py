"""How a model reads each of its parameters: found by tracing it, never by names."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend import core
from jax.extend.core import primitives

from zero_jax.tree import named_leaves


@dataclasses.dataclass(frozen=True)
class Read:
    """What tracing told of one parameter.

    stacked: dims over which a loop or map of the model's own runs, so that it reads slices; lookup: dims
    that the model indexes with computed indices, as an embedding does; count: how many times it is read;
    on_entry: the module reads it in a way that cannot be intercepted, so it is gathered when the model is
    entered.
    """

    stacked: tuple[int, ...] = ()
    lookup: tuple[int, ...] = ()
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

    def __call__(self, value: jax.Array) -> jax.Array:
        self.seen.append((self.name, self.dims))
        return value


def trace_reads(run: Callable[..., Any], args: tuple[Any, ...], on_entry: frozenset[str]) -> dict[str, Read]:
    """Traces `run(uses, *args)`, a `Recorder` for each leaf of the parameters `args[0]`: how each leaf is read."""
    params = args[0]
    seen: list[tuple[str, tuple[int, ...]]] = []
    leaves = named_leaves(params)
    recorders = [Recorder(name, tuple(range(leaf.ndim)), seen) for name, leaf in leaves]
    jaxpr = jax.make_jaxpr(functools.partial(run, jax.tree.unflatten(jax.tree.structure(params), recorders)))(*args)
    lookups = set(_lookups(jaxpr.jaxpr))
    reads = {}
    for name, leaf in leaves:
        dims = {kept for reader, kept in seen if reader == name}
        kept = set(range(leaf.ndim)).intersection(*dims) if dims else set(range(leaf.ndim))
        looked_up = {
            ks[i] for ks in dims for shape, indexed in lookups if shape == tuple(leaf.shape[k] for k in ks if k >= 0)
            for i in indexed}
        reads[name] = Read(
            stacked=tuple(d for d in range(leaf.ndim) if d not in kept), lookup=tuple(sorted(looked_up)),
            count=sum(reader == name for reader, _ in seen), on_entry=name in on_entry)
    return reads


def _lookups(jaxpr: core.Jaxpr) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(operand shape, indexed dims) of every indexing by computed indices in `jaxpr`, at any depth."""
    for eqn in jaxpr.eqns:
        if eqn.primitive is primitives.gather_p:
            shape, sizes = tuple(eqn.invars[0].aval.shape), eqn.params["slice_sizes"]
            yield shape, tuple(d for d, size in enumerate(sizes) if size < shape[d])
        for inner in core.jaxprs_in_params(eqn.params):
            yield from _lookups(inner)


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
