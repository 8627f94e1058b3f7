"""report.html: a run on one page that needs no other file, server or network."""

import html
import io
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zero_jax.cli.reports.measures import TEXT, Measures
from zero_jax.cli.reports.report import size_text, step_time_text, steps_text, whose_memory
from zero_jax.cli.training.metrics_log import read_rows
from zero_jax.contract.report import Report
from zero_jax.contract.violations import counted_bytes
from zero_jax.step.compiled import CompiledStep
from zero_jax.xla.timing import Timing

MAX_POINTS = 1500
"""Of a curve: more than a screen has columns only make the file larger."""

Series = Sequence[tuple[float, float]]


def thinned(series: Series, most: int = MAX_POINTS) -> Series:
    """At most `most` of the points, evenly, with the last one; those that are not finite are left out.

    >>> thinned([(i, i) for i in range(10)], 4)
    [(0, 0), (3, 3), (6, 6), (9, 9)]
    """
    finite = [(x, y) for x, y in series if math.isfinite(y)]
    if len(finite) <= most:
        return finite
    return [finite[i * (len(finite) - 1) // (most - 1)] for i in range(most)]


def curves(lines: Mapping[str, Series], *, title: str, unit: str, log_scale: bool = False) -> str:
    """Named curves over steps; the one of few points has markers."""
    figure, axes = _figure(3.0)
    for name, series in lines.items():
        points = thinned(series)
        if points:
            few, constant = len(points) <= 40, len(points) == 2 and points[0][1] == points[1][1]
            axes.plot(*zip(*points, strict=True), marker="o" if few and not constant else None, markersize=3.5,
                      linewidth=1.6 if few else 0.9, label=name, linestyle="--" if constant else "-")
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel("step", fontsize=8)
    axes.set_ylabel(unit, fontsize=8)
    if log_scale:
        axes.set_yscale("log")
    axes.grid(alpha=0.25)
    if len(lines) > 1 and axes.get_legend_handles_labels()[0]:  # none where a run ended before its first step
        axes.legend(fontsize=8, frameon=False)
    return _svg(figure)


def bars(values: Mapping[str, float], *, title: str, unit: str, beside: Mapping[str, float] | None = None,
         names: tuple[str, str] = ("", "")) -> str:
    """A horizontal bar for each name; beside: a second, grey one below it; names: of the two kinds of bars."""
    figure, axes = _figure(0.9 + 0.42 * len(values))
    rows = range(len(values))
    height = 0.7 if beside is None else 0.36
    axes.barh([row - (height / 2 if beside is not None else 0) for row in rows], list(values.values()), height,
              label=names[0])
    if beside is not None:
        axes.barh([row + height / 2 for row in rows], [beside.get(name, 0.0) for name in values], height,
                  color="0.75", label=names[1])
        axes.legend(fontsize=8, frameon=False)
    axes.set_yticks(list(rows), list(values), fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(unit, fontsize=8)
    axes.set_title(title, loc="left", fontsize=10)
    axes.grid(alpha=0.25, axis="x")
    return _svg(figure)


def _figure(height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # slow to import, and needed once

    figure = Figure(figsize=(7, height), layout="constrained")
    axes = figure.add_subplot()
    axes.tick_params(labelsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def _svg(figure: Any) -> str:
    """The figure as an `svg` element: text stays text, and no date makes two of them differ."""
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "zero_jax"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue().partition("?>")[2].partition(">")[2].strip()  # without the XML and DOCTYPE lines


MIB = 1 << 20

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1120px; margin: 2em auto; padding: 0 1.2em; }
h1 { font-size: 1.5em; margin-bottom: 0.2em; } h2 { font-size: 1.1em; margin: 1.8em 0 0.5em; }
.tiles { display: flex; flex-wrap: wrap; gap: 0.7em; margin: 1em 0; }
.tile { border: 1px solid #ddd; border-radius: 6px; padding: 0.5em 0.9em; }
.tile b { display: block; font-size: 1.25em; } .tile span { color: #666; font-size: 0.85em; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(440px, 1fr)); gap: 0.8em; }
figure { margin: 0; } svg { width: 100%; height: auto; } p.note { color: #666; margin: 0.2em 0; }
table { border-collapse: collapse; font-size: 0.9em; } td, th { text-align: left; padding: 0.15em 1em 0.15em 0; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
pre { background: #f6f6f6; padding: 0.8em; overflow-x: auto; font-size: 0.85em; white-space: pre-wrap; }
"""


def report_html(*, title: str, head: Sequence[str], options: str, log: Path, program: CompiledStep,
                summary: Mapping[str, Any], versions: Mapping[str, str], samples: Sequence[str], profile: str = "",
                measures: Measures = TEXT, timing: Timing | None = None) -> str:
    """The page as HTML; what comes from users is escaped.

    title: in a line. head: the first lines of the run. options: its config as TOML. log: its train.jsonl. program: the
    compiled step. summary: as the last line of the log. versions: of packages, by name. samples: what it makes of
    held-out examples. profile: where time went; "" if untraced. measures: what was counted and measured. timing: the
    predicted step; None where none is.
    """
    def text(value: object) -> str:
        return html.escape(str(value))

    steps = rows_by_step(log)
    sections = [
        f"<h1>{text(title)}</h1>",
        *(f'<p class="note">{text(line)}</p>' for line in head),
        tiles(summary, measures),
        "<h2>Curves</h2>", f'<div class="figures">{"".join(curve_figures(steps, summary, measures))}</div>',
        "<h2>Memory and communication of a device</h2>",
        f'<div class="figures">{memory_figure(program)}{communication_figure(program.report)}</div>',
        communication_table(program.report.timed(timing))]
    if profile:
        sections.append(f"<h2>Where the time went</h2><pre>{text(profile)}</pre>")
    if samples:
        sections.append("<h2>What it makes of held-out examples</h2>" + "".join(
            f"<pre>{text(each)}</pre>" for each in samples))
    packages = ", ".join(f"{name} {version}" for name, version in versions.items())
    sections.append(f"<h2>Options</h2><pre>{text(options)}</pre><p class=\"note\">{text(packages)}</p>")
    return ("<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">"
            f"<title>{text(title)}</title><style>{STYLE}</style></head>\n<body>\n" + "\n".join(sections)
            + "\n</body></html>\n")


def rows_by_step(log: Path) -> dict[int, dict[str, Any]]:
    """The metrics of each step, with those of its evaluation; of a step that was taken twice, the later ones."""
    steps: defaultdict[int, dict[str, Any]] = defaultdict(dict)
    for row in read_rows(log):
        if isinstance(row.get("step"), int):
            steps[row["step"]] |= row
    return dict(sorted(steps.items()))


def tiles(summary: Mapping[str, Any], measures: Measures) -> str:
    """The results in large type."""
    evaluation, loss = summary["evaluation"], f"validation loss, {measures.unit}"
    ended = ", interrupted" if summary["interrupted"] else ", preempted" if summary["preempted"] else ""
    shown = {
        **({loss: f"{evaluation['validation_loss']:.3f}"} if "validation_loss" in evaluation else {}),
        **measures.shown(evaluation, "validation_"),
        **{f"loss of a {name}": f"{value:.3f}" for name, value in summary["baselines"].items()},
        **({f"{measures.items} per second": f"{summary['items_per_second']:,.0f}"} if summary["steps_taken"] else {}),
        **({"time of a step": time} if (time := step_time_text(summary)) else {}),
        f"peak memory{whose_memory(summary)}": size_text(summary["peak_bytes"]),
        f"seconds for {steps_text(summary)}{ended}": f"{summary['seconds']:,.0f}",
    }
    return '<div class="tiles">' + "".join(
        f'<div class="tile"><b>{html.escape(value)}</b><span>{html.escape(name)}</span></div>'
        for name, value in shown.items()) + "</div>"


def curve_figures(steps: Mapping[int, Mapping[str, Any]], summary: Mapping[str, Any], measures: Measures) -> list[str]:
    """Curves of loss, measures, learning rate, gradient norm, speed, utilisation and data wait, where logged."""
    def series(name: str, scale: float = 1.0) -> list[tuple[float, float]]:
        return [(step, scale * row[name]) for step, row in steps.items()
                if isinstance(row.get(name), (int, float))]

    losses = {"training": series("loss"), "validation": series("validation_loss")}
    for name, value in summary["baselines"].items() if steps else ():
        losses[name] = [(step, value) for step in (min(steps), max(steps))]
    figures = [curves(losses, title="Loss", unit=measures.unit)]
    measured = []
    for each in measures.beside:
        if each.name != "perplexity":  # which is the loss, to another scale
            scale, unit = (100, "%") if each.percent else (1, "")
            lines = {"training": series(each.name, scale), "validation": series(f"validation_{each.name}", scale)}
            measured.append((f"{each.label[0].upper()}{each.label[1:]}", lines, unit, False))
    for title, lines, unit, log_scale in (
            *measured,
            ("Learning rate", {"learning rate": series("learning_rate")}, "", False),
            ("Norm of the gradient", {"norm": series("grad_norm")}, "", True),
            ("Speed", {"speed": series(measures.rate)}, f"{measures.items} per second", False),
            ("Utilisation of the peak", {"MFU": series("mfu", 100), "HFU": series("hfu", 100)}, "%", False),
            ("Wait for data", {"wait": series("data_wait", 1000)}, "ms in a step", False)):
        if any(lines.values()):
            figures.append(curves(lines, title=title, unit=unit, log_scale=log_scale and min(
                (value for line in lines.values() for _, value in line), default=0) > 0))
    return [f"<figure>{figure}</figure>" for figure in figures]


def memory_parts(program: CompiledStep) -> dict[str, float]:
    """Bytes on each device: the state by kind, and what the compiled step adds to it."""
    parts: defaultdict[str, float] = defaultdict(float)
    for row in program.layout.placements():
        parts[row.name.partition("/")[0]] += row.device_bytes
    if program.memory is not None:
        parts["temporaries of a step"] += program.memory.temp_size_in_bytes
        parts["batch, code and others"] += max(0.0, program.device_bytes - sum(parts.values()))
    small = [name for name, size in parts.items() if size < 0.002 * sum(parts.values())]
    return {name: size for name, size in parts.items() if name not in small} | (
        {"rest": sum(parts[name] for name in small)} if small else {})


def memory_figure(program: CompiledStep) -> str:
    """Bars of `memory_parts`."""
    parts = memory_parts(program)
    return "<figure>" + bars({name: size / MIB for name, size in parts.items()}, unit="MiB",
                             title=f"Memory: {size_text(sum(parts.values()))}") + "</figure>"


def communication_figure(report: Report) -> str:
    """Bars of what a step sends for each purpose, and of the stage's budget for it."""
    sent = {_short(each.budget.purpose): counted_bytes(each, report.contract) / MIB for each in report.results}
    budget = {_short(each.budget.purpose): each.budget.communication_bytes / MIB for each in report.results}
    return "<figure>" + bars(sent, beside=budget, unit="MiB per step", names=("sent", "budget"),
                             title=f"Sent: {size_text(sum(sent.values()) * MIB)} per step") + "</figure>"


def communication_table(report: Report) -> str:
    """What a step sends, by purpose, with the notes of the contract, and predicted milliseconds where there are any."""
    names = ("ms alone", "ms exposed") if report.seconds else ()
    seconds = report.seconds or [()] * len(report.results)
    rows = "".join(
        f"<tr><td>{html.escape(result.budget.purpose)}</td>"
        f"<td>{html.escape(', '.join(sorted({each.kind for each in result.collectives})) or 'none')}</td>"
        f"<td>{html.escape(' x '.join(result.budget.axes))}</td>"
        f'<td class="number">{size_text(counted_bytes(result, report.contract))}</td>'
        f'<td class="number">{size_text(result.budget.communication_bytes)}</td>'
        + "".join(f'<td class="number">{1e3 * each:,.2f}</td>' for each in times) + "</tr>"
        + "".join(f'<tr><td colspan="{5 + len(names)}" class="note">{html.escape(note)}</td></tr>'
                  for note in result.notes)
        for times, result in zip(seconds, report.results, strict=True))
    heads = "".join(f'<th class="number">{name}</th>' for name in ("sent", "budget", *names))
    return f"<table><tr><th>purpose</th><th>collectives</th><th>over</th>{heads}</tr>{rows}</table>"


def _short(purpose: str, most: int = 34) -> str:
    return purpose if len(purpose) <= most else purpose[: most - 3] + "..."
