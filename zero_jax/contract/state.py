"""Whether the state is sharded as its stage says: from the layout alone, before anything is compiled."""

import math
from collections.abc import Iterator

from zero_jax.contract.report import Contract, StateBudget
from zero_jax.gather.gather import compute_spec
from zero_jax.layout.layout import Layout, Placement
from zero_jax.sharding.partition import SMALL_LEAF, parts_of

TOLERANCE = 0.01
"""Share by which the state may exceed what it takes where every leaf divides."""

MERGED_PADDING = 0.005
"""Share of a leaf with merged dims that may be padding: on a TPU its parts are whole rows (`partition.ROWS`)."""


def state_budget(layout: Layout) -> StateBudget:
    """The state of `layout` beside the ideal, and what is replicated though the stage shards its kind.

    Variables are no parameters and are whole at every stage. A parameter, or each part of one that is split over
    `tensor`, of at most `partition.SMALL_LEAF` bytes may stay whole, and so may its moments; the padding of a leaf of
    which no dim divides is part of the ideal.
    """
    placements, sizes = layout.placements(), layout.axes.zero_sizes
    ideal, replicated, excess = 0.0, {}, {}
    for row in placements:
        is_sharded = layout.shards(row.name) and not row.name.startswith("variables/") and math.prod(row.shape) > 1
        is_split = any(entry is not None for entry in compute_spec(row.spec, layout.axes))
        tensor_size = layout.tensor_size if is_split else 1
        num_shards = layout.num_shards if is_sharded else 1
        least = (row.bytes + _padding(row, layout.num_shards)) / (num_shards * tensor_size)
        ideal += least
        excess[row.name] = row.device_bytes - least
        if parts_of(row.spec, sizes) < num_shards and row.bytes / tensor_size > SMALL_LEAF:
            replicated[row.name] = (
                f"{row.dtype}{list(row.shape)} is stored {num_shards // parts_of(row.spec, sizes)} times, "
                f"{row.bytes:,} bytes" + (f" ({row.note})" if row.note else ""))
    largest = sorted(excess, key=lambda name: -excess[name])[:3]
    return StateBudget(sum(row.device_bytes for row in placements), ideal, replicated,
                       {name: excess[name] for name in largest if excess[name] > 0})


def state_violations(contract: Contract) -> Iterator[str]:
    """What of the state the stage shards and the layout does not."""
    state = contract.state
    if state is None:
        return
    for name, why in state.replicated.items():
        yield (f"{name} stays replicated, though stage {contract.stage} shards its kind: {why}. Give it a dim that "
               f"divides by the {math.prod(contract.mesh[axis] for axis in contract.zero_axes)} devices and that no "
               "loop of the model's own runs over, or list the parameter in frozen= if it is not trained.")
    if state.device_bytes > (1 + TOLERANCE) * state.ideal_bytes + SMALL_LEAF:
        most = ", ".join(f"{name} ({excess:,.0f} bytes too many)" for name, excess in state.excess.items())
        yield (f"{state.device_bytes:,} bytes of state are on each device, {state.ideal_bytes:,.0f} would be if every "
               f"leaf were in equal parts: {most}. step.layout(batch).describe() says how each leaf is stored.")


def _padding(row: Placement, num_shards: int) -> int:
    """Bytes of padding that a leaf cannot do without; 0 where it has more than it takes to divide."""
    if len(row.stored) != len(row.shape):
        itemsize = row.bytes // max(1, math.prod(row.shape))
        return row.padding if row.padding <= max(MERGED_PADDING * row.bytes, num_shards * itemsize) else 0
    fits = all(stored - size < num_shards for stored, size in zip(row.stored, row.shape, strict=True))
    return row.padding if fits else 0
