"""Parameters of a model that are not stored as such, but computed where the model reads them from leaves that are.

A kernel with an adapter is read from itself and two thin matrices; a quantised one from its codes. Each of the stored
leaves is sharded, gathered and checked as any parameter.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
from flax import traverse_util
from jax.sharding import PartitionSpec as P

from zero_jax.errors import UsageError
from zero_jax.sharding.param_access import ParamAccess

Path: TypeAlias = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Composed:
    """One parameter of the model.

    path: its keys in the model's tree. like: its shape and dtype in the model. parts: for each stored leaf what its
    last key has in addition, "" for one of the parameter's own name. dims: for each leaf the dims that it shares with
    the parameter (all leaves have as many dims). build: the parameter, from its leaves as they are read; inside of
    loops both have less dims.
    """

    path: Path
    like: jax.ShapeDtypeStruct
    parts: tuple[str, ...]
    dims: tuple[tuple[int, ...], ...]
    build: Callable[..., jax.Array]

    @property
    def name(self) -> str:
        """The name of the parameter."""
        return name_of(self.path)

    @property
    def part_paths(self) -> tuple[Path, ...]:
        """The keys of the stored leaves."""
        return tuple((*self.path[:-1], f"{self.path[-1]}{part}" if part else self.path[-1]) for part in self.parts)

    @property
    def part_names(self) -> tuple[str, ...]:
        """The names of the stored leaves."""
        return tuple(map(name_of, self.part_paths))


def name_of(path: Path) -> str:
    """The name of a leaf, from its keys."""
    return "/".join(map(str, path))


Composition: TypeAlias = Sequence[Composed]
"""The parameters of a model that are computed from others; all others are stored as they are."""


def group_parts(tree: Mapping[Any, Any], composition: Composition, group: Callable[[Composed, list[Any]], Any]) -> Any:
    """`tree`, a dict tree of stored leaves, as the model's: `group(composed, leaves)` in the place of such leaves."""
    flat: dict[Path, Any] = dict(traverse_util.flatten_dict(tree))
    for composed in composition:
        leaves = [flat.pop(path) for path in composed.part_paths]
        flat[composed.path] = group(composed, leaves)
    return traverse_util.unflatten_dict(flat)


def model_tree(tree: Mapping[Any, Any], composition: Composition) -> Any:
    """The model's own abstract parameters, from the stored ones."""
    return group_parts(tree, composition, lambda composed, _: composed.like)


def part_specs(specs: Mapping[str, P], composition: Composition) -> dict[str, P]:
    """Specs of stored leaves by name, from those of the model's parameters: on the dims that both share."""
    by_part = dict(specs)
    for composed in composition:
        spec = by_part.pop(composed.name, None)
        for name, shared in zip(composed.part_names, composed.dims, strict=True):
            if spec is not None and any(spec[dim] is not None for dim in shared):
                by_part[name] = P(*[entry if dim in shared else None for dim, entry in enumerate(spec)])
    return by_part


def refuse_derived(reads: dict[str, ParamAccess], composition: Composition) -> dict[str, ParamAccess]:
    """Gives `reads` back; raises ValueError where the loss itself differentiates by a composed parameter.

    It would get the derivatives by its parts.
    """
    for composed in composition:
        if any(name in reads and reads[name].derived for name in composed.part_names):
            raise UsageError(f"The loss differentiates the model by {composed.name}, which is computed from other "
                             "arrays (it has an adapter, or is quantised): leave it out of the targets, or that "
                             "derivative out.")
    return reads
