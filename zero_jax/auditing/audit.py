"""`zero_jax.audit`: what any jitted step sends, holds and waits for that it need not; in words, as JSON, as a page."""

import dataclasses
import html
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from zero_jax.auditing.findings import MIB, Finding, findings, ideal_bytes, sent, stage
from zero_jax.auditing.program import Program, compile_step
from zero_jax.auditing.roles import OPTIMIZER, PARAMS, Selector
from zero_jax.errors import few
from zero_jax.xla.events import Event, Loop, Work, totals


@dataclasses.dataclass(frozen=True)
class Audit:
    """The report on a step; `str` gives it in words.

    Attributes:
        program: the compiled step.
        findings: what costs, the dearest kinds first; empty for a clean step.
    """

    program: Program = dataclasses.field(repr=False)
    findings: tuple[Finding, ...]

    @property
    def sent_bytes(self) -> float:
        """Bytes that a device sends in a step."""
        return sent(self.program.collectives)

    def sent_by_purpose(self) -> dict[str, float]:
        """Bytes that a device sends in a step: gathers of parameters, reductions of gradients, and the rest."""
        result: dict[str, float] = {}
        for each in self.program.collectives:
            served = self.program.served(each, PARAMS) or self.program.served(each, OPTIMIZER)
            purpose = ("gather" if each.kind == "all-gather" else "reduce") if served else "rest"
            result[purpose] = result.get(purpose, 0.0) + each.communication_bytes * each.count
        return result

    def sent_by_collective(self) -> dict[str, dict[str, Any]]:
        """Bytes that a device sends in a step by kind, dtype and arrays, with the line of the largest."""
        result: dict[str, dict[str, Any]] = {}
        for each in sorted(self.program.collectives, key=lambda each: -each.communication_bytes * each.count):
            leaves = self.program.served(each, PARAMS) or self.program.served(each, OPTIMIZER)
            place = few(sorted({leaf.label for leaf in leaves}), 3) or each.op_name.rpartition("/")[2]
            entry = result.setdefault(f"{each.kind} {'+'.join(sorted(set(each.dtypes)))} of {place}",
                                      {"bytes": 0.0, "source": each.source})
            entry["bytes"] += each.communication_bytes * each.count
        return result

    def memory(self) -> dict[str, int]:
        """Bytes of each device: parameters, optimizer, batch, other arguments, and temporaries."""
        result: dict[str, int] = {}
        for leaf in self.program.leaves:
            result[leaf.role] = result.get(leaf.role, 0) + leaf.device_bytes
        if self.program.memory is not None:
            result["temporaries"] = self.program.memory.temp_size_in_bytes
        return result

    def to_json(self) -> dict[str, Any]:
        """The report as what `json.dumps` takes."""
        program, timing = self.program, self.program.timing
        return {
            "target": program.target.text if program.target else program.devices[0].device_kind,
            "devices": program.num_devices, "stage": stage(program), "sent_bytes": self.sent_bytes,
            "sent_by_collective": self.sent_by_collective(), "sent_by_purpose": self.sent_by_purpose(),
            "ideal_bytes": {str(key): value for key, value in ideal_bytes(program).items()},
            "memory": self.memory(), "device_bytes": program.device_bytes,
            "flops": sum(totals(program.schedule).flops.values()),
            "recomputed_flops": _recomputed(program.schedule),
            "seconds": timing and timing.seconds,
            "exposed_seconds": timing and sum(timing.exposed_seconds.values()),
            "findings": [dataclasses.asdict(each) for each in self.findings],
        }

    def __str__(self) -> str:
        """The report in words."""
        program, data = self.program, self.to_json()
        num_params = sum(leaf.size for _, leaf in program.of(PARAMS))
        lines = [f"{num_params / 1e6:,.1f}M parameters on {program.num_devices} devices of {data['target']}, stored as "
                 f"ZeRO stage {data['stage']}"]
        parts = ", ".join(f"{key} {value / MIB:,.1f}" for key, value in self.sent_by_purpose().items())
        ideal = ", ".join(f"{key}: {value / MIB:,.1f}" for key, value in ideal_bytes(program).items())
        lines.append(f"sent by a device: {self.sent_bytes / MIB:,.1f} MiB a step ({parts}); ZeRO {ideal}")
        lines.append("memory of a device, MiB: " + ", ".join(
            f"{key} {value / MIB:,.1f}" for key, value in self.memory().items()))
        if program.timing is not None:
            waiting = f"{1e3 * data['exposed_seconds']:.2f}"
            lines.append(f"predicted step: {1e3 * data['seconds']:.2f} ms, of which {waiting} wait for collectives")
        count = len(self.findings)
        lines.append("nothing found" if not count else f"{count} finding{'s' * (count > 1)}:")
        return "\n".join([*lines, *(f"  {each}" for each in self.findings)])

    def to_html(self, path: str | Path | None = None) -> str:
        """The report as a page that needs no other file; written to `path` if that is given."""
        page = _page(self)
        if path is not None:
            Path(path).write_text(page, encoding="utf-8")
        return page


def audit(jitted: Any, *shapes: Any, target: str | None = None, params: Selector | None = None,
          batch: Selector | None = None, compiler_options: Mapping[str, Any] | None = None) -> Audit:
    """What the step `jitted(*shapes)` sends, holds and waits for that it need not; it is compiled and never executed.

    Any jitted function will do, as `step(params, opt_state, batch) -> (params, opt_state, loss)` or
    `step(state, batch) -> (state, metrics)`: what outputs replace is state, and what is named `params`, or has the
    shapes of the rest, is parameters. For a target the meshes of `shapes`, and those within the step, are of as many
    live or simulated devices (`zero_jax.simulate_devices(8)` for `h100:8`).

    Raises UsageError for a function that is not jitted, does not lower, or has no state.

    Args:
        jitted: what `jax.jit` returns, or a `ZeroTrainStep` (whose one argument is a batch).
        shapes: arguments: arrays, or `jax.ShapeDtypeStruct`s with shardings.
        target: a topology that need not be here, as `h100:8`; None: the devices of the shardings.
        params: which inputs are parameters: the beginning of their labels (`"state.params"`), or a function of a label.
        batch: which inputs are the batch.
        compiler_options: XLA's, for this compilation. With a target, give again those that `jax.jit` got.
    """
    program = compile_step(jitted, shapes, target=target, params=params, batch=batch, compiler_options=compiler_options)
    return Audit(program, tuple(findings(program)))


def _recomputed(schedule: Iterable[Event]) -> float:
    """FLOPs that are computed a second time: by `jax.checkpoint`, whose name stack says so, or by XLA itself."""
    result = 0.0
    for event in schedule:
        if isinstance(event, Loop):
            result += event.trips * _recomputed(event.body)
        elif isinstance(event, Work) and ("rematted_computation" in event.op_name or ".remat" in event.name):
            result += sum(event.flops.values())
    return result


_STYLE = ("body{font:15px/1.5 system-ui,sans-serif;max-width:1000px;margin:2em auto;padding:0 1em;color:#222}"
          "td,th{text-align:left;padding:.15em 1em .15em 0}pre{background:#f6f6f6;padding:.8em;white-space:pre-wrap}"
          "svg{width:100%;height:auto}")
_COLORS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#9d755d", "#e45756")


def _page(audit: Audit) -> str:
    text = html.escape
    timing = audit.program.timing
    parts = [f"<style>{_STYLE}</style><h1>Audit of a step</h1><pre>{text(str(audit).splitlines()[0])}</pre>"]
    if timing is not None:
        spent = {key: 1e3 * value for key, value in timing.spent.items() if value}
        parts += ["<h2>The step, ms by what bounds it; links are exposed communication</h2>", _bar(spent, "ms")]
    parts += ["<h2>Memory of a device, MiB</h2>", _bar({k: v / MIB for k, v in audit.memory().items()}, "MiB"),
              "<h2>Sent by a device, MiB by purpose</h2>",
              _bar({key: value / MIB for key, value in audit.sent_by_purpose().items()}, "MiB"),
              "<h2>Findings</h2><table><tr><th>what<th>where<th>MiB<th>ms<th>remedy"]
    for each in audit.findings:
        cells = (f"{each.code}: {each.message}", f"{each.place} {each.source}", f"{each.bytes / MIB:,.1f}",
                 "" if each.seconds is None else f"{1e3 * each.seconds:.2f}", each.remedy)
        parts.append("<tr>" + "".join(f"<td>{text(cell)}" for cell in cells))
    data = text(json.dumps(audit.to_json(), indent=1))
    return ("<!doctype html><meta charset=utf-8><title>audit</title>" + "".join(parts)
            + f"</table><details><summary>JSON</summary><pre>{data}</pre></details>")


def _bar(values: Mapping[str, float], unit: str) -> str:
    """One bar, cut by `values`, with a legend."""
    total, at, shapes = sum(values.values()) or 1.0, 0.0, []
    for number, (name, value) in enumerate(values.items()):
        color, width = _COLORS[number % len(_COLORS)], 960 * value / total
        title = html.escape(f"{name}: {value:,.2f} {unit}")
        shapes.append(f'<rect x="{at:.1f}" y="0" width="{width:.1f}" height="28" fill="{color}">'
                      f"<title>{title}</title></rect>"
                      f'<text x="{160 * (number % 6)}" y="{50 + 18 * (number // 6)}" fill="{color}" font-size="13">'
                      f"{title}</text>")
        at += width
    return f'<svg viewBox="0 0 960 {60 + 18 * (len(values) // 6)}">{"".join(shapes)}</svg>'
