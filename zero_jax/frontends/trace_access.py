"""How a model accesses each of its parameters, from its trace and never from names."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from zero_jax.frontends.param_flow import mark_read, param_flow
from zero_jax.frontends.product_flow import contracted_dims, num_products, product_uses
from zero_jax.jaxpr.equations import trace_with_shape
from zero_jax.sharding.param_access import ParamAccess
from zero_jax.tree import named_leaves


@dataclasses.dataclass(frozen=True)
class AccessRecorder:
    """Takes the place of a `gather.ParamUse` while tracing: records with which of its dims a parameter is read."""

    name: str
    dims: tuple[int, ...]
    shape: tuple[int, ...]
    seen: list[tuple[str, tuple[int, ...]]] = dataclasses.field(compare=False)
    unfit: set[str] = dataclasses.field(compare=False)
    """Names of parameters that were read in a shape that is not what loops over their leading dims leave."""
    derived: set[str] = dataclasses.field(compare=False)
    """Names of parameters by which the traced function itself differentiates: it gets such a gradient as stored."""

    def drop_dim(self, index: int) -> "AccessRecorder":
        """As `ParamUse.drop_dim`."""
        return self._edit(lambda dims: dims[:index] + dims[index + 1:])

    def add_dim(self, index: int) -> "AccessRecorder":
        """As `ParamUse.add_dim`; -1 marks a dim that the stored parameter does not have."""
        return self._edit(lambda dims: (*dims[:index], -1, *dims[index:]))

    def _edit(self, edit: Callable[[tuple[int, ...]], tuple[int, ...]]) -> "AccessRecorder":
        return dataclasses.replace(self, dims=edit(self.dims), shape=edit(self.shape))

    def encoded(self, value: jax.Array, stacked: Sequence[int]) -> jax.Array:
        """As `ParamUse.encoded`: the array as it is."""
        return value

    def gather(self, value: jax.Array) -> tuple[jax.Array, jax.Array]:
        """As `ParamUse.gather`: the array as it is, marked as read."""
        if any(size not in (own, -1) for size, own in zip(self.shape, value.shape, strict=True)):
            self.unfit.add(self.name)
        value = mark_read(self.name, value, self.dims, functools.partial(self.derived.add, self.name))
        return value, value

    def read(self, carrier: jax.Array, gathered: jax.Array) -> jax.Array:
        """As `ParamUse.read`: records one read."""
        self.seen.append((self.name, self.dims))
        return gathered


def trace_reads(run: Callable[..., Any], args: tuple[Any, ...], on_entry: frozenset[str]
                ) -> tuple[dict[str, ParamAccess], frozenset[str]]:
    """How `run` reads each parameter, and the names of those that must be gathered up front beside `on_entry`.

    It traces `run(uses, *args)`, an `AccessRecorder` for each leaf of the parameters `args[0]`, which returns
    (outputs, {name: what the parameter is afterwards}).
    """
    params = args[0]
    seen: list[tuple[str, tuple[int, ...]]] = []
    unfit, derived = set[str](), set[str]()
    leaves = named_leaves(params)
    recorders = [AccessRecorder(name, tuple(range(leaf.ndim)), leaf.shape, seen, unfit, derived)
                 for name, leaf in leaves]
    recorded_run = functools.partial(run, jax.tree.unflatten(jax.tree.structure(params), recorders))
    closed, (_, final) = trace_with_shape(recorded_run, *args)
    flow = param_flow(closed.jaxpr, [name for name, _ in leaves], sorted(final))
    reads, products = {}, product_uses(closed.jaxpr)
    for name, leaf in leaves:
        dims = {dims_read for reader, dims_read in seen if reader == name}
        always_read = set(range(leaf.ndim)).intersection(*dims)
        stacked = tuple(d for d in range(leaf.ndim) if d not in always_read)
        uses = products.get(name, [None])
        reads[name] = ParamAccess(
            stacked=stacked, contracted=contracted_dims(uses, leaf.ndim, stacked),
            products=num_products(uses, leaf.ndim - len(stacked)),
            checkpointed=any(use.checkpointed for use in uses if use is not None),
            count=sum(reader == name for reader, _ in seen), on_entry=name in on_entry,
            on_entry_if_padded=name in flow.summed | derived, written=name in flow.written, derived=name in derived)
    return reads, (flow.bypassed | unfit) - on_entry


def gathered_up_front(read: ParamAccess | None, use: Any) -> bool:
    """Whether a parameter read so is given to the model already gathered by `use`, and not where it reads it."""
    if read is None or use is None:
        return False
    if read.on_entry or not read.on_entry_if_padded:
        return read.on_entry
    return not isinstance(use, AccessRecorder) and not use.stored_shape.is_identity


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
