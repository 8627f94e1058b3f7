"""The command line, derived from the configs. What can be refused without JAX is refused before it is imported."""

import dataclasses
import os
import sys
from collections.abc import Sequence

from zero_jax.config import InspectConfig, TrainConfig
from zero_jax.export_config import ExportConfig
from zero_jax.launch import PREEMPTED, LaunchConfig, end_with_launcher, launch
from zero_jax.plan_config import PlanConfig

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""
DOES_NOT_FIT = 3
"""Exit status of a plan that does not fit: an answer, and no error."""

_PLAN_ENVIRONMENT = {
    "TF_CPP_MIN_LOG_LEVEL": "3",  # XLA's own words on programs that do not fit
    # No device is used: none is looked for, and none is missed.
    "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
}


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command of `args` (default: those of the process) and returns its exit status.

    0, or 1 for a run that failed, 2 for wrong input (one message on standard error), 3 for a plan that does not fit,
    75 for a run that SIGTERM ended after it had saved, 124 for one that hung (--hang-exit), 130 after Ctrl-C.
    """
    args = list(sys.argv[1:] if args is None else args)
    try:
        if args[:1] == ["launch"]:
            return _launch(args)
        return _run(_parse(args))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except FloatingPointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return INTERRUPTED


def _launch(args: list[str]) -> int:
    """`launch [options] -- command`: what the command would refuse is refused here, before any process starts."""
    end = args.index("--") if "--" in args else len(args)
    config, command = _parse(args[:end]), args[end + 1:]
    assert isinstance(config, LaunchConfig)
    if not command:
        raise ValueError("launch: no command to run. Give one after --, as in: launch --processes 2 -- train.")
    inner = _parse(command)
    if not isinstance(inner, TrainConfig) or isinstance(inner, InspectConfig):
        raise ValueError(f"launch: {command[0]} does not run as several processes; train does.")
    if inner.distributed:
        raise ValueError("distributed: leave it out, since launch tells each process its place.")
    devices = inner.devices or config.processes * config.devices_per_process
    if devices % config.processes or devices > config.processes * config.devices_per_process:
        raise ValueError(f"devices={devices} does not fit {config.processes} processes with "
                         f"{config.devices_per_process} devices each: give a multiple of the former, at most all.")
    inner.check_devices(devices)
    dataclasses.replace(inner, devices=devices).check()
    return launch(command, processes=config.processes, devices_per_process=config.devices_per_process)


def _parse(args: Sequence[str]) -> TrainConfig | PlanConfig | ExportConfig | LaunchConfig:
    try:
        import tyro
    except ImportError as error:
        raise ValueError(f"{error}: the command line needs pip install 'zero-jax[train]'.") from error
    commands = {"train": TrainConfig, "plan": PlanConfig, "inspect": InspectConfig, "export": ExportConfig,
                "launch": LaunchConfig}
    return tyro.extras.subcommand_cli_from_dict(
        commands, prog="python -m zero_jax", args=args,
        description="ZeRO for JAX: any Flax model, any stage, the numbers of one device.")


def _run(config: TrainConfig | PlanConfig | ExportConfig | LaunchConfig) -> int:
    assert not isinstance(config, LaunchConfig)
    end_with_launcher()
    if isinstance(config, PlanConfig):  # before JAX is imported
        for name, value in _PLAN_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
    config.check()
    if isinstance(config, ExportConfig):
        from zero_jax.exporting import export_command

        print(*export_command(config), sep="\n")
        return 0
    if isinstance(config, TrainConfig) and not isinstance(config, InspectConfig):
        from zero_jax.train import train  # imports JAX

        summary = train(config)
        return INTERRUPTED if summary.interrupted else PREEMPTED if summary.preempted else 0
    from zero_jax.planning import inspect_command, plan_command

    if isinstance(config, PlanConfig):
        return 0 if plan_command(config) else DOES_NOT_FIT
    inspect_command(config)
    return 0
