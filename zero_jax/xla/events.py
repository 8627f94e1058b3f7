"""The events of a scheduled program (work, starts and ends of collectives, loops), their totals and their overlap."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

from zero_jax.xla.collective import Collective


@dataclasses.dataclass(frozen=True)
class Work:
    """An instruction that computes or moves data in HBM, and is no collective.

    Attributes:
        name: its name in the program.
        opcode: its opcode; "fusion" for most.
        op_name: the JAX name stack it comes from; "" if the compiler introduced it.
        flops: FLOPs of its matrix products by dtype of the operands; empty if it has none.
        hbm_bytes: bytes that it reads from HBM and writes to it.
        opaque: what a custom call calls, where its FLOPs are not known here (`kernels.is_opaque`); else "".
        kernel: what `Rates` tells apart, see `cost.kernel`: "odd", "64 forward", "128 backward"; else "".
        length: keys of each sequence, where it is a kernel of attention; else 0.
    """

    name: str
    opcode: str
    op_name: str
    flops: Mapping[str, float]
    hbm_bytes: float
    opaque: str = ""
    kernel: str = ""
    length: int = 0


@dataclasses.dataclass(frozen=True)
class Start:
    """A collective begins. The `Done` of a synchronous one follows at once."""

    collective: Collective


@dataclasses.dataclass(frozen=True)
class Done:
    """The program waits here for `collective`, the same object as in its `Start`; not at all if none is in flight.

    A pipelined loop may wait for what the previous iteration started, so that Done comes first in its body. In the
    first iteration it waits for what was started before the loop, which therefore has a Done at the same position.
    """

    collective: Collective


@dataclasses.dataclass(frozen=True)
class Loop:
    """`body`, run `trips` times; counted once where the number depends on data and is not `known`."""

    trips: int
    known: bool
    body: tuple["Event", ...]


Event = Work | Start | Done | Loop


@dataclasses.dataclass(frozen=True)
class Totals:
    """FLOPs by dtype, and HBM bytes, of all the work."""

    flops: dict[str, float]
    hbm_bytes: float


def with_runs(events: Iterable[Event], runs: int = 1) -> Iterator[tuple[Work | Start | Done, int]]:
    """The events and those in their loops, in order, with how often the loops around each run it."""
    for event in events:
        if isinstance(event, Loop):
            yield from with_runs(event.body, runs * event.trips)
        else:
            yield event, runs


def collectives(events: Iterable[Event]) -> Iterator[Collective]:
    """The collectives of `events`, in order; `count` says how often the loops around one run it."""
    return (event.collective for event, _ in with_runs(events) if isinstance(event, Start))


def again_by_xla(work: Work) -> bool:
    """Whether XLA itself runs it a second time to save memory: it names such instructions `.remat`."""
    return ".remat" in work.name


def again(work: Work) -> bool:
    """Whether it runs a second time: by XLA, or by `jax.checkpoint`, whose name stack says so."""
    return again_by_xla(work) or "rematted_computation" in work.op_name


def totals(events: Iterable[Event], *, of: Callable[[Work], bool] = lambda work: True) -> Totals:
    """The work of `events`, or that `of` which something holds; that of a loop times its trips."""
    flops: Counter[str] = Counter()
    hbm_bytes = 0.0
    for event, runs in with_runs(events):
        if isinstance(event, Work) and of(event):
            flops.update({dtype: runs * amount for dtype, amount in event.flops.items()})
            hbm_bytes += runs * event.hbm_bytes
    return Totals(dict(flops), hbm_bytes)


def opaque_calls(events: Iterable[Event]) -> Iterator[Work]:
    """The custom calls of `events` whose FLOPs are not known, in order; once for a loop."""
    return (event for event, _ in with_runs(events) if isinstance(event, Work) and event.opaque)


class _Clock:
    """Work so far, as (FLOPs, HBM bytes), and how much of it each collective spans."""

    def __init__(self):
        self.now = (0.0, 0.0)
        self.order: list[Collective] = []
        self.started: dict[int, tuple[float, float]] = {}
        self.early: dict[int, tuple[float, float]] = {}
        self.spans: dict[int, tuple[float, float]] = {}

    def since(self, then: tuple[float, float]) -> tuple[float, float]:
        return self.now[0] - then[0], self.now[1] - then[1]

    def run(self, events: Iterable[Event]) -> None:
        body_start, first = self.now, len(self.order)
        for event in events:
            if isinstance(event, Work):
                self.now = self.now[0] + sum(event.flops.values()), self.now[1] + event.hbm_bytes
            elif isinstance(event, Start):
                self.order.append(event.collective)
                self.started[id(event.collective)] = self.now
            elif isinstance(event, Done):
                which = id(event.collective)
                if which not in self.started:
                    self.early.setdefault(which, self.since(body_start))
                elif which not in self.spans:
                    self.spans[which] = self.since(self.started[which])
            else:
                before = self.now
                self.run(event.body)
                once = self.since(before)
                self.now = before[0] + event.trips * once[0], before[1] + event.trips * once[1]
        for which in map(id, self.order[first:]):  # started in this body, and waited for in the next iteration
            if which in self.early and which not in self.spans:
                tail = self.since(self.started[which])
                self.spans[which] = tail[0] + self.early[which][0], tail[1] + self.early[which][1]


def with_overlap(events: Iterable[Event]) -> tuple[Event, ...]:
    """`events`, with the work between start and done of each collective in its `overlapped_flops` and `_bytes`.

    Loops in between count their trips.
    """
    events, clock = tuple(events), _Clock()
    clock.run(events)
    updated: dict[int, Collective] = {}
    for collective in clock.order:
        flops, hbm_bytes = clock.spans.get(id(collective), (0.0, 0.0))
        updated[id(collective)] = dataclasses.replace(
            collective, overlapped_flops=flops, overlapped_bytes=hbm_bytes)

    def replaced(event: Event) -> Event:
        if isinstance(event, Loop):
            return dataclasses.replace(event, body=tuple(map(replaced, event.body)))
        if isinstance(event, Work):
            return event
        return dataclasses.replace(event, collective=updated.get(id(event.collective), event.collective))

    return tuple(map(replaced, events))
