"""The audit as a page of HTML with figures in SVG, drawn here: it needs no other file, library or network."""

import html
import json
from collections.abc import Mapping, Sequence
from typing import Any

from zero_jax.auditing.findings import MIB, Finding
from zero_jax.auditing.program import Program
from zero_jax.auditing.roles import PARAMS
from zero_jax.errors import few
from zero_jax.xla.timing import Span

_STYLE = ("body{font:15px/1.5 system-ui,sans-serif;max-width:1000px;margin:2em auto;padding:0 1em;color:#222}"
          "td,th{text-align:left;padding:.15em 1em .15em 0;vertical-align:top}table{border-collapse:collapse}"
          "td{border-top:1px solid #ddd}pre{background:#f6f6f6;padding:.8em;white-space:pre-wrap}h2{font-size:1.1em}"
          "svg{width:100%;height:auto}")
_COLORS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#9d755d", "#72b7b2", "#bab0ac")
_WAITING = "#e45756"
_WIDTH, _LEFT, _ROW = 960, 90, 26


def page(program: Program, findings: Sequence[Finding], data: Mapping[str, Any]) -> str:
    """The page; data: `Audit.to_json()`."""
    title = f"{data['devices']} devices of {data['target']}, stored as ZeRO stage {data['stage']}"
    parts = [f"<style>{_STYLE}</style><h1>Audit of a step</h1><p>{_text(title)}"]
    if data["seconds"]:
        parts += [f"<h2>A step of one device, predicted: {1e3 * data['seconds']:.2f} ms, of which "
                  f"{1e3 * data['exposed_seconds']:.2f} wait for collectives (red)</h2>",
                  _timeline(program.spans), _waits(program)]
    peak = {name: value / MIB for name, value in data["peak"].items()}
    parts += [f"<h2>Memory of a device at the peak: {sum(peak.values()):,.0f} MiB</h2>", _bar(peak, "MiB"),
              _largest(program) if program.memory is not None else "",
              f"<h2>Sent by a device in a step: {data['sent_bytes'] / MIB:,.0f} MiB</h2>",
              _bar({name: value / MIB for name, value in data["sent_by_purpose"].items()}, "MiB"),
              "<p>Ideal, in the dtype of storage: " + ", ".join(
                  f"ZeRO-{number} {value / MIB:,.0f} MiB" for number, value in data["ideal_bytes"].items())]
    if data["stage_3"]:
        parts.append(f"<p>The same at stage 3 here: {_text(same_text(data['stage_3']))}")
    rows = [(f"{each.code}: {each.message}", " ".join(filter(None, (each.place, _short(each.source)))),
             f"{each.bytes / MIB:,.1f}", "" if each.seconds is None else f"{1e3 * each.seconds:.2f}", each.remedy)
            for each in findings]
    parts += ["<h2>Findings</h2>", _table(("what", "where", "MiB", "ms", "remedy"), rows) if rows else "<p>None.",
              f"<details><summary>JSON</summary><pre>{_text(json.dumps(data, indent=1))}</pre></details>"]
    return "<!doctype html><meta charset=utf-8><title>Audit of a step</title>" + "".join(parts)


def same_text(data: Mapping[str, Any]) -> str:
    """What a step sends, holds and takes, in a line; data: its `Audit.to_json()`."""
    held = data["device_bytes"] or sum(data["memory"].values())
    time = f", takes {1e3 * data['seconds']:.2f} ms" if data["seconds"] else ""
    return f"sends {data['sent_bytes'] / MIB:,.1f} MiB, holds {held / MIB:,.1f} MiB{time}"


def _text(value: object) -> str:
    return html.escape(str(value))


def _short(source: str) -> str:
    """The end of a path, which says enough beside a figure."""
    return "/".join(source.split("/")[-3:])


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    body = "".join("<tr>" + "".join(f"<td>{_text(cell)}" for cell in row) for row in rows)
    return "<table><tr>" + "".join(f"<th>{_text(cell)}" for cell in head) + body + "</table>"


def _waits(program: Program) -> str:
    """The five collectives that are waited for longest."""
    rows = [(f"{1e3 * seconds:.2f}", each.kind,
             few([leaf.label for leaf in program.served(each, PARAMS)], 2), _short(each.source))
            for seconds, each in program.waits()[:5]]
    return _table(("waited, ms", "for", "of", "from"), rows) if rows else ""


def _largest(program: Program) -> str:
    """The largest temporaries at the peak."""
    rows = [(f"{each.bytes / MIB:,.1f}", each.what, each.shape, _short(each.source))
            for each in program.temporaries.live[:6]]
    return _table(("MiB", "temporary", "shape", "from"), rows) if rows else ""


def _timeline(spans: Sequence[Span]) -> str:
    """A lane for compute and one for each link; what is waited for is red, over all lanes."""
    end = max((span.end for span in spans), default=0.0) or 1.0
    lanes = ["compute", *dict.fromkeys(span.lane for span in spans if span.lane not in ("compute", "waiting"))]
    scale, height = (_WIDTH - _LEFT) / end, _ROW * len(lanes)
    shapes = [f'<text x="0" y="{_ROW * row + 17}" font-size="13">{_text(lane)}</text>'
              for row, lane in enumerate(lanes)]
    for row, lane in enumerate(lanes):
        shapes += [_rect(_LEFT + at * scale, _ROW * row + 2, (to - at) * scale, _ROW - 4, _COLORS[min(row, 1)],
                         f"{name} at {1e3 * at:.3f} ms, {1e3 * (to - at):.3f} ms")
                   for at, to, name in _merged(spans, lane, 0.5 / scale)]
    shapes += [_rect(_LEFT + at * scale, 0, (to - at) * scale, height, _WAITING,
                     f"waits {1e3 * (to - at):.3f} ms for {name}", 0.45)
               for at, to, name in _merged(spans, "waiting", 0.5 / scale)]
    for tick in range(5):
        x = _LEFT + (_WIDTH - _LEFT) * tick / 4
        anchor = "end" if tick == 4 else "middle" if tick else "start"
        shapes.append(f'<text x="{x:.0f}" y="{height + 16}" font-size="12" fill="#666" text-anchor="{anchor}">'
                      f"{1e3 * end * tick / 4:.2f} ms</text>")
    return f'<svg viewBox="0 0 {_WIDTH} {height + 22}">{"".join(shapes)}</svg>'


def _merged(spans: Sequence[Span], lane: str, gap: float) -> list[tuple[float, float, str]]:
    """(start, end, names) of what is in a lane; neighbours that no pixel parts are one."""
    result: list[tuple[float, float, list[str]]] = []
    for span in sorted((each for each in spans if each.lane == lane), key=lambda each: each.start):
        if result and span.start - result[-1][1] < gap:
            start, end, names = result[-1]
            result[-1] = start, max(end, span.end), names
        else:
            result.append((span.start, span.end, names := []))
        names.append(span.event.op_name.rpartition("/")[2] or span.event.name)
    return [(start, end, few(dict.fromkeys(names), 3)) for start, end, names in result]


def _rect(x: float, y: float, width: float, height: float, color: str, title: str, opacity: float = 1.0) -> str:
    return (f'<rect x="{x:.1f}" y="{y}" width="{max(width, 0.4):.1f}" height="{height}" fill="{color}" '
            f'opacity="{opacity}"><title>{_text(title)}</title></rect>')


def _bar(values: Mapping[str, float], unit: str) -> str:
    """One bar, cut by `values`, with a legend."""
    total, at, shapes = sum(values.values()) or 1.0, 0.0, []
    values = {name: value for name, value in values.items() if value > 1e-4 * total}
    for number, (name, value) in enumerate(values.items()):
        color, title = _COLORS[number % len(_COLORS)], f"{name}: {value:,.1f} {unit}"
        x, y = _WIDTH / 4 * (number % 4), 50 + 18 * (number // 4)
        shapes += [_rect(at, 0, _WIDTH * value / total, 28, color, title), _rect(x, y - 10, 10, 10, color, title),
                   f'<text x="{x + 15}" y="{y}" font-size="13">{_text(title)}</text>']
        at += _WIDTH * value / total
    return f'<svg viewBox="0 0 {_WIDTH} {42 + 18 * -(-len(values) // 4)}">{"".join(shapes)}</svg>'
