"""Which parameters of a layout are sent as codes, how, and why the others are not."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping

from jax.sharding import PartitionSpec as P

from zero_jax.arguments import check_matched
from zero_jax.errors import UsageError
from zero_jax.gather.quantized.gather import GatherCodes
from zero_jax.gather.quantized.messages import BlockFormat
from zero_jax.gather.quantized.policy import Codes, Hop
from zero_jax.gather.quantized.products import MatrixFormat
from zero_jax.sharding.mesh_axes import MeshAxes
from zero_jax.sharding.param_access import ParamAccess
from zero_jax.sharding.partition import axes_by_dim, parts_of
from zero_jax.sharding.stored_shape import StoredShape
from zero_jax.typing import AxisNames, DType


@dataclasses.dataclass(frozen=True)
class QuantizedLeaves:
    """What of a layout's parameters is quantised.

    Attributes:
        policy: what was asked for; None: nothing, and products in float8 alone send codes.
        hops: of the reductions of gradients; none where these are sent as they are.
        gathers: how the weights of each quantised parameter are sent, by name.
        gradients: names of the parameters whose gradients are quantised.
        reasons: why the others are sent as they are, by name.
        sizes: elements of each parameter, by name.
        products: names of those whose products are in float8; those of `gathers` are sent so.
        layers: into how many slices loops of the model cut it, each of which is sent by itself, by name.
    """

    policy: Codes | None
    hops: tuple[Hop, ...]
    gathers: Mapping[str, GatherCodes] = dataclasses.field(default_factory=dict)
    gradients: frozenset[str] = frozenset()
    reasons: Mapping[str, str] = dataclasses.field(default_factory=dict)
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    layers: Mapping[str, int] = dataclasses.field(default_factory=dict)
    products: frozenset[str] = frozenset()

    def describe(self) -> Iterator[str]:
        """Lines of text: what is quantised, and each leaf that is not, with the reason."""
        if self.products:
            sent = ", ".join(sorted(self.products - self.gathers.keys()))
            yield f"products in float8: {', '.join(sorted(self.products))}"
            yield f"of these, weights that are not sent as float8: {sent or 'none'}"
        if self.policy is None:
            return
        rest = sum(self.sizes[name] for name in self.reasons)
        share = rest / max(1, sum(self.sizes.values()))
        yield f"communication: {self.policy.text}; {1 - share:.3%} of the parameters"
        yield "sent as they are: " + (", ".join(f"{name} ({why})" for name, why in self.reasons.items()) or "none")


@dataclasses.dataclass(frozen=True)
class Leaf:
    """What decides whether a parameter is quantised.

    spec: of its gradient, or of itself where it is frozen. dtype: as the model reads it. gathered: whether its weights
    are gathered, and trained: whether its gradient is reduced.
    """

    stored_shape: StoredShape
    spec: P
    dtype: DType
    access: ParamAccess
    gathered: bool
    trained: bool


def quantized_leaves(policy: Codes, leaves: Mapping[str, Leaf], axes: MeshAxes, hpz_axes: AxisNames
                     ) -> QuantizedLeaves:
    """The choice for each of `leaves`, by name. hpz_axes: the last over which messages are gathered.

    Raises ValueError where nothing would be sent in a format that is asked for, or where a parameter is excluded that
    there is not.
    """
    check_matched("Communication: exclude", policy.exclude, leaves)
    hops = policy.hops(axes, hpz_axes)
    leaves = {name: leaf for name, leaf in leaves.items()
              if leaf.gathered and policy.weights is not None or leaf.trained and hops}
    weights = BlockFormat(policy.weights or "int8", policy.block)
    codes = {name: _codes(weights, leaf, axes, hpz_axes) for name, leaf in leaves.items()}
    reasons = {name: why for name, leaf in leaves.items() if (why := policy.reason(
        name, leaf.stored_shape.shape, leaf.dtype, num_loops=len(leaf.access.stacked),
        local_size=codes[name].num_values, num_parts=parts_of(leaf.spec, axes.zero_sizes), all_parts=axes.zero_size))}
    found = QuantizedLeaves(
        policy, hops,
        gathers={name: codes[name] for name, leaf in leaves.items()
                 if name not in reasons and leaf.gathered and policy.weights is not None},
        gradients=frozenset(name for name, leaf in leaves.items() if name not in reasons and leaf.trained and hops),
        reasons=reasons, sizes={name: math.prod(leaf.stored_shape.shape) for name, leaf in leaves.items()},
        layers={name: math.prod(leaf.stored_shape.stored[dim] for dim in leaf.access.stacked)
                for name, leaf in leaves.items()})
    for what, chosen in (("weights", found.gathers), ("gradients", found.gradients)):
        if getattr(policy, what) is not None and not chosen:
            raise UsageError(f"communication: {what}={getattr(policy, what)!r} would change nothing: the {what} of all "
                             f"parameters are sent as they are, {_listed(reasons)}. Leave it out, or give smaller "
                             f"blocks than of {policy.block} values, where those are too large.")
    return found


def _listed(reasons: Mapping[str, str]) -> str:
    """The first few of `reasons`, for a message."""
    few = [f"{name} ({why})" for name, why in itertools.islice(reasons.items(), 4)]
    return ", ".join(few) + (f" and {len(reasons) - len(few)} more" if len(reasons) > len(few) else "")


def with_products(found: QuantizedLeaves | None, products: frozenset[str], leaves: Mapping[str, Leaf], axes: MeshAxes,
                  hpz_axes: AxisNames, *, encoded: bool) -> QuantizedLeaves | None:
    """`found`, and the parameters `products`, which are gathered as the float8 that they are multiplied in.

    encoded: False: they are gathered as they are, and rounded where they are used.
    """
    if not products:
        return found
    found = found or QuantizedLeaves(None, ())
    codes = {name: _codes(MatrixFormat(leaf.dtype), leaf, axes, hpz_axes) for name, leaf in leaves.items()
             if name in products and encoded and leaf.gathered and axes.zero_size > 1
             and parts_of(leaf.spec, axes.zero_sizes) == axes.zero_size}
    return dataclasses.replace(
        found, products=products, reasons={name: why for name, why in found.reasons.items() if name not in codes},
        gathers={**{name: each for name, each in found.gathers.items() if name not in products}, **codes})


def _codes(format: BlockFormat | MatrixFormat, leaf: Leaf, axes: MeshAxes, hpz_axes: AxisNames) -> GatherCodes:
    """How the messages of a leaf are made."""
    stored = leaf.stored_shape.stored
    entries = axes_by_dim(leaf.spec, len(stored))
    local = tuple(size // axes.size(*entry) for size, entry in zip(stored, entries, strict=True))
    names = [axis for axis in axes.mesh.axis_names if any(axis in entry for entry in entries)]
    order = sorted(names, key=lambda axis: (axis != axes.tensor, axis not in hpz_axes))
    return GatherCodes(
        format, axes, P(*entries), local, tuple(dim in leaf.access.stacked for dim in range(len(stored))), tuple(order))
