"""Tensor parallelism: which dims of which parameters are split over the mesh axis `tensor`, by rules or by metadata.

A parameter is gathered over ZeRO's axes alone and used as the rules split it; XLA partitions the matrix products to
match (Megatron-LM, arXiv 1909.08053: a column-parallel kernel, a row-parallel one, then one all-reduce).
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec as P

from zero_jax.arguments import check_matched, patterns, shown, whole
from zero_jax.errors import UsageError
from zero_jax.sharding.mesh import TENSOR
from zero_jax.sharding.mesh_axes import MeshAxes
from zero_jax.tree import named_leaves


@dataclasses.dataclass(frozen=True)
class TensorRule:
    """Parameters in whose name `re.search` finds `pattern` are split as `spec` says.

    spec: an entry for each of the parameter's last dims, None or "tensor", or that axis by the mesh's own name for it;
    dims before those, over which a loop runs, are not split. units: number of indivisible parts (attention heads), a
    multiple of the size of the axis.
    """

    pattern: str
    spec: P | tuple[str | None, ...]
    units: int | None = None

    def __post_init__(self) -> None:
        patterns("tensor_rules: pattern", (self.pattern,), "\"up/kernel\"")
        if not isinstance(self.spec, (P, tuple, list)):
            raise UsageError(f"tensor_rules: {self.pattern!r} has the spec {shown(self.spec)}: give one entry for each "
                             f"of the last dims, None or {TENSOR!r}, as P(None, {TENSOR!r}).")
        if self.units is not None:
            whole(f"tensor_rules: {self.pattern!r} has units", self.units, 1)


def rules_of(rules: Any) -> tuple[TensorRule, ...]:
    """`rules` as `TensorRule`s; raises ValueError for anything but such and tuples of their fields."""
    if not isinstance(rules, (tuple, list)):
        raise UsageError(f"tensor_rules={shown(rules)}: give a list of rules, as "
                         f"[(\"up/kernel\", P(None, {TENSOR!r}))].")
    for rule in rules:
        if not isinstance(rule, TensorRule) and not (isinstance(rule, (tuple, list)) and 2 <= len(rule) <= 3):
            raise UsageError(f"tensor_rules: {shown(rule)} is no rule: give (pattern, spec) or (pattern, spec, units), "
                             f"as (\"up/kernel\", P(None, {TENSOR!r})).")
    return tuple(rule if isinstance(rule, TensorRule) else TensorRule(*rule) for rule in rules)


def tensor_specs(params: Any, axes: MeshAxes, rules: Sequence[TensorRule | tuple[Any, ...]] = (),
                 metadata: Mapping[str, Sequence[Any]] | None = None) -> dict[str, P]:
    """The spec of each parameter that is split over `tensor`, with an entry for each dim; empty without that axis.

    The first rule that matches counts. metadata: Flax's partitioning metadata by parameter, names of mesh axes of which
    only that of tensor parallelism is used, by its own name or as `tensor`. Raises ValueError for a rule that matches
    nothing, a spec that does not fit its parameter or contradicts the metadata, dims and units that the axis does not
    divide, and an axis for tensor parallelism over which nothing is split.
    """
    rules = rules_of(rules)
    tensor, num_shards, leaves = axes.tensor, axes.tensor_size, named_leaves(params)
    for rule in rules:
        check_matched("tensor_rules", [rule.pattern], [name for name, _ in leaves])
        if rule.units is not None and rule.units % num_shards:
            raise UsageError(f"tensor_rules: {rule.pattern!r} is made of {rule.units} units (heads), which do not "
                             f"divide over the {num_shards} devices of the axis {tensor!r} of the mesh "
                             f"{axes.sizes}: give a size of that axis which divides {rule.units}.")
    specs: dict[str, P] = {}
    for name, leaf in leaves:
        rule = next((rule for rule in rules if re.search(rule.pattern, name)), None)
        from_metadata = _metadata_spec(name, leaf, (metadata or {}).get(name), tensor)
        spec = from_metadata if rule is None else _rule_spec(name, leaf, rule, tensor)
        if rule is not None and from_metadata is not None and from_metadata != spec:
            raise UsageError(f"Parameter {name} of shape {leaf.shape} is {from_metadata} by the model's own metadata, "
                             f"and {spec} by the rule {rule.pattern!r} of tensor_rules: make them agree, or drop one.")
        if spec is None or tensor not in spec:
            continue
        for dim, entry in enumerate(spec):
            if entry == tensor and leaf.shape[dim] % num_shards:
                raise UsageError(
                    f"Parameter {name} of shape {leaf.shape}: dim {dim} of {leaf.shape[dim]} does not divide over the "
                    f"{num_shards} devices of the axis {tensor!r} of the mesh {axes.sizes}. Give a size of that "
                    "axis which divides it, or a model whose dim does (a vocabulary is padded to a multiple of "
                    f"{num_shards}).")
        specs[name] = spec
    if num_shards > 1 and not specs:
        raise UsageError(f"The mesh {axes.sizes} has an axis {tensor!r}, and no parameter is split over it: give "
                         f"tensor_rules=[(\"up/kernel\", P(None, \"{tensor}\")), ...], or partitioning metadata in the "
                         "model, or a mesh without that axis.")
    return specs if num_shards > 1 else {}


def _rule_spec(name: str, leaf: Any, rule: TensorRule, tensor: str) -> P:
    """The rule's spec with an entry for each dim of `leaf`."""
    spec = _by_name(rule.spec, tensor)
    strange = any(entry not in (None, tensor) for entry in spec)
    if strange or sum(entry == tensor for entry in spec) > 1 or len(spec) > len(leaf.shape):
        raise UsageError(
            f"tensor_rules: {rule.pattern!r} asks for {rule.spec} of parameter {name} of shape {leaf.shape}: give one "
            f"entry for each of its last dims, None or {tensor!r}, the latter at most once.")
    return P(*[None] * (len(leaf.shape) - len(spec)), *spec)


def _metadata_spec(name: str, leaf: Any, names: Sequence[Any] | None, tensor: str) -> P | None:
    """The spec of a parameter by its partitioning metadata; None where they do not name this axis."""
    if names is None or tensor not in (names := _by_name(names, tensor)):
        return None
    if len(names) != len(leaf.shape):
        raise UsageError(f"Parameter {name} of shape {leaf.shape} has partitioning metadata {tuple(names)}: one entry "
                         "for each dim is needed.")
    return P(*[tensor if entry == tensor else None for entry in names])


def _by_name(entries: P | Sequence[Any], tensor: str) -> tuple[Any, ...]:
    """`entries` with the mesh's name of the axis where they say `tensor`, the role."""
    return tuple(tensor if entry == TENSOR else entry for entry in entries)
