"""Whether what is offloaded is in host memory, once, and updated in place there.

A compiler may copy a stack of layers within host memory in every iteration of a loop, or keep a second one, and compute
the right numbers: only the program shows it.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from zero_jax.layout.layout import Layout
from zero_jax.offload.host_update import STREAM_SCOPE
from zero_jax.offload.tpu_tiles import padded
from zero_jax.transforms.host_gradients import GRADIENT_SCOPE
from zero_jax.tree import leaf_bytes, named_leaves
from zero_jax.xla.host_reads import HostRead, HostWrite, copied_bytes, host_reads, host_writes
from zero_jax.xla.parser import Module

TOLERANCE = 0.001
"""Share by which the arguments in host memory may exceed the layout's."""

READ_TOLERANCE = 0.05
"""Share by which what is read of parameters may exceed the promise."""

MIN_AHEAD = 0.25
"""Share of what loops read of parameters that comes up an iteration ahead, at least, and of checkpoints likewise: none
does without XLA's pipelining, mostly all with it."""

TILES = (" A parameter that the model reads whole comes up in parts, and is not copied, with tiling={its name: number "
         "of tiles}.")
"""What to do about copies of parameters within host memory."""


@dataclasses.dataclass(frozen=True)
class HostBudget:
    """What a step may keep in the host's memory, for each device.

    state_bytes: of the state. activations: whether checkpoints are kept there, too, for the backward pass.
    padding, gradient_padding: bytes by which a TPU's tiles may exceed those of the state, and of `gradients`.
    param_bytes: of the parameters that the model reads from there; num_gathers: in how many microbatches. has_copy:
        whether the update does not read these, since it has master weights of its own. ahead: whether each layer is to
        come up an iteration before its use, and each checkpoint: on GPUs; XLA:TPU decides by itself. gradients: bytes
        of each stack of gradients that backward writes there, once in each of so many microbatches, whose sum it is.
    """

    state_bytes: int
    activations: bool = False
    padding: int = 0
    param_bytes: int = 0
    num_gathers: int = 1
    has_copy: bool = True
    ahead: bool = True
    gradients: tuple[int, ...] = ()
    microbatches: int = 1
    gradient_padding: int = 0

    @property
    def read_bytes(self) -> int:
        """Bytes of parameters that may come up in a step: forward, backward, and for an update that reads them."""
        return self.param_bytes * (2 * self.num_gathers + (not self.has_copy))

    @property
    def gradients_down(self) -> int:
        """Bytes of gradients that backward writes in a step."""
        return sum(self.gradients) * self.microbatches

    @property
    def gradients_up(self) -> int:
        """Bytes of sums over microbatches that backward reads, to add to them."""
        return self.gradients_down if self.microbatches > 1 else 0


@dataclasses.dataclass(frozen=True)
class HostUse:
    """What a compiled step keeps in the host's memory, for each device, in bytes.

    copies: (bytes, name, in_loop) of each copy from host memory to host memory. reads: from there to the device's.
    writes: of parts of arrays there that are no inputs of the step.
    """

    argument_bytes: int
    alias_bytes: int
    temporary_bytes: int
    copies: tuple[tuple[int, str, bool], ...] = ()
    reads: tuple[HostRead, ...] = ()
    writes: tuple[HostWrite, ...] = ()

    def param_reads(self, budget: HostBudget) -> list[HostRead]:
        """Those of the parameters that the model reads."""
        fields = ("weights" if budget.has_copy else "params", "frozen")
        return [read for read in self.reads if read.field in fields]

    @property
    def stack_reads(self) -> list[HostRead]:
        """Those of what loops keep in stacks, which are no input of the step: checkpoints, or sums of gradients.

        XLA:TPU takes the first iteration out of a loop, where the scope tells the reads of sums from those of the
        update.
        """
        return [read for read in self.reads if read.is_slice and not read.source and (
            GRADIENT_SCOPE in read.op_name or read.in_loop and STREAM_SCOPE not in read.op_name)]

    @property
    def gradient_reads(self) -> list[HostRead]:
        """Those of gradients that backward wrote there, by the update."""
        return [read for read in self.reads if not read.source and GRADIENT_SCOPE not in read.op_name
                and (STREAM_SCOPE in read.op_name or not read.in_loop)]


def host_budget(layout: Layout, *, activations: bool, num_gathers: int = 1) -> HostBudget | None:
    """The budget of a layout; None where nothing is offloaded, or the backend counts host memory as the device's."""
    if layout.axes.platform == "cpu" or not (layout.host or activations):
        return None
    padding, gradient_padding = _tile_padding(layout) if layout.axes.is_tpu else (0, 0)
    return HostBudget(layout.host_bytes, activations, padding,
                      layout.host_param_bytes, num_gathers, layout.state.weights is not None,
                      ahead=not layout.axes.is_tpu, gradients=tuple(layout.host_gradients.values()),
                      microbatches=layout.microbatches, gradient_padding=gradient_padding)


def host_use(module: Module, memory: Any) -> HostUse | None:
    """What a compiled program keeps in host memory; None where the backend does not tell."""
    if memory is None:
        return None
    return HostUse(memory.host_argument_size_in_bytes, memory.host_alias_size_in_bytes,
                   memory.host_temp_size_in_bytes, tuple(_copies(module)), tuple(host_reads(module)),
                   tuple(host_writes(module)))


def host_violations(budget: HostBudget | None, use: HostUse | None) -> Iterator[str]:
    """A line for each way in which a program keeps more in host memory than the state, or less."""
    if budget is None or use is None:
        return
    if not budget.state_bytes <= use.argument_bytes <= (1 + TOLERANCE) * budget.state_bytes + budget.padding:
        yield (f"{use.argument_bytes:,} bytes of the step's arguments are in host memory on each device, "
               f"{budget.state_bytes:,} of the state should be: the compiler dropped or moved their memory kind.")
    if use.alias_bytes < use.argument_bytes:
        yield (f"{use.argument_bytes - use.alias_bytes:,} bytes of the state in host memory are not updated in place, "
               "so that host memory holds them twice: look for a leaf whose new value has another shape or dtype.")
    gradient_bytes = sum(budget.gradients)
    if use.temporary_bytes > (1 + TOLERANCE) * gradient_bytes + budget.gradient_padding and not budget.activations:
        largest = f" ({max(use.copies)[1]} copies {max(use.copies)[0]:,} bytes)" if use.copies else ""
        yield (f"{use.temporary_bytes - gradient_bytes:,} bytes of temporaries are in host memory"
               f"{' beside the gradients' * bool(gradient_bytes)}: a second copy of what is updated "
               f"in place{largest}.{TILES * bool(budget.param_bytes and use.copies)}")
    missing = collections.Counter(budget.gradients) - collections.Counter(write.stack_bytes for write in use.writes)
    if missing or use.temporary_bytes < gradient_bytes:
        left = sum(size * count for size, count in missing.items()) or gradient_bytes - use.temporary_bytes
        yield (f"{left:,} bytes of gradients, of {gradient_bytes:,} that backward should write to host memory, are not "
               "there: they are stacked in device memory until the update.")
    elif budget.gradients:
        yield from _gradient_violations(budget, use)
    if in_loops := [copy for copy in use.copies if copy[2]]:
        yield (f"{len(in_loops)} copies within host memory are in loops, of {max(in_loops)[0]:,} bytes in each "
               f"iteration ({max(in_loops)[1]}): whole stacks are copied where a block should be written.")
    if budget.param_bytes:
        yield from _param_violations(budget, use)
    total, ahead = bytes_of(use.stack_reads), bytes_ahead(use.stack_reads)
    if budget.activations and budget.ahead and ahead < MIN_AHEAD * total:
        yield (f"Of {total:,} bytes of checkpoints that backward reads from host memory, {ahead:,} come up an "
               "iteration ahead: the others are waited for in the iteration that uses them.")


def _gradient_violations(budget: HostBudget, use: HostUse) -> Iterator[str]:
    """A line each for gradients that are written, and sums that are read, more or less often than once a microbatch."""
    # A checkpoint's writes are of the same kind; a step has not both.
    down, up = bytes_of(use.writes), bytes_of(use.stack_reads)
    of = f"of {sum(budget.gradients):,} bytes in {budget.microbatches} microbatches"
    if abs(down - budget.gradients_down) > TOLERANCE * budget.gradients_down:
        yield (f"{down:,} bytes of gradients are written to host memory by backward in a step, "
               f"{budget.gradients_down:,} should be, {of}: a layer is written more than once, or not at all.")
    if abs(up - budget.gradients_up) > TOLERANCE * budget.gradients_up:
        yield (f"{up:,} bytes of gradients are read from host memory by backward in a step, {budget.gradients_up:,} "
               f"should be, {of}: whole stacks are read where a layer should be, or sums of microbatches are lost.")
    if whole := [read for read in use.reads if not (read.is_slice or read.source) and (
            read.bytes >= min(budget.gradients))]:
        yield (f"{bytes_of(whole):,} bytes of gradients in host memory are brought up whole by {whole[0].name} and so "
               "on, where the update should read blocks: the device has all of a stack.")


def _param_violations(budget: HostBudget, use: HostUse) -> Iterator[str]:
    """A line each for parameters that come up too often, and for layers that are waited for."""
    reads = use.param_reads(budget)
    total = bytes_of(reads)
    if total > (1 + READ_TOLERANCE) * budget.read_bytes:
        most = max(reads, key=lambda read: read.bytes * read.runs)
        yield (f"{total:,} bytes of parameters come up from host memory in a step, {budget.read_bytes:,} should: "
               f"{most.source or most.name} is read {most.runs} times, {most.bytes:,} bytes each: a parameter that is "
               "read whole within a loop.")
    layers = [read for read in reads if read.in_loop and read.is_slice]
    in_loops, ahead = bytes_of(layers), bytes_ahead(layers)
    in_update = 0 if budget.has_copy else budget.param_bytes
    if budget.ahead and ahead < MIN_AHEAD * (in_loops - in_update):
        yield (f"Of {in_loops:,} bytes of parameters that loops read from host memory, {ahead:,} come up an "
               "iteration ahead: the others are waited for in the iteration that uses them.")


def bytes_of(reads: Iterable[HostRead | HostWrite]) -> int:
    """What they copy in a step."""
    return sum(read.bytes * read.runs for read in reads)


def bytes_ahead(reads: Iterable[HostRead]) -> int:
    """What those of them copy that come up an iteration ahead."""
    return bytes_of(read for read in reads if read.is_ahead)


def _tile_padding(layout: Layout) -> tuple[int, int]:
    """What tiles may add to the shards of the state in host memory, and to those of gradients there.

    Of the state in the worse order of the last two dims, of gradients in the better one, which backward gives them.
    """
    def added(shape: Sequence[int], worst: Callable[..., int]) -> float:
        """As a share of the elements."""
        rows, columns = (1, 1, *shape)[-2:]
        return worst(padded(rows, columns), padded(columns, rows)) / (rows * columns) - 1

    def padding(name: str, leaf: Any) -> int:
        shape = leaf.sharding.shard_shape(leaf.shape)
        return round(added(shape, max) * leaf_bytes(shape, leaf.dtype)) if name in layout.host else 0

    shapes = {name: leaf.shape for name, leaf in named_leaves(layout.state.params)}
    gradients = [layout.host_gradients[name] * added(sharding.shard_shape(shapes[name]), min)
                 for name, sharding in named_leaves(layout.gradients) if name in layout.host_gradients]
    return sum(padding(*pair) for pair in named_leaves(layout.state)), round(sum(gradients))


def _copies(module: Module) -> Iterator[tuple[int, str, bool]]:
    for frame, instruction in module.walk():
        is_copy = instruction.opcode in ("copy", "copy-start")
        if is_copy and (size := copied_bytes(frame.computation, instruction, to_host=True)):
            yield size, instruction.name, any(caller.opcode == "while" for _, caller in frame.calls())
