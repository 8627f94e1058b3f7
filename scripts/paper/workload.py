"""A training step of a GPT by formula, as the events that zero_jax/xla/timing.py times; nothing is compiled."""

import dataclasses
import itertools

from arithmetic import megatron_step_flops

from zero_jax.planning.formulas import activation_bytes_exact
from zero_jax.stages import stage_of
from zero_jax.xla.collective import Collective
from zero_jax.xla.events import Done, Event, Loop, Start, Work
from zero_jax.xla.targets import Target
from zero_jax.xla.timing import Rates, Timing, predict

# The cluster of the ZeRO paper: DGX-2 of 16 V100. ring: its "12.5 GB/s per link (InfiniBand EDR)", sections 1 and 10.2.
# matmul: the one constant that is fitted, on one figure: 100B runs at 38 TFlops per GPU (section 10.2). It also stands
# for what `transformer_workload` leaves out. scripts/paper/throughput.py prints the errors.
DGX2_RATES = Rates(matmul=0.474, ring=12.5e9)


def device_coords(target: Target) -> list[tuple[int, ...]]:
    """Coordinates of all devices in order: GPUs host by host, chips of a torus axis by axis."""
    if target.chip.tpu:
        return list(itertools.product(*map(range, target.dims), range(target.chip.tpu.devices_per_chip)))
    return [(number // target.dims[1], number) for number in range(target.num_devices)]


@dataclasses.dataclass(frozen=True)
class Workload:
    """A step by formula. Devices of a tensor-parallel group are neighbours; ZeRO shards across the groups."""

    events: tuple[Event, ...]
    devices: int
    tokens: float
    model_flops: float

    def predict(self, target: Target, rates: Rates | None = None) -> Timing:
        """Predicted time on the first `devices` of `target`."""
        return predict(self.events, target, device_coords(target)[: self.devices], tokens=self.tokens,
                       model_flops=self.model_flops, rates=rates)


def transformer_workload(
    *, layers: int, hidden: int, heads: int, batch: int, length: int, vocab: int, data: int, stage: int,
    tensor: int = 1, recompute: bool = True, split_checkpoints: bool = False, overlap: bool = True
) -> Workload:
    """A step of a GPT with ZeRO over `data` groups and Megatron's tensor parallelism in each, in 16 bits.

    FLOPs are `megatron_step_flops`. Matrix products run after their memory traffic, not beside it: with M rows
    (batch x length) of K in and N out, split over `tensor`, a product reaches x / (x + x0) of its rate, where
    x = 1 / (1/M + 1/K + 1/N) and x0 is the chip's FLOP/s over its bytes/s. Elementwise kernels write and read each
    activation once in every pass. Adam moves 28 bytes for each parameter that a device updates.

    Args:
        layers: blocks.
        hidden: width; the feed-forward layer has 4 times as much.
        heads: of attention.
        batch: sequences for each tensor-parallel group.
        length: tokens of a sequence.
        vocab: size of the vocabulary.
        data: data-parallel degree, over which ZeRO shards.
        tensor: tensor-parallel degree; two blocking all-reduces in each pass over a block.
        stage: ZeRO's. Gradients are reduced during the next block's backward; parameters are gathered after the
            update (1 and 2), or one block ahead of their use (3).
        recompute: every block's forward again in backward.
        split_checkpoints: P_a: a block's checkpoint is gathered over the tensor-parallel group before that.
        overlap: whether ZeRO's collectives overlap with the work.
    """
    rows, row, words = batch * length, stage_of(stage), vocab / tensor
    ranks, across = tuple(range(tensor)), tuple(range(0, data * tensor, tensor))
    block, embedding = 12 * hidden**2 / tensor, (vocab + length) * hidden / tensor  # parameters of a device
    everything = layers * block + embedding
    flops = (24 * rows * hidden**2 + 4 * rows * length * hidden) / tensor  # of a block's forward
    sides = ((hidden, 3 * hidden), (hidden, hidden), (hidden, 4 * hidden), (hidden, 4 * hidden))  # whole, split
    moved = 2 * activation_bytes_exact(1, hidden, heads, batch, length, model=tensor)
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
    useful = data * (megatron_step_flops(layers, hidden, batch, length, vocab) - layers * tensor * flops)
    return Workload(events, data * tensor, data * rows, useful)


def _blocks(
    layers: int, work: tuple[Event, ...], gather: tuple[Event, ...], reduce: tuple[Event, ...], overlap: bool
) -> tuple[Event, ...]:
    """A pass over all blocks; `gather` runs one block ahead and `reduce` one behind, or both without overlap."""
    if not overlap:
        return (Loop(layers, True, (*gather, *work, *reduce)),)
    fetch, fetched, body = gather[:1], gather[1:], (*work, *reduce[::-1])
    return (*fetch, Loop(layers - 1, True, (*fetched, *fetch, *body)), *fetched, *body, *reduce[1:])


def _work(flops: float, hbm_bytes: float) -> tuple[Event, ...]:
    """FLOPs, and then bytes: one after the other."""
    return tuple(Work("", "", "", {"bf16": amount} if amount else {}, moved)
                 for amount, moved in ((flops, 0.0), (0.0, hbm_bytes)) if amount or moved)


def _collective(kind: str, payload_bytes: float, group: tuple[int, ...]) -> tuple[Event, ...]:
    """Start and done of a collective; nothing in a group of one."""
    if len(group) < 2:
        return ()
    collective = Collective(
        kind=kind, shapes=(), payload_bytes=round(payload_bytes), group=group, count=1, count_known=True, in_loop=False,
        asynchronous=True, computation="", name="", op_name="", source="")
    return Start(collective), Done(collective)
