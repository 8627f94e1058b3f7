"""A compiled program as the events of its schedule: work, the starts and ends of collectives, loops.

One walk from ENTRY gives the events that everything else is computed from. Work between the `Start` and the `Done` of
a collective overlaps with it. The backends split a collective in different ways:

- CPU does not: every start is followed by its done.
- GPU has `-start` and `-done`, of a collective or of a computation that wraps it; a start marked `is_sync` blocks.
- TPU prints an asynchronous collective again in each fusion that carries it along (same `chain_id`), from the fusion
  with AsyncCollectiveStart to the one with AsyncCollectiveDone. Those fusions also compute, which is counted as
  overlap. A plain collective, or one in any other fusion, blocks.
"""

import dataclasses
from collections.abc import Iterable, Iterator

from zero_jax.xla import cost, replica_groups
from zero_jax.xla.collective import Collective, Execution, chain_of, is_sync, kind_in, kind_of, read_collective
from zero_jax.xla.events import Done, Event, Loop, Start, Work, collectives, totals, with_overlap
from zero_jax.xla.kernels import is_opaque
from zero_jax.xla.parser import Frame, Instruction, Module, parse
from zero_jax.xla.provenance import Flow, Value, search
from zero_jax.xla.trip_count import trip_count


def schedule(text: str | Module) -> tuple[Event, ...]:
    """Events of one run of `text`, on one device. Raises ValueError if `text` is not an HLO module.

    Of a conditional, the branch that costs most is taken: by communication bytes, then FLOPs, then HBM bytes. Of the
    condition of a loop, only the collectives are.

    Args:
        text: `jitted.lower(...).compile().as_text()`, of CPU, GPU or TPU, or what `parse` made of it.
    """
    walk = _Walk(text)
    return with_overlap(walk.with_dones(walk.visit(walk.module.frame(walk.module.entry), Execution())))


_KEY = tuple[str | None, ...]


@dataclasses.dataclass(frozen=True)
class _PendingDone:
    """A done whose start may come later in the text, as in a pipelined loop."""

    keys: tuple[_KEY, ...]


class _Walk:
    """Depth-first walk over the computations of one module."""

    def __init__(self, text: str | Module):
        self.module = parse(text)
        self.flow = Flow(self.module)
        # The parts of an asynchronous TPU collective share channel and chain. The part that a
        # custom call AsyncCollectiveStart takes is the collective; later fusions carry the others.
        self.starts = {
            (computation.name, operand)
            for computation in self.module.computations.values()
            for instruction in computation.instructions.values()
            if 'custom_call_target="AsyncCollectiveStart"' in instruction.tail
            for operand in instruction.operands
        }
        parts = (self.module.computations[within].instructions[name] for within, name in self.starts)
        self.chains = {chain for part in parts if (chain := chain_of(part))}
        self.started: dict[_KEY, list[Collective]] = {}
        self._communicates: dict[str, bool] = {}

    def communicates(self, name: str) -> bool:
        """Whether the computation `name`, or any that it calls, has a collective."""
        if name not in self._communicates:
            self._communicates[name] = any(
                kind_of(instruction) or any(self.communicates(callee) for callee in instruction.callees)
                for instruction in self.module.computations[name].instructions.values()
            )
        return self._communicates[name]

    def visit(self, frame: Frame, execution: Execution, fused: bool = False) -> list:
        """Events of one computation, some as `_PendingDone`; of a fusion without its work, which its caller counts."""
        events: list = []
        for instruction in frame.computation.instructions.values():
            opcode = instruction.opcode
            if kind_of(instruction):
                events += self._collective(frame, instruction, execution)
            elif opcode in ("while", "conditional", "call"):
                events += self._control_flow(frame, instruction, execution, fused)
            elif opcode.endswith(("-done", "-update")):  # they repeat the callee of their start
                events += self._done(frame, instruction)
            elif 'custom_call_target="AsyncCollectiveDone"' in instruction.tail:
                chains = (chain_of(frame.computation.instructions[name]) for name in instruction.operands)
                events += [_PendingDone((chain,)) for chain in chains if chain in self.chains]
            elif opcode in cost.WRAPPERS or any(map(self.communicates, instruction.callees)):
                events += self._wrapped(frame, instruction, execution, fused)
            elif not fused:
                events += self._work(frame, instruction)
        return events

    def _work(self, frame: Frame, instruction: Instruction) -> list[Work]:
        flops = cost.flops(self.module, frame, instruction)
        hbm_bytes = cost.hbm_bytes(self.module, frame, instruction)
        opaque = instruction.custom_call_target if is_opaque(instruction, flops) else ""
        if not flops and not hbm_bytes and not opaque:
            return []
        op_name = self.module.metadata(instruction)[0]
        kernel, length = cost.kernel(self.module, frame.computation, instruction) if flops else ("", 0)
        return [Work(instruction.name, instruction.opcode, op_name, flops, hbm_bytes, opaque, kernel, length)]

    def _collective(self, frame: Frame, instruction: Instruction, execution: Execution) -> list:
        chain = chain_of(instruction)
        carried = (frame.computation.name, instruction.name) in self.starts
        if chain in self.chains and not carried:
            return []
        if carried:
            execution = dataclasses.replace(execution, asynchronous=True)
        collective = read_collective(self.module, frame, instruction, execution)
        collective = dataclasses.replace(
            collective, serves=self.flow.serves(frame, instruction, collective.kind),
            then=_next_groups(self.flow, frame, instruction))
        key = chain if carried and chain else _key(frame, instruction)
        self.started[key] = [collective]
        return [Start(collective)] if collective.asynchronous else [Start(collective), Done(collective)]

    def _wrapped(self, frame: Frame, instruction: Instruction, execution: Execution, fused: bool) -> list:
        """Events of a fusion, or of a computation that runs asynchronously, with the collectives in it."""
        work = [] if fused else self._work(frame, instruction)
        if not any(map(self.communicates, instruction.callees)):
            return work
        split = instruction.opcode.endswith("-start")
        if split:
            execution = dataclasses.replace(execution, asynchronous=not is_sync(instruction))
        inside = [event for name in instruction.callees
                  for event in self._enter(frame, instruction, name, execution, True)]
        if split:
            self.started[_key(frame, instruction)] = [e.collective for e in inside if isinstance(e, Start)]
        ends = [event for event in inside if isinstance(event, _PendingDone)]
        return [event for event in inside if not isinstance(event, _PendingDone)] + work + ends

    def _enter(self, frame: Frame, caller: Instruction, name: str, execution: Execution, fused: bool = False) -> list:
        return self.visit(self.module.frame(name, caller, frame), execution, fused)

    def _control_flow(self, frame: Frame, instruction: Instruction, execution: Execution, fused: bool) -> list:
        if instruction.opcode == "call":
            return self._enter(frame, instruction, instruction.callees[0], execution, fused)
        if instruction.opcode == "conditional":
            branches = [self._enter(frame, instruction, name, execution) for name in instruction.callees]
            return max(branches, key=_cost, default=[])
        trips = trip_count(self.module, frame, instruction)
        known, times = trips is not None, 1 if trips is None else trips
        condition, loops = instruction.attribute("condition"), []
        if self.communicates(condition):  # it runs once more than the body
            tests = self._enter(frame, instruction, condition, execution.loop(times + 1 if known else None))
            loops = [Loop(times + 1 if known else 1, known, tuple(tests))]
        body = self._enter(frame, instruction, instruction.attribute("body"), execution.loop(trips))
        return [*loops, Loop(times, known, tuple(body))] if body else loops

    def _done(self, frame: Frame, instruction: Instruction) -> list:
        if not instruction.opcode.endswith("-done") or instruction.opcode in ("copy-done", "slice-done", "recv-done"):
            return []

        def back(value):
            return () if _starts(value) else self.flow.sources(value)

        origins = search([(frame, instruction.operands[0], ())], back)
        keys = tuple(_key(each[0], start) for each in origins if (start := _starts(each)))
        if all(key in self.started for key in keys):
            return [Done(collective) for key in keys for collective in self.started[key] if collective.asynchronous]
        return [_PendingDone(keys)]

    def with_dones(self, events: Iterable) -> tuple[Event, ...]:
        """`events` with each `_PendingDone` replaced by the `Done`s of its collectives."""
        result: list[Event] = []
        for event in events:
            if isinstance(event, _PendingDone):
                ended = [collective for key in event.keys for collective in self.started.get(key, ())]
                result += [Done(collective) for collective in ended if collective.asynchronous]
            elif isinstance(event, Loop):
                result.append(dataclasses.replace(event, body=self.with_dones(event.body)))
            else:
                result.append(event)
        return tuple(result)


def _key(frame: Frame, instruction: Instruction) -> _KEY:
    return frame.computation.name, frame.caller and frame.caller.name, instruction.name


def _starts(value: Value) -> Instruction | None:
    instruction = value[0].computation.instructions[value[1]]
    split = instruction.opcode in cost.WRAPPERS and instruction.opcode.endswith("-start")
    return instruction if split or kind_of(instruction) else None


def _cost(events: list) -> tuple[float, float, float]:
    """Cost of a branch: communication bytes, then FLOPs, then HBM bytes."""
    work = totals(events)
    return sum(each.step_bytes for each in collectives(events)), sum(work.flops.values()), work.hbm_bytes


_SUMS = "reduce-scatter", "all-reduce"


def _next_groups(flow: Flow, frame: Frame, instruction: Instruction) -> tuple[tuple[int, ...], ...]:
    """`Collective.then`."""
    kind, found = kind_in(frame, instruction), set[tuple[int, ...]]()
    if kind not in ("all-gather", *_SUMS):
        return ()
    many = len(replica_groups.first_group(instruction.attributes, flow.module.num_devices))
    for position, operand in enumerate(instruction.operands):
        size = frame.computation.instructions[operand].elements

        def step(value: Value, size: int = size) -> Iterator[Value]:
            users = value[0].computation.users.get(value[1], ())
            if any(user.opcode == "scatter" and at == len(user.operands) - 1 for user, at in users):
                found.add(())
            for use in flow.uses(value):
                user, sent = (each[0].computation.instructions[each[1]] for each in (use, value))
                other = None if user is instruction or not kind_of(user) else kind_in(use[0], user)
                if kind in _SUMS and other in _SUMS and sent.elements < size or (
                        kind == other == "all-gather" and sent.elements == size * many):
                    found.add(replica_groups.first_group(user.attributes, flow.module.num_devices))
                elif other in ("collective-permute", "all-to-all"):
                    found.add(())
                else:
                    yield use

        for _ in search([(frame, instruction.name, (position,) if len(instruction.operands) > 1 else ())], step):
            pass
    return tuple(sorted(found))
