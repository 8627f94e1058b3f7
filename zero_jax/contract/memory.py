"""Whether a program holds the whole model at once, which stage 3 is there to avoid."""

import math
from collections.abc import Iterable, Iterator, Mapping

from zero_jax.contract.codes import largest_tile
from zero_jax.contract.purpose import purpose_of, total_elements
from zero_jax.contract.report import Contract, TrafficResult
from zero_jax.gather.gather import GATHER_SCOPE
from zero_jax.xla.aliasing import is_sent, update_of
from zero_jax.xla.collective import Collective
from zero_jax.xla.liveness import Buffer, Buffers
from zero_jax.xla.parser import Module

HOST = 5
"""The memory space of the host."""


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
    elements = sum(math.prod(dims) for _, dims in collective.shapes)
    return collective.payload_bytes * min(1.0, largest_tile(collective, contract) / max(elements, 1))


def gathered_at_once(module: Module) -> int:
    """The most bytes of temporaries, at one time, that hold gathered parameters: whole, or slices put together."""
    buffers = Buffers(module)
    owners = {(value.frame, value.instruction.name, value.path): buffer
              for buffer in buffers.all for value in buffer.values}
    # A GPU has a memory space for what collectives send.
    temporaries = [buffer for buffer in buffers.all if buffer.kind == "temporary" and buffer.space != HOST]
    direct = {id(buffer) for buffer in temporaries if _is_gathered(buffer, buffers.module)}

    def updates(buffer: Buffer) -> Iterator[Buffer | None]:
        for value in buffer.values:
            update = update_of(buffers.module, value.instruction, value.path)
            if update and update.operand:
                yield owners.get((value.frame, update.operand, ()))

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
