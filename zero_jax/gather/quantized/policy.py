"""The policy of quantised communication (ZeRO++, arXiv 2306.10209): which formats weights and gradients travel in."""

import dataclasses
import re
from collections.abc import Sequence

import jax.numpy as jnp

from zero_jax.arguments import patterns, shown, whole
from zero_jax.errors import UsageError
from zero_jax.gather.quantized.messages import GRADIENT_NAMES, NAMES, BlockFormat
from zero_jax.sharding.mesh_axes import MeshAxes
from zero_jax.typing import AxisNames, DType, Pattern, Shape

BLOCK_STEP = 16
"""What a block's size must be a multiple of, so that packed codes fill the registers of every chip."""

Hop = tuple[AxisNames, BlockFormat]
"""Mesh axes over which gradients are reduced together, and the format in which they are sent."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Codes:
    """Which codes weights and gradients are sent as: the part of `zero_jax.Communication` that layouts read."""

    weights: str | None = None
    gradients: str | tuple[str, str] | None = None
    block: int = 256
    exclude: Pattern | Sequence[Pattern] = ()

    def __post_init__(self) -> None:
        given = self.gradients
        formats = tuple(given) if isinstance(given, (tuple, list)) else () if given is None else (given,)
        if len(formats) > 2 or given is not None and not formats:
            raise UsageError(f"Communication(gradients={shown(given)}): give a format, {_listed(GRADIENT_NAMES)}, or a "
                             "pair for inside a node and across nodes, as (\"int8\", \"fp4\").")
        for name, value, known in (("weights", self.weights, NAMES),
                                   *(("gradients", each, GRADIENT_NAMES) for each in formats)):
            if not (isinstance(value, str) and value in known) and (name != "weights" or value is not None):
                only = " of weights" if isinstance(value, str) and value in GRADIENT_NAMES else ""
                raise UsageError(f"Communication({name}={shown(value)}) is no format{only}: give {_listed(known)}, or "
                                 "None.")
        if self.weights is None and given is None and (self.block != 256 or self.exclude):
            raise UsageError("Communication(block=, exclude=) quantise nothing: give weights=\"int8\" or "
                             "gradients=\"int8\" beside them, say, or leave them out.")
        block = whole("Communication: block", self.block, BLOCK_STEP)
        if block % BLOCK_STEP or block > 2**16:
            raise UsageError(f"Communication(block={block}): give a multiple of {BLOCK_STEP}, at most {2**16}.")
        object.__setattr__(self, "block", block)
        object.__setattr__(self, "exclude", patterns("Communication: exclude", self.exclude, "(\"embed\",)"))
        object.__setattr__(self, "gradients", next(iter(formats)) if len(set(formats)) == 1 else formats or None)

    @property
    def text(self) -> str:
        """What is sent in which format."""
        gradients = self.gradients if not isinstance(self.gradients, tuple) else " inside, ".join(
            self.gradients) + " across nodes"
        parts = [f"{what} {how}" for what, how in (("weights", self.weights), ("gradients", gradients)) if how]
        return f"{', '.join(parts)}, blocks of {self.block}"

    def hops(self, axes: MeshAxes, hpz_axes: AxisNames = ()) -> tuple[Hop, ...]:
        """The all-to-alls of a gradient, inside a node first; none where gradients are sent as they are.

        The last may be over `axes.replica`, across which the sums are gathered again.
        """
        if self.gradients is None:
            return ()
        zero = [name for name in axes.mesh.axis_names if name in axes.zero and axes.size(name) > 1]
        replicas = [axes.replica] if axes.replica_size > 1 else []
        if set(hpz_axes) & set(zero):
            inside = [name for name in zero if name in hpz_axes]
        else:
            inside = zero if replicas else zero[-1:]
        groups = [inside, [name for name in zero if name not in inside], replicas]
        formats = self.gradients if isinstance(self.gradients, tuple) else (self.gradients,) * 2
        return tuple((tuple(group), BlockFormat(formats[min(number, 1)], self.block))
                     for number, group in enumerate(group for group in groups if group))

    def reason(self, name: str, shape: Shape, dtype: DType, *, num_loops: int, local_size: int, num_parts: int,
               all_parts: int) -> str:
        """Why the parameter `name` is sent as it is; "" where it is quantised.

        shape: the true one, of which `num_loops` dims are stacked layers. local_size: values on a device of a layer.
        num_parts: over how many of the `all_parts` devices it is sharded.
        """
        if any(re.search(pattern, name) for pattern in self.exclude):
            return "excluded"
        if not jnp.issubdtype(dtype, jnp.floating):
            return f"of dtype {jnp.dtype(dtype)}"
        if num_parts < all_parts:
            return f"not sharded over all {all_parts} devices"
        if len(shape) - num_loops < 2:
            return "a vector"
        return f"fewer than {self.block} values on a device" if local_size < self.block else ""


def _listed(names: tuple[str, ...]) -> str:
    return " or ".join(f'"{name}"' for name in names)
