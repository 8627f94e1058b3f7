"""Tensor parallelism: which dims of which parameters are split over the mesh axis `tensor`, by rules or by metadata.

A parameter is used as the rules split it and gathered over ZeRO's axes alone; XLA splits the products to match
(Megatron-LM, arXiv 1909.08053: a column-parallel kernel, then a row-parallel one, and one sum behind them).
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from zero_jax.mesh import TENSOR
from zero_jax.tree import named_leaves


@dataclasses.dataclass(frozen=True)
class TensorRule:
    """Parameters in whose name `re.search` finds `pattern` are split as `spec` says.

    spec: an entry for each of the parameter's last dims, None or "tensor"; dims before those, over which a loop runs,
    are not split. units: how many parts may not be cut further (heads), which the axis must divide.
    """

    pattern: str
    spec: P | tuple[str | None, ...]
    units: int | None = None


def tensor_specs(params: Any, mesh: Mesh, rules: Sequence[TensorRule | tuple[Any, ...]] = (),
                 metadata: Mapping[str, Sequence[Any]] | None = None) -> dict[str, P]:
    """For each parameter that is split over `tensor` its spec, an entry for each dim; empty without that axis.

    The first rule that matches counts. metadata: what the model itself says, by parameter, as names of mesh axes; other
    names say nothing. Raises ValueError for a rule that matches nothing, a spec that does not fit its parameter or
    contradicts the metadata, dims and units that the axis does not divide, and an axis `tensor` over which nothing is
    split.
    """
    rules = [rule if isinstance(rule, TensorRule) else TensorRule(*rule) for rule in rules]
    ways, leaves = mesh.shape.get(TENSOR, 1), named_leaves(params)
    for rule in rules:
        if not any(re.search(rule.pattern, name) for name, _ in leaves):
            raise ValueError(f"tensor_rules: {rule.pattern!r} matches no parameter. There are: "
                             f"{', '.join(name for name, _ in leaves)}.")
        if rule.units is not None and rule.units % ways:
            raise ValueError(f"tensor_rules: {rule.pattern!r} is made of {rule.units} units (heads), which do not "
                             f"divide over the {ways} devices of the axis {TENSOR!r} of the mesh {dict(mesh.shape)}: "
                             f"give a size of that axis which divides {rule.units}.")
    found: dict[str, P] = {}
    for name, leaf in leaves:
        rule = next((rule for rule in rules if re.search(rule.pattern, name)), None)
        own = _own(name, leaf, (metadata or {}).get(name))
        spec = own if rule is None else _aligned(name, leaf, rule)
        if rule is not None and own is not None and own != spec:
            raise ValueError(f"Parameter {name} of shape {leaf.shape} is {own} by the model's own metadata, and {spec} "
                             f"by the rule {rule.pattern!r} of tensor_rules: make them agree, or drop one.")
        if spec is None or TENSOR not in spec:
            continue
        for dim, entry in enumerate(spec):
            if entry == TENSOR and leaf.shape[dim] % ways:
                raise ValueError(
                    f"Parameter {name} of shape {leaf.shape}: dim {dim} of {leaf.shape[dim]} does not divide over the "
                    f"{ways} devices of the axis {TENSOR!r} of the mesh {dict(mesh.shape)}. Give a size of that axis "
                    f"which divides it, or a model whose dim does (a vocabulary is padded to a multiple of {ways}).")
        found[name] = spec
    if ways > 1 and not found:
        raise ValueError(f"The mesh {dict(mesh.shape)} has an axis {TENSOR!r}, and no parameter is split over it: give "
                         "tensor_rules=[(\"up/kernel\", P(None, \"tensor\")), ...], or partitioning metadata in the "
                         "model, or a mesh without that axis.")
    return found if ways > 1 else {}


def _aligned(name: str, leaf: Any, rule: TensorRule) -> P:
    """The rule's spec with an entry for each dim of `leaf`."""
    spec = rule.spec
    if set(spec) - {None, TENSOR} or sum(entry == TENSOR for entry in spec) > 1 or len(spec) > len(leaf.shape):
        raise ValueError(
            f"tensor_rules: {rule.pattern!r} asks for {spec} of parameter {name} of shape {leaf.shape}: give one entry "
            f"for each of its last dims, None or {TENSOR!r}, the latter at most once.")
    return P(*[None] * (len(leaf.shape) - len(spec)), *spec)


def _own(name: str, leaf: Any, names: Sequence[Any] | None) -> P | None:
    """What the model's metadata say of a parameter; None where they say nothing of this axis."""
    if names is None or TENSOR not in names:
        return None
    if len(names) != len(leaf.shape):
        raise ValueError(f"Parameter {name} of shape {leaf.shape} has partitioning metadata {tuple(names)}: one entry "
                         "for each dim is needed.")
    return P(*[TENSOR if entry == TENSOR else None for entry in names])
