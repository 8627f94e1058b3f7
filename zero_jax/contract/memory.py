"""Whether the state is sharded as its stage says (of the layout alone), and a program holds the whole model at once."""

import math
from collections.abc import Iterable, Iterator, Mapping

from zero_jax.contract.codes import largest_tile
from zero_jax.contract.purpose import purpose_of, total_elements
from zero_jax.contract.report import Contract, StateBudget, TrafficResult
from zero_jax.gather.gather import GATHER_SCOPE, compute_spec
from zero_jax.layout.layout import Layout, Placement
from zero_jax.sharding.partition import SMALL_LEAF, parts_of
from zero_jax.xla.aliasing import is_sent, update_of
from zero_jax.xla.collective import Collective
from zero_jax.xla.liveness import Buffer, Buffers
from zero_jax.xla.parser import Module
from zero_jax.xla.shapes import HOST

STATE_TOLERANCE = 0.01
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
    if state.device_bytes > (1 + STATE_TOLERANCE) * state.ideal_bytes + SMALL_LEAF:
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


def gathered_limit(collectives: Iterable[Collective], contract: Contract) -> float:
    """Bytes that gathered parameters may take at one time at stage 3; infinite at others, and on simulated devices.

    Half of all layers, the parameters that are no part of a repeated layer, and two of the largest gathers, one that is
    used and one under way, each as it is stored and as it is read; and the step's own copy of them. XLA combines small
    gathers, and may gather all of a small model at once. Of what is computed in tiles no more than these gathers, and
    the copies that hpZ keeps.
    """
    if contract.stage < 3 or contract.platform == "cpu" or not contract.zero_axes:
        return float("inf")
    untiled = [each for each in contract.params if each.tiles == 1]
    repeated = sum(each.bytes for each in untiled if each.slices * each.copies > 1)
    others = sum(each.bytes for each in untiled) - repeated
    largest = max((_payload(each, contract) for each in collectives if purpose_of(each, contract) == "gather"),
                  default=0)
    decoded = max((each.bytes / sent for each in contract.params if each.gathers_codes and (sent := each.gathered)),
                  default=1.0)  # a message is of half or a quarter of the bytes of what it holds
    kept = sum(each.kept * each.bytes / each.size for each in contract.params)
    return others + repeated / 2 + 4 * max(1.0, decoded) * largest + kept + contract.copy_bytes


def _payload(collective: Collective, contract: Contract) -> float:
    """Bytes that one gather makes; of parameters that are computed in tiles, of one tile."""
    return collective.payload_bytes * min(1.0, largest_tile(collective, contract) / max(collective.elements, 1))


def gathered_at_once(module: Module) -> int:
    """The most bytes of temporaries, at one time, that hold gathered parameters: whole, or slices put together."""
    buffers = Buffers(module)
    # A GPU has a memory space for what collectives send.
    temporaries = [buffer for buffer in buffers.all if buffer.kind == "temporary" and buffer.space != HOST]
    direct = {id(buffer) for buffer in temporaries if _is_gathered(buffer, buffers.module)}

    def updates(buffer: Buffer) -> Iterator[Buffer | None]:
        for value in buffer.values:
            update = update_of(buffers.module, value.instruction, value.path)
            if update and update.operand:
                yield buffers.owners.get((value.frame, update.operand, ()))

    gathered = [buffer for buffer in temporaries
                if id(buffer) in direct or any(id(source) in direct for source in updates(buffer))]
    return sum(max(value.array.dense_bytes for value in buffer.values) for buffer in buffers.at_peak(gathered)[1])


def memory_violations(results: Mapping[str, TrafficResult], contract: Contract, gathered_bytes: int) -> Iterator[str]:
    """A line if the program holds more gathered parameters at one time than `gathered_limit` allows."""
    gathers = results["gather"].collectives
    if gathered_bytes <= gathered_limit(gathers, contract):
        return
    model = sum(each.bytes for each in contract.params)
    up_front = [each for each in contract.params if each.up_front]
    if sum(each.bytes for each in up_front) > model / 2:
        names = ", ".join(each.name for each in sorted(up_front, key=lambda each: -each.bytes)[:3])
        cause = (f"{names} and others are gathered up front, since their module reads them other than through Flax's "
                 "accessor, or overwrites them.")
    elif total_elements(gathers) < 1.1 * contract.num_gathers * sum(each.gathered for each in contract.params):
        cause = ("they are gathered once, and kept from the forward to the backward pass: look for a checkpoint policy "
                 "of the model's own that saves them.")
    else:
        cause = "many layers are gathered at one time: put them in a loop (nn.scan, nnx.scan), or remat each."
    yield (f"{gathered_bytes:,} bytes of gathered parameters are in memory at one time, of {model:,.0f} that the model "
           f"has; stage 3 gathers a layer when it is used, and drops it: {cause}")


def _is_gathered(buffer: Buffer, module: Module) -> bool:
    """Whether a gather writes `buffer`, or a fusion with one in it."""
    return any(GATHER_SCOPE in module.metadata(value.instruction)[0] for value in buffer.values
               if value.instruction.opcode not in ("parameter", "while", "tuple", "get-tuple-element")
               and not is_sent(value.instruction, value.path))
