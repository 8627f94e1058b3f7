"""A training run: corpus, model, step, loop, and the files that it writes."""

import dataclasses
import functools
import signal
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from rich.console import Console

from zero_jax.checkpoint.checkpoint import Checkpoints
from zero_jax.checkpoint.local_copies import LocalCopies
from zero_jax.cli.config_file import config_text, save_config
from zero_jax.cli.environment import simulates
from zero_jax.cli.generate import generate, next_logits
from zero_jax.cli.loop import Loop, MetricsLog, make_folder
from zero_jax.cli.model_lookup import ModelChoice
from zero_jax.cli.plan_config import PlanConfig
from zero_jax.cli.report import (
    ProgressReporter,
    make_console,
    memory_text,
    optimizer_text,
    peak_bytes,
    replicated_text,
    size_text,
    state_table,
    summary_table,
)
from zero_jax.cli.resume import fixed, resumed
from zero_jax.cli.train_config import SIMULATED_DEVICES, TrainConfig
from zero_jax.data import corpus
from zero_jax.data.batches import Batches
from zero_jax.data.prefetch import Prefetched
from zero_jax.distributed.agreement import all_or_none, is_first
from zero_jax.distributed.initialize import choose_devices, initialize, local, on_host, put_global
from zero_jax.distributed.preemption import Preemption
from zero_jax.distributed.watchdog import Watchdog
from zero_jax.errors import UsageError
from zero_jax.interop.naming import OWN, Names
from zero_jax.interop.params_io import import_params, model_leaves
from zero_jax.interop.safetensors_file import find_tensors
from zero_jax.optim.presets import OPTIMIZERS
from zero_jax.optim.schedules import make_schedule
from zero_jax.sharding.layout import Layout
from zero_jax.sharding.mesh import make_mesh, simulate_devices
from zero_jax.step.guard import Guard
from zero_jax.step.make import make_zero_train_step
from zero_jax.step.step import ZeroTrainStep
from zero_jax.transforms.remat import Remat

PROMPT_TOKENS, SAMPLE_TOKENS, TEMPERATURE = 64, 160, 0.7


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
    bigram_loss: float | None
    tokens_per_second: float
    seconds: float
    peak_bytes: int
    log: Path
    curve: Path | None
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
    tokens = corpus.load(config.data, max_bytes=config.max_bytes, vocab_size=vocab_size)
    train_part, eval_part = _split(tokens, config)
    step = step_of(config, choice, devices)
    shape = {"batch_size": config.batch_size, "length": config.seq_len, "sharding": step.batch_sharding,
             "vocab_size": vocab_size}
    batches, held_out = Batches(train_part, seed=config.seed, **shape), Batches(eval_part, **shape)
    bigram = _bigram(config, vocab_size, train_part, eval_part)
    layout = step.layout(batches[0])
    checkpoints = Checkpoints(config.checkpoints, keep_last=config.max_to_keep)
    if config.save_every and (message := checkpoints.lock()):
        console.print(message, soft_wrap=True)
    copies = LocalCopies(config.local_checkpoints, fixed(config)) if config.local_checkpoints else None
    restored = resumed(config, checkpoints, copies, step, batches, console) if config.resume else None
    if copies is not None and not config.resume:
        copies.clear()
    after = restored.step if restored else 0
    log = MetricsLog(config.out / "train.jsonl", after=after if config.resume else None, writes=is_first())
    if log.lost:
        console.print(f"Lost: {log.lost} steps that were taken after step {after}; they are taken again.")
    interrupted, samples = False, ()
    versions = {name: metadata.version(name) for name in ("jax", "flax", "optax")}
    try:
        if is_first():
            path = save_config(config, config.out, {"zero_jax": metadata.version("zero-jax"), **versions})
            changed = config_text(config, only_changed=True) or "none\n"
            console.print(f"Options, all in {path}; not the default:\n{changed}", soft_wrap=True)
        console.print(
            f"{config.model} in {config.precision} at stage {config.stage} on {len(devices)} {devices[0].platform} "
            f"devices; {len(train_part):,} tokens to train on, {len(eval_part):,} held out", soft_wrap=True)
        console.print(state_table(layout))
        console.print(replicated_text(layout), soft_wrap=True)
        console.print(optimizer_text(layout), soft_wrap=True)
        # Compiled ahead of time, for its memory analysis; calling `step` itself would compile it again.
        compiled = step.lower(batches[0]).compile()
        console.print(memory_text(compiled.memory_analysis()), soft_wrap=True)
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
        with ProgressReporter(console, total=config.steps) as progress, watchdog, feed:
            loop = Loop(config, compiled, step.evaluator(ema=config.ema is not None), feed, held_out, log,
                        progress, watchdog, preemption, bigram, f"state {size_text(layout.device_bytes)}/device",
                        save if config.save_every else None,
                        step.check_replicas if config.check_replicas else None, copy if copies else None)
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
            samples = _samples(config, step, state, eval_part)
        curve = log.draw(f"{config.model}, stage {config.stage}, {len(devices)} devices", bigram)
        summary = Summary(
            steps=log.last_step, loss=log.train[-1][1] if log.train else None,
            validation_loss=log.validation[-1][1] if log.validation else None, bigram_loss=bigram,
            tokens_per_second=loop.tokens_per_second, seconds=time.perf_counter() - started,
            peak_bytes=peak_bytes(local(devices)), log=log.path, curve=curve, samples=samples,
            interrupted=interrupted, preempted=loop.preempted and not interrupted, signal=asked)
        log.write(summary=_plain(summary))
    finally:
        log.close()
        checkpoints.close()
    for sample in samples:
        console.print(sample, soft_wrap=True)
    console.print(summary_table(_plain(summary)))
    return summary


def devices_of(config: TrainConfig) -> list[jax.Device]:
    """The devices of the run, over all processes; simulated where there is no accelerator."""
    if simulates() and not jax.distributed.is_initialized():
        simulate_devices(config.devices or SIMULATED_DEVICES)
    try:
        devices = jax.devices()
    except RuntimeError as error:
        raise UsageError(f"JAX finds no devices ({error}): JAX_PLATFORMS=cpu simulates them.") from error
    number = config.devices or len(devices)
    if number > len(devices):
        raise UsageError(
            f"devices={number}, but there are {len(devices)} of kind {devices[0].platform}: give fewer, or set "
            "JAX_PLATFORMS=cpu to simulate them.")
    config.check_devices(number)
    return choose_devices(number)


def step_of(config: TrainConfig, choice: ModelChoice, devices: list[jax.Device]) -> ZeroTrainStep:
    """The train step of `config`: its optimizer with clipping and a schedule, on a mesh of `devices`."""
    schedule = make_schedule(config.schedule, **config.schedule_arguments(config.steps))
    # The injected rate is part of the state, so that the step's metrics report it.
    make = functools.partial(OPTIMIZERS[config.optimizer], weight_decay=config.weight_decay)
    injected = optax.inject_hyperparams(lambda learning_rate: make(learning_rate))(learning_rate=schedule)
    optimizer = optax.chain(optax.clip_by_global_norm(config.grad_clip_norm), injected)
    mesh = make_mesh(replica=config.replica, tensor=config.tensor, context=config.context, devices=devices)
    return make_zero_train_step(
        choice.build(choice.config), config.stage, optimizer=optimizer, mesh=mesh, precision=config.precision,
        accumulate=config.accumulate, reduce=config.reduce, gather=config.gather, ema=config.ema,
        guard=Guard(skip=config.max_bad_steps), **residual_options(config, choice))


def residual_options(config: TrainConfig | PlanConfig, choice: ModelChoice) -> dict[str, Any]:
    """Model parallelism and activation options of a configuration, as arguments of `make_zero_train_step`."""
    return {
        "tensor_rules": choice.tensor_rules(config.tensor), "sequence_parallel": config.sequence_parallel,
        "overlap": config.overlap,
        "remat": {"full": "full", "dots": "dots", "sqrt": Remat(every="sqrt")}.get(config.remat),
        "partition_activations": {"no": False, "yes": True}.get(config.partition_activations, "cpu")}


def _names_in(path: Path, layout: Layout, choice: ModelChoice) -> Names:
    """The naming of a file: ours where a tensor has a name of ours, else that of the model's module (Hugging Face)."""
    fields = choice.tensor_names()
    ours = {name for name, _ in model_leaves(layout.stored_shapes)}
    return OWN if fields is None or ours & find_tensors(path).keys() else Names(**fields)


def _split(tokens: np.ndarray, config: TrainConfig) -> tuple[np.ndarray, np.ndarray]:
    """(training part, held-out part): a twentieth is held out, at least one batch."""
    one_batch = config.batch_size * config.seq_len + 1
    if len(tokens) < 2 * one_batch + config.seq_len:
        raise UsageError(
            f"The data has {len(tokens):,} tokens, and two batches, one of them held out, take {2 * one_batch:,}: give "
            f"more data, or a smaller batch_size={config.batch_size} or seq_len={config.seq_len}.")
    return corpus.split(tokens, length=config.seq_len, holdout=max(0.05, one_batch / len(tokens)))


def _bigram(config: TrainConfig, vocab_size: int | None, *parts: np.ndarray) -> float | None:
    vocab_size = vocab_size if config.token_file else corpus.BYTE_VOCAB_SIZE
    if vocab_size is None or vocab_size > 4096:
        return None  # its table of counts has the square of that
    return corpus.bigram_loss(*parts, vocab_size=vocab_size)


def _samples(config: TrainConfig, step: ZeroTrainStep, state: Any, eval_part: np.ndarray) -> tuple[str, ...]:
    """Continuations of held-out text, or of held-out ids where tokens are not bytes."""
    if not config.samples:
        return ()
    devices = step.batch_sharding.num_devices
    rows = -(-config.samples // devices) * devices
    prompt = min(PROMPT_TOKENS, config.seq_len)
    starts = np.arange(rows) * (len(eval_part) - prompt) // rows
    prompts = np.stack([eval_part[start : start + prompt] for start in starts])
    evaluate = step.evaluator(next_logits, ema=config.ema is not None)

    def logits(batch: Any) -> np.ndarray:
        # Sharded like any batch: otherwise every device would compute all rows.
        return on_host(evaluate(state, put_global(batch, step.batch_sharding)))

    new = generate(logits, prompts, num_tokens=SAMPLE_TOKENS, length=config.seq_len,
                   temperature=TEMPERATURE, seed=config.seed)

    def text(ids: np.ndarray) -> str:
        if config.token_file:
            return " ".join(map(str, ids))
        # An untrained model generates control characters, which a terminal would interpret.
        return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in corpus.decode(ids))

    return tuple(f"--- held-out text:\n{text(prompts[i])}\n--- continued by the model:\n{text(new[i])}"
                 for i in range(config.samples))


def _plain(row: Any) -> dict[str, Any]:
    """A dataclass as plain JSON."""
    return {name: str(value) if isinstance(value, Path) else value for name, value in dataclasses.asdict(row).items()}
