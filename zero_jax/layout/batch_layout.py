"""How the leaves of a batch are sharded: split over the devices as examples, by a rule of the user's, or not at all."""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zero_jax.errors import UsageError
from zero_jax.sharding.batch import abstract_batch, check_dtype
from zero_jax.sharding.mesh_axes import MeshAxes
from zero_jax.sharding.partition import axes_by_dim, names_of
from zero_jax.tree import map_named, named_leaves
from zero_jax.typing import Batch, Pattern, Pytree, Spec

BatchRule: TypeAlias = tuple[Pattern, Spec | None]
"""A pattern of names of a batch's leaves, and how these are sharded: a spec, or None (whole on every device)."""


@dataclasses.dataclass(frozen=True)
class BatchLayout:
    """How each leaf of a batch is sharded.

    A leaf that a rule matches by its spec; the first rule whose pattern `re.search` finds in the leaf's name decides. A
    scalar, such as a typed key, is whole on every device. All other leaves are examples: their leading dim is the
    global batch, which the devices split, and with an axis `context` their second dim is the sequence.

    Attributes:
        axes: the mesh.
        rules: as `Parallelism(batch_specs=...)` takes them. Raises ValueError for one that is malformed, or
            names no axis of the mesh.
    """

    axes: MeshAxes
    rules: Sequence[BatchRule] = ()

    def __post_init__(self) -> None:
        for rule in self.rules:
            if not (isinstance(rule, (tuple, list)) and len(rule) == 2 and isinstance(rule[0], str)
                    and isinstance(rule[1], (P, type(None)))):
                raise UsageError(f"batch_specs: {rule!r} is no rule: give pairs of a pattern and a PartitionSpec, or "
                                 "None for leaves that are whole on every device, as (\"edges\", P(\"data\")).")
            if unknown := [axis for axis in names_of(rule[1] or P()) if axis not in self.axes.mesh.axis_names]:
                raise UsageError(f"batch_specs: {rule!r} names {unknown[0]!r}, and the mesh has the axes "
                                 f"{self.axes.sizes}.")

    def spec(self, name: str, leaf: Any) -> Spec:
        """How the leaf `name` is sharded."""
        own = self._own(name, leaf)
        return P(*self.axes.batch_spec[:np.ndim(leaf)]) if own is None else own

    def is_example(self, name: str, leaf: Any) -> bool:
        """Whether the leading dim of the leaf is the global batch."""
        return self._own(name, leaf) is None

    def _own(self, name: str, leaf: Any) -> Spec | None:
        """The spec of a leaf of no examples; None of examples."""
        rule = next((rule for rule in self.rules if re.search(rule[0], name)), None)
        if rule is None:
            return P() if np.ndim(leaf) == 0 else None
        return P() if rule[1] is None else rule[1]

    def is_even(self, batch: Batch) -> bool:
        """Whether all leaves are sharded as examples by one sharding."""
        return self.axes.context not in self.axes.zero and all(
            self.is_example(name, leaf) for name, leaf in named_leaves(batch))

    def shardings(self, batch: Batch) -> Pytree:
        """A `NamedSharding` for each leaf."""
        return map_named(lambda name, leaf: NamedSharding(self.axes.mesh, self.spec(name, leaf)), batch)

    def target(self, name: str, leaf: Any, *, steps: bool) -> NamedSharding:
        """Where a leaf belongs, whole where it does not divide; steps: of several batches, (steps, ...)."""
        one = jax.ShapeDtypeStruct(np.shape(leaf)[int(steps):], leaf.dtype)
        spec = self.spec(name, one)
        divides = all(size % self.axes.size(*names) == 0
                      for size, names in zip(one.shape, axes_by_dim(spec), strict=False))
        return NamedSharding(self.axes.mesh, P(*[None] * steps, *spec) if divides else P())

    def replicated(self, batch: Batch) -> tuple[str, ...]:
        """The names of the leaves that are whole on every device."""
        return tuple(name for name, leaf in named_leaves(batch) if not any(self.spec(name, leaf)))

    def size(self, batch: Batch) -> int:
        """The global batch; where no leaf is of examples, what the leading dims have in common that are split like it.

        Always a multiple of the devices over which examples are split.
        """
        leaves = named_leaves(batch)
        examples = [np.shape(leaf)[0] for name, leaf in leaves if self.is_example(name, leaf)]
        if examples:
            return examples[0]
        split = [np.shape(leaf)[0] for name, leaf in leaves
                 if {*self.axes.batch} <= {*names_of(P(*self.spec(name, leaf)[:1]))}]
        return math.gcd(*split) or self.axes.batch_shards

    def check_global(self, batch: Batch, *, steps: bool = False) -> None:
        """Raises ValueError where a leaf that devices split is of this process alone, and there are several.

        JAX would take each device's part of it from another process's array. steps: of several batches.
        """
        if jax.process_count() == 1 or not any(map(self._is_local, jax.tree.leaves(batch))):
            return
        for name, leaf in named_leaves(batch):
            if self._is_local(leaf) and any(self.spec(name, jax.ShapeDtypeStruct(leaf.shape[int(steps):], leaf.dtype))):
                kind = "a NumPy array" if isinstance(leaf, np.ndarray) else "an array on this process's devices"
                raise UsageError(f"batch[{name!r}] is {kind}, and there are {jax.process_count()} processes, of which "
                                 "each has examples of its own: make a global array of them with "
                                 "jax.make_array_from_process_local_data, or take zero_jax.data.batches.Batches, which "
                                 "does.")

    def _is_local(self, leaf: Any) -> bool:
        """Whether a leaf is of NumPy, which JAX does not split in several processes, or lacks the parts of others."""
        return isinstance(leaf, np.ndarray) or (
            isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.is_fully_addressable
            and self.axes.mesh.is_multi_process)

    def check(self, batch: Batch, num_microbatches: int = 1) -> None:
        """Raises ValueError unless every leaf divides as it is sharded, and all examples are equally many.

        Of several processes none has the whole batch: there its sharded leaves are global arrays, not NumPy's.
        With an axis `context` every second dim of examples is the sequence, and must divide over it.
        """
        leaves = named_leaves(batch)
        if not leaves:
            raise UsageError("The batch is empty: give a pytree of arrays whose leading dim is the global batch.")
        for pattern, _ in self.rules:
            if not any(re.search(pattern, name) for name, _ in leaves):
                raise UsageError(f"batch_specs: {pattern!r} matches no leaf of the batch, which has "
                                 f"{', '.join(name for name, _ in leaves)}.")
        for name, leaf in leaves:
            check_dtype(name, leaf)
        self.check_global(batch)
        for name, leaf in leaves:
            if not self.is_example(name, leaf):
                self._check_own(name, leaf, num_microbatches)
        examples = [(name, leaf) for name, leaf in leaves if self.is_example(name, leaf)]
        if examples:
            self._check_examples(examples, num_microbatches)
        elif not self.rules:
            raise UsageError("The batch has no leaf whose leading dim is the global batch: give a pytree of arrays "
                             "with one, or batch_specs=... for leaves that are no examples.")
        elif num_microbatches > 1:
            raise UsageError(f"accumulate={num_microbatches} splits the examples of a batch, and this one has none: "
                             "it has scalars and leaves of batch_specs alone: give accumulate=1.")

    def _check_own(self, name: str, leaf: Any, num_microbatches: int) -> None:
        spec, shape = self.spec(name, leaf), np.shape(leaf)
        if len(spec) > len(shape):
            raise UsageError(f"batch_specs: batch[{name!r}] of shape {shape} has fewer dims than {spec}.")
        for dim, names in enumerate(axes_by_dim(spec)):
            if shape[dim] % self.axes.size(*names):
                raise UsageError(f"batch_specs: dim {dim} of batch[{name!r}] of shape {shape} does not divide over "
                                 f"{spec[dim]!r} of the mesh {self.axes.sizes}: pad it (a graph's edges with those of "
                                 "a node of its own), or give None, which leaves it whole on every device.")
        if any(spec) and num_microbatches > 1:
            raise UsageError(f"batch_specs: batch[{name!r}] is no part of the examples that accumulate="
                             f"{num_microbatches} splits: give accumulate=1, or None for it, so that every microbatch "
                             "has all of it.")

    def _check_examples(self, leaves: Sequence[tuple[str, Any]], num_microbatches: int) -> None:
        axes, num_shards = self.axes, self.axes.batch_shards
        sizes = {name: np.shape(leaf)[0] for name, leaf in leaves}
        if len(set(sizes.values())) > 1:
            raise UsageError(
                "The leaves of the batch differ in their leading dim, the global batch: "
                + ", ".join(f"{name} {size}" for name, size in sizes.items()) + ". Give rules for those that are no "
                "examples: Parallelism(batch_specs=[(\"edges\", P(\"data\")), (\"table\", None)]).")
        size = next(iter(sizes.values()))
        devices = f"the {num_shards} devices of the axes {', '.join(axes.batch)} of the mesh {axes.sizes}"
        if size and not size % num_shards and size % (num_shards * num_microbatches):
            raise UsageError(
                f"A batch of {size} does not divide into {num_microbatches} microbatches over {devices}: give a "
                f"multiple of {num_shards * num_microbatches}, or another accumulate.")
        if size % num_shards or not size:
            raise UsageError(f"A batch of {size} does not divide over {devices}: give a multiple of {num_shards}, or a "
                             "smaller mesh.")
        for name, leaf in leaves:
            if np.ndim(leaf) > 1 and np.shape(leaf)[1] % axes.context_size:
                raise UsageError(
                    f"batch[{name!r}] of shape {np.shape(leaf)}: its second dim, the sequence, must divide over the "
                    f"{axes.context_size} devices of the axis {axes.context!r} of the mesh {axes.sizes}: give another "
                    "length, or context=1.")

    def is_ragged(self, batch: Batch) -> bool:
        """Whether the examples are equally many, and do not divide over the devices: a last batch."""
        sizes = {np.shape(leaf)[0] for name, leaf in named_leaves(batch) if self.is_example(name, leaf)}
        return len(sizes) == 1 and min(sizes) > 0 and min(sizes) % self.axes.batch_shards != 0

    def resized(self, batch: Batch, size: int) -> Batch:
        """`batch` as `jax.ShapeDtypeStruct`s with so many examples."""
        return map_named(lambda name, leaf: leaf.update(shape=(size, *leaf.shape[1:])) if self.is_example(name, leaf)
                         else leaf, abstract_batch(batch))

    def rounded_up(self, batch: Batch) -> Batch:
        """A ragged batch as `jax.ShapeDtypeStruct`s of the next size that divides."""
        return self.resized(batch, -(-self.size(batch) // self.axes.batch_shards) * self.axes.batch_shards)

    def abstract(self, batch: Batch) -> Batch:
        """`batch` as `jax.ShapeDtypeStruct`s with shardings."""
        return map_named(lambda name, leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=NamedSharding(self.axes.mesh, self.spec(name, leaf))),
            abstract_batch(batch))


def hashable(shardings: Pytree) -> Any:
    """What is equal for batches that one compiled program can take."""
    return jax.tree.structure(shardings), *jax.tree.leaves(shardings)
