"""Two audits as JSON: what a step sends, holds and computes in the second and not in the first, and why."""

from collections.abc import Iterator, Mapping
from typing import Any

MIB = 1 << 20
TOLERANCE = 0.01
"""Share by which a number may change without a line."""


def changes(old: Mapping[str, Any], new: Mapping[str, Any], *, tolerance: float = TOLERANCE) -> list[str]:
    """A line for each number of `Audit.to_json()` that changed beyond `tolerance`, and finding that came or went."""
    return [*_numbers(old, new, tolerance), *_collectives(old, new, tolerance), *_findings(old, new)]


def _numbers(old: Mapping[str, Any], new: Mapping[str, Any], tolerance: float) -> Iterator[str]:
    for key in ("target", "devices", "stage"):
        if old.get(key) != new.get(key):
            yield f"{key}: {old.get(key)} -> {new.get(key)}"
    rows = [("sent", "sent_bytes", MIB, "MiB"), ("memory of a device", "device_bytes", MIB, "MiB"),
            ("FLOPs of a device", "flops", 1e9, "GFLOP"),
            ("recomputed FLOPs", "recomputed_flops", 1e9, "GFLOP"), ("step", "seconds", 1e-3, "ms"),
            ("waiting for collectives", "exposed_seconds", 1e-3, "ms")]
    for name, key, unit, text in rows:
        yield from _row(name, old.get(key), new.get(key), unit, text, tolerance)
    for key, name in (("sent_by_purpose", "sent for"), ("memory", "memory:")):
        before, after = old.get(key, {}), new.get(key, {})
        for part in sorted({*before, *after}):
            yield from _row(f"{name} {part}", before.get(part, 0), after.get(part, 0), MIB, "MiB", tolerance)


def _collectives(old: Mapping[str, Any], new: Mapping[str, Any], tolerance: float) -> Iterator[str]:
    """A line for each group of collectives, with its line of source."""
    if not ("sent_by_collective" in old and "sent_by_collective" in new):
        return
    before, after = old["sent_by_collective"], new["sent_by_collective"]
    for name in sorted({*before, *after}):
        was, now = before.get(name, {}), after.get(name, {})
        where = now.get("source") or was.get("source")
        for line in _row(name, was.get("bytes", 0.0), now.get("bytes", 0.0), MIB, "MiB", tolerance):
            yield line + f" at {where}" * bool(where)


def _row(name: str, old: float | None, new: float | None, unit: float, text: str, tolerance: float) -> Iterator[str]:
    if old is None or new is None or abs(new - old) <= tolerance * max(abs(old), abs(new)):
        return
    share = f" ({100 * (new / old - 1):+.0f} %)" if old >= 0.01 * unit else ""
    if max(abs(old), abs(new)) >= 0.01 * unit:
        yield f"{name}: {old / unit:,.2f} -> {new / unit:,.2f} {text}{share}"


def _findings(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    def by_code(report: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
        return {each["code"]: each for each in report.get("findings", ())}

    before, after = by_code(old), by_code(new)
    for code in sorted(after.keys() - before.keys()):
        each = after[code]
        where = "; ".join(filter(None, (each.get("place"), each.get("source"))))
        yield f"new: {code}: {each.get('message')}" + f" at {where}" * bool(where) + f". {each.get('remedy')}"
    for code in sorted(before.keys() - after.keys()):
        yield f"gone: {code}: {before[code].get('message')}"
