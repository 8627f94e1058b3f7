"""The placements of a step's state that were compared, and which of them is taken."""

import dataclasses
import math
from collections.abc import Mapping
from typing import TypeAlias

from zero_jax.planning.plan import Plan
from zero_jax.sharding.memory.kinds import Offload

NONE, DISK = "no", "disk"
"""The names of the placements without offload, and with states in files."""

Placement: TypeAlias = Offload | str | None
"""What `make_zero_train_step(offload=...)` takes."""


@dataclasses.dataclass(frozen=True)
class OffloadChoice:
    """The placement of a step's state; printed, a table of those that were compared.

    Attributes:
        name: "no", "optimizer", that with the least share of the states that has to be in host memory, as
            "optimizer 0.412", "parameters", or "disk".
        offload: what `make_zero_train_step(offload=...)` takes.
        reason: why that one, in a sentence.
        plans: the compiled step of each placement, by name.
        refused: why this step cannot have another placement, by name.
        notes: where what was measured and what was predicted part, a sentence each.
    """

    name: str
    offload: Placement
    reason: str
    plans: Mapping[str, Plan] = dataclasses.field(repr=False)
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False)
    notes: tuple[str, ...] = ()

    @property
    def plan(self) -> Plan:
        """That of the chosen placement."""
        return self.plans[self.name]

    def __str__(self) -> str:
        has_disk = DISK in self.plans
        rows = [("offload", "device bytes", "of", "host bytes", "of", *("disk bytes", "of") * has_disk, "waits s",
                 "step s", "")]
        for name, plan in self.plans.items():
            waits = "" if plan.transfers is None else f"{plan.transfers.exposed_seconds:.3g}"
            rows.append((name, f"{plan.needed_bytes:,}", _number(plan.memory_bytes), f"{plan.host_bytes:,}",
                         _number(plan.host_memory_bytes),
                         *(f"{plan.disk_bytes:,}", _number(plan.disk_memory_bytes)) * has_disk,
                         waits, f"{_seconds(plan):.3g}" if _is_timed(plan) else "",
                         "does not fit" if not plan.fits else "chosen" if name == self.name else "fits"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) if number in (0, len(row) - 1) else cell.rjust(width)
                           for number, (cell, width) in enumerate(zip(row, widths, strict=True))) for row in rows]
        refused = [f"{name}: {why}" for name, why in self.refused.items()]
        return "\n".join([f"Placement: {self.reason}.", *map(str.rstrip, lines), *refused, *self.notes])


def choose(plans: Mapping[str, Plan]) -> tuple[str, str]:
    """(The name of the placement to take, why), of plans of one step on one target that differ in `offload` alone.

    Of equal or unknown times the first; where none fits, the one that lacks least.
    """
    fitting = {name: plan for name, plan in plans.items() if plan.fits}
    if not fitting:
        name = min(plans, key=lambda name: plans[name].lacking_bytes)
        return name, f"no placement fits, and {placement_text(name)} lacks least"
    name = min(fitting, key=lambda name: _seconds(fitting[name]))
    others = [f"{placement_text(other)} " + ("does not fit" if other not in fitting else _time(plans[other]))
              for other in plans if other != name]
    first = f"is predicted to take {_seconds(plans[name]):.3g} s a step" if _is_timed(plans[name]) else (
        "fits and moves the least, and times are not predicted for these devices")
    return name, "; ".join([f"{placement_text(name)} {first}", *others])


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


def placement_text(name: str) -> str:
    """A placement in a sentence."""
    if name == NONE:
        return "no offload"
    kind, _, share = name.partition(" ")
    return f"offload={kind}" + f" with a share of {share} of the states on the host" * bool(share)
