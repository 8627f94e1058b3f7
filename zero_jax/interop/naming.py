"""Rules that map the names of a model's parameters to those of tensors in a file. No JAX."""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from zero_jax.arguments import shown
from zero_jax.errors import UsageError
from zero_jax.interop.model_config import IN_FILE
from zero_jax.interop.safetensors_file import Tensor


@dataclasses.dataclass(frozen=True)
class Rule:
    """How a file stores the parameters whose name matches a pattern.

    leaf: pattern of the full name, as "blocks/qkv/kernel". tensor: the name in the file, in which "{group}" stands for
    what the pattern's group of that name matched. If one such group matched nothing, the leaf is stacked: index i of
    its first dim is the tensor with i in that place. columns: for each index of the last dim the index in the file;
    None: the same. transpose: the file stores a matrix as (out, in), and ours is (in, out); columns then index the
    file's first dim. For more dims than two: the dim of ours that each of the file's is, as (3, 2, 0, 1) for a
    convolution of PyTorch's.
    """

    leaf: str
    tensor: str
    columns: Sequence[int] | None = None
    transpose: bool | Sequence[int] = False

    def order(self, num_dims: int) -> tuple[int, ...]:
        """The dim of ours that each dim of a tensor in the file is."""
        if isinstance(self.transpose, bool):
            return tuple(range(num_dims))[::-1 if self.transpose else 1]
        if sorted(self.transpose) != [*range(num_dims)]:
            raise UsageError(f"The rule {self.leaf!r} has transpose={shown(self.transpose)}, and what it matches has "
                             f"{num_dims} dims: give each of them once.")
        return tuple(self.transpose)


@dataclasses.dataclass(frozen=True)
class Names:
    """All rules of a model; the first that matches a name is used.

    rules: `Rule`s or tuples of their fields. ignored: patterns of full names of tensors that are not parameters. tied:
    optional tensors, each of which must equal another one. prefix: optional before the names in a file that is read,
    and written before them. renamed: (pattern of a full name in a file that is read, what `re.sub` puts in its place).
    config: config.json of the model, which a written file holds as metadata, and which a file that is read is compared
    with; None: not known. Without rules each parameter has our name, as `blocks/qkv/kernel`, and other variables as
    `variables/batch_stats/mean`.
    """

    rules: Sequence[Any] = (("(?P<name>.+)", "{name}"),)
    ignored: Sequence[str] = ()
    tied: Mapping[str, str] = dataclasses.field(default_factory=dict)
    prefix: str = ""
    renamed: Sequence[tuple[str, str]] = ()
    config: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.rules, (tuple, list)) or not all(
                isinstance(r, Rule) or isinstance(r, (tuple, list)) and 2 <= len(r) <= 4 for r in self.rules):
            raise UsageError(f"Names: rules={shown(self.rules)}: give a list of rules (leaf, tensor, columns, "
                             "transpose).")
        object.__setattr__(self, "rules", tuple(r if isinstance(r, Rule) else Rule(*r) for r in self.rules))

    @property
    def metadata(self) -> dict[str, str]:
        """Of a written file."""
        return {"format": "pt"} | ({} if self.config is None else {IN_FILE: json.dumps(self.config)})

    def known_as(self, tensor: str) -> str:
        """The name that the rules know for a tensor of a file that is read."""
        for pattern, replacement in self.renamed:
            tensor = re.sub(rf"\A(?:{pattern})\Z", replacement, tensor)
        return tensor.removeprefix(self.prefix)

    def written(self, tensor: str) -> str:
        """The name of a tensor in a written file: with the prefix."""
        return self.prefix + tensor

    def parts(self, leaf: str, shape: tuple[int, ...]) -> "Parts":
        """The tensors of the leaf of that name and logical shape. Raises ValueError if no rule matches."""
        for rule in self.rules:
            if (match := re.fullmatch(rule.leaf, leaf)) is None:
                continue
            groups = match.groupdict()
            open_ = [name for name, value in groups.items() if value is None and f"{{{name}}}" in rule.tensor]
            if len(open_) > 1 or open_ and not shape:
                raise UsageError(f"{leaf} of shape {shape} matches the rule {rule.leaf!r} without {', '.join(open_)}: "
                                 "only one group may be open, and the first dim stands for it.")
            if rule.columns is not None and (len(shape) == 0 or sorted(rule.columns) != [*range(shape[-1])]):
                raise UsageError(f"{leaf} has shape {shape}, and the rule {rule.leaf!r} orders {len(rule.columns)} "
                                 "columns: give each index of the last dim once.")
            layers = [{open_[0]: i} for i in range(shape[0])] if open_ else [{}]
            names = tuple(rule.tensor.format(**(groups | layer)) for layer in layers)
            return Parts(leaf, shape, names, bool(open_), rule)
        raise UsageError(f"No rule matches the parameter {leaf} of shape {shape}: these names are not for this model.")


OWN = Names()
"""Our names, of any model."""


@dataclasses.dataclass(frozen=True)
class Parts:
    """One leaf as tensors of a file: `names`, one per index of the first dim where it is `stacked`."""

    leaf: str
    shape: tuple[int, ...]
    names: tuple[str, ...]
    stacked: bool
    rule: Rule

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """The shape of each tensor in the file."""
        shape = self.shape[1:] if self.stacked else self.shape
        return tuple(shape[dim] for dim in self.rule.order(len(shape)))

    def read(self, tensors: Mapping[str, Tensor], index: tuple[slice, ...]) -> np.ndarray:
        """The slice `index` of the leaf (slices with start and stop); nothing else is read."""
        if self.stacked:
            return np.stack([self._read(tensors[name], index[1:]) for name in self.names[index[0]]])
        return self._read(tensors[self.names[0]], index)

    def _read(self, tensor: Tensor, index: tuple[slice, ...]) -> np.ndarray:
        inside: tuple[Any, ...] = index
        if self.rule.columns is not None:
            inside = (*index[:-1], np.asarray(self.rule.columns)[index[-1]])
        order = self.rule.order(len(inside))
        return tensor.read(tuple(inside[dim] for dim in order)).transpose(np.argsort(order))

    def split(self, value: np.ndarray) -> list[np.ndarray]:
        """The tensors of a whole leaf."""
        if self.rule.columns is not None:
            value = value[..., np.argsort(self.rule.columns)]
        layers = list(value) if self.stacked else [value]
        return [layer.transpose(self.rule.order(layer.ndim)) for layer in layers]
