"""The placements of a step's state that were compared, and which of them is taken."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from zero_jax.offload.offload import Offload
from zero_jax.planning.plan import Plan

NONE, DISK = "no", "disk"
"""The names of the placements without offload, and with states in files."""

OffloadArgument: TypeAlias = Offload | str | None
"""What `make_zero_train_step(offload=...)` takes."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A placement, and the plan of the step that has it."""

    offload: OffloadArgument
    plan: Plan

    @property
    def name(self) -> str:
        """As `OffloadChoice.name`."""
        if isinstance(self.offload, Offload):
            return f"optimizer {self.offload.fraction:g}" if self.offload.disk is None else DISK
        return self.offload or NONE

    @property
    def text(self) -> str:
        """In a sentence."""
        if self.offload is None:
            return "no offload"
        if isinstance(self.offload, Offload) and self.offload.disk is None:
            return f"offload=optimizer with a share of {self.offload.fraction:g} of the states on the host"
        return f"offload={self.name}"


@dataclasses.dataclass(frozen=True)
class OffloadChoice:
    """The placement of a step's state; printed, a table of those that were compared.

    Attributes:
        chosen: the placement, and the plan of the step that has it.
        reason: why that one, in a sentence.
        candidates: what was compared, in the order of what a step moves.
        refused: why this step cannot have another placement, by name.
        notes: where what was measured and what was predicted part, a sentence each.
    """

    chosen: Candidate
    reason: str
    candidates: tuple[Candidate, ...] = dataclasses.field(repr=False)
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False)
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """"no", "optimizer" ("optimizer 0.412" of a share), "parameters", "gradients" or "disk"."""
        return self.chosen.name

    @property
    def offload(self) -> OffloadArgument:
        """What `make_zero_train_step(offload=...)` takes."""
        return self.chosen.offload

    @property
    def plan(self) -> Plan:
        """The compiled step of the chosen placement."""
        return self.chosen.plan

    @property
    def plans(self) -> dict[str, Plan]:
        """The compiled step of each placement, by name."""
        return {each.name: each.plan for each in self.candidates}

    def __str__(self) -> str:
        has_disk = any(each.name == DISK for each in self.candidates)
        rows = [("offload", "device bytes", "of", "host bytes", "of", *("disk bytes", "of") * has_disk, "waits s",
                 "step s", "")]
        for each in self.candidates:
            plan = each.plan
            waits = "" if plan.transfers is None else f"{plan.transfers.exposed_seconds:.3g}"
            rows.append((each.name, f"{plan.needed_bytes:,}", _number(plan.memory_bytes), f"{plan.host_bytes:,}",
                         _number(plan.host_memory_bytes),
                         *(f"{plan.disk_bytes:,}", _number(plan.disk_memory_bytes)) * has_disk,
                         waits, f"{_seconds(plan):.3g}" if _is_timed(plan) else "",
                         "does not fit" if not plan.fits else "chosen" if each is self.chosen else "fits"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) if number in (0, len(row) - 1) else cell.rjust(width)
                           for number, (cell, width) in enumerate(zip(row, widths, strict=True))) for row in rows]
        refused = [f"{name}: {why}" for name, why in self.refused.items()]
        return "\n".join([f"Placement: {self.reason}.", *map(str.rstrip, lines), *refused, *self.notes])


def choose(candidates: Sequence[Candidate]) -> tuple[Candidate, str]:
    """(The placement to take, why), of candidates for one step on one target that differ in `offload` alone.

    Of equal or unknown times the first; where none fits, the one that lacks least.
    """
    fitting = [each for each in candidates if each.plan.fits]
    if not fitting:
        least = min(candidates, key=lambda each: each.plan.lacking_bytes)
        return least, f"no placement fits, and {least.text} lacks least"
    chosen = min(fitting, key=lambda each: _seconds(each.plan))
    first = f"is predicted to take {_seconds(chosen.plan):.3g} s a step" if _is_timed(chosen.plan) else (
        "fits and moves the least, and times are not predicted for these devices")
    others = [f"{each.text} " + (_time(each.plan) if each.plan.fits else "does not fit")
              for each in candidates if each is not chosen]
    return chosen, "; ".join([f"{chosen.text} {first}", *others])


def _is_timed(plan: Plan) -> bool:
    return math.isfinite(_seconds(plan))


def _seconds(plan: Plan) -> float:
    """Infinite where it is not known, as where the rate of the link that it waits for is not."""
    waits = plan.layout.host or plan.layout.disk
    return math.inf if plan.timing is None or waits and plan.transfers is None else plan.timing.seconds


def _time(plan: Plan) -> str:
    return f"takes {_seconds(plan):.3g} s" if _is_timed(plan) else "moves more"


def lack_text(plan: Plan) -> str:
    """What a step needs of each memory, and what that has."""
    host = f", {plan.host_bytes:,} of {_number(plan.host_memory_bytes)} of its host" if plan.host_bytes else ""
    disk = f", {plan.disk_bytes:,} of {_number(plan.disk_memory_bytes)} of its disks" if plan.disk_bytes else ""
    return (f"{plan.needed_bytes:,} of {_number(plan.memory_bytes)} bytes of a device{host}{disk}"
            + (f" ({plan.refused})" if plan.refused else ""))


def _number(value: int | None) -> str:
    return "" if value is None else f"{value:,}"
