"""The events of a scheduled program: work, the starts and ends of collectives, loops; and what they add up to."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from zero_jax.hlo_collective import Collective


@dataclasses.dataclass(frozen=True)
class Work:
    """An instruction that computes or moves data in HBM, and is no collective.

    Attributes:
        name: its name in the program.
        opcode: its opcode; "fusion" for most.
        op_name: the JAX name stack it comes from, "" if the compiler made it up.
        flops: FLOPs of its matrix products by dtype of the operands; empty if it has none.
        hbm_bytes: bytes that it reads from HBM and writes to it.
    """

    name: str
    opcode: str
    op_name: str
    flops: Mapping[str, float]
    hbm_bytes: float


@dataclasses.dataclass(frozen=True)
class Start:
    """A collective begins. A synchronous one has its `Done` right behind."""

    collective: Collective


@dataclasses.dataclass(frozen=True)
class Done:
    """The program waits here for `collective`, the object of its `Start`; for nothing if it is not under way.

    A pipelined loop may wait for what the iteration before has started, so that Done comes first in its body. In the
    first iteration it waits for what was started ahead of the loop, which therefore has a Done at the same place.
    """

    collective: Collective


@dataclasses.dataclass(frozen=True)
class Loop:
    """`body`, `trips` times over; once if the number is not `known` (it depends on data)."""

    trips: int
    known: bool
    body: tuple["Event", ...]


Event = Work | Start | Done | Loop


@dataclasses.dataclass(frozen=True)
class Totals:
    """FLOPs by dtype, and HBM bytes, of all the work."""

    flops: dict[str, float]
    hbm_bytes: float


@dataclasses.dataclass(frozen=True)
class Overlap:
    """Work that is scheduled between the start and the done of `collective`, in one run of it."""

    collective: Collective
    flops: float
    hbm_bytes: float


def collectives(events: Iterable[Event]) -> Iterator[Collective]:
    """The collectives of `events`, in order; `count` says how often the loops around one run it."""
    for event in events:
        if isinstance(event, Start):
            yield event.collective
        elif isinstance(event, Loop):
            yield from collectives(event.body)


def totals(events: Iterable[Event]) -> Totals:
    """All the work of `events`, that of loops times their trips."""
    flops: Counter[str] = Counter()
    moved = 0.0
    for event in events:
        if isinstance(event, Work):
            flops.update(event.flops)
            moved += event.hbm_bytes
        elif isinstance(event, Loop):
            inside = totals(event.body)
            flops.update({dtype: event.trips * amount for dtype, amount in inside.flops.items()})
            moved += event.trips * inside.hbm_bytes
    return Totals(dict(flops), moved)


def overlapped(events: Iterable[Event]) -> list[Overlap]:
    """For every collective, in order, the work between its start and its done; loops in between count their trips."""
    clock = _Clock()
    clock.run(events)
    return [Overlap(c, *clock.spans.get(id(c), (0.0, 0.0))) for c in clock.order]


class _Clock:
    """Work so far, as (FLOPs, HBM bytes), and what of it each collective spans."""

    def __init__(self):
        self.now = (0.0, 0.0)
        self.order: list[Collective] = []
        self.began: dict[int, tuple[float, float]] = {}
        self.early: dict[int, tuple[float, float]] = {}
        self.spans: dict[int, tuple[float, float]] = {}

    def since(self, then: tuple[float, float]) -> tuple[float, float]:
        return self.now[0] - then[0], self.now[1] - then[1]

    def run(self, events: Iterable[Event]) -> None:
        begin, first = self.now, len(self.order)
        for event in events:
            if isinstance(event, Work):
                self.now = self.now[0] + sum(event.flops.values()), self.now[1] + event.hbm_bytes
            elif isinstance(event, Start):
                self.order.append(event.collective)
                self.began[id(event.collective)] = self.now
            elif isinstance(event, Done):
                which = id(event.collective)
                if which not in self.began:
                    self.early.setdefault(which, self.since(begin))
                elif which not in self.spans:
                    self.spans[which] = self.since(self.began[which])
            else:
                before = self.now
                self.run(event.body)
                once = self.since(before)
                self.now = before[0] + event.trips * once[0], before[1] + event.trips * once[1]
        for which in map(id, self.order[first:]):  # begun in this body, and waited for in its next run
            if which in self.early and which not in self.spans:
                tail = self.since(self.began[which])
                self.spans[which] = tail[0] + self.early[which][0], tail[1] + self.early[which][1]


def with_overlap(events: Iterable[Event]) -> tuple[Event, ...]:
    """`events`, with the overlap of each collective written into it."""
    events = tuple(events)
    found = {
        id(each.collective): dataclasses.replace(
            each.collective, overlapped_flops=each.flops, overlapped_bytes=each.hbm_bytes
        )
        for each in overlapped(events)
    }
    return _renewed(events, found)


def _renewed(events: Iterable[Event], found: Mapping[int, Collective]) -> tuple[Event, ...]:
    return tuple(
        dataclasses.replace(event, body=_renewed(event.body, found))
        if isinstance(event, Loop)
        else event
        if isinstance(event, Work)
        else dataclasses.replace(event, collective=found.get(id(event.collective), event.collective))
        for event in events
    )
