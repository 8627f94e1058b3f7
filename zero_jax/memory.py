"""Where did all the memory go: the paper's section 3 for a train step, by formula, as placed and as compiled."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax

from zero_jax import accounting, residual
from zero_jax.accounting import ZERO_JAX, ZERO_JAX_FP32, ByteCounts
from zero_jax.layout import Layout, Placement
from zero_jax.residual import Held, Residual
from zero_jax.tree import path_name

PARAMETERS, MASTER, MOMENTUM, VARIANCE = "parameters", "master", "momentum", "variance"
OTHER_STATE, BATCH, PADDING = "other state", "batch", "padding"
FRAGMENTATION, METRICS, CODE, HOST = "fragmentation", "metrics", "generated code", "host memory"
TEMPORARIES = (residual.GRADIENTS, residual.ACTIVATIONS, residual.GATHERED, residual.OTHER, FRAGMENTATION)
STATE = (PARAMETERS, MASTER, residual.GRADIENTS, MOMENTUM, VARIANCE)
"""The model states of section 3.1."""

_MOMENTS = {"mu": MOMENTUM, "trace": MOMENTUM, "nu": VARIANCE}
_COUNTS = {"weights": PARAMETERS, "gradients": residual.GRADIENTS, "accumulator": residual.GRADIENTS,
           "master": MASTER, "momentum": MOMENTUM, "variance": VARIANCE, "gathered": residual.GATHERED}
_FIXED = {
    residual.GRADIENTS: "they live inside the step, among the temporaries",
    residual.ACTIVATIONS: "kept from forward to backward",
    residual.GATHERED: "whole parameters that are alive at the peak",
    FRAGMENTATION: "allocated, and not found alive at the peak",
    METRICS: "and what else is not updated in place",
}


@dataclasses.dataclass(frozen=True)
class Transformer:
    """What the paper's formula for activations takes; `batch` is one device's.

    remat: one checkpoint for each layer, and the rest computed again. element_bytes: of an activation. split: over how
    many devices each checkpoint is partitioned (P_a). host: checkpoints lie in the host's memory (P_a+cpu).
    """

    layers: int
    hidden: int
    heads: int
    batch: int
    length: int
    remat: bool = False
    element_bytes: int = 2
    split: int = 1
    host: bool = False

    @property
    def activations(self) -> dict[str, float]:
        """Bytes by each way to keep them (section 3.2, whose 8 GB for GPT-2 are the square root of 60).

        The last is that of Korthikanti et al. 2022, for fp16.
        """
        sizes = self.layers, self.hidden, self.batch, self.length
        everything = self.element_bytes * accounting.activation_elements(*sizes)
        return {
            "all": everything,
            "a checkpoint per layer": 0.0 if self.host else (
                self.element_bytes * accounting.checkpoint_elements(*sizes, model=self.split)),
            "a checkpoint every sqrt(layers), and as many layers": (
                self.element_bytes * accounting.sqrt_checkpoint_elements(*sizes)),
            "the square root of all in GB": 1e9 * math.sqrt(everything / 1e9),
            "all with attention scores": accounting.activation_bytes_exact(
                self.layers, self.hidden, self.heads, self.batch, self.length)}


@dataclasses.dataclass(frozen=True)
class Row:
    """Bytes per device of one thing; None where a column says nothing of it. `note`: why the columns differ."""

    name: str
    formula: float | None
    placed: int | None
    compiled: int | None
    note: str = ""


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """The table of a step, in bytes per device.

    held: what is alive when most temporaries are, the largest first. Its classes are the rows of `TEMPORARIES`, which
    with `FRAGMENTATION` add up to the compiler's temporaries.
    """

    title: str
    rows: tuple[Row, ...]
    held: tuple[Held, ...] = dataclasses.field(default=(), repr=False)

    def __getitem__(self, name: str) -> Row:
        return next(row for row in self.rows if row.name == name)

    @property
    def state(self) -> Row:
        """All but temporaries, code and host memory: what lies there between steps, and the batch."""
        return self._sum("state", lambda name: name not in (*TEMPORARIES, METRICS, CODE, HOST))

    @property
    def temporaries(self) -> Row:
        """What lives inside a step. The paper keeps gradients between backward and update, so by formula they are."""
        return self._sum("temporaries", lambda name: name in TEMPORARIES)

    @property
    def peak(self) -> Row:
        """All that a device must have."""
        return self._sum("peak", lambda name: name != HOST)

    def largest(self, count: int = 10) -> list[tuple[int, str, str, str]]:
        """What holds the memory at the peak: (bytes, class and shape, op_name, "file:line"), the largest first."""
        return [(each.bytes, f"{each.what}: {each.shape}", each.op_name, each.source) for each in self.held[:count]]

    def _sum(self, title: str, wanted: Any) -> Row:
        rows = [row for row in self.rows if wanted(row.name)]

        def total(column: str) -> Any:
            values = [value for row in rows if (value := getattr(row, column)) is not None]
            return sum(values) if values else None

        return Row(title, total("formula"), total("placed"), total("compiled"))


def formula_bytes(
    num_params: float, counts: ByteCounts, stage: int, num_shards: int, *, transformer: Transformer | None = None,
    model_ways: int = 1, largest_layer: float = 0, buffer_limit: float = 0
) -> dict[str, float]:
    """Row -> bytes per device by the paper's formulas, of another system with its `counts`.

    model_ways: the model-parallel degree. largest_layer: its parameters, where `counts` has a gathered layer.
    buffer_limit: of the fp32 buffer in which gradients are fused: 0 is none (this library's), math.inf is section
    3.2's, a number is C_B's.
    """
    found: dict[str, float] = {}
    parts = accounting.model_state_bytes(counts, stage, num_params, data=num_shards, model=model_ways,
                                         largest_layer=largest_layer)
    for part, size in parts.items():
        if getattr(counts, part):
            found[_COUNTS[part]] = found.get(_COUNTS[part], 0) + size
    if transformer:
        ways = transformer.activations
        found[residual.ACTIVATIONS] = ways["a checkpoint per layer" if transformer.remat else "all"]
    if buffer_limit:
        found[residual.OTHER] = accounting.fused_buffer_bytes(num_params / model_ways, limit=buffer_limit)
    return found


def memory_report(
    layout: Layout, compiled: Any = None, *, counts: ByteCounts | None = None, activations: Transformer | None = None,
    buffer_limit: float = 0
) -> MemoryReport:
    """Where the memory of a step goes, by formula, as placed and as compiled.

    Args:
      layout: `step.layout(batch)`.
      compiled: `step.compile(batch)`, for live or described devices; None leaves its column empty.
      counts: bytes per parameter of the formula. Default: this library's, of the layout's precision.
      activations: the model as the formula of activations takes it; None leaves that out.
      buffer_limit: as `formula_bytes` takes it.
    """
    psi = layout.num_params
    mixed = _mixed(layout)
    counts = counts or (ZERO_JAX if mixed else ZERO_JAX_FP32)
    formula = formula_bytes(psi, counts, layout.stage.number, layout.num_shards, transformer=activations,
                            model_ways=layout.model_ways, largest_layer=_largest_layer(layout),
                            buffer_limit=buffer_limit)
    placed = _placed(layout)
    found, program = _compiled(layout, compiled) if compiled is not None else ({}, None)
    order = (*STATE, *placed, BATCH, PADDING, residual.ACTIVATIONS, residual.GATHERED, residual.OTHER, FRAGMENTATION,
             METRICS, CODE, HOST)
    rows = [
        Row(name, formula.get(name), sum(row.device_bytes for row in placed[name]) if name in placed else None,
            found.get(name))
        for name in dict.fromkeys(order) if name in formula or name in placed or name in found]
    rows = tuple(
        dataclasses.replace(row, note=_note(layout, row, placed.get(row.name, ()), activations, program))
        for row in rows)
    return MemoryReport(
        f"Where the memory goes: stage {layout.stage.number} ({layout.stage.name}), psi = {psi:,} parameters, "
        f"N = {layout.num_shards} shards" + f", model parallelism {layout.model_ways}" * (layout.model_ways > 1)
        + "; bytes per device", rows, tuple(program.held) if program else ())


def _mixed(layout: Layout) -> bool:
    """Whether the model reads parameters in fewer bytes than they are stored in."""
    stored = jax.tree.leaves(layout.state.params)
    uses = jax.tree.leaves(layout.uses)
    return layout.state.weights is not None or max((leaf.dtype.itemsize for leaf in stored), default=0) > max(
        (use.dtype.itemsize for use in uses), default=math.inf)


def _largest_layer(layout: Layout) -> int:
    """Parameters of the largest module; of one layer where a loop runs over a stack of them."""
    sizes: dict[str, int] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(layout.state.params):
        name = path_name(path)
        stacked = layout.reads[name].stacked if name in layout.reads else ()
        module = path_name(path[:1])
        sizes[module] = sizes.get(module, 0) + leaf.size // math.prod(leaf.shape[dim] for dim in stacked)
    return max(sizes.values(), default=0)


def _placed(layout: Layout) -> dict[str, list[Placement]]:
    rows: dict[str, list[Placement]] = {}
    for row, kind in zip(layout.placements(), _kinds(layout), strict=True):
        rows.setdefault(kind, []).append(row)
    return rows


def _kinds(layout: Layout) -> list[str]:
    """The row of each leaf of the state, in tree order."""
    mixed = _mixed(layout)
    params = {path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(layout.state.params)}

    def kind(row: Placement) -> str:
        tree, _, rest = row.name.partition("/")
        if tree == "params":
            return MASTER if mixed else PARAMETERS
        if tree == "weights":
            return PARAMETERS
        if tree == "opt_state":
            parts = rest.split("/")
            for start in range(1, len(parts)):
                if "/".join(parts[start:]) in params:
                    return _MOMENTS.get(parts[start - 1], f"optimizer ({parts[start - 1]})")
        return OTHER_STATE

    return [kind(row) for row in layout.placements()]


def _compiled(layout: Layout, compiled: Any) -> tuple[dict[str, int], Residual | None]:
    """Row -> bytes of the compiled step, and what it holds at its peak."""
    memory = compiled.memory_analysis()
    if memory is None:
        return {}, None
    found = Residual(compiled.as_text())
    kinds = {"state" + jax.tree_util.keystr(path): kind for (path, _), kind in zip(
        jax.tree_util.tree_leaves_with_path(layout.state), _kinds(layout), strict=True)}
    rows = dict.fromkeys([*kinds.values(), BATCH], 0)
    for name, size in found.buffers.arguments().items():
        rows[kinds.get(name, BATCH)] += size
    rows[PADDING] = memory.argument_size_in_bytes - sum(rows.values())
    rows |= dict.fromkeys(TEMPORARIES, 0)
    for each in found.held:
        rows[each.what] += each.bytes
    # The walk's errors are in it: measured on H100, 0.3 % at most of what the compiler's own simulation finds alive.
    rows[FRAGMENTATION] = memory.temp_size_in_bytes - sum(each.bytes for each in found.held)
    rows[METRICS] = memory.output_size_in_bytes - memory.alias_size_in_bytes
    rows[CODE] = memory.generated_code_size_in_bytes
    rows[HOST] = (memory.host_argument_size_in_bytes + memory.host_output_size_in_bytes
                  - memory.host_alias_size_in_bytes + memory.host_temp_size_in_bytes)
    return rows, found


def _note(layout: Layout, row: Row, placements: Sequence[Placement], transformer: Transformer | None,
          found: Residual | None) -> str:
    """Why the columns of `row` differ, in a few words."""
    parts = [_FIXED.get(row.name, "")]
    if row.name in (PARAMETERS, MASTER, MOMENTUM, VARIANCE) and row.placed is None:
        gathered = row.name == PARAMETERS and layout.stage.shards_params
        parts += ["not stored: gathered from the master, where it is used" if gathered else "not stored"]
    if row.name == residual.ACTIVATIONS and transformer:
        ways = (f"{name} {size / 1e9:.3g}" for name, size in transformer.activations.items())
        parts += ["GB by formula: " + ", ".join(ways)]
    if row.formula is not None and row.placed is not None:
        whole = [each for each in placements if each.note.startswith("replicated")]
        extra = sum(each.device_bytes - each.bytes / layout.num_shards / layout.model_ways for each in whole)
        padded = sum(each.padding / each.stored_bytes * each.device_bytes for each in placements if each.padding)
        if whole:
            largest = max(whole, key=lambda each: each.device_bytes)
            parts += [f"{len(whole)} leaves do not divide by {layout.num_shards}: +{extra:,.0f} ({largest.name}, ...)"]
        if padded:
            parts += [f"{sum(each.padding > 0 for each in placements)} leaves are padded to divide: +{padded:,.0f}"]
        if layout.model_ways > 1:
            parts += ["what no rule splits over tensor is in it whole"]
        elif abs(row.placed - row.formula - extra - padded) >= 1:
            parts += ["stored as " + ", ".join(sorted({each.dtype for each in placements}))]
    if row.compiled is not None and row.placed is not None and row.compiled < row.placed:
        parts += ["the step does not take all of it"]
    if row.name == PADDING and row.compiled:
        parts += ["tiles and alignment of arguments"]
    if found and row.name in TEMPORARIES:
        if first := next((each for each in found.held if each.what == row.name), None):
            parts += [f"largest: {first.shape}"]
        if row.name == residual.OTHER and found.uses_chip:
            parts += ["what lies in memory on the chip is not counted"]
        if row.name == FRAGMENTATION and row.compiled is not None and row.compiled < 0:
            parts += ["the compiler shares more than is seen here"]
    return "; ".join(part for part in parts if part)
