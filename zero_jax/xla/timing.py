"""Step time of a scheduled program on a target topology: what runs when on one device, and what it waits for.

Two engines: one computes, the other sends. Work takes a launch and the longer of its FLOPs over the chip's rate and its
bytes over the HBM's bandwidth, as far as `Rates` says that they are reached. A collective takes a latency and its bytes
over the bandwidth of the links that it crosses; it starts once those links are free, and overlaps with work until its
`Done` waits for it.

Not modelled: tiles that a matrix product does not fill, contention on links beyond what `Target.link`
counts, traffic to the host, and devices that differ.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from zero_jax.xla.chip import Rates
from zero_jax.xla.collective import Collective
from zero_jax.xla.events import Done, Event, Loop, Start, Work, again_by_xla, opaque_calls, totals
from zero_jax.xla.targets import Target

# Seconds to start a collective, and for each hop of its ring. GPU: NCCL's own model (src/graph/tuning.cc, ring, LL:
# small messages; large ones hide it). TPU: about 1 us a hop (the JAX scaling book, part 2).
START_SECONDS = {"cuda": 6.6e-6, "tpu": 1e-6}
HOP_SECONDS = {"nvlink": 0.6e-6, "network": 2.7e-6, "ici": 1e-6, "die": 1e-6}
_PASSES = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1}  # times around the ring; others go one hop


@dataclasses.dataclass(frozen=True)
class Timing:
    """A predicted step. Seconds are of one device; `spent` sums to `seconds`.

    Attributes:
        seconds: the step.
        compute_seconds: its FLOPs alone, at the reached rates.
        hbm_seconds: its HBM traffic alone.
        communication_seconds: its collectives alone, by link: nvlink, network, die, or ici with its axes: "ici xy".
        spent: the step by what bounds it: compute, memory (work bound by HBM), launches (where the chip's rates
            have them), and links (waiting for them).
        tokens_per_second: of all devices.
        mfu: model FLOPs utilisation: the model's FLOPs over the peak's; of causal attention what the mask leaves.
        hfu: hardware FLOPs utilisation: those of the program, with recomputation, over the peak's.
        palm_mfu: MFU with PaLM's formula for the model's FLOPs, with all of attention; None where the model is not
            known as a transformer, or parts of it are frozen, whose gradients that formula counts.
        recomputed: the share of the program's FLOPs that XLA runs again to save memory, unasked.
        uncounted: custom calls whose FLOPs are in none of these, as "target (op_name)".
        collectives: of each collective, by its computation and its name, seconds alone and seconds exposed.
        band: what nine in ten published steps of the chip took over the predicted time; empty: not compared.
    """

    seconds: float
    compute_seconds: float
    hbm_seconds: float
    communication_seconds: Mapping[str, float]
    spent: Mapping[str, float]
    tokens_per_second: float
    mfu: float
    hfu: float
    palm_mfu: float | None = None
    recomputed: float = 0.0
    uncounted: tuple[str, ...] = ()
    collectives: Mapping[tuple[str, str], tuple[float, float]] = dataclasses.field(default_factory=dict, repr=False)
    band: tuple[float, ...] = ()

    @property
    def exposed_seconds(self) -> dict[str, float]:
        """Time spent waiting for collectives, by link."""
        return {link: self.spent[link] for link in self.communication_seconds}

    @property
    def useful(self) -> float:
        """The model's FLOPs over those of the program; below 1 by what is recomputed, repeated or masked."""
        return self.mfu / self.hfu if self.hfu else 0.0

    @property
    def bound(self) -> str:
        """What bounds most of the step: "compute", "memory", "launches", or a link's name."""
        return max(self.spent, key=lambda name: self.spent[name])


def predict(
    events: Iterable[Event], target: Target, coords: Sequence[tuple[int, ...]], *, tokens: float = 0.0,
    model_flops: float = 0.0, palm_flops: float | None = None, rates: Rates | None = None
) -> Timing:
    """Predicted time of one run of `events` on every device of `coords`.

    Two iterations of a loop are simulated; the others take the time of the second.

    Args:
        events: of the step, from `zero_jax.xla.schedule.schedule(text)`.
        target: the target topology.
        coords: of each partition: `[xla_devices.coords(d) for d in mesh.devices.flat]`.
        tokens: of a step, on all devices; without them its tokens per second are 0.
        model_flops: of a step, on all devices, without recomputation; without them MFU is 0.
        palm_flops: the same by PaLM's formula, if it is known.
        rates: default: those of the target's chip.
    """
    events, peak = tuple(events), target.chip.peak_flops["bf16"]
    program, again = (sum(each.flops.values()) for each in (totals(events), totals(events, of=again_by_xla)))
    device = _Device(target, coords, rates or target.chip.rates)
    device.run(events)
    clock, seconds = device.clock, device.clock["now"]
    links, spent = ({key[1]: value for key, value in clock.items() if key[0] == kind} for kind in ("link", "spent"))
    each = 1 / seconds if seconds else 0.0
    collectives = {key[1:]: (value, clock["exposed", *key[1:]]) for key, value in tuple(clock.items())
                   if key[0] == "alone"}
    uncounted = dict.fromkeys(f"{call.opaque} ({call.op_name or call.name})" for call in opaque_calls(events))
    return Timing(
        seconds=seconds, compute_seconds=clock["flops"], hbm_seconds=clock["bytes"], communication_seconds=links,
        spent=dict.fromkeys(("compute", "memory", *links), 0.0) | spent, tokens_per_second=tokens * each,
        mfu=model_flops * each / len(coords) / peak, hfu=program * each / peak,
        recomputed=again / program if program else 0.0,
        palm_mfu=None if palm_flops is None else palm_flops * each / len(coords) / peak, uncounted=tuple(uncounted),
        collectives=collectives, band=device.rates.band)


@dataclasses.dataclass(frozen=True)
class Span:
    """Something that one device does from `start` to `end`, in seconds of the step.

    Attributes:
        lane: "compute", "waiting" (nothing but communication runs), or the name of a link.
        start: its beginning.
        end: its end.
        event: the work, or the collective that is sent or waited for.
    """

    lane: str
    start: float
    end: float
    event: Work | Collective


def timeline(events: Iterable[Event], target: Target, coords: Sequence[tuple[int, ...]]) -> list[Span]:
    """What `predict` reckons with, in order; of a loop of more than `MAX_TRIPS` iterations the first two."""
    device = _Device(target, coords, target.chip.rates, MAX_TRIPS)
    device.run(events)
    return device.spans


def collective_seconds(target: Target, group: Sequence[tuple[int, ...]], kind: str) -> tuple[float, float]:
    """(Seconds of latency of a collective over the devices at `group`, bytes/s that each sends), as in `predict`."""
    route = _Device(target, group, target.chip.rates).route(group)
    return route.latency(kind), route.bandwidth


MAX_TRIPS = 1000
"""Iterations of a loop that a timeline has."""


@dataclasses.dataclass(frozen=True)
class _Route:
    """How a group's collectives are sent: the link that reports them, the links that they occupy, and their rates."""

    name: str
    lanes: tuple[str, ...]
    bandwidth: float
    start: float  # seconds of latency
    once_around: float
    hop: float

    def latency(self, kind: str) -> float:
        """Seconds of a collective of this kind beside those of its bytes."""
        return self.start + (_PASSES.get(kind, 0) * self.once_around or self.hop)


class _Device:
    """One device's engines. What a loop's iterations add up is in `clock`, which is extrapolated as a whole.

    exact_trips: up to so many iterations of a loop are run one by one, so that `spans` has them all.
    """

    def __init__(self, target: Target, coords: Sequence[tuple[int, ...]], rates: Rates, exact_trips: int = 2):
        self.target, self.coords, self.rates, self.exact_trips = target, coords, rates, exact_trips
        self.clock: defaultdict[Any, float] = defaultdict(float)
        self.routes: dict[tuple[int, ...], _Route] = {}
        self.spans: list[Span] = []

    def run(self, events: Iterable[Event]) -> None:
        kinds: dict[type, Callable[[Any], None]] = {
            Work: self.work, Start: self.start, Done: self.wait, Loop: self.loop}
        for event in events:
            kinds[type(event)](event)

    def work(self, work: Work) -> None:
        chip, clock, rates, peak = self.target.chip, self.clock, self.rates, self.target.chip.peak_flops
        named = (("f8" if dtype.startswith("f8") else dtype, flops) for dtype, flops in work.flops.items())
        compute = sum(flops / peak.get(dtype, peak["f32"]) / rates.of_peak(dtype, work.kernel, work.length)
                      for dtype, flops in named)
        memory = work.hbm_bytes / (chip.memory_bandwidth * rates.hbm)
        clock["flops"] += compute
        clock["bytes"] += memory
        busy = max(compute, memory)
        clock["spent", "memory" if memory > compute else "compute"] += busy
        if rates.launch:
            clock["spent", "launches"] += rates.launch
        self.spans.append(Span("compute", clock["now"], clock["now"] + busy, work))
        clock["now"] += busy + rates.launch

    def start(self, event: Start) -> None:
        collective = event.collective
        if not collective.communication_bytes:
            return
        if collective.group not in self.routes:
            self.routes[collective.group] = self.route([self.coords[each] for each in collective.group])
        route, clock = self.routes[collective.group], self.clock
        seconds = route.latency(collective.kind) + collective.communication_bytes / route.bandwidth
        end = seconds + max(clock["now"], *(clock["free", lane] for lane in route.lanes))
        clock["link", route.name] += seconds
        clock["alone", collective.computation, collective.name] += seconds
        self.spans.append(Span(route.name, end - seconds, end, collective))
        clock["end", id(collective)] = end
        for lane in route.lanes:
            clock["free", lane] = end

    def wait(self, event: Done) -> None:
        clock, key = self.clock, ("end", id(event.collective))
        if key in clock and clock[key] > clock["now"]:
            clock["spent", self.routes[event.collective.group].name] += clock[key] - clock["now"]
            clock["exposed", event.collective.computation, event.collective.name] += clock[key] - clock["now"]
            self.spans.append(Span("waiting", clock["now"], clock[key], event.collective))
            clock["now"] = clock[key]

    def loop(self, loop: Loop) -> None:
        runs = loop.trips if loop.trips <= self.exact_trips else 2
        for _ in range(runs):
            before = dict(self.clock)
            self.run(loop.body)
        for key, value in self.clock.items() if loop.trips > runs else ():
            self.clock[key] = value + (loop.trips - runs) * (value - before.get(key, 0.0))

    def route(self, group: Sequence[tuple[int, ...]]) -> _Route:
        """The route of `group`. A lane carries one collective at a time: an axis of the torus, NVLink, the network."""
        link, reached, start = self.target.link(group), self.rates.links, START_SECONDS[self.target.chip.platform]
        if self.target.chip.gpu:
            crossed = len({host // self.target.chip.gpu.nvlink_hosts for host, _ in group}) - 1
            around = crossed * HOP_SECONDS["network"] + (len(group) - 1 - crossed) * HOP_SECONDS["nvlink"]
            bandwidth = min(link.bandwidth, self.rates.ring) if crossed else link.bandwidth
            return _Route(link.name, (link.name,), bandwidth * reached, start, around, HOP_SECONDS[link.name])
        sizes = [len(set(along)) for along in zip(*(coord[:-1] for coord in group), strict=True)]
        axes = "".join(axis for axis, size in zip("xyz", sizes, strict=False) if size > 1)
        lanes = tuple(f"{link.name} {axis}" for axis in axes) or (link.name,)
        around, name = (sum(sizes) - len(sizes)) * HOP_SECONDS[link.name], f"{link.name} {axes}".rstrip()
        return _Route(name, lanes, link.bandwidth * reached, start, around, HOP_SECONDS[link.name])


@dataclasses.dataclass(frozen=True)
class OverlapEffect:
    """A step without and with overlap: each pair is (without, with), of one device.

    Attributes:
        exposed_seconds: predicted, in which nothing but communication runs.
        seconds: predicted, of the step.
        mfu: model FLOPs utilisation.
        temporaries: bytes.
    """

    exposed_seconds: tuple[float, float]
    seconds: tuple[float, float]
    mfu: tuple[float, float]
    temporaries: tuple[int, int]

    @classmethod
    def of(cls, timings: tuple[Timing, Timing], memories: tuple[Any, Any]) -> "OverlapEffect":
        """From the two predictions and the two `memory_analysis()`, without overlap first."""
        before, after = timings
        return cls((sum(before.exposed_seconds.values()), sum(after.exposed_seconds.values())),
                   (before.seconds, after.seconds), (before.mfu, after.mfu),
                   (memories[0].temp_size_in_bytes, memories[1].temp_size_in_bytes))
