"""A plan as tables, as JSON, and as the paper's Figure 1 for any model."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from zero_jax.cli.planning.training_cost import TrainingCost
from zero_jax.cli.reports.report import (
    PLAIN,
    largest_table,
    memory_table,
    optimizer_bytes,
    optimizer_text,
    replicated_text,
    size_text,
)
from zero_jax.contract.verify import Report
from zero_jax.layout.layout import Layout, update_bytes_of
from zero_jax.planning.memory import model_states
from zero_jax.planning.plan import Plan
from zero_jax.planning.search import SearchResult, tokens_per_second
from zero_jax.stages import STAGES
from zero_jax.xla.process_memory import FRACTION, fraction_text, memory_fraction
from zero_jax.xla.timing import OverlapEffect


def plan_tables(plan: Plan, *, advice: bool = True) -> RenderableType:
    """The complete report: whether it fits, memory by purpose, communication by purpose and link, predicted time.

    advice: also `Plan.advice`, which is not compiled.
    """
    parts: list[RenderableType] = [verdict(plan), replicated_text(plan.layout), optimizer_text(plan.layout)]
    if plan.layout.gather_note:
        parts.append(f"Parameters are gathered {plan.layout.gather_note}")
    if plan.memory is not None:
        parts += [memory_table(plan.memory), largest_table(plan.memory)]
    if plan.communication is not None:
        parts.append(communication_table(plan.communication))
    if plan.links:
        parts.append(_links_table(plan))
    if plan.timing is not None:
        parts.append(_timing_table(plan))
    if plan.layout.overlap_note:
        parts.append("Collectives run beside compute by options of XLA, which `step.layout(batch).describe()` names.")
    if plan.overlap is not None:
        parts.append(_overlap_table(plan.overlap))
    if plan.timing is not None and plan.timing.recomputed > RECOMPUTED:
        parts.append(recomputed_text(plan.timing.recomputed))
    if advice and plan.advice:
        parts.append("What would help:\n" + "\n".join(f"  - {line}" for line in plan.advice))
    return Group(*parts)


RECOMPUTED = 0.01
"""The share of a program's FLOPs from which what XLA recomputes is warned of."""


def recomputed_text(share: float) -> str:
    """The warning that XLA recomputes this share of a program's FLOPs, and how to mend it."""
    return (f"WARNING: XLA recomputes {share:.0%} of the program's FLOPs to stay within {memory_fraction():.0%} of the "
            "memory: recompute what costs least (--remat full), give a smaller batch, or, where there is room, a "
            f"larger {FRACTION}.")


def verdict(plan: Plan) -> str:
    """Whether the step fits, in a sentence or two."""
    where = f"{plan.target.text}" if plan.target else "live devices"
    head = (f"Stage {plan.stage} on {where}: {plan.num_devices} devices, mesh "
            f"{' x '.join(f'{name} {size}' for name, size in plan.mesh.items())}, global batch {plan.batch_size}"
            f"{f' of {plan.length:,} tokens' if plan.length else ''}. ")
    if plan.memory_bytes is None:
        head += f"Needs {size_text(plan.needed_bytes)} on each device."
    elif plan.fits:
        head += (f"Fits: {size_text(plan.needed_bytes)} of {size_text(plan.memory_bytes)} on each device, "
                 f"{size_text(plan.free_bytes)} left.")
    elif plan.free_bytes >= 0 and not plan.refused:
        head += (f"Does not fit: {size_text(plan.needed_bytes)} of {size_text(plan.memory_bytes)} on each device "
                 "would, and what is on the host or on disk does not.")
    else:
        state = plan.layout.device_bytes
        head += (f"Does not fit: {size_text(plan.needed_bytes)} needed of {size_text(plan.memory_bytes)} on each "
                 f"device, {size_text(-plan.free_bytes)} too much; {size_text(state)} of it is state, the rest the "
                 "batch and temporaries.")
    if plan.target is not None and plan.target.chip.gpu is not None:
        head += f"\n{fraction_text()}"
    if plan.layout.host or plan.transfers is not None and plan.transfers.checkpoints:
        stored = f": {offloaded_text(plan.layout)}" if plan.layout.host else ""
        head += (f"\nHost memory: {size_text(plan.host_bytes)} for each device"
                 + (f" of {size_text(plan.host_memory_bytes)}" if plan.host_memory_bytes else "")
                 + f"{stored}. {transfers_text(plan)}")
    if plan.layout.disk:
        head += (f"\nOn disk: {size_text(plan.disk_bytes)} for each device"
                 + (f" of {size_text(plan.disk_memory_bytes)}" if plan.disk_memory_bytes else "")
                 + f", two generations of {offloaded_text(plan.layout, 'disk')}, and a copy of what is in memory. "
                 f"{disk_text(plan)} The device memory is that of forward and backward, with the gradients.")
    if plan.refused:
        head += f"\nThe compiler: {plan.refused}"
    if plan.target is not None and plan.target.chip.note:
        head += f"\nNote: {plan.target.chip.note}"
    return head


def transfers_text(plan: Plan) -> str:
    """What a step moves between host memory and the device, and how long it waits for it."""
    moved = plan.transfers
    if moved is None:
        up, down = update_bytes_of(plan.layout.placements())
        gradients = plan.layout.host_gradient_bytes
        return f"The update reads {size_text(up)} and writes {size_text(down)}." + (
            f" Backward {_gradients_text(gradients, plan.layout.microbatches)}." if gradients else "")
    parts = []
    if moved.update_up:
        parts.append(f"the update reads {size_text(moved.update_up)} and writes {size_text(moved.update_down)}")
    if moved.params_up:
        parts.append(f"forward and backward read {size_text(moved.params_up)} of parameters, "
                     f"{moved.params_ahead / moved.params_up:.0%} of it a layer ahead")
    if moved.gradients_down:
        parts.append("backward " + _gradients_text(plan.layout.host_gradient_bytes, plan.layout.microbatches))
    if moved.checkpoints:
        parts.append(f"forward writes {size_text(moved.checkpoints)} of activations, which backward reads")
    text = "; ".join(parts)
    return (f"{text[0].upper()}{text[1:]}: {moved.seconds:.3g} s on the link to the host, "
            f"{moved.exposed_seconds:.3g} s of it exposed.")


def _gradients_text(size: int, microbatches: int) -> str:
    """What backward writes of gradients, and reads of their sums; size: of the stacks in host memory."""
    if microbatches == 1:
        return f"writes {size_text(size)} of gradients, which the update reads"
    return (f"reads and writes {size_text(microbatches * size)} of gradients, the sums of {microbatches} microbatches "
            f"in {size_text(size)}, which the update reads")


def disk_text(plan: Plan) -> str:
    """What a step reads and writes of files, and how long it waits for it."""
    moved = plan.transfers
    if moved is None:
        return "A step reads and writes a generation."
    return (f"The update reads {size_text(moved.update_up)} and writes {size_text(moved.update_down)}. Of "
            f"{moved.seconds:.3g} s at the disks nothing else runs in {moved.exposed_seconds:.3g} s.")


def offloaded_text(layout: Layout, memory: str = "host") -> str:
    """What of the state is in host memory (or on disk), by field: opt_state 1.45 GiB, params 743 MiB."""
    sizes: dict[str, int] = {}
    for row in layout.placements():
        if row.memory == memory:
            field = row.name.split("/")[0]
            sizes[field] = sizes.get(field, 0) + row.device_bytes
    if memory == "host" and layout.host_gradients:
        sizes["gradients"] = layout.host_gradient_bytes
    return ", ".join(f"{name} {size_text(size)}" for name, size in sizes.items())


def communication_table(report: Report) -> Table:
    """The bytes that a step sends for each purpose, beside the budget of its stage; predicted milliseconds of them.

    alone: of its collectives, were nothing else to run. exposed: in which nothing else does. Both are left out where
    no time is predicted.
    """
    table = _table("Communication by purpose: bytes that each device sends per step", "purpose", "collectives", "over",
                   "sent", "budget", *(("ms alone", "ms exposed") if report.seconds else ()))
    for number, result in enumerate(report.results):
        sent, budget = result.communication_bytes, result.budget
        last = [f"{each * 1e3:,.2f}" if sent else "" for each in report.seconds[number]] if report.seconds else []
        table.add_row(budget.purpose, ", ".join(sorted({c.kind for c in result.collectives})), " x ".join(budget.axes),
                      size_text(sent), size_text(budget.communication_bytes), *last)
        for note in result.notes:
            table.add_row(f"  {note}")
    for line in report.violations:
        table.add_row(f"BROKEN: {line}")
    return table


def search_table(result: SearchResult) -> Table:
    """All plans that a search compiled, the chosen one in bold."""
    ended = ", where the search ends: more may fit" * (result.size == result.limit)
    title = f"Search: {result.model}, size {result.size:,}{ended}" if result.plan else "Search: nothing fits"
    table = _table(title, "stage", "batch", "needed", "of", "", "tokens/s", "compiled in")
    for plan in result.tried:
        table.add_row(str(plan.stage), str(plan.batch_size), size_text(plan.needed_bytes),
                      size_text(plan.memory_bytes or 0), "fits" if plan.fits else "does not fit",
                      f"{tokens_per_second(plan):,.0f}" if plan.timing else "", f"{plan.compile_seconds:.0f} s",
                      style="bold" if plan is result.plan else None)
    return table


def cost_table(cost: TrainingCost) -> Table:
    """Days, device-hours and dollars of a number of tokens; the band is that of the predicted step."""
    def figure(value: float) -> str:
        return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"

    table = _table(f"{cost.tokens:,} tokens at the predicted speed", "", "", "")
    low, high = (each * cost.days for each in cost.band) if cost.band else (0.0, 0.0)
    table.add_row("days", figure(cost.days), f"{figure(low)} to {figure(high)}" if cost.band else "not compared")
    table.add_row("device-hours", figure(cost.device_hours))
    if cost.price is not None:
        table.add_row(f"dollars, at {cost.price:g} per device-hour", figure(cost.dollars or 0.0))
    return table


def plan_json(plan: Plan) -> dict[str, Any]:
    """A plan as plain JSON; sizes in bytes per device, times in seconds."""
    report = plan.communication
    seconds: Iterable[Any] = (report and report.seconds) or itertools.repeat(
        (None, None), len(report.results) if report else 0)
    communication = report and {
        "sent": report.communication_bytes, "budget": report.contract.communication_bytes,
        "violations": report.violations,
        "purposes": [{"purpose": result.budget.purpose, "sent": result.communication_bytes,
                      "budget": result.budget.communication_bytes,
                      "seconds": alone, "exposed_seconds": exposed,
                      "collectives": [_collective(c, plan.mesh) for c in result.collectives]}
                     for result, (alone, exposed) in zip(report.results, seconds, strict=True)]}
    return {
        "target": plan.target and plan.target.text, "note": plan.target.chip.note if plan.target else "",
        "stage": plan.stage, "devices": plan.num_devices, "mesh": dict(plan.mesh), "batch_size": plan.batch_size,
        "length": plan.length,
        "fits": plan.fits, "memory_bytes": plan.memory_bytes, "needed_bytes": plan.needed_bytes,
        "free_bytes": plan.free_bytes, "state_bytes": plan.layout.device_bytes, "host_bytes": plan.host_bytes,
        "disk_bytes": plan.disk_bytes, "transfers": plan.transfers and dataclasses.asdict(plan.transfers),
        "refused": plan.refused, "advice": plan.advice, "compile_seconds": plan.compile_seconds,
        "communication": communication,
        "memory": plan.memory and [dataclasses.asdict(row) for row in plan.memory.rows],
        "links": [{"link": link, "axes": axes, "bytes": sent} for (link, axes), sent in plan.links.items()],
        "timing": plan.timing and {
            **{name: value for name, value in vars(plan.timing).items() if name != "collectives"},
            "bound": plan.timing.bound, "useful": plan.timing.useful,
            "band": [each * plan.timing.seconds for each in plan.timing.band]},
        **dict(zip(("optimizer_bytes", "adamw_bytes"), optimizer_bytes(plan.layout), strict=True)),
        "gather": plan.layout.gather_note, "overlap": plan.overlap and dataclasses.asdict(plan.overlap),
        "replicated": [{"name": row.name, "bytes": row.bytes} for row in plan.layout.replicated()],
    }


def draw_stages(path: Path, layout: Layout, memory_bytes: int | None, title: str) -> None:
    """A PNG of the model states of a device at each stage, stacked as in the paper's Figure 1; GB are 1e9 bytes."""
    from matplotlib.figure import Figure  # slow to import, and needed once

    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    axes = figure.add_subplot(ylabel="GB on each device")
    axes.set_title(title, fontsize=10)
    names = [f"stage {row.number}\n{row.name}" for row in STAGES]
    states = [model_states(layout, row.number) for row in STAGES]
    bottom = [0.0] * len(states)
    for kind in states[0]:
        heights = [each[kind] / 1e9 for each in states]
        axes.bar(names, heights, 0.6, bottom=bottom, label=kind)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    for place, total in enumerate(bottom):
        axes.text(place, total, f"{total:.3g}", ha="center", va="bottom")
    if memory_bytes:
        axes.axhline(memory_bytes / 1e9, linestyle="--", color="gray", label=f"memory, {memory_bytes / 1e9:.3g}")
    axes.set_ylim(0, 1.1 * max(*bottom, (memory_bytes or 0) / 1e9))
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path)


def _links_table(plan: Plan) -> Table:
    table = _table("Communication by link: bytes that each device sends per step", "link", "over", "sent")
    for (link, axes), sent in sorted(plan.links.items(), key=lambda item: -item[1]):
        table.add_row(link, " x ".join(axes), size_text(sent))
    return table


def _timing_table(plan: Plan) -> Table:
    timing = plan.timing
    assert timing is not None
    table = _table("Predicted step time (not measured; the model is zero_jax/xla/timing.py)", "", "seconds",
                   "share")
    for name, seconds in timing.spent.items():
        waits = name in timing.communication_seconds
        label = f"waiting for {name} ({timing.communication_seconds[name]:.3g} s alone)" if waits else name
        table.add_row(label, f"{seconds:.3g}", f"{seconds / timing.seconds:.0%}" if timing.seconds else "")
    table.add_section()
    table.add_row(f"step, bound by {timing.bound}", f"{timing.seconds:.3g}", style="bold")
    band = timing.band
    table.add_row("as far off as nine in ten published steps of this chip", f"{band[0] * timing.seconds:.3g} to "
                  f"{band[1] * timing.seconds:.3g}" if band else "not compared")
    table.add_row("tokens per second", f"{timing.tokens_per_second:,.0f}")
    table.add_row("MFU, and HFU with recomputation; causal attention counts half", f"{timing.mfu:.1%}",
                  "not known" if timing.uncounted else f"{timing.hfu:.1%}")
    if timing.palm_mfu is not None:
        table.add_row("MFU by PaLM's formula, 6 N + 12 L h s a token, with all of attention", f"{timing.palm_mfu:.1%}")
    if timing.hfu and not timing.uncounted:
        table.add_row("useful: the model's FLOPs over the program's", f"{timing.useful:.1%}")
        table.add_row("recomputed by XLA to save memory, of the program's FLOPs", f"{timing.recomputed:.1%}")
    for call in timing.uncounted:
        table.add_row(f"NOT COUNTED, so that the step is slower than this: {call}")
    return table


def _overlap_table(effect: OverlapEffect) -> Table:
    table = _table("What overlap and prefetch change (times are predicted)", "", "without", "with")
    table.add_row("exposed communication, seconds", *(f"{seconds:.3g}" for seconds in effect.exposed_seconds))
    table.add_row("step, seconds", *(f"{seconds:.3g}" for seconds in effect.seconds))
    table.add_row("MFU", *(f"{share:.1%}" for share in effect.mfu))
    table.add_row("temporaries", *map(size_text, effect.temporaries))
    return table


def _collective(collective: Any, mesh: Mapping[str, int]) -> dict[str, Any]:
    return {
        "kind": collective.kind, "dtypes": collective.dtypes, "payload_bytes": collective.payload_bytes,
        "communication_bytes": collective.communication_bytes, "count": collective.count,
        "count_known": collective.count_known, "axes": collective.axes(mesh), "asynchronous": collective.asynchronous,
        "overlapped_flops": collective.overlapped_flops, "serves": collective.serves, "op_name": collective.op_name,
        "source": collective.source,
    }


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, min_width=min(len(title), 98), **PLAIN)
    for number, name in enumerate(columns):
        table.add_column(name, justify="left" if not number or name in ("collectives", "over") else "right")
    return table


def finite(value: Any) -> Any:
    """`value` as JSON allows: inf and nan as None, tuples as lists."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
