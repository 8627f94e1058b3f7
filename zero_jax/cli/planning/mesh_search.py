"""`plan --search mesh`: how to divide a model over a target, ranked by formula, the best of it compiled."""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

from rich.table import Table

from zero_jax.cli.planning.plan_config import PlanConfig
from zero_jax.cli.planning.remedies import flags
from zero_jax.cli.reports.report import PLAIN, size_text
from zero_jax.cli.step_from_config import attention_text
from zero_jax.errors import UsageError
from zero_jax.planning.division import Collective, Decoder, Division, Estimate, divisions, estimate
from zero_jax.planning.plan import Plan
from zero_jax.sharding.mesh import make_mesh
from zero_jax.xla.devices import coords, target_devices
from zero_jax.xla.process_memory import process_bytes
from zero_jax.xla.targets import Target
from zero_jax.xla.timing import collective_seconds

SHOWN, COMPILED, TRIES, SECONDS = 10, 3, 6, 600
"""Divisions that are listed; of them compiled until so many fit, at most so many, for so long."""
SEARCHED = ("stage", "tensor", "context", "replica", "hpz", "accumulate", "gather", "reduce", "loss_chunks", "offload",
            "sequence_parallel", "quantize_weights", "quantize_gradients")
"""The options that a search varies where they are at their defaults; and remat, where it is the model's."""


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


def decoder_of(sizes: Any, num_params: int, moments: float = 8.0, *, scored_length: int = 0) -> Decoder:
    """What the formula knows of a model, by its config. Raises UsageError for what is no such transformer.

    scored_length: tokens whose scores a token has in memory; 0 with a kernel of attention that keeps none.
    """
    if missing := [name for name in ("num_layers", "width", "num_heads", "vocab_size") if not hasattr(sizes, name)]:
        raise UsageError(f"search=mesh: the model's config has no {missing[0]}, by which its time is estimated: give "
                         "search=fit.")
    hidden = getattr(sizes, "hidden", None)  # gate, up, and their product; without a gate: before and after
    tied = getattr(sizes, "tied", True)
    products = num_params - (0 if tied else sizes.vocab_size * sizes.width)
    return Decoder(
        num_params, sizes.num_layers, sizes.width, sizes.num_heads, getattr(sizes, "num_kv_heads", sizes.num_heads),
        getattr(sizes, "head_dim", None) or sizes.width // sizes.num_heads, 3 * hidden if hidden else 8 * sizes.width,
        sizes.vocab_size, 6.0 * products, moments, 3 * sizes.num_heads * scored_length)


def ranked(config: PlanConfig, model: Decoder, target: Target, *, batch: int, length: int,
           can_split: bool = True) -> tuple[list[tuple[Division, Estimate]], int]:
    """(The divisions that fit by formula, the fastest first, and how many there are)."""
    defaults = {field.name: field.default for field in dataclasses.fields(PlanConfig)}
    fixed = {name: getattr(config, name) for name in SEARCHED if getattr(config, name) != defaults[name]}
    if config.remat != "model":
        fixed["remat"] = {"yes": "full", "sqrt": "full"}.get(config.remat, config.remat)
    if not can_split:
        fixed["tensor"] = 1
    if not target.chip.gpu:  # axes along the torus, and no node with links of its own
        fixed.setdefault("hpz", 1)
    links, devices = dict[tuple[int, ...], Collective](), target_devices(target)
    found, counted, room = list[tuple[Division, Estimate]](), 0, process_bytes(target.chip)
    host = target.num_devices // target.num_hosts if target.chip.gpu else 16
    for division in divisions(model, target.num_devices, batch=batch, length=length, largest_tensor=host, fixed=fixed):
        counted += 1
        sizes = division.replica, division.tensor, division.context, division.hpz
        if sizes not in links:
            links[sizes] = _links(target, devices, division)
        if each := estimate(model, division, batch=batch, length=length, chip=target.chip, collective=links[sizes],
                            compute_bytes=4 if config.precision == "fp32" else 2, room=room):
            if each.host_bytes <= (target.chip.host_memory_bytes or 0):
                found.append((division, each))
    return sorted(found, key=lambda item: item[0].preferred * item[1].seconds), counted


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
    moments = sum(row.bytes for row in layout.placements() if row.name.startswith("opt_state")) / layout.num_params
    kernel = attention_text(choice, batch=batch, length=length, precision=config.precision)
    model = decoder_of(choice.config, layout.num_params, moments,
                       scored_length=length if kernel.startswith("Attention: xla") else 0)
    found, counted = ranked(config, model, target, batch=batch, length=length, can_split=choice.rules is not None)
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


def _links(target: Target, devices: Any, division: Division) -> Collective:
    data = division.data if division.hpz == 1 else (division.data // division.hpz, division.hpz)
    mesh = make_mesh(data, replica=division.replica, context=division.context, tensor=division.tensor,
                     devices=devices)

    @functools.cache
    def link(kind: str, axis: str) -> tuple[float, float]:
        wanted = {"data": ("data", "data_0", "data_1", "context"), "hpz": ("data_1",)}.get(axis, (axis,))
        group = mesh.devices[tuple(slice(None) if name in wanted else 0 for name in mesh.axis_names)]
        return collective_seconds(target, [coords(device) for device in group.flat], kind)

    return link
