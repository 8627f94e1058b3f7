"""A training run: data, model, step, loop, and the files that it writes."""

import contextlib
import dataclasses
import platform
import signal
import time
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from zero_jax.checkpoint.checkpoint import Checkpoints
from zero_jax.checkpoint.local_copies import LocalCopies
from zero_jax.checkpoint.manifest import Manifest
from zero_jax.cli.chosen import with_chosen_microbatches, with_chosen_offload
from zero_jax.cli.config_file import config_text, save_config
from zero_jax.cli.objectives.choose import objective_of
from zero_jax.cli.objectives.objective import Objective
from zero_jax.cli.reports import report
from zero_jax.cli.reports.html_report import report_html
from zero_jax.cli.start import check_start, first_state
from zero_jax.cli.step_from_config import devices_of, evaluator_of, step_of
from zero_jax.cli.train_config import TrainConfig
from zero_jax.cli.training.loop import Loop
from zero_jax.cli.training.metrics_log import MetricsLog, make_folder, metric_writers
from zero_jax.cli.training.profile import Profile, profile_writer
from zero_jax.cli.training.progress import ProgressReporter
from zero_jax.cli.training.resume import StatesOnDisk, fixed, resumed
from zero_jax.cli.training.run_head import evaluation_line, head_lines, write_readme
from zero_jax.cli.training.run_programs import OneProgram, SlicePrograms, slices_of
from zero_jax.data.prefetch import Prefetched
from zero_jax.distributed.agreement import all_or_none, is_first, on_any
from zero_jax.distributed.initialize import initialize, local
from zero_jax.distributed.preemption import Preemption
from zero_jax.distributed.watchdog import Watchdog
from zero_jax.planning.flops import model_flops, step_flops
from zero_jax.planning.plan import timing_of
from zero_jax.step.disk.step import DiskTrainStep
from zero_jax.versions import installed_version
from zero_jax.xla.live_chip import topology_of


@dataclasses.dataclass(frozen=True)
class Summary:
    """The results of a run. Losses are in the unit of its objective (nats per token); None where nothing was measured.

    steps: all, with those before it was resumed; steps_taken: of this process, whose are items_per_second and seconds.
    evaluation: the last one, by names as `validation_loss`. baselines: losses to compare with, by the name of what has
    them. items_per_second: tokens or images in training, without compilation and validation. peak_bytes: the largest of
    any accelerator, or of this process where devices are `simulated`. interrupted: Ctrl-C ended it early, preempted:
    SIGTERM or SIGHUP did; nothing is generated then. signal: the number of the signal that did, if this process has
    received it. step_seconds: the median of a step; predicted_seconds: of one, by the chip file of the devices.
    """

    steps: int
    steps_taken: int
    loss: float | None
    evaluation: dict[str, float]
    baselines: dict[str, float]
    items_per_second: float
    seconds: float
    peak_bytes: int
    simulated: bool
    log: Path
    curve: Path | None
    report: Path | None
    samples: tuple[str, ...]
    interrupted: bool
    preempted: bool
    signal: int | None
    step_seconds: float | None = None
    predicted_seconds: float | None = None

    @property
    def validation_loss(self) -> float | None:
        """Of the last evaluation."""
        return self.evaluation.get("validation_loss")


def train(config: TrainConfig, *, console: Console | None = None) -> Summary:
    """Runs the training of `config`, reports on `console`, and returns the results.

    Raises ValueError for an invalid configuration, before anything is compiled or overwritten, and BadStepError after
    more than `config.max_bad_steps` consecutive steps that are not finite.
    """
    objective = objective_of(config)
    initialize(distributed=config.distributed, heartbeat_seconds=config.heartbeat)
    with Preemption() as preemption, contextlib.ExitStack() as closing:
        return _train(config, objective, console, preemption, closing)


def _train(config: TrainConfig, objective: Objective, console: Console | None, preemption: Preemption,
           closing: contextlib.ExitStack) -> Summary:
    started, choice = time.perf_counter(), objective.choice
    devices = devices_of(config)
    check_start(config)
    console = (console or report.make_console()) if is_first() else Console(quiet=True)
    all_or_none(lambda: make_folder(config.out) if is_first() else None)
    data = objective.load_data()
    if config.epochs is not None:
        epochs, (one_pass, _) = config.epochs, data.batches(None)
        config = config.settled(one_pass.batches_per_epoch)
        console.print(f"--epochs {epochs}: {one_pass.batches_per_epoch} batches each, {config.steps} steps.")
    topology = topology_of(devices, config.chip)
    placed, placement = with_chosen_offload(config, objective, devices)
    placed, microbatches = with_chosen_microbatches(placed, lambda: step_of(
        placed, choice, devices, loss=objective.loss).layout(objective.batch_shapes()), choice, topology,
        batch=config.batch_size, length=objective.length)
    if microbatches:
        console.print(microbatches, soft_wrap=True)
    together = step_of(placed, choice, devices, loss=objective.loss)
    slices = slices_of(config, together)
    step: Any = slices or together
    batches, held_out = data.batches(step.batch_sharding)
    layout = step.layout(batches[0])
    checkpoints = closing.enter_context(Checkpoints(config.checkpoints, keep_last=config.max_to_keep))
    if config.save_every and (message := checkpoints.lock()):
        console.print(message, soft_wrap=True)
    copies = LocalCopies(config.local_checkpoints, fixed(config)) if config.local_checkpoints else None
    on_disk = StatesOnDisk(config, step, batches, checkpoints) if isinstance(step, DiskTrainStep) else None

    def note(manifest: Manifest) -> None:
        if on_disk is not None:
            on_disk.note(manifest.step, manifest.data)

    if on_disk is not None:
        closing.callback(step.close)
    restored = None
    if config.resume:
        restored = on_disk.resumed(console) if on_disk is not None else None
        restored = restored or resumed(config, checkpoints, copies, step, batches, console, note)
    if copies is not None and not config.resume:
        copies.clear()
    after = restored.step if restored else 0
    writers = closing.enter_context(metric_writers(config.log_to, config.out, _plain(config), after=after)
                                    ) if is_first() else []
    log = MetricsLog(config.out / "train.jsonl", after=after if config.resume else None, writes=is_first(),
                     writers=writers)
    closing.callback(log.close)
    if log.lost:
        console.print(f"Lost: {log.lost} steps that were taken after step {after}; they are taken again.")
    interrupted, samples = False, ()
    versions = {name: installed_version(name) for name in ("zero-jax", "jax", "jaxlib", "flax", "optax")}
    try:
        if is_first():
            write_readme(config, choice)
            path = save_config(config, config.out, versions)
            changed = config_text(config, only_changed=True) or "none\n"
            console.print(f"Options, all in {path}; not the default:\n{changed}", soft_wrap=True)
        if placement:
            console.print(str(placement), soft_wrap=True)
        console.print(report.state_table(layout))
        console.print(report.replicated_text(layout), soft_wrap=True)
        console.print(report.optimizer_text(layout), soft_wrap=True)
        programs = SlicePrograms(slices, batches[0], after=after) if slices else OneProgram(step, batches[0])
        program = programs.alone
        flops = step_flops(model_flops(step, batches[0]), program.schedule, num_devices=len(devices),
                           peak=topology and topology.chip.peak_flops["bf16"])
        timing = topology and timing_of(program, topology)[0]
        console.print(report.memory_text(program.memory), soft_wrap=True)
        head = [*head_lines(objective, program, flops, devices[0].device_kind, devices[0].platform),
                *programs.head_lines(config.steps), data.summary,
                evaluation_line(held_out.batches_per_epoch, config.eval_batches)]
        console.print(*head, sep="\n", soft_wrap=True)
        log.write(config=_plain(config), versions=versions, devices=[str(device) for device in devices],
                  objective=objective.name, baselines=data.baselines, state_bytes_per_device=layout.device_bytes,
                  resumed_after=after, lost_steps=log.lost)
        if on_disk is not None and not restored:
            on_disk.note(0)
        state = restored.state if restored else first_state(config, choice, together, batches[0],
                                                               console)
        if slices and not restored:
            state = slices.from_synchronous(state)
        if line := objective.prepare(step, state, resumed=restored is not None):
            console.print(line, soft_wrap=True)
        del restored  # its state is donated

        def save(number: int, state: Any) -> None:
            checkpoints.save(step, state, at=number, data=batches.state(),
                             config=fixed(config) | objective.noted())

        def copy(number: int, state: Any) -> None:
            assert copies is not None
            copies.save(step, state, at=number, data=batches.state(), heads=checkpoints.heads())

        watchdog = Watchdog(config.hang_after, process=jax.process_index(), end=config.hang_exit)
        feed = Prefetched(batches, depth=config.prefetch)
        first, last = config.profile_steps
        profile = Profile(config.out / "profile", first, last) if first > after and is_first() else None
        say_profile = profile and profile_writer(profile, program.schedule, programs.module,
                                                 steps=last - first + 1, devices=len(local(devices)))
        if profile:
            closing.callback(profile.stop)
        elif config.profile and is_first():
            console.print(f"--profile {config.profile}: the run continues after step {after}, and traces nothing.")
        with ProgressReporter(console, total=config.steps, measures=objective.measures) as progress, watchdog, feed:
            sums = evaluator_of(config, step, objective.sums)
            loop = Loop(
                config, objective, programs.run, sums, feed, held_out, log,
                progress, watchdog, preemption, data.baselines,
                flops, local(devices), programs.memory_bytes, save if config.save_every else None,
                step.check_replicas if config.check_replicas else None, copy if copies else None, profile, say_profile,
                on_disk and on_disk.note, programs.read)
            try:
                state = loop.run(state, after=after)
            except KeyboardInterrupt:
                interrupted = True
        checkpoints.wait()
        if copies is not None and config.save_every:
            copies.clear()  # the last state is saved
        # Of one process, say, after the last step that all agree on: what follows has collectives.
        interrupted = on_any(interrupted or preemption.signal == signal.SIGINT)
        asked = preemption.signal if loop.preempted or interrupted else None
        preemption.release()  # the run is saved: Ctrl-C ends what follows
        if not interrupted and not loop.preempted:
            samples = objective.samples(step, state, data)
        curve = log.draw(f"{config.model}, stage {config.stage}, {len(devices)} devices", data.baselines,
                         objective.measures.unit)
        last_step, loss = log.train[-1] if log.train else (0, None)
        summary = Summary(
            steps=last_step, steps_taken=len(loop.durations), loss=loss,
            evaluation=log.evaluation, baselines=dict(data.baselines), items_per_second=loop.items_per_second,
            seconds=time.perf_counter() - started, peak_bytes=report.peak_bytes(local(devices)),
            simulated=not report.device_bytes(local(devices)), log=log.path, curve=curve,
            report=config.out / "report.html" if config.html and is_first() else None, samples=samples,
            interrupted=interrupted, preempted=loop.preempted and not interrupted, signal=asked,
            step_seconds=loop.median_seconds, predicted_seconds=timing and timing.seconds)
        log.write(summary=_plain(summary))
        if summary.report is not None:
            title = f"{config.model}, ZeRO stage {config.stage}, {len(devices)} {devices[0].platform} devices"
            summary.report.write_text(report_html(
                title=title, head=head, options=config_text(config), log=log.path, program=program,
                summary=_plain(summary), versions={"Python": platform.python_version(), **versions}, samples=samples,
                profile=loop.profile_text, measures=objective.measures, timing=timing), encoding="utf-8")
    finally:
        closing.close()
    for sample in samples:
        console.print(sample, soft_wrap=True)
    console.print(report.summary_table(_plain(summary), objective.measures))
    return summary


def _plain(row: Any) -> dict[str, Any]:
    """A dataclass as plain JSON."""
    return {name: str(value) if isinstance(value, Path) else value for name, value in dataclasses.asdict(row).items()}
