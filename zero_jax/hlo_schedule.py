"""A compiled program as the events of its schedule: work, the starts and ends of collectives, loops.

One walk from ENTRY, which everything else is read from. What lies between the `Start` and the `Done` of a collective
runs while it is under way. The backends split a collective in different ways:

- CPU does not: every collective is a start and at once its done.
- GPU has `-start` and `-done`, of a collective or of a computation that wraps it; a start marked `is_sync` blocks.
- TPU prints an asynchronous collective again in each fusion that carries it along (same `chain_id`), from the fusion
  with AsyncCollectiveStart to the one with AsyncCollectiveDone. Those fusions compute meanwhile, which is counted.
  A plain collective, or one in any other fusion, blocks.
"""

import dataclasses
from collections.abc import Iterable

from zero_jax import hlo_collective, hlo_cost, hlo_flow, hlo_text
from zero_jax.hlo_collective import Collective, Place
from zero_jax.hlo_events import (
    Done,
    Event,
    Loop,
    Overlap,
    Start,
    Totals,
    Work,
    collectives,
    overlapped,
    totals,
    with_overlap,
)
from zero_jax.hlo_text import Frame, Instruction

__all__ = [
    "Done", "Event", "Loop", "Overlap", "Start", "Totals", "Work", "collectives", "overlapped", "schedule", "totals",
]  # fmt: skip


def schedule(text: str) -> tuple[Event, ...]:
    """Events of one run of `text`, on one device. Raises ValueError if `text` is no HLO module.

    Of a conditional the branch that costs most is taken: in wire bytes, then FLOPs, then HBM bytes. Of the condition
    of a loop only the collectives are.

    Args:
        text: `jitted.lower(...).compile().as_text()`, of CPU, GPU or TPU.
    """
    walk = _Walk(text)
    events = walk.bind(walk.visit(Frame(walk.module.computations[walk.module.entry], None, None), Place()))
    return with_overlap(events)


_KEY = tuple[str | None, ...]


@dataclasses.dataclass(frozen=True)
class _End:
    """A done whose start may come later in the text."""

    keys: tuple[_KEY, ...]


class _Walk:
    """Depth-first walk over the computations of one module."""

    def __init__(self, text: str):
        self.module = hlo_text.parse(text)
        self.flow = hlo_flow.Flow(self.module, text[: text.find("\n")])
        # The pieces of an asynchronous TPU collective share channel and chain. The piece that a
        # custom call AsyncCollectiveStart takes is the collective; later fusions carry the others.
        self.starts = {
            (computation.name, operand)
            for computation in self.module.computations.values()
            for instruction in computation.instructions.values()
            if 'custom_call_target="AsyncCollectiveStart"' in instruction.tail
            for operand in instruction.operands
        }
        pieces = (self.module.computations[within].instructions[name] for within, name in self.starts)
        self.chains = {chain for piece in pieces if (chain := hlo_collective.chain_of(piece))}
        self.begun: dict[_KEY, list[Collective]] = {}
        self._talks: dict[str, bool] = {}

    def talks(self, name: str) -> bool:
        """Whether computation `name` or anything that it calls has a collective."""
        if name not in self._talks:
            self._talks[name] = any(
                hlo_collective.kind_of(instruction) or any(self.talks(callee) for callee in instruction.callees)
                for instruction in self.module.computations[name].instructions.values()
            )
        return self._talks[name]

    def visit(self, frame: Frame, place: Place, fused: bool = False) -> list:
        """Events of one computation, some as `_End`; those of a fusion without its work, which is its caller's."""
        events: list = []
        for instruction in frame.computation.instructions.values():
            opcode = instruction.opcode
            if hlo_collective.kind_of(instruction):
                events += self._collective(frame, instruction, place)
            elif opcode in ("while", "conditional", "call"):
                events += self._branch(frame, instruction, place, fused)
            elif opcode.endswith(("-done", "-update")):  # these name the computation of their start again
                events += self._done(frame, instruction)
            elif 'custom_call_target="AsyncCollectiveDone"' in instruction.tail:
                pieces = (frame.computation.instructions[name] for name in instruction.operands)
                chains = map(hlo_collective.chain_of, pieces)
                events += [_End((chain,)) for chain in chains if chain in self.chains]
            elif opcode in hlo_cost.WRAPPERS or any(map(self.talks, instruction.callees)):
                events += self._wrapped(frame, instruction, place, fused)
            elif not fused:
                events += self._work(frame, instruction)
        return events

    def _work(self, frame: Frame, instruction: Instruction) -> list[Work]:
        flops = hlo_cost.flops(self.module, frame, instruction)
        moved = hlo_cost.hbm_bytes(self.module, frame, instruction)
        if not flops and not moved:
            return []
        return [Work(instruction.name, instruction.opcode, self.module.metadata(instruction)[0], flops, moved)]

    def _collective(self, frame: Frame, instruction: Instruction, place: Place) -> list:
        chain = hlo_collective.chain_of(instruction)
        carried = (frame.computation.name, instruction.name) in self.starts
        if chain in self.chains and not carried:
            return []
        if carried:
            place = dataclasses.replace(place, asynchronous=True)
        found = hlo_collective.read(self.module, frame, instruction, place)
        found = dataclasses.replace(found, serves=self.flow.serves(frame, instruction, found.kind))
        key = chain if carried and chain else _key(frame, instruction)
        self.begun[key] = [found]
        return [Start(found)] if found.asynchronous else [Start(found), Done(found)]

    def _wrapped(self, frame: Frame, instruction: Instruction, place: Place, fused: bool) -> list:
        """A fusion, or a computation that runs asynchronously, with the collectives in it."""
        work = [] if fused else self._work(frame, instruction)
        if not any(map(self.talks, instruction.callees)):
            return work
        split = instruction.opcode.endswith("-start")
        if split:
            place = dataclasses.replace(place, asynchronous=not hlo_collective.is_sync(instruction))
        inside = [event for name in instruction.callees for event in self._enter(frame, instruction, name, place, True)]
        if split:
            self.begun[_key(frame, instruction)] = [e.collective for e in inside if isinstance(e, Start)]
        ends = [event for event in inside if isinstance(event, _End)]
        return [event for event in inside if not isinstance(event, _End)] + work + ends

    def _enter(self, frame: Frame, caller: Instruction, name: str, place: Place, fused: bool = False) -> list:
        return self.visit(Frame(self.module.computations[name], caller, frame), place, fused)

    def _branch(self, frame: Frame, instruction: Instruction, place: Place, fused: bool) -> list:
        if instruction.opcode == "call":
            return self._enter(frame, instruction, instruction.callees[0], place, fused)
        if instruction.opcode == "conditional":
            branches = [self._enter(frame, instruction, name, place) for name in instruction.callees]
            return max(branches, key=_cost, default=[])
        trips = hlo_text.trip_count(self.module, frame, instruction)
        known, times = trips is not None, 1 if trips is None else trips
        condition, loops = instruction.attribute("condition"), []
        if self.talks(condition):  # it also runs when it says stop
            again = self._enter(frame, instruction, condition, place.loop(times + 1 if known else None))
            loops = [Loop(times + 1 if known else 1, known, tuple(again))]
        body = self._enter(frame, instruction, instruction.attribute("body"), place.loop(trips))
        return [*loops, Loop(times, known, tuple(body))] if body else loops

    def _done(self, frame: Frame, instruction: Instruction) -> list:
        if not instruction.opcode.endswith("-done") or instruction.opcode in ("copy-done", "slice-done", "recv-done"):
            return []

        def back(value):
            return () if _starts(value) else self.flow.sources(value)

        origins = hlo_flow.search([(frame, instruction.operands[0], ())], back)
        keys = tuple(_key(each[0], started) for each in origins if (started := _starts(each)))
        if all(key in self.begun for key in keys):
            return [Done(found) for key in keys for found in self.begun[key] if found.asynchronous]
        return [_End(keys)]

    def bind(self, events: Iterable) -> tuple[Event, ...]:
        """`events` with each `_End` as what it ends."""
        bound: list[Event] = []
        for event in events:
            if isinstance(event, _End):
                ended = [found for key in event.keys for found in self.begun.get(key, ())]
                bound += [Done(found) for found in ended if found.asynchronous]
            elif isinstance(event, Loop):
                bound.append(dataclasses.replace(event, body=self.bind(event.body)))
            else:
                bound.append(event)
        return tuple(bound)


def _key(frame: Frame, instruction: Instruction) -> _KEY:
    return frame.computation.name, frame.caller and frame.caller.name, instruction.name


def _starts(value: hlo_flow.Value) -> Instruction | None:
    instruction = value[0].computation.instructions[value[1]]
    split = instruction.opcode in hlo_cost.WRAPPERS and instruction.opcode.endswith("-start")
    return instruction if split or hlo_collective.kind_of(instruction) else None


def _cost(events: list) -> tuple[float, float, float]:
    """What a branch costs: wire bytes, then FLOPs, then HBM bytes."""
    work = totals(events)
    wire = sum(c.wire_bytes * c.count for c in collectives(events))
    return wire, sum(work.flops.values()), work.hbm_bytes
