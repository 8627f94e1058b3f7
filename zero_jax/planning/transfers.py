"""Time that a step spends on moving state between host memory or files and the device, from its compiled program.

The update moves all that is stored there with next to no compute beside it: its time is exposed whole. On TPUs the link
carries both directions at once, held to the host's memory bandwidth, and what loops read an iteration ahead (of
parameters, and the checkpoints that they write and read) is copied beside the forward and backward pass; the rest is
waited for. On GPUs copy engines do so too, where the program has them (`xla.host_copies`: jax 0.11.2, without gradients
in host memory), but that both directions of the update are counted one after the other: on an H100 a third of it was at
a time. Else kernels read and write host memory, which ran one after another there, and beside nothing: steps took
longer by the sum of both directions, to 5 % (docs/results.md, "On one GPU"). ZeRO-Infinity (arXiv 2104.07857, section
4) bounds all of this by arithmetic intensity over bandwidth; here the bytes are those of the program.

States in files are read and written between compiled programs: nothing else of the step runs meanwhile.
"""

import dataclasses
import math
from collections.abc import Iterable

from zero_jax.contract.host import HostBudget, HostUse, bytes_ahead, bytes_of
from zero_jax.layout.layout import update_bytes_of
from zero_jax.offload.disk_leaves import DiskTraffic
from zero_jax.step.compiled import CompiledStep
from zero_jax.xla.chip import Chip
from zero_jax.xla.host_reads import HostRead, HostWrite
from zero_jax.xla.targets import Target
from zero_jax.xla.timing import Timing

REACHED = 0.8
"""Share of the link's and the host memory's rates that copies reach; CUDA's bandwidthTest has 0.8 to 0.85 of PCIe, and
`scripts/bench/gpu.py` 0.77 to 0.8 on an H100."""

COPY_SECONDS = 10e-6
"""What a copy takes beside its bytes, however few they are (cudaMemcpyAsync of a kilobyte from pinned memory)."""

ENGINE_BANDWIDTH = 4e9
"""Bytes/s that one process reads and writes, with checksums and copies, where the disk is no limit: 4.09e9 on two cores
with files in memory (`python scripts/bench/disk.py engine --folder /dev/shm --gib 1`); on more cores not measured."""


@dataclasses.dataclass(frozen=True)
class Transfers:
    """Bytes of one device in a step, and seconds. up: from host memory or disk; down: to it.

    Attributes:
        place: "host" or "disk".
        gradients_down: gradients that are written before the update, and are taken to be waited for. update_up has what
            comes back.
        gradients_up: sums over microbatches that backward reads to add to them, and is taken to wait for, too.
        checkpoints: activations that forward writes into host memory, and backward reads.
        params_up: parameters that forward and backward read.
        params_ahead: those of them that loops read an iteration ahead.
        update_up, update_down: what the update reads and writes.
        seconds: in which the link is busy.
        exposed_seconds: of these, in which nothing else runs.
    """

    params_up: int
    params_ahead: int
    update_up: int
    update_down: int
    seconds: float
    exposed_seconds: float
    place: str = "host"
    gradients_down: int = 0
    gradients_up: int = 0
    checkpoints: int = 0


def transfers_of(compiled: CompiledStep, chip: Chip, timing: Timing) -> Transfers | None:
    """What a compiled step moves; None where nothing is offloaded, or nothing is known of the chip's host.

    timing: of the step without its transfers.
    """
    budget, use = compiled.contract.host, compiled.host_use
    if budget is None or use is None or not chip.host_link_bandwidth:
        return None
    rows = compiled.layout.placements()
    update_up, update_down = update_bytes_of(rows)
    gradient_reads, sum_reads, writes = (
        (use.gradient_reads, use.stack_reads, use.writes) if budget.gradients else ([], [], ()))
    gradients_down, gradients_up = bytes_of(writes), bytes_of(sum_reads)
    update_up += bytes_of(gradient_reads)
    reads = use.param_reads(budget) if budget.param_bytes else []
    params_ahead = bytes_ahead(reads)
    # Where there is no copy for the model, the update reads the same arrays.
    params_up = max(params_ahead, bytes_of(reads) - (0 if budget.has_copy else budget.param_bytes))
    # Each is written once, and read once, the last one outside of the loops.
    stacks = use.stack_reads if budget.activations else []
    checkpoints = max(bytes_of(use.writes), bytes_of(stacks)) if budget.activations else 0
    ahead = _seconds(chip, params_ahead + checkpoints, checkpoints,
                     copies=2 * _runs(stacks) + _runs(read for read in reads if read.is_ahead))
    waited = _seconds(chip, params_up - params_ahead, 0, copies=_runs(read for read in reads if not read.is_ahead))
    # An iteration adds to what it read, and writes it: one after the other.
    sums = (_seconds(chip, 0, gradients_down, copies=_runs(writes))
            + _seconds(chip, gradients_up, 0, copies=_runs(sum_reads)))
    # At least one copy of each leaf up, and one down.
    update = _seconds(chip, update_up, update_down,
                      copies=2 * sum(row.memory == "host" for row in rows) + _runs(gradient_reads))
    hidden = min(ahead, timing.seconds) * _share_beside_compute(compiled, budget, use, chip)
    seconds = ahead + waited + update + sums
    return Transfers(params_up, params_ahead, update_up, update_down, seconds, seconds - hidden,
                     gradients_down=gradients_down, gradients_up=gradients_up, checkpoints=checkpoints)


def _runs(copies: Iterable[HostRead | HostWrite]) -> int:
    return sum(copy.runs for copy in copies)


def _share_beside_compute(compiled: CompiledStep, budget: HostBudget, use: HostUse, chip: Chip) -> float:
    """Of what is copied beside forward and backward: on GPUs, with engines, what iterations of loops read ahead."""
    if not chip.gpu:
        return 1.0
    if not any(each.walk for each in compiled.host_slices):
        return 0.0
    reads = use.stack_reads if budget.activations else []
    return bytes_ahead(reads) / bytes_of(reads) if reads else 1.0


def predicted_disk_rate(target: Target) -> float:
    """Bytes/s that a process of `target` is predicted to read and write together, as many; 0: not known."""
    chip = target.chip
    if not (chip.disk_read_bandwidth and chip.disk_write_bandwidth):
        return 0.0
    disk = 2 * REACHED / (1 / chip.disk_read_bandwidth + 1 / chip.disk_write_bandwidth)
    return min(disk * target.num_devices / target.num_hosts, ENGINE_BANDWIDTH)


def disk_transfers(traffic: DiskTraffic, target: Target, rate: float | None = None) -> Transfers | None:
    """What a step with files moves; None where the rates of the disks or of the host's link are not known.

    A disk that reads and writes takes the time of both; the link and the process's threads work beside it. States are
    moved when all else is done. rate: bytes/s that a process reads and writes together, measured, in the place of the
    disk's and the threads'.
    """
    chip, read, written = target.chip, traffic.read, traffic.written
    if not (chip.host_link_bandwidth and (rate or predicted_disk_rate(target))):
        return None
    of_process = (read + written) * target.num_devices / target.num_hosts / (rate or ENGINE_BANDWIDTH)
    disk = 0.0 if rate else (read / chip.disk_read_bandwidth + written / chip.disk_write_bandwidth) / REACHED
    link = max(read, written) / chip.host_link_bandwidth / REACHED  # copied by the driver, both ways at once
    seconds = max(disk, of_process, link, _memory_seconds(chip, read + written))
    return Transfers(0, 0, read, written, seconds, seconds, "disk")


def with_transfers(timing: Timing, transfers: Transfers | None) -> Timing:
    """`timing` with the exposed time of the transfers, by the name of their place."""
    if transfers is None:
        return timing
    seconds = timing.seconds + transfers.exposed_seconds
    share = timing.seconds / seconds if seconds else 1.0
    return dataclasses.replace(
        timing, seconds=seconds, spent={**timing.spent, transfers.place: transfers.exposed_seconds},
        communication_seconds={**timing.communication_seconds, transfers.place: transfers.seconds},
        tokens_per_second=timing.tokens_per_second * share, mfu=timing.mfu * share, hfu=timing.hfu * share,
        palm_mfu=None if timing.palm_mfu is None else timing.palm_mfu * share)


def _seconds(chip: Chip, up: int, down: int, *, copies: int) -> float:
    on_link = up + down if chip.gpu else max(up, down)
    link = on_link / chip.host_link_bandwidth / REACHED
    return max(link, _memory_seconds(chip, up + down)) + copies * COPY_SECONDS


def _memory_seconds(chip: Chip, size: int) -> float:
    return size / (chip.host_memory_bandwidth or math.inf) / REACHED
