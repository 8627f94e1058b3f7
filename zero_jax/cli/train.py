"""A training run: corpus, model, step, loop, and the files that it writes."""

import contextlib
import dataclasses
import platform
import signal
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from zero_jax.checkpoint.checkpoint import Checkpoints
from zero_jax.checkpoint.local_copies import LocalCopies
from zero_jax.cli.config_file import config_text, save_config
from zero_jax.cli.evaluation import token_sums
from zero_jax.cli.html_report import Run, write_report
from zero_jax.cli.loop import Loop
from zero_jax.cli.metric_writers import metric_writers
from zero_jax.cli.metrics_log import MetricsLog, make_folder
from zero_jax.cli.model_lookup import ModelChoice
from zero_jax.cli.profile import Profile, profile_writer
from zero_jax.cli.progress import ProgressReporter
from zero_jax.cli.report import (
    make_console,
    memory_text,
    optimizer_text,
    peak_bytes,
    replicated_text,
    state_table,
    summary_table,
)
from zero_jax.cli.resume import fixed, resumed
from zero_jax.cli.run_data import load_data
from zero_jax.cli.run_folder import write_readme
from zero_jax.cli.run_head import head_lines, memory_bytes
from zero_jax.cli.samples import continuations
from zero_jax.cli.step_from_config import devices_of, step_of
from zero_jax.cli.train_config import TrainConfig
from zero_jax.data.prefetch import Prefetched
from zero_jax.distributed.agreement import all_or_none, is_first
from zero_jax.distributed.initialize import initialize, local
from zero_jax.distributed.preemption import Preemption
from zero_jax.distributed.watchdog import Watchdog
from zero_jax.interop.naming import OWN, Names
from zero_jax.interop.params_io import import_params, model_leaves
from zero_jax.interop.safetensors_file import find_tensors
from zero_jax.planning.flops import step_flops
from zero_jax.sharding.layout import Layout
from zero_jax.step.compiled import CompiledStep
from zero_jax.xla.live_chip import chip_of_kind


@dataclasses.dataclass(frozen=True)
class Summary:
    """The results of a run. Losses are in nats per token; None where nothing was measured.

    tokens_per_second: in training, without compilation and validation. peak_bytes: the largest of any accelerator, or
    of this process where devices are simulated. interrupted: Ctrl-C ended it early, preempted: SIGTERM or SIGHUP did;
    nothing is generated then. signal: the number of the signal that did, if this process has received it.
    """

    steps: int
    loss: float | None
    validation_loss: float | None
    validation_perplexity: float | None
    validation_accuracy: float | None
    bigram_loss: float | None
    tokens_per_second: float
    seconds: float
    peak_bytes: int
    log: Path
    curve: Path | None
    report: Path | None
    samples: tuple[str, ...]
    interrupted: bool
    preempted: bool
    signal: int | None


def train(config: TrainConfig, *, console: Console | None = None) -> Summary:
    """Runs the training of `config`, reports on `console`, and returns the results.

    Raises ValueError for an invalid configuration, before anything is compiled or overwritten, and BadStepError after
    more than `config.max_bad_steps` consecutive steps that are not finite.
    """
    choice = config.check()
    initialize(distributed=config.distributed, heartbeat_seconds=config.heartbeat)
    with Preemption() as preemption:
        return _train(config, choice, console, preemption)


def _train(config: TrainConfig, choice: ModelChoice, console: Console | None, preemption: Preemption) -> Summary:
    started = time.perf_counter()
    devices = devices_of(config)
    console = (console or make_console()) if is_first() else Console(quiet=True)
    all_or_none(lambda: make_folder(config.out) if is_first() else None)
    vocab_size = getattr(choice.config, "vocab_size", None)
    data = load_data(config, vocab_size)
    step = step_of(config, choice, devices)
    batches, held_out = data.batches(step.batch_sharding)
    bigram = data.bigram
    layout = step.layout(batches[0])
    checkpoints = Checkpoints(config.checkpoints, keep_last=config.max_to_keep)
    if config.save_every and (message := checkpoints.lock()):
        console.print(message, soft_wrap=True)
    copies = LocalCopies(config.local_checkpoints, fixed(config)) if config.local_checkpoints else None
    restored = resumed(config, checkpoints, copies, step, batches, console) if config.resume else None
    if copies is not None and not config.resume:
        copies.clear()
    after = restored.step if restored else 0
    closing = contextlib.ExitStack()
    writers = closing.enter_context(metric_writers(config.log_to, config.out, _plain(config), after=after)
                                    ) if is_first() else []
    log = MetricsLog(config.out / "train.jsonl", after=after if config.resume else None, writes=is_first(),
                     writers=writers)
    if log.lost:
        console.print(f"Lost: {log.lost} steps that were taken after step {after}; they are taken again.")
    interrupted, samples = False, ()
    versions = {name: metadata.version(name) for name in ("zero-jax", "jax", "jaxlib", "flax", "optax")}
    try:
        if is_first():
            write_readme(config)
            path = save_config(config, config.out, versions)
            changed = config_text(config, only_changed=True) or "none\n"
            console.print(f"Options, all in {path}; not the default:\n{changed}", soft_wrap=True)
        console.print(state_table(layout))
        console.print(replicated_text(layout), soft_wrap=True)
        console.print(optimizer_text(layout), soft_wrap=True)
        # Compiled ahead of time, for its memory analysis; calling `step` itself would compile it again.
        compiled = step.lower(batches[0]).compile()
        program = CompiledStep(compiled.as_text() or "", compiled.memory_analysis(), layout, step.contract(batches[0]))
        chip = chip_of_kind(devices[0].device_kind)
        flops = step_flops(step.trace_forward(batches[0]), program.schedule, num_devices=len(devices),
                           peak=chip and chip.peak_flops["bf16"])
        console.print(memory_text(compiled.memory_analysis()), soft_wrap=True)
        head = [*head_lines(config, program, flops, devices[0].device_kind, devices[0].platform), data.summary]
        console.print(*head, sep="\n", soft_wrap=True)
        log.write(config=_plain(config), versions=versions, devices=[str(device) for device in devices],
                      bigram_loss=bigram, state_bytes_per_device=layout.device_bytes, resumed_after=after,
                      lost_steps=log.lost)
        state = restored.state if restored else step.init(jax.random.key(config.seed), batches[0])
        if config.init_from is not None and restored is None:
            state = import_params(config.init_from, step, state, batches[0],
                                  names=_names_in(config.init_from, layout, choice))
        del restored  # its state is donated

        def save(number: int, state: Any) -> None:
            checkpoints.save(step, state, at=number, data=batches.state(), config=fixed(config))

        def copy(number: int, state: Any) -> None:
            assert copies is not None
            copies.save(step, state, at=number, data=batches.state(), heads=checkpoints.heads())

        watchdog = Watchdog(config.hang_after, process=jax.process_index(), end=config.hang_exit)
        feed = Prefetched(batches, depth=config.prefetch)
        first, last = config.profile_steps
        profile = Profile(config.out / "profile", first, last) if first > after and is_first() else None
        say_profile = profile and profile_writer(profile, program.schedule, "jit__step", steps=last - first + 1,
                                                 devices=len(local(devices)))
        if profile:
            closing.callback(profile.stop)
        elif config.profile and is_first():
            console.print(f"profile={config.profile}: the run continues after step {after}, and traces nothing.")
        with ProgressReporter(console, total=config.steps) as progress, watchdog, feed:
            sums = step.evaluator(token_sums, ema=config.ema is not None)
            loop = Loop(
                config, compiled, sums, feed, held_out, log, progress, watchdog, preemption, bigram, flops,
                local(devices), memory_bytes(program), save if config.save_every else None,
                step.check_replicas if config.check_replicas else None, copy if copies else None, profile, say_profile)
            try:
                state = loop.run(state, after=after)
            except KeyboardInterrupt:
                interrupted = True
        checkpoints.wait()
        if copies is not None and config.save_every:
            copies.clear()  # the last state is saved
        interrupted = interrupted or preemption.signal == signal.SIGINT
        asked = preemption.signal if loop.preempted or interrupted else None
        preemption.release()  # the run is saved: Ctrl-C ends what follows
        if not interrupted and not loop.preempted:
            samples = continuations(config, choice, step, state, data)
        curve = log.draw(f"{config.model}, stage {config.stage}, {len(devices)} devices", bigram)
        summary = Summary(
            steps=log.last_step, loss=log.train[-1][1] if log.train else None,
            bigram_loss=bigram, **{f"validation_{name}": log.evaluation.get(f"validation_{name}")
                                   for name in ("loss", "perplexity", "accuracy")},
            tokens_per_second=loop.tokens_per_second, seconds=time.perf_counter() - started,
            peak_bytes=peak_bytes(local(devices)), log=log.path, curve=curve,
            report=config.out / "report.html" if config.html and is_first() else None, samples=samples,
            interrupted=interrupted, preempted=loop.preempted and not interrupted, signal=asked)
        log.write(summary=_plain(summary))
        if summary.report is not None:
            title = f"{config.model}, ZeRO stage {config.stage}, {len(devices)} {devices[0].platform} devices"
            write_report(summary.report, Run(
                title, head, config_text(config), log.path, program, _plain(summary),
                {"Python": platform.python_version(), **versions}, samples, loop.profile_text))
    finally:
        closing.close()
        log.close()
        checkpoints.close()
    for sample in samples:
        console.print(sample, soft_wrap=True)
    console.print(summary_table(_plain(summary)))
    return summary


def _names_in(path: Path, layout: Layout, choice: ModelChoice) -> Names:
    """The naming of a file: ours where a tensor has a name of ours, else that of the model's module (Hugging Face)."""
    fields = choice.tensor_names()
    ours = {name for name, _ in model_leaves(layout.stored_shapes)}
    return OWN if fields is None or ours & find_tensors(path).keys() else Names(**fields)


def _plain(row: Any) -> dict[str, Any]:
    """A dataclass as plain JSON."""
    return {name: str(value) if isinstance(value, Path) else value for name, value in dataclasses.asdict(row).items()}
