"""What a run prints and draws: the bytes of its state, its progress, and its loss curve."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich import box
from rich.console import Console
from rich.table import Table

from zero_jax.cli.reports.measures import Measures
from zero_jax.layout.layout import Layout, Placement
from zero_jax.planning.memory import TEMPORARIES, MemoryReport, Row
from zero_jax.tree import leaf_bytes

PLAIN: dict[str, Any] = {
    "box": box.SIMPLE_HEAD, "title_justify": "left", "pad_edge": False, "collapse_padding": True}
"""The style of a table, which holds at 100 columns."""


def make_console(width: int = 100) -> Console:
    """Standard output; `width` columns wide where it is no terminal: the command line's tables hold at 100."""
    return Console(width=None if sys.stdout.isatty() else width, highlight=False, markup=False, emoji=False)


def size_text(num_bytes: float) -> str:
    """A number of bytes with a binary unit.

    >>> size_text(938_000), size_text(3 << 30)
    ('916.0 KiB', '3.0 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def formulas(layout: Layout) -> dict[str, tuple[str, float]]:
    """For params, weights, opt_state and ema: bytes per device by the stage's formula, as text and number.

    P is the number of trained parameters and N that of shards; masters and Adam's two moments have the dtype in which
    parameters are stored. In fp32 the sum of the first three is `Stage.state_bytes`. Slices that train by themselves
    have outer parameters and momentum beside, sharded at every stage.
    """
    stage, weights = layout.stage, layout.state.weights
    stored, read, average = (max((leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)), default=0)
                             for tree in (layout.state.params, weights, layout.state.ema))
    terms = {"params": (stored, stage.shards_params or (weights is not None and stage.shards_optimizer)),
             "opt_state": (2 * stored, stage.shards_optimizer)}
    if weights is not None:
        terms["weights"] = (read, stage.shards_params)
    if layout.state.ema is not None:
        terms["ema"] = (average, stage.shards_optimizer)
    sizes = {kind: (f"{size} P" + ("/N" if split else ""),
                    size * layout.num_params / (layout.num_shards if split else 1))
             for kind, (size, split) in terms.items()}
    if layout.one_slice is not None:
        (text, value), outer = sizes["opt_state"], 2 * max(4, stored)
        sizes["opt_state"] = f"{text} + {outer} P/N", value + outer * layout.num_params / layout.num_shards
    return sizes


def state_table(layout: Layout) -> Table:
    """The bytes of the state: a row for each top-level module of the model, with the formula beside it."""
    rows, expected = layout.placements(), formulas(layout)
    table = Table(
        title=f"State by module: stage {layout.stage.number} ({layout.stage.name}), "
              f"P = {layout.num_params:,} parameters, N = {layout.num_shards} shards",
        **PLAIN)
    for name in ("state", "leaves", "largest", "dtype", "split dim", "per device", "by formula"):
        table.add_column(name, justify="left" if name in ("state", "largest", "dtype") else "right",
                         no_wrap=name != "largest")
    kinds: dict[str, dict[str, list[Placement]]] = {}
    params = [row.name.partition("/")[2] for row in rows if row.name.startswith("params/")]
    for row in rows:
        kind, label = _group(row.name, params)
        kinds.setdefault(kind, {}).setdefault(label, []).append(row)
    for kind, groups in kinds.items():
        members = [row for group in groups.values() for row in group]
        text, value = expected.get(kind, ("", 0.0))
        table.add_row(f"{kind}: {text}" if text else kind, str(len(members)), "", "", "", _bytes(members),
                      f"{value:,.0f}" if text else "", style="bold")
        for label, group in groups.items():
            if label:
                table.add_row(f"  {label}", str(len(group)), *_summary(group), _bytes(group), "")
    table.add_section()
    total = sum(value for _, value in expected.values())
    table.add_row("all", str(len(rows)), "", "", "", _bytes(rows), f"{total:,.0f}", style="bold")
    return table


def replicated_text(layout: Layout) -> str:
    """The leaves that are replicated although the stage shards their kind, by name."""
    rows = layout.replicated()
    names = ", ".join(row.name for row in rows[:8]) + (", ..." if len(rows) > 8 else "")
    return f"Replicated, since they could not be sharded: {len(rows)} leaves" + (
        f" ({size_text(sum(row.bytes for row in rows))}): {names}" if rows else "")


def optimizer_bytes(layout: Layout) -> tuple[int, int]:
    """Bytes of optimizer state on each device, and those that AdamW in fp32 would take there."""
    state_bytes = sum(row.device_bytes for row in layout.placements() if row.name.startswith("opt_state"))
    shards = jax.tree.map(lambda leaf, like: like.shard_shape(leaf.shape), layout.state.params, layout.gradients)
    shards = jax.tree.leaves(shards, is_leaf=lambda shape: isinstance(shape, tuple))
    return state_bytes, 4 + sum(2 * leaf_bytes(shape, jnp.float32) for shape in shards)  # its count, mu and nu


def optimizer_text(layout: Layout) -> str:
    """What the optimizer stores on each device, and how much less than AdamW in fp32, in a line."""
    state_bytes, adamw_bytes = optimizer_bytes(layout)
    difference = f"{abs(adamw_bytes - state_bytes):,} {'fewer' if state_bytes < adamw_bytes else 'more'} than"
    return (f"optimizer state: {state_bytes:,} bytes on each device, "
            f"{difference if state_bytes != adamw_bytes else 'as'} AdamW in fp32 ({adamw_bytes:,})")


def memory_text(analysis: Any) -> str:
    """The memory of the compiled step on each device, from `Compiled.memory_analysis()`."""
    if analysis is None:
        return "Compiled step: this backend does not report its memory."
    parts = {"arguments": "argument_size_in_bytes", "temporaries": "temp_size_in_bytes",
             "outputs": "output_size_in_bytes", "of them aliased to arguments": "alias_size_in_bytes"}
    return "Compiled step, per device: " + ", ".join(
        f"{size_text(getattr(analysis, field))} {name}" for name, field in parts.items())


def draw_curves(
    path: Path, *, title: str, unit: str, train: Sequence[tuple[int, float]], validation: Sequence[tuple[int, float]],
    baselines: Mapping[str, float]
) -> None:
    """A PNG of loss, in `unit`, over steps; each baseline is a horizontal line."""
    from matplotlib.figure import Figure  # slow to import, and needed once

    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    axes = figure.add_subplot(title=title, xlabel="step", ylabel=f"loss, {unit}")
    axes.plot(*zip(*train, strict=True), linewidth=0.8, alpha=0.7, label="training")
    if validation:
        axes.plot(*zip(*validation, strict=True), marker="o", label=f"validation: {validation[-1][1]:.3f}")
    for name, loss in baselines.items():
        axes.axhline(loss, linestyle="--", color="gray", label=f"{name}: {loss:.3f}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)


def summary_table(summary: Mapping[str, Any], measures: Measures) -> Table:
    """The summary of a run, from the fields of `train.Summary`."""
    def loss(value: float | None) -> str:
        return "none" if value is None else f"{value:.3f} {measures.unit}"

    table = Table(box=box.SIMPLE_HEAD, show_header=False)
    evaluation = summary["evaluation"]
    table.add_row("validation loss", loss(evaluation.get("validation_loss")), style="bold")
    for name, value in summary["baselines"].items():
        table.add_row(f"{name}'s", loss(value))
    for label, value in measures.shown(evaluation, "validation_").items():
        table.add_row(label, value)
    table.add_row("training loss", loss(summary["loss"]))
    if summary["steps_taken"]:
        table.add_row("speed", f"{summary['items_per_second']:,.0f} {measures.items}/s")
        if text := step_time_text(summary):
            table.add_row("time of a step", text)
    table.add_row(f"peak memory{whose_memory(summary)}", size_text(summary["peak_bytes"]))
    table.add_row("time", f"{summary['seconds']:.0f} s for {steps_text(summary)}"
                  + (", interrupted" if summary["interrupted"] else ", preempted" if summary["preempted"] else ""))
    files = (summary["log"], summary["curve"], summary["report"])
    table.add_row("written", ", ".join(path for path in files if path))
    return table


def step_time_text(summary: Mapping[str, Any]) -> str:
    """The median time of a step beside the predicted one; empty where none is predicted.

    >>> step_time_text({"step_seconds": 0.125, "predicted_seconds": 0.1})
    '125 ms measured (median), 100 ms predicted: 1.25 times that'
    """
    measured, predicted = summary["step_seconds"], summary["predicted_seconds"]
    if not measured or not predicted:
        return ""
    return (f"{1e3 * measured:.3g} ms measured (median), {1e3 * predicted:.3g} ms predicted: "
            f"{measured / predicted:.3g} times that")


def steps_text(summary: Mapping[str, Any]) -> str:
    """The steps that the process took, of those of the run where it was resumed."""
    taken, steps = summary["steps_taken"], summary["steps"]
    return f"{taken:,} steps" if taken >= steps else f"{taken:,} of {steps:,} steps"


def whose_memory(summary: Mapping[str, Any]) -> str:
    """Whose peak memory that of a run is: a device's, or the process's where devices are simulated."""
    return " of the process" if summary["simulated"] else " of a device"


def process_bytes() -> int:
    """Peak resident memory of this process so far; 0 where the system does not report it."""
    try:
        import resource  # not on Windows
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def peak_bytes(devices: Sequence[Any]) -> int:
    """Peak memory on any of `devices` so far; of this process where they are simulated."""
    return device_bytes(devices) or process_bytes()


def device_bytes(devices: Sequence[Any]) -> int:
    """Peak memory on any of `devices` so far, as they report it; 0 where they report nothing, as simulated ones."""
    return max(((device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in devices), default=0)


def _group(name: str, params: Sequence[str]) -> tuple[str, str]:
    """(kind, label) of a leaf: opt_state/1/0/mu/blocks/qkv/kernel belongs to opt_state, "mu: blocks"."""
    kind, _, rest = name.partition("/")
    if kind in ("params", "weights", "frozen", "ema", "variables"):
        return kind, rest.partition("/")[0]
    if kind == "opt_state":
        for param in params:
            if rest.endswith("/" + param):
                moment = rest.removesuffix("/" + param).rpartition("/")[2]
                return kind, f"{moment}: {param.partition('/')[0]}"
        return kind, "counts and rates"
    return "step, guard and rng", ""


def _bytes(rows: Sequence[Placement]) -> str:
    return f"{sum(row.device_bytes for row in rows):,}"


def _summary(rows: Sequence[Placement]) -> tuple[str, str, str]:
    """Shape and dtype of the largest leaf, and the dims that are sharded ("1 or 2": leaves differ)."""
    largest = max(rows, key=lambda row: row.bytes)
    dims = {str(dim) if len(row.stored) == len(row.shape) else "merged"
            for row in rows for dim, axis in enumerate(row.spec) if axis}
    replicated = {"none" for row in rows if not any(row.spec)}
    return " x ".join(map(str, largest.shape)) or "scalar", largest.dtype, " or ".join(sorted(dims | replicated))


GB = 1e9


def memory_table(report: MemoryReport) -> Table:
    """By formula, as stored and as compiled, in GB of 1e9 bytes as in the paper."""
    table = Table(title=report.title, **PLAIN)
    for name in ("GB = 1e9 bytes", "by formula", "as placed", "as compiled", "note"):
        left = name in ("GB = 1e9 bytes", "note")
        table.add_column(name, justify="left" if left else "right", no_wrap=name != "note")
    inside = [row for row in report.rows if row.name in TEMPORARIES]
    for row in (row for row in report.rows if row not in inside):
        _add(table, row)
    table.add_section()
    for row in inside:
        _add(table, row)
    table.add_section()
    for row in (report.state, report.temporaries, report.peak):
        _add(table, row, style="bold")
    return table


def largest_table(report: MemoryReport, count: int = 10) -> Table:
    """The largest buffers that are live at the peak, with the source line that each comes from."""
    table = Table(title="Largest temporaries at the peak", **PLAIN)
    for name in ("GB", "what", "operation", "source"):
        table.add_column(name, justify="right" if name == "GB" else "left", no_wrap=name == "GB",
                         overflow="fold")
    for size, what, op_name, source in report.largest(count):
        table.add_row(_text(size), what, "/".join(op_name.split("/")[-3:]), "/".join(source.split("/")[-2:]))
    return table


def _add(table: Table, row: Row, style: str | None = None) -> None:
    table.add_row(row.name, _text(row.formula), _text(row.placed), _text(row.compiled), row.note, style=style)


def _text(size: float | None) -> str:
    return "" if size is None else f"{size / GB:.3f}" if size >= GB / 1e3 or not size else f"{size / GB:.6f}"
