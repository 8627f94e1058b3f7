"""A plan as people and programs read it: tables, JSON, and the paper's Figure 1 for any model."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table

from zero_jax.contract import Report
from zero_jax.memory_table import largest_table, memory_table
from zero_jax.optimizers import optimizer_bytes, optimizer_text
from zero_jax.planner import Plan
from zero_jax.report import replicated_text, size_text
from zero_jax.search import Found


def plan_tables(plan: Plan) -> RenderableType:
    """The whole answer: whether it fits, what holds the memory, what crosses which link, how long it takes."""
    parts: list[RenderableType] = [verdict(plan), replicated_text(plan.layout), optimizer_text(plan.layout)]
    if plan.memory is not None:
        parts += [memory_table(plan.memory), largest_table(plan.memory)]
    if plan.wire is not None:
        parts.append(wire_table(plan.wire))
    if plan.links:
        parts.append(_links_table(plan))
    if plan.timing is not None:
        parts.append(_timing_table(plan))
    if plan.advice:
        parts.append("What would help:\n" + "\n".join(f"  - {line}" for line in plan.advice))
    return Group(*parts)


def verdict(plan: Plan) -> str:
    """The answer in a sentence or two."""
    where = f"{plan.target.text}" if plan.target else "live devices"
    head = (f"Stage {plan.stage} on {where}: {plan.num_devices} devices, mesh "
            f"{' x '.join(f'{name} {size}' for name, size in plan.mesh.items())}, global batch {plan.batch_size}. ")
    if plan.memory_bytes is None:
        head += f"Needs {size_text(plan.needed_bytes)} on each device."
    elif plan.fits:
        head += (f"Fits: {size_text(plan.needed_bytes)} of {size_text(plan.memory_bytes)} on each device, "
                 f"{size_text(plan.free_bytes)} left.")
    else:
        state = plan.layout.device_bytes
        head += (f"Does not fit: {size_text(plan.needed_bytes)} needed of {size_text(plan.memory_bytes)} on each "
                 f"device, {size_text(-plan.free_bytes)} too much; {size_text(state)} of it are state, the rest the "
                 "batch and temporaries.")
    if plan.refused:
        head += f"\nThe compiler: {plan.refused}"
    if plan.target is not None and plan.target.chip.note:
        head += f"\nNote: {plan.target.chip.note}"
    return head


def wire_table(wire: Report) -> Table:
    """What a step sends for what, beside what its stage promises."""
    table = _table("What crosses the wire: bytes that each device sends per step", "purpose", "collectives", "over",
                   "sent", "promised", "asynchronous")
    for kept in wire.kept:
        overlapped = sum(c.wire_bytes * c.count for c in kept.collectives if c.asynchronous)
        table.add_row(kept.promise.purpose, ", ".join(sorted({c.kind for c in kept.collectives})),
                      " x ".join(kept.promise.axes), size_text(kept.wire_bytes), size_text(kept.promise.wire_bytes),
                      f"{overlapped / kept.wire_bytes:.0%}" if kept.wire_bytes else "")
        for note in kept.notes:
            table.add_row(f"  {note}")
    for line in wire.violations:
        table.add_row(f"BROKEN: {line}")
    return table


def found_table(found: Found) -> Table:
    """All that a search compiled, and what it chose."""
    table = _table(f"Search: {found.model}, size {found.size}" if found.plan else "Search: nothing fits", "stage",
                   "batch", "needed", "of", "", "compiled in")
    for plan in found.tried:
        table.add_row(str(plan.stage), str(plan.batch_size), size_text(plan.needed_bytes),
                      size_text(plan.memory_bytes or 0), "fits" if plan.fits else "does not fit",
                      f"{plan.compile_seconds:.0f} s", style="bold" if plan is found.plan else None)
    return table


def plan_json(plan: Plan) -> dict[str, Any]:
    """A plan as what JSON can hold; sizes in bytes per device, times in seconds."""
    wire = plan.wire and {
        "sent": plan.wire.wire_bytes, "promised": plan.wire.contract.wire_bytes, "violations": plan.wire.violations,
        "purposes": [{"purpose": kept.promise.purpose, "sent": kept.wire_bytes, "promised": kept.promise.wire_bytes,
                      "collectives": [_collective(c, plan.mesh) for c in kept.collectives]} for kept in plan.wire.kept]}
    return {
        "target": plan.target and plan.target.text, "note": plan.target.chip.note if plan.target else "",
        "stage": plan.stage, "devices": plan.num_devices, "mesh": dict(plan.mesh), "batch_size": plan.batch_size,
        "fits": plan.fits, "memory_bytes": plan.memory_bytes, "needed_bytes": plan.needed_bytes,
        "free_bytes": plan.free_bytes, "state_bytes": plan.layout.device_bytes, "host_bytes": plan.host_bytes,
        "refused": plan.refused, "advice": plan.advice, "compile_seconds": plan.compile_seconds, "wire": wire,
        "memory": plan.memory and [dataclasses.asdict(row) for row in plan.memory.rows],
        "links": [{"link": link, "axes": axes, "bytes": sent} for (link, axes), sent in plan.links.items()],
        "timing": plan.timing and dataclasses.asdict(plan.timing) | {"bound": plan.timing.bound},
        **dict(zip(("optimizer_bytes", "adamw_bytes"), optimizer_bytes(plan.layout), strict=True)),
        "replicated": [{"name": row.name, "bytes": row.bytes} for row in plan.layout.replicated()],
    }


def draw_stages(path: Path, plans: Sequence[Plan], title: str) -> None:
    """A PNG of each stage's memory per device, stacked as in the paper's Figure 1; GB are 1e9 bytes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import, and needed once
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(title=title, ylabel="GB per device", xlabel="stage")
    names = [f"{plan.stage}" + ("" if plan.fits else "\ndoes not fit") for plan in plans]
    bottom = [0.0] * len(plans)
    for kind in ("parameters", "optimizer states", "batch and temporaries"):
        heights = [held(plan)[kind] / 1e9 for plan in plans]
        axes.bar(names, heights, bottom=bottom, label=kind)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    for place, total in enumerate(bottom):
        axes.text(place, total, f"{total:.3g}", ha="center", va="bottom")
    if memory := plans[0].memory_bytes:
        axes.axhline(memory / 1e9, linestyle="--", color="gray", label=f"memory: {memory / 1e9:.0f}")
    axes.legend()
    figure.savefig(path)


def held(plan: Plan) -> Mapping[str, float]:
    """What holds the memory of a device, in bytes: parameters, optimizer states, and all that comes and goes."""
    sizes = {"parameters": 0.0, "optimizer states": 0.0}
    for row in plan.layout.placements():
        read = row.name.partition("/")[0] in ("params", "weights", "frozen", "variables")
        sizes["parameters" if read else "optimizer states"] += row.device_bytes
    return {**sizes, "batch and temporaries": max(0.0, plan.needed_bytes - sum(sizes.values()))}


def _links_table(plan: Plan) -> Table:
    table = _table("What crosses which link: bytes that each device sends per step", "link", "over", "sent")
    for (link, axes), sent in sorted(plan.links.items(), key=lambda item: -item[1]):
        table.add_row(link, " x ".join(axes), size_text(sent))
    return table


def _timing_table(plan: Plan) -> Table:
    timing = plan.timing
    assert timing is not None
    table = _table("Predicted step: what its time goes into (no measurement; the model is in zero_jax/timing.py)", "",
                   "seconds", "share")
    for name, seconds in timing.spent.items():
        waits = name not in ("compute", "memory")
        label = f"waiting for {name} ({timing.wire_seconds[name]:.3g} s alone)" if waits else name
        table.add_row(label, f"{seconds:.3g}", f"{seconds / timing.seconds:.0%}" if timing.seconds else "")
    table.add_section()
    table.add_row(f"step, bound by {timing.bound}", f"{timing.seconds:.3g}", style="bold")
    table.add_row("tokens per second", f"{timing.tokens_per_second:,.0f}")
    table.add_row("MFU, and HFU with recomputation", f"{timing.mfu:.1%}", f"{timing.hfu:.1%}")
    return table


def _collective(collective: Any, mesh: Mapping[str, int]) -> dict[str, Any]:
    return {
        "kind": collective.kind, "dtypes": collective.dtypes, "payload_bytes": collective.payload_bytes,
        "wire_bytes": collective.wire_bytes, "count": collective.count, "count_known": collective.count_known,
        "axes": collective.axes(mesh), "asynchronous": collective.asynchronous,
        "overlapped_flops": collective.overlapped_flops, "serves": collective.serves, "op_name": collective.op_name,
        "source": collective.source,
    }


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for number, name in enumerate(columns):
        table.add_column(name, justify="left" if not number or name in ("collectives", "over") else "right")
    return table


def finite(value: Any) -> Any:
    """`value` with what JSON cannot hold (inf, nan) as None, and tuples as lists."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
