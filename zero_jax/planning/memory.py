"""Memory of a train step by purpose (the paper's section 3): by formula, as placed and as compiled."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax

from zero_jax.layout.layout import Layout, Placement
from zero_jax.planning import formulas
from zero_jax.planning.formulas import ZERO_JAX, ZERO_JAX_FP32, ByteCounts
from zero_jax.planning.temporaries import ACTIVATIONS, GATHERED, GRADIENTS, OTHER, LiveBuffer, LiveTemporaries
from zero_jax.stages import stage_of
from zero_jax.step.compiled import CompiledStep
from zero_jax.tree import named_leaves

PARAMETERS, MASTER, MOMENTUM, VARIANCE = "parameters", "master", "momentum", "variance"
OTHER_STATE, BATCH, PADDING = "other state", "batch", "padding"
FRAGMENTATION, METRICS, CODE, HOST = "fragmentation", "metrics", "generated code", "host memory"
TEMPORARIES = (GRADIENTS, ACTIVATIONS, GATHERED, OTHER, FRAGMENTATION)
STATE = (PARAMETERS, MASTER, GRADIENTS, MOMENTUM, VARIANCE)
"""The model states of section 3.1."""

_MOMENTS = {"mu": MOMENTUM, "trace": MOMENTUM, "nu": VARIANCE}
_COUNTS = {"weights": PARAMETERS, "gradients": GRADIENTS, "accumulator": GRADIENTS,
           "master": MASTER, "momentum": MOMENTUM, "variance": VARIANCE, "gathered": GATHERED}
_FIXED = {
    GRADIENTS: "temporaries of the step, not state",
    ACTIVATIONS: "saved by forward for backward",
    GATHERED: "gathered parameters that are alive at the peak",
    FRAGMENTATION: "allocated, but not alive at the peak",
    METRICS: "and what else is not updated in place",
}
_AWAY = {"host": "in host memory", "disk": "in files"}


@dataclasses.dataclass(frozen=True)
class Transformer:
    """What the paper's formula for activations takes; `batch` is one device's.

    remat: one checkpoint for each layer, and the rest computed again. element_bytes: of an activation. split: over how
    many devices each checkpoint is partitioned (P_a). host: checkpoints are offloaded to host memory (P_a+cpu).
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
        """Bytes by remat policy (section 3.2, whose 8 GB for GPT-2 are the square root of 60).

        The last is that of Korthikanti et al. 2022, for fp16.
        """
        sizes = self.layers, self.hidden, self.batch, self.length
        everything = self.element_bytes * formulas.activation_elements(*sizes)
        return {
            "all": everything,
            "a checkpoint per layer": 0.0 if self.host else (
                self.element_bytes * formulas.checkpoint_elements(*sizes, model=self.split)),
            "a checkpoint every sqrt(layers), and as many layers": (
                self.element_bytes * formulas.sqrt_checkpoint_elements(*sizes)),
            "the square root of all in GB": 1e9 * math.sqrt(everything / 1e9),
            "all with attention scores": formulas.activation_bytes_exact(
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

    live: temporaries that are alive at the peak, the largest first. Its classes are the rows of `TEMPORARIES`, which
    with `FRAGMENTATION` add up to the compiler's temporaries.
    """

    title: str
    rows: tuple[Row, ...]
    live: tuple[LiveBuffer, ...] = dataclasses.field(default=(), repr=False)

    def __getitem__(self, name: str) -> Row:
        return next(row for row in self.rows if row.name == name)

    @property
    def state(self) -> Row:
        """State between steps and the batch: all but temporaries, metrics, code and host memory."""
        return self._sum("state", lambda name: name not in (*TEMPORARIES, METRICS, CODE, HOST))

    @property
    def temporaries(self) -> Row:
        """What a step allocates and frees, by formula with the gradients that the paper stores until the update."""
        return self._sum("temporaries", lambda name: name in TEMPORARIES)

    @property
    def peak(self) -> Row:
        """The memory that a device must have."""
        return self._sum("peak", lambda name: name != HOST)

    def largest(self, count: int = 10) -> list[tuple[int, str, str, str]]:
        """The temporaries of the peak: (bytes, class and shape, op_name, "file:line"), the largest first."""
        return [(each.bytes, f"{each.what}: {each.shape}", each.op_name, each.source) for each in self.live[:count]]

    def _sum(self, title: str, wanted: Any) -> Row:
        rows = [row for row in self.rows if wanted(row.name)]

        def total(column: str) -> Any:
            values = [value for row in rows if (value := getattr(row, column)) is not None]
            return sum(values) if values else None

        return Row(title, total("formula"), total("placed"), total("compiled"))


def formula_bytes(
    num_params: float, counts: ByteCounts, stage: int, num_shards: int, *, transformer: Transformer | None = None,
    tensor_size: int = 1, largest_layer: float = 0, buffer_limit: float = 0
) -> dict[str, float]:
    """Row -> bytes per device by the paper's formulas, of another system with its `counts`.

    tensor_size: the model-parallel degree. largest_layer: its parameters, where `counts` has a gathered layer.
    buffer_limit: of the fp32 buffer in which gradients are fused: 0 is none (this library's), math.inf is section
    3.2's, a number is C_B's.
    """
    sizes: dict[str, float] = {}
    parts = formulas.model_state_bytes(counts, stage, num_params, data=num_shards, model=tensor_size,
                                       largest_layer=largest_layer)
    for part, size in parts.items():
        if getattr(counts, part):
            sizes[_COUNTS[part]] = sizes.get(_COUNTS[part], 0) + size
    if transformer:
        sizes[ACTIVATIONS] = transformer.activations["a checkpoint per layer" if transformer.remat else "all"]
    if buffer_limit:
        sizes[OTHER] = formulas.fused_buffer_bytes(num_params / tensor_size, limit=buffer_limit)
    return sizes


def memory_report(
    layout: Layout, compiled: CompiledStep | None = None, *, counts: ByteCounts | None = None,
    activations: Transformer | None = None, buffer_limit: float = 0
) -> MemoryReport:
    """Where the memory of a step goes, by formula, as placed and as compiled.

    Args:
      layout: `step.layout(batch)`.
      compiled: `step.compiled_step(batch)`, for live devices or a target; None leaves its column empty.
      counts: bytes per parameter of the formula. Default: this library's, of the layout's precision.
      activations: the model as the formula of activations takes it; None leaves that out.
      buffer_limit: as `formula_bytes` takes it.
    """
    num_params = layout.num_params
    mixed = _mixed(layout)
    counts = counts or (ZERO_JAX if mixed else ZERO_JAX_FP32)
    formula = formula_bytes(num_params, counts, layout.stage.number, layout.num_shards, transformer=activations,
                            tensor_size=layout.tensor_size, largest_layer=_largest_layer(layout),
                            buffer_limit=buffer_limit)
    placed = _placed(layout)
    measured, program = _compiled(layout, compiled) if compiled is not None else ({}, None)
    order = (*STATE, *placed, BATCH, PADDING, ACTIVATIONS, GATHERED, OTHER, FRAGMENTATION, METRICS, CODE, HOST)
    stored = {name: sum(each.device_bytes for each in some if each.memory == "device") for name, some in placed.items()}
    if layout.host_bytes:
        stored[HOST] = layout.host_bytes
    rows = [Row(name, formula.get(name), stored.get(name), measured.get(name))
            for name in dict.fromkeys(order) if name in formula or name in stored or name in measured]
    rows = tuple(
        dataclasses.replace(row, note=_note(layout, row, placed.get(row.name, ()), activations, program))
        for row in rows)
    return MemoryReport(
        f"Where the memory goes: stage {layout.stage.number} ({layout.stage.name}), {num_params:,} "
        f"{'trained ' * bool(layout.state.frozen)}parameters, {layout.num_shards} shards"
        + f", model parallelism {layout.tensor_size}" * (layout.tensor_size > 1)
        + "; bytes per device", rows, tuple(program.live) if program else ())


def model_states(layout: Layout, stage: int) -> dict[str, float]:
    """Bytes per device of the model states that a step of this layout would have at `stage`: the bars of Figure 1.

    By formula, as if every leaf divides, from the sizes of the leaves and of this optimizer's states, to which master
    weights count. Gradients are those of the whole model, as it reads it. What is offloaded counts 0.
    """
    row, mixed, rows, read = stage_of(stage), _mixed(layout), layout.placements(), layout.read_itemsize

    def stored(tree: str) -> float:
        return sum(each.bytes for each in rows if each.memory == "device" and each.name.partition("/")[0] == tree)

    params, shards = layout.num_params / layout.tensor_size, layout.num_shards
    master, optimizer = (stored(tree) / layout.tensor_size for tree in ("params", "opt_state"))
    copy = read * params * (not row.shards_params) if mixed else master
    frozen = (stored("frozen") + stored("variables")) / layout.tensor_size
    return {
        "parameters": (copy + frozen) / (shards if row.shards_params else 1),
        "gradients": read * params / (shards if row.shards_gradients else 1),
        "optimizer states": (optimizer + master * mixed) / (shards if row.shards_optimizer else 1)}


def _mixed(layout: Layout) -> bool:
    """Whether the model reads parameters in fewer bytes than they are stored in."""
    stored = jax.tree.leaves(layout.state.params)
    uses = jax.tree.leaves(layout.uses)
    return layout.state.weights is not None or max((leaf.dtype.itemsize for leaf in stored), default=0) > max(
        (use.dtype.itemsize for use in uses), default=math.inf)


def _largest_layer(layout: Layout) -> int:
    """Parameters of the largest module; of one layer where a loop runs over a stack of them."""
    sizes: dict[str, int] = {}
    for name, leaf in named_leaves(layout.state.params):
        stacked = layout.reads[name].stacked if name in layout.reads else ()
        module = name.partition("/")[0]
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
    params = dict(named_leaves(layout.state.params))

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


def _compiled(layout: Layout, compiled: CompiledStep) -> tuple[dict[str, int], LiveTemporaries | None]:
    """Row -> bytes of the compiled step, and its temporaries at the peak."""
    memory = compiled.memory
    if memory is None:
        return {}, None
    temporaries = LiveTemporaries(compiled.module)
    kinds = {"state" + jax.tree_util.keystr(path): kind for (path, _), kind in zip(
        jax.tree_util.tree_leaves_with_path(layout.state), _kinds(layout), strict=True)}
    rows = dict.fromkeys([*kinds.values(), BATCH], 0)
    for name, size in temporaries.buffers.arguments().items():
        rows[kinds.get(name, BATCH)] += size
    rows[PADDING] = memory.argument_size_in_bytes - sum(rows.values())
    rows |= dict.fromkeys(TEMPORARIES, 0)
    for each in temporaries.live:
        rows[each.what] += each.bytes
    # This includes the errors of our liveness walk: on H100 at most 0.3 % of what the compiler's own simulation counts.
    rows[FRAGMENTATION] = memory.temp_size_in_bytes - sum(each.bytes for each in temporaries.live)
    rows[METRICS] = memory.output_size_in_bytes - memory.alias_size_in_bytes
    rows[CODE] = memory.generated_code_size_in_bytes
    rows[HOST] = compiled.host_bytes
    return rows, temporaries


def _note(layout: Layout, row: Row, placements: Sequence[Placement], transformer: Transformer | None,
          temporaries: LiveTemporaries | None) -> str:
    """Why the columns of `row` differ, in a few words."""
    parts = [_FIXED.get(row.name, "")]
    if row.name in (PARAMETERS, MASTER, MOMENTUM, VARIANCE) and row.placed is None:
        gathered = row.name == PARAMETERS and layout.stage.shards_params
        parts += ["not stored: gathered from the master, where it is used" if gathered else "not stored"]
    if row.name == ACTIVATIONS and transformer:
        formulas_text = (f"{name} {size / 1e9:.3g}" for name, size in transformer.activations.items())
        parts += ["GB by formula: " + ", ".join(formulas_text)]
    for memory, name in _AWAY.items():
        if size := sum(each.device_bytes for each in placements if each.memory == memory):
            parts += [f"{size:,} {name}"]
    if row.formula is not None and row.placed is not None and all(each.memory == "device" for each in placements):
        replicated = [each for each in placements if each.note.startswith("replicated")]
        extra = sum(each.device_bytes - each.bytes / layout.num_shards / layout.tensor_size for each in replicated)
        padded = sum(each.padding / each.stored_bytes * each.device_bytes for each in placements if each.padding)
        if replicated:
            largest = max(replicated, key=lambda each: each.device_bytes)
            parts += [f"{len(replicated)} leaves do not divide by {layout.num_shards}: +{extra:,.0f} "
                      f"({largest.name}, ...)"]
        if padded:
            parts += [f"{sum(each.padding > 0 for each in placements)} leaves are padded to divide: +{padded:,.0f}"]
        if layout.tensor_size > 1:
            parts += ["includes leaves that no rule splits over tensor"]
        elif abs(row.placed - row.formula - extra - padded) >= 1:
            parts += ["stored as " + ", ".join(sorted({each.dtype for each in placements}))]
    if row.compiled is not None and row.placed is not None and row.compiled < row.placed:
        parts += ["the step does not read all of it"]
    if row.name == PADDING and row.compiled:
        parts += ["tiles and alignment of arguments"]
    if temporaries and row.name in TEMPORARIES:
        if first := next((each for each in temporaries.live if each.what == row.name), None):
            parts += [f"largest: {first.shape}"]
        if row.name == OTHER and temporaries.uses_chip:
            parts += ["on-chip memory is not counted"]
        if row.name == FRAGMENTATION and row.compiled is not None and row.compiled < 0:
            parts += ["the compiler shares more than is seen here"]
    return "; ".join(part for part in parts if part)
