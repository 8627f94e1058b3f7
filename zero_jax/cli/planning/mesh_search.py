"""`plan --search mesh`: how to divide a model over a target, ranked by formula, the best of it compiled."""

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

from rich.table import Table

from zero_jax.cli.planning.plan_config import PlanConfig
from zero_jax.cli.planning.ranking import SEARCHED, decoder_of_step, left_open, ranked
from zero_jax.cli.planning.remedies import flags
from zero_jax.cli.reports.report import PLAIN, size_text
from zero_jax.errors import UsageError
from zero_jax.planning.division import Division, Estimate
from zero_jax.planning.plan import Plan
from zero_jax.xla.targets import Target

SHOWN, COMPILED, TRIES, SECONDS = 10, 3, 6, 600
"""Divisions that are listed; of them compiled until so many fit, at most so many, for so long."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A division by formula, the options that ask for it, and its plan where it was compiled."""

    division: Division
    estimate: Estimate
    config: PlanConfig
    plan: Plan | None = None


@dataclasses.dataclass(frozen=True)
class MeshSearch:
    """Candidates, the fastest by formula first. counted: divisions that the formula compared; of them fitting: fit."""

    candidates: tuple[Candidate, ...]
    counted: int
    fitting: int
    notes: tuple[str, ...] = ()

    def lines(self, target: Target) -> list[str]:
        """What the table leaves open."""
        if not self.candidates:
            return [f"Nothing fits {target.text} by formula: give more devices, or a smaller batch.", *self.notes]
        return [*(["None of those that were compiled fits."] if self.best is None else []), *self.notes]

    def as_json(self) -> list[dict[str, Any]]:
        """The candidates, in their order; sizes in bytes of a device, times in seconds."""
        return [{**dataclasses.asdict(each.division), "estimate": dataclasses.asdict(each.estimate),
                 "compiled": each.plan and {
                     "fits": each.plan.fits, "needed_bytes": each.plan.needed_bytes,
                     "seconds": each.plan.timing and each.plan.timing.seconds}} for each in self.candidates]

    @property
    def best(self) -> Candidate | None:
        """Of those that were compiled and fit the one with the shortest step."""
        fit = [each for each in self.candidates if each.plan is not None and each.plan.fits and each.plan.timing]
        return min(fit, key=lambda each: each.division.preferred * each.plan.timing.seconds,  # pyright: ignore
                   default=None)


def listed(config: PlanConfig, found: list[tuple[Division, Estimate]], sizes: Any, batch: int) -> Iterator[Candidate]:
    """Of each kind of division the fastest that the table of combinations does not refuse."""
    seen = set[object]()
    for division, each in found:
        if division.kind in seen:
            continue
        changes = {name: getattr(division, name) for name in SEARCHED}
        if division.accumulate == 1:  # nothing is repeated
            changes |= {"reduce": "auto"} | ({"gather": "auto"} if division.gather == "use" else {})
        if config.remat == "model":  # what a model does by itself is of the model's own
            own = getattr(sizes, "remat", None)
            changes["remat"] = {"no": "model" if not own else "no", "full": "model" if own else "full"}.get(
                division.remat, division.remat)
        try:
            other = dataclasses.replace(config, **changes, batch_size=batch, batch_per_device=1, search="no")
            other.check()
        except UsageError:
            continue
        seen.add(division.kind)
        yield Candidate(division, each, other)


def search_mesh(config: PlanConfig, layout: Any, choice: Any, target: Target, *, batch: int, length: int | None,
                plan_of: Callable[[PlanConfig], Plan], on_plan: Callable[[str, Plan], None]) -> MeshSearch:
    """The ways to divide `batch` sequences over `target`, and the plans of the best.

    layout: of the step that `config` asks for. plan_of: of another config; on_plan: called with the flags and the plan
    of each. Raises UsageError for a model that the formula does not know, or that takes no sequences.
    """
    if length is None:
        raise UsageError("search=mesh: the model takes no sequences, by which its time is estimated: give search=fit.")
    model = decoder_of_step(config, choice, layout, batch=batch, length=length)
    found, counted = ranked(left_open(config, choice, target), model, target, list(layout.mesh.devices.flat),
                            batch=batch, length=length, precision=config.precision)
    candidates = list[Candidate]()
    for each in listed(config, found, choice.config, batch):
        candidates.append(each)
        if len(candidates) == SHOWN:
            break
    began, fits = time.perf_counter(), 0
    for number, each in enumerate(candidates[:TRIES]):
        if fits == COMPILED or time.perf_counter() - began > SECONDS:
            break
        try:
            plan = plan_of(each.config)
        except ValueError:  # what only a step knows: dims that do not divide
            continue
        candidates[number] = dataclasses.replace(each, plan=plan)
        fits += plan.fits
        on_plan(flags(changed(config, each)) or "as asked for", plan)
    notes = () if model.vocab % 2 == 0 or config.tensor > 1 else (
        f"No tensor parallelism: a vocabulary of {model.vocab:,} divides over no two devices; --vocab-size "
        f"{-(-model.vocab // 128) * 128} would.",)
    return MeshSearch(tuple(candidates), counted, len(found), notes)


def changed(config: PlanConfig, candidate: Candidate) -> dict[str, Any]:
    """What of the options of a candidate is not as in `config`."""
    return {name: value for name in (*SEARCHED, "remat")
            if (value := getattr(candidate.config, name)) != getattr(config, name)}


def mesh_table(config: PlanConfig, found: MeshSearch) -> Table:
    """The candidates: by formula, and as compiled where they were; the best of those in bold."""
    table = Table(title=f"Search: {found.counted:,} divisions by formula, {found.fitting:,} fit; the best of each kind",
                  **PLAIN)
    table.add_column("options beside those given")
    for name in ("data", "formula s", "exposed", "needs", "compiled s", "exposed", "needs"):
        table.add_column(name, justify="right")
    best = found.best
    for each in found.candidates:
        plan, timing = each.plan, each.plan.timing if each.plan else None
        cells = ("", "", "") if plan is None else (
            f"{timing.seconds:.3g}" if timing else "", f"{1e3 * sum(timing.exposed_seconds.values()):,.0f} ms"
            if timing else "", size_text(plan.needed_bytes) if plan.fits else "does not fit")
        table.add_row(flags(changed(config, each)) or "none", str(each.division.data), f"{each.estimate.seconds:.3g}",
                      f"{1e3 * each.estimate.exposed:,.0f} ms", size_text(round(each.estimate.device_bytes)), *cells,
                      style="bold" if each is best else None)
    return table
