"""The command line, derived from the configs. Bad input is refused before JAX is imported, where that is possible."""

import contextlib
import dataclasses
import errno
import json
import os
import platform
import select
import shutil
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from zero_jax.cli.audit_command import (
    AuditConfig,
    BudgetsConfig,
    DiffConfig,
    audit_command,
    budgets_command,
    diff_command,
)
from zero_jax.cli.calibrate_command import CalibrateConfig, calibrate_command
from zero_jax.cli.config_file import expand_config
from zero_jax.cli.environment import shown_text
from zero_jax.cli.flags import MAX_WIDTH, TAKE_FILE, commands_text, help_text, in_flags, read_flags
from zero_jax.cli.model_lookup import UsersModuleError, models_text, nearest, raised_text, users_line
from zero_jax.cli.planning.plan_config import PlanConfig
from zero_jax.cli.tokenize_command import TokenizeConfig, tokenize_command
from zero_jax.cli.train_config import InspectConfig, TrainConfig
from zero_jax.cli.weights.file_configs import ChatConfig, EvaluateConfig, ExportConfig, GenerateConfig, ImportConfig
from zero_jax.distributed.launch import PREEMPTED, LaunchConfig, end_with_launcher, launch
from zero_jax.errors import ReplicaError, UnwrittenCheckpointError, UsageError
from zero_jax.versions import installed_version
from zero_jax.xla.process_memory import set_fraction
from zero_jax.xla.targets import targets_text

INTERRUPTED, HUNG_UP = 130, 129
"""Exit status after Ctrl-C and SIGHUP, as shells have it."""
OUTPUT_CLOSED = 141
"""Exit status where the reader of the output ended: 128 + SIGPIPE, as shells have it."""
DOES_NOT_FIT = 3
"""Exit status of a plan that does not fit, or not before its deadline, which is an answer and not an error."""

_PLAN_ENVIRONMENT = {
    "TF_CPP_MIN_LOG_LEVEL": "3",  # XLA logs an error for a program that does not fit; the report says so
    # No device is used, so that none is searched for and none missing is warned of.
    "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
}


Config = (TrainConfig | PlanConfig | ExportConfig | GenerateConfig | ChatConfig | EvaluateConfig | ImportConfig
          | TokenizeConfig | LaunchConfig | AuditConfig | DiffConfig | BudgetsConfig | CalibrateConfig)
"""Of any command."""

COMMANDS: dict[str, type[Config]] = {
    "train": TrainConfig, "plan": PlanConfig, "inspect": InspectConfig, "export": ExportConfig,
    "generate": GenerateConfig, "chat": ChatConfig, "evaluate": EvaluateConfig, "import": ImportConfig,
    "tokenize": TokenizeConfig, "launch": LaunchConfig, "audit": AuditConfig, "diff": DiffConfig,
    "budgets": BudgetsConfig, "calibrate": CalibrateConfig}


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command of `args` (default: those of the process) and returns its exit status.

    0, or 1 for a run that failed, 2 for bad input (one message on standard error), 3 for a plan that does not fit or is
    late, 75 for a run that saved and ended on SIGTERM, 129 for one that did on SIGHUP, 130 for one that did on Ctrl-C;
    130 after a second or another Ctrl-C, too, 124 for a run that hung (--hang-exit), 141 where the reader of the output
    ended, as head does, whereupon nothing is printed. Output that cannot be written, as on a full disk, is told with 2;
    closed output is dropped. What the user's own code raises, in a forward pass say, is bad input, and told with its
    line. An error that is neither that nor a bad step is raised as it is, with which Python ends with 1.
    ZERO_JAX_TRACEBACK=1 in the environment shows the traceback of the others, too.
    """
    _open_closed_streams()
    try:
        try:
            return _status(sys.argv[1:] if args is None else args)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        if not _output_is_closed():
            raise
        _drop_output()
        return OUTPUT_CLOSED
    except OSError as error:
        if not _output_fails():
            raise
        _drop_output()
        return _failed(UsageError(f"standard output cannot be written ({error.strerror}): free space, or send it to "
                                  "another file."), 2)


def _open_closed_streams() -> None:
    """Gives standard streams that are closed, as by `>&-`, the null device.

    The first files that are opened would get their numbers, and what libraries print would be written into them.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))


def _output_fails() -> bool:
    """Whether standard output, and not some other file, is what cannot be written: an empty line shows it."""
    try:
        print(flush=True)
    except OSError:
        return True
    return False


def _drop_output() -> None:
    """Python flushes once more at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _output_is_closed() -> bool:
    """Whether standard output is a pipe without a reader, and not some other pipe is broken."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), select.POLLERR)
    return bool(poll.poll(0))


def _status(args: Sequence[str]) -> int:
    """The exit status; errors of the user's are told in a line."""
    args = list(args)
    try:
        _check_utf8(args)
        if (text := _help(args)) is not None:
            print(text)
            return 0
        texts = {"--version": version_text, "models": models_text, "targets": targets_text}
        if len(args) == 1 and args[0] in texts:
            print(texts[args[0]]())
            return 0
        if args[:1] == ["launch"]:
            return _launch(args)
        return _run(_parse(args))
    except (FloatingPointError, ReplicaError, UnwrittenCheckpointError) as error:
        return _failed(error, 1, args)
    except UsageError as error:  # and no other ValueError, which may be one of JAX or of ours
        return _failed(error, 2, args)
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return INTERRUPTED
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        name = "a path" if error.filename is None else error.filename
        return _failed(UsageError(f"{name} is longer than names of files and folders can be: give a shorter one."), 2)
    except Exception as error:
        if where := users_line(error):
            return _failed(UsersModuleError(raised_text(error, where)), 2)
        raise


def _check_utf8(args: Sequence[str]) -> None:
    """Raises ValueError for an argument with bytes that are no UTF-8: it could not be printed, logged or encoded."""
    for arg in args:
        try:
            arg.encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"the argument {arg} is no UTF-8 (at its character {error.start + 1}): write a text in "
                             "UTF-8, rename a file or folder (convmv -f latin1 -t utf-8 --notest, if that is its "
                             "encoding).") from error


def version_text() -> str:
    """The versions of zero_jax, JAX, jaxlib and Python in a line; nothing of them is imported."""
    versions = ", ".join(f"{package} {installed_version(package)}" for package in ("jax", "jaxlib"))
    return f"zero_jax {installed_version('zero-jax')} ({versions}, Python {platform.python_version()})"


def _failed(error: Exception, status: int, args: Sequence[str] = ()) -> int:
    """`status`, with the message of `error` on standard error; before it the traceback, where it is asked for.

    args: of the command whose options it names.
    """
    if os.environ.get("ZERO_JAX_TRACEBACK", "0") not in ("", "0"):
        traceback.print_exception(error)
    names = {field.name for command in {*COMMANDS} & {*args} for field in dataclasses.fields(COMMANDS[command])}
    message = str(error) if isinstance(error, UsersModuleError) else in_flags(str(error), {*names, "config"})
    print(f"error: {message}", file=sys.stderr)
    return status


def _launch(args: Sequence[str]) -> int:
    """`launch [options] -- command`: what the command would refuse is refused before any process starts."""
    end = args.index("--") if "--" in args else len(args)
    config, command = _parse(args[:end]), args[end + 1:]
    assert isinstance(config, LaunchConfig)
    if not command:
        raise UsageError("launch: no command to run. Give one after --, as in: launch --processes 2 -- train.")
    inner = _parse(command)
    if not isinstance(inner, TrainConfig) or isinstance(inner, InspectConfig):
        raise UsageError(f"launch: {command[0]} does not run as several processes; train does.")
    if inner.distributed:
        raise UsageError("distributed: leave it out: launch gives each process its number and the coordinator.")
    devices = inner.devices or config.processes * config.devices_per_process
    if devices % config.processes or devices > config.processes * config.devices_per_process:
        raise UsageError(f"devices={devices} does not fit {config.processes} processes with "
                         f"{config.devices_per_process} devices each: give a multiple of the former, at most all.")
    inner.check_devices(devices)
    launched = dataclasses.replace(inner, devices=devices)
    launched.check()
    from zero_jax.cli.objectives.choose import objective_of  # imports JAX

    objective_of(launched)
    if config.restarts and not inner.save_every:
        raise UsageError("launch: restarts with save_every=0: there would be no checkpoint to start again from.")

    def smaller(left: int) -> tuple[int, int] | None:
        least = config.min_processes or 1
        for processes in range(max(left, least), least - 1, -1):
            for each in range(devices // config.processes, 0, -1):
                with contextlib.suppress(UsageError):
                    inner.check_devices(processes * each)
                    return processes, each
        return None

    return launch(command, processes=config.processes, devices_per_process=config.devices_per_process,
                  restarts=config.restarts, smaller=smaller if config.min_processes else None)


def _parse(args: Sequence[str]) -> Config:
    command = _command(args)
    by_place = {**dict.fromkeys(("chat", "generate", "evaluate"), "--checkpoint"), "audit": "--step",
                "budgets": "--action"}  # chat RUN, audit FILE.py:NAME
    if command in by_place and args[1:] and not args[1].startswith("-"):
        args = [command, by_place[command], *args[1:]]
    if command == "diff" and len(args) > 2 and not any(each.startswith("-") for each in args[1:3]):
        args = ["diff", "--old", args[1], "--new", *args[2:]]
    args = expand_config(args, {name: COMMANDS[name] for name in TAKE_FILE})
    return read_flags(command, COMMANDS[command], args[1:])


def _command(args: Sequence[str]) -> str:
    """The command that is asked for. Raises UsageError where there is none of that name."""
    if not args:
        raise UsageError(f"no command: give one of {', '.join(COMMANDS)}, or --help.")
    if args[0] not in COMMANDS:
        raise UsageError(f"there is no command {args[0]}{nearest(args[0], [*COMMANDS])}")
    return args[0]


def _help(args: Sequence[str]) -> str | None:
    """The help that `args` ask for; None where they ask for none."""
    before = args[:args.index("--")] if "--" in args else args
    if before[:1] == ["launch"] and before != args and (text := _help(args[len(before) + 1:])) is not None:
        return text
    asked = [arg for arg in before if arg in ("-h", "--help", "--help-all")]
    if not asked:
        return None
    program = "zero-jax" if Path(sys.argv[0]).name.startswith("zero-jax") else "python -m zero_jax"
    width = min(MAX_WIDTH, shutil.get_terminal_size().columns)
    if before[0] in asked:
        return commands_text(COMMANDS, program=program, width=width)
    command = _command(before)
    return help_text(command, COMMANDS[command], program=program, everything="--help-all" in asked, width=width)


def _run(config: Config) -> int:
    assert not isinstance(config, LaunchConfig)
    end_with_launcher()
    if isinstance(config, PlanConfig | TrainConfig):  # before JAX is imported
        set_fraction()
    if isinstance(config, PlanConfig) or isinstance(config, TrainConfig | AuditConfig) and config.target:
        # Before JAX is imported.
        for name, value in _PLAN_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
    if isinstance(config, DiffConfig):
        return diff_command(config)
    if isinstance(config, BudgetsConfig):
        return budgets_command(config)
    if isinstance(config, AuditConfig):
        return audit_command(config)
    if isinstance(config, CalibrateConfig):
        calibrate_command(config)
        return 0
    config.check()
    if isinstance(config, TokenizeConfig):
        print(*tokenize_command(config), sep="\n")
        return 0
    if isinstance(config, GenerateConfig):
        from zero_jax.cli.weights.generate_command import generate_command

        texts = generate_command(config)
        for prompt, text in zip(config.prompts, texts, strict=True) if config.out is None else ():
            print(f"--- {shown_text(prompt)}\n{shown_text(text)}")
        if config.out is not None:
            print(f"{len(texts)} texts in {config.out}")
        return 0
    if isinstance(config, EvaluateConfig):
        from zero_jax.cli.weights.evaluate_command import evaluate_command

        score = evaluate_command(config)
        print(json.dumps(score.as_json()) if config.json else score)
        return 0
    if isinstance(config, ChatConfig):
        from zero_jax.cli.weights.generate_command import chat_command

        chat_command(config)
        return 0
    if isinstance(config, ExportConfig | ImportConfig):
        from zero_jax.cli.weights.export_command import export_command, import_command

        paths = export_command(config) if isinstance(config, ExportConfig) else import_command(config)
        print(*paths, sep="\n")
        return 0
    if isinstance(config, TrainConfig) and not isinstance(config, InspectConfig) and not config.dry_run:
        from zero_jax.cli.training.train import train  # imports JAX

        summary = train(config)
        if summary.interrupted:
            return INTERRUPTED
        return HUNG_UP if summary.signal == signal.SIGHUP else PREEMPTED if summary.preempted else 0
    from zero_jax.cli.planning.plan_command import inspect_command, plan_command

    if isinstance(config, PlanConfig):
        return 0 if plan_command(config) else DOES_NOT_FIT
    return 0 if inspect_command(config) else DOES_NOT_FIT
