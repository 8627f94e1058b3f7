"""The programs of a run, compiled before its first step: of one step, or of slices that train by themselves."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from zero_jax.cli.reports.report import size_text
from zero_jax.cli.train_config import TrainConfig
from zero_jax.cli.training.loop import plain_metrics
from zero_jax.cli.training.run_head import memory_bytes
from zero_jax.contract.report import Report
from zero_jax.diloco.functions import DiLoCoFunctions
from zero_jax.diloco.step import DiLoCoStep
from zero_jax.planning.plan import Plan, examine
from zero_jax.step.compiled import CompiledStep
from zero_jax.step.disk.step import DiskTrainStep
from zero_jax.step.step import ZeroTrainStep
from zero_jax.typing import Batch
from zero_jax.xla.targets import Target


def slices_of(config: TrainConfig, step: ZeroTrainStep) -> DiLoCoStep | None:
    """`step` as slices take it by themselves; None where the run is synchronous."""
    return DiLoCoStep(DiLoCoFunctions(step, config.outer_options())) if config.diloco_every else None


class SlicePrograms:
    """Every program of a DiLoCo step, called as one step.

    Compiled before the first of them runs, so that memory and traffic of all are known, and no step waits for XLA.
    Attributes as those of `run_programs.OneProgram`, where `alone` is the program that sends nothing between slices.
    """

    module = "jit_program"

    def __init__(self, step: DiLoCoStep, batch: Batch, *, after: int):
        """after: the steps that the state has taken."""
        self._step, self._taken = step, after
        self._compiled = {fragment: step.lower(batch, fragment).compile()
                          for fragment in (None, *range(step.outer.fragments))}
        programs = {fragment: step.as_data(compiled, batch, fragment) for fragment, compiled in self._compiled.items()}
        self._reports = {fragment: program.report for fragment, program in programs.items()}
        self._sent = {fragment: float(round(slice_bytes(report))) for fragment, report in self._reports.items()}
        self.alone, self.memory_bytes = programs[None], max(map(memory_bytes, programs.values()))

    def head_lines(self, steps: int) -> list[str]:
        """What the head of a run says of its slices."""
        return slice_lines(self._step, self._reports, steps=steps)

    def run(self, state: Any, batch: Batch) -> tuple[Any, dict[str, Any]]:
        """A step of every slice, with `slice_bytes` among its metrics: what each device sends between slices."""
        fragment = self._step.due(self._taken)
        self._taken += 1
        state, metrics = self._compiled[fragment](state, batch)
        return state, metrics | {"slice_bytes": self._sent[fragment]}

    @staticmethod
    def read(metrics: Mapping[str, Any]) -> dict[str, Any]:
        """The metrics of a step as numbers: the mean over the slices of this process, beside the losses of each.

        In a run of several processes those that a process has no device of are not fetched, for that would be traffic.
        `stopped`: a loss or a gradient is not finite.
        """
        row: dict[str, Any] = {}
        finite = True
        for name, value in metrics.items():
            each = local_slices(value)
            row[name] = float(each.mean())
            finite &= bool(np.isfinite(each).all()) or name not in ("loss", "grad_norm")
            if name == "loss":
                row |= {"loss_min": float(each.min()), "loss_max": float(each.max())}
        return row | {"stopped": not finite, "bad": False}


def slice_bytes(report: Report) -> float:
    """Bytes that each device sends between slices, as compiled."""
    return next(result.communication_bytes for result in report.results if result.budget.key == "slices")


def local_slices(value: Any) -> np.ndarray:
    """A metric by slice, of those whose devices this process has."""
    if not isinstance(value, jax.Array):
        return np.asarray([value])
    shards = {str(shard.index): shard.data for shard in value.addressable_shards}
    return np.concatenate([np.atleast_1d(np.asarray(data)) for data in shards.values()])


def slice_lines(step: DiLoCoStep, reports: Mapping[int | None, Report], *, steps: int) -> list[str]:
    """What a run of so many steps says of its slices: when they are averaged, and what that sends, as compiled."""
    outer, size = step.outer, step.axes.size(step.axes.slices)
    sent = [slice_bytes(reports[fragment]) for fragment in range(outer.fragments)]
    often = f"once in {outer.every} steps" if outer.fragments == 1 else (
        f"in {outer.fragments} fragments, each once in {outer.every} steps")
    lines = [
        f"DiLoCo: {size} slices of {step.mesh.size // size} devices take their steps by themselves and are averaged "
        f"{often}{', beside the next step' * outer.overlap}.",
        f"Between slices: {' + '.join(map(size_text, sent))} sent by each device in {outer.every} steps, "
        f"{size_text(sum(sent) / outer.every)} a step on average; {size_text(slice_bytes(reports[None]))} in a step "
        "without an average."]
    if (last := last_average(step, steps)) < steps:
        lines.append(f"Note: what is evaluated and exported are the outer parameters; after step {last} of {steps} not "
                     "all of them are averaged again.")
    return lines + [f"Breaks its contract: {line}" for report in reports.values() for line in report.violations]


def last_average(step: DiLoCoStep, steps: int) -> int:
    """The last step of a run of `steps` whose movement is in all of the outer parameters; 0 for none."""
    averaged = [[taken + (not step.outer.overlap) for taken in range(steps) if step.due(taken) == fragment]
                for fragment in range(step.outer.fragments)]  # with overlap: of what there was before the step
    return min(max(steps_of_one, default=0) for steps_of_one in averaged)


def examine_slices(step: DiLoCoStep, batch: Batch, target: Target | None, *, steps: int, transformer: Any,
                   timed_on: Target | None = None) -> tuple[Plan, list[str], bool]:
    """(The plan of a step without an average, lines of what averages need and send, whether all programs fit)."""
    plans = {fragment: examine(step, batch, target, transformer, fragment=fragment, timed_on=timed_on)
             for fragment in (None, *range(step.outer.fragments))}
    reports = {fragment: plan.communication for fragment, plan in plans.items() if plan.communication is not None}
    lines = slice_lines(step, reports, steps=steps) if reports.keys() == plans.keys() else []
    for fragment, plan in plans.items():
        if fragment is not None:
            time = "" if plan.timing is None else (
                f", {plan.timing.seconds * 1e3:,.2f} ms predicted, of which "
                f"{sum(plan.timing.exposed_seconds.values()) * 1e3:,.2f} ms nothing but communication runs")
            lines.append(f"A step with fragment {fragment}: {size_text(plan.needed_bytes)} on each device{time}."
                         + f" Does not fit: {plan.refused or size_text(-plan.free_bytes) + ' too much'}."
                         * (not plan.fits))
    return plans[None], lines, all(plan.fits for plan in plans.values())


class OneProgram:
    """The program of a `ZeroTrainStep`, compiled ahead of time for its memory analysis: the step would compile again.

    Attributes:
        run: takes a step: (state, batch) to (new state, metrics).
        alone: the program, as data.
        memory_bytes: that it needs on each device.
        module: its name in a trace.
        read: the metrics of a step as numbers.
    """

    module, read = "jit_step", staticmethod(plain_metrics)

    def __init__(self, step: ZeroTrainStep, batch: Batch):
        """Compiles; a step whose states are in files runs by itself, for its program does not read them."""
        if isinstance(step, DiskTrainStep):
            self.run, self.alone = step, step.compiled_step(batch)
        else:
            self.run = step.lower(batch).compile()
            self.alone = CompiledStep(self.run.as_text() or "", self.run.memory_analysis(), step.layout(batch),
                                      step.contract(batch))
        self.memory_bytes = memory_bytes(self.alone)

    def head_lines(self, steps: int) -> list[str]:
        """What the head of a run says of its programs beside the step's own lines."""
        return []
