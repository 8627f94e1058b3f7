"""Step time of a scheduled program on a described machine: what runs when on one device, and what it waits for.

Two engines: one computes, the other sends. Work takes the longer of its FLOPs over the chip's rate and its bytes over
the HBM's bandwidth. A collective takes its wire bytes over the bandwidth of the links that it crosses, and a latency;
it begins once those links are free, and runs beside the work until its `Done` waits for it.

Not in it: launches of kernels, tiles that a product does not fill, links that other devices' collectives share beyond
what `Target.link` counts, traffic to the host, and devices that differ.
"""

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from zero_jax import accounting
from zero_jax.hlo_collective import Collective
from zero_jax.hlo_events import Done, Event, Loop, Start, Work, totals
from zero_jax.stages import stage_of
from zero_jax.targets import Target

# Seconds to begin a collective, and for each hop of its ring. GPU: NCCL's own model (src/graph/tuning.cc, ring, LL:
# small messages; large ones hide it). TPU: about 1 us a hop (the JAX scaling book, part 2).
BEGIN = {"cuda": 6.6e-6, "tpu": 1e-6}
HOP = {"nvlink": 0.6e-6, "network": 2.7e-6, "ici": 1e-6, "die": 1e-6}
_PASSES = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1}  # around the ring; others go one hop


@dataclasses.dataclass(frozen=True)
class Rates:
    """Which part of the chip's figures a program reaches. The defaults are typical of large arrays, and not fitted.

    Attributes:
        matmul: of the peak FLOP/s: cuBLAS on large bf16 products has 0.7 to 0.8 on H100, A100 and V100.
        hbm: of the HBM's bandwidth: a copy has 0.85 to 0.9.
        wire: of the links' bandwidth: nccl-tests report 0.8 of NVLink (all-reduce, DGX-2 and DGX H100).
        ring: most that a group that crosses hosts gets of the network, in bytes/s; inf: all that `Target.link` gives.
    """

    matmul: float = 0.75
    hbm: float = 0.85
    wire: float = 0.8
    ring: float = math.inf


# The machine of the ZeRO paper. ring: its "12.5 GB/s per link (InfiniBand EDR)", sections 1 and 10.2. matmul: the one
# constant fitted, on one figure: 100B runs at 38 TFlops per GPU (section 10.2). It also stands for what
# `transformer_workload` leaves out. scripts/paper_throughput.py has the errors.
PAPER = Rates(matmul=0.474, ring=12.5e9)


@dataclasses.dataclass(frozen=True)
class Timing:
    """A predicted step. Seconds are of one device; `spent` adds up to `seconds`.

    Attributes:
        seconds: the step.
        compute_seconds: its FLOPs alone, at the rates reached.
        hbm_seconds: its HBM traffic alone.
        wire_seconds: its collectives alone, by link: nvlink, network, die, or ici and its axes: "ici x", "ici xy".
        spent: the step by what it went into: compute, memory (work that HBM bounds), and links (waits for them).
        tokens_per_second: of all devices.
        mfu: the model's FLOPs over the peak's.
        hfu: the FLOPs of the program, recomputation included, over the peak's.
    """

    seconds: float
    compute_seconds: float
    hbm_seconds: float
    wire_seconds: Mapping[str, float]
    spent: Mapping[str, float]
    tokens_per_second: float
    mfu: float
    hfu: float

    @property
    def exposed_seconds(self) -> dict[str, float]:
        """Waits for collectives, by link."""
        return {link: self.spent[link] for link in self.wire_seconds}

    @property
    def bound(self) -> str:
        """What most of the step goes into: "compute", "memory", or a link's name."""
        return max(self.spent, key=lambda name: self.spent[name])


def predict(
    events: Iterable[Event], target: Target, coords: Sequence[tuple[int, ...]], *, tokens: float, model_flops: float,
    rates: Rates | None = None
) -> Timing:
    """The time of one run of `events` on every device of `coords`.

    Of a loop two iterations are run, and the others take what the second did.

    Args:
        events: `zero_jax.hlo_schedule.schedule(text)`, or those of a `Workload`.
        target: the machine.
        coords: where each partition is: `[hardware.coords(d) for d in mesh.devices.flat]`.
        tokens: of a step, on all devices.
        model_flops: of a step, on all devices, without recomputation.
        rates: default: `Rates()`.
    """
    events, peak = tuple(events), target.chip.peak_flops["bf16"]
    device = _Device(target, coords, rates or Rates())
    device.run(events)
    clock, seconds = device.clock, device.clock["now"]
    wire, spent = ({key[1]: value for key, value in clock.items() if key[0] == kind} for kind in ("wire", "spent"))
    each = 1 / seconds if seconds else 0.0
    return Timing(
        seconds=seconds, compute_seconds=clock["flops"], hbm_seconds=clock["bytes"], wire_seconds=wire,
        spent=dict.fromkeys(("compute", "memory", *wire), 0.0) | spent, tokens_per_second=tokens * each,
        mfu=model_flops * each / len(coords) / peak, hfu=sum(totals(events).flops.values()) * each / peak)


@dataclasses.dataclass(frozen=True)
class _Route:
    """How a group's collectives go: the link they are reported under, the links they keep busy, and how fast."""

    name: str
    lanes: tuple[str, ...]
    bandwidth: float
    once_around: float  # seconds of latency
    hop: float


class _Device:
    """One device's engines; all that changes is in `clock`, so that a loop can be extrapolated as a whole."""

    def __init__(self, target: Target, coords: Sequence[tuple[int, ...]], rates: Rates):
        self.target, self.coords, self.rates = target, coords, rates
        self.clock: defaultdict[Any, float] = defaultdict(float)
        self.routes: dict[tuple[int, ...], _Route] = {}

    def run(self, events: Iterable[Event]) -> None:
        kinds: dict[type, Callable[[Any], None]] = {
            Work: self.work, Start: self.start, Done: self.wait, Loop: self.loop}
        for event in events:
            kinds[type(event)](event)

    def work(self, work: Work) -> None:
        chip, clock, peak = self.target.chip, self.clock, self.target.chip.peak_flops
        named = (("f8" if dtype.startswith("f8") else dtype, flops) for dtype, flops in work.flops.items())
        compute = sum(flops / (peak.get(dtype, peak["f32"]) * self.rates.matmul) for dtype, flops in named)
        memory = work.hbm_bytes / (chip.memory_bandwidth * self.rates.hbm)
        clock["flops"] += compute
        clock["bytes"] += memory
        clock["spent", "memory" if memory > compute else "compute"] += max(compute, memory)
        clock["now"] += max(compute, memory)

    def start(self, event: Start) -> None:
        collective = event.collective
        if not collective.wire_bytes:
            return
        if collective.group not in self.routes:
            self.routes[collective.group] = self.route([self.coords[each] for each in collective.group])
        route, clock = self.routes[collective.group], self.clock
        around = _PASSES.get(collective.kind, 0) * route.once_around
        latency = BEGIN[self.target.chip.platform] + (around or route.hop)
        seconds = latency + collective.wire_bytes / route.bandwidth
        end = seconds + max(clock["now"], *(clock["free", lane] for lane in route.lanes))
        clock["wire", route.name] += seconds
        clock["end", id(collective)] = end
        for lane in route.lanes:
            clock["free", lane] = end

    def wait(self, event: Done) -> None:
        clock, key = self.clock, ("end", id(event.collective))
        if key in clock and clock[key] > clock["now"]:
            clock["spent", self.routes[event.collective.group].name] += clock[key] - clock["now"]
            clock["now"] = clock[key]

    def loop(self, loop: Loop) -> None:
        for _ in range(min(2, loop.trips)):
            before = dict(self.clock)
            self.run(loop.body)
        for key, value in self.clock.items() if loop.trips > 2 else ():
            self.clock[key] = value + (loop.trips - 2) * (value - before.get(key, 0.0))

    def route(self, group: Sequence[tuple[int, ...]]) -> _Route:
        """Lanes are links that one collective has at a time: an axis of the torus, NVLink, the network."""
        link, wire = self.target.link(group), self.rates.wire
        if self.target.chip.gpu:
            crossed = len({host // self.target.chip.gpu.nvlink_hosts for host, _ in group}) - 1
            around = crossed * HOP["network"] + (len(group) - 1 - crossed) * HOP["nvlink"]
            bandwidth = min(link.bandwidth, self.rates.ring) if crossed else link.bandwidth
            return _Route(link.name, (link.name,), bandwidth * wire, around, HOP[link.name])
        sizes = [len(set(along)) for along in zip(*(coord[:-1] for coord in group), strict=True)]
        axes = "".join(axis for axis, size in zip("xyz", sizes, strict=False) if size > 1)
        lanes = tuple(f"{link.name} {axis}" for axis in axes) or (link.name,)
        around, name = (sum(sizes) - len(sizes)) * HOP[link.name], f"{link.name} {axes}".rstrip()
        return _Route(name, lanes, link.bandwidth * wire, around, HOP[link.name])


def places(target: Target) -> list[tuple[int, ...]]:
    """Coordinates of all devices in order, for what is not compiled: GPUs host by host, chips axis by axis."""
    if target.chip.tpu:
        return list(itertools.product(*map(range, target.dims), range(target.chip.tpu.devices_per_chip)))
    return [(number // target.dims[1], number) for number in range(target.num_devices)]


@dataclasses.dataclass(frozen=True)
class Workload:
    """A step by formula, for what is not compiled here. Tensor-parallel groups are neighbours, ZeRO goes across."""

    events: tuple[Event, ...]
    devices: int
    tokens: float
    model_flops: float

    def predict(self, target: Target, rates: Rates | None = None) -> Timing:
        """Its time on the first `devices` of `target`."""
        return predict(self.events, target, places(target)[: self.devices], tokens=self.tokens,
                       model_flops=self.model_flops, rates=rates)


def transformer_workload(
    *, layers: int, hidden: int, heads: int, batch: int, length: int, vocab: int, data: int, stage: int,
    tensor: int = 1, recompute: bool = True, split_checkpoints: bool = False, overlap: bool = True
) -> Workload:
    """A step of a GPT with ZeRO over `data` groups and Megatron's tensor parallelism in each, in 16 bits.

    FLOPs are `accounting.megatron_step_flops`. Products run after their memory traffic, and not beside it: with M rows
    (batch x length) of K in and N out, split over `tensor`, a product reaches x / (x + x0) of its rate, where
    x = 1 / (1/M + 1/K + 1/N) and x0 is the chip's FLOP/s over its bytes/s. Elementwise kernels write and read each
    activation once in every pass. Adam moves 28 bytes for each parameter that a device updates.

    Args:
        layers: blocks.
        hidden: width; the feed-forward layer has 4 times as much.
        heads: of attention.
        batch: sequences for each tensor-parallel group.
        length: tokens of a sequence.
        vocab: words.
        data: data-parallel degree, over which ZeRO shards.
        tensor: tensor-parallel degree; two all-reduces in each of a block's passes, which block.
        stage: ZeRO's. Gradients are reduced behind the next block's backward; parameters are gathered after the update
            (1 and 2), or one block ahead of their use (3).
        recompute: every block's forward again in backward.
        split_checkpoints: P_a: a block's checkpoint is gathered over the tensor-parallel group before that.
        overlap: whether ZeRO's collectives run beside the work.
    """
    rows, row, words = batch * length, stage_of(stage), vocab / tensor
    ranks, across = tuple(range(tensor)), tuple(range(0, data * tensor, tensor))
    block, embedding = 12 * hidden**2 / tensor, (vocab + length) * hidden / tensor  # parameters of a device
    everything = layers * block + embedding
    flops = (24 * rows * hidden**2 + 4 * rows * length * hidden) / tensor  # of a block's forward
    sides = ((hidden, 3 * hidden), (hidden, hidden), (hidden, 4 * hidden), (hidden, 4 * hidden))  # whole, split
    moved = 2 * accounting.activation_bytes_exact(1, hidden, heads, batch, length, model=tensor)
    moved += sum(2 * (rows * (whole + split / tensor) + whole * split / tensor) for whole, split in sides)
    reduces = 2 * _collective("all-reduce", 2 * rows * hidden, ranks)
    forward, backward = _work(flops, moved) + reduces, _work(2 * flops, 2 * moved) + reduces
    if recompute:
        checkpoint = _collective("all-gather", 2 * rows * hidden, ranks) if split_checkpoints else ()
        backward = checkpoint + forward + backward
    head = _work(6 * rows * hidden * words, 6 * (rows * (hidden + words) + hidden * words))

    def gather(params: float, *, when: bool) -> tuple[Event, ...]:
        return _collective("all-gather", 2 * params, across) if when else ()

    def reduce(params: float) -> tuple[Event, ...]:
        return _collective("reduce-scatter" if row.shards_optimizer else "all-reduce", 2 * params, across)

    table, fetch = (gather(size, when=row.shards_params) for size in (embedding, block))
    events = (
        *table, *_blocks(layers, forward, fetch, (), overlap), *table, *head,
        *_blocks(layers, backward, fetch, reduce(block), overlap), *reduce(embedding),
        *_work(0, 28 * everything / (data if row.shards_optimizer else 1)),
        *gather(everything, when=row.shards_optimizer and not row.shards_params))
    useful = data * (accounting.megatron_step_flops(layers, hidden, batch, length, vocab) - layers * tensor * flops)
    return Workload(events, data * tensor, data * rows, useful)


def _blocks(
    layers: int, work: tuple[Event, ...], gather: tuple[Event, ...], reduce: tuple[Event, ...], overlap: bool
) -> tuple[Event, ...]:
    """A pass over all blocks; `gather` runs one block ahead and `reduce` one behind, or both in line."""
    if not overlap:
        return (Loop(layers, True, (*gather, *work, *reduce)),)
    fetch, fetched, body = gather[:1], gather[1:], (*work, *reduce[::-1])
    return (*fetch, Loop(layers - 1, True, (*fetched, *fetch, *body)), *fetched, *body, *reduce[1:])


def _work(flops: float, hbm_bytes: float) -> tuple[Event, ...]:
    """FLOPs, and then bytes: one after the other."""
    return tuple(Work("", "", "", {"bf16": amount} if amount else {}, moved)
                 for amount, moved in ((flops, 0.0), (0.0, hbm_bytes)) if amount or moved)


def _collective(kind: str, payload_bytes: float, group: tuple[int, ...]) -> tuple[Event, ...]:
    """Its start and its done; nothing in a group of one."""
    if len(group) < 2:
        return ()
    found = Collective(
        kind=kind, shapes=(), payload_bytes=round(payload_bytes), group=group, count=1, count_known=True, in_loop=False,
        asynchronous=True, computation="", name="", op_name="", source="")
    return Start(found), Done(found)
