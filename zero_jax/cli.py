"""The command line, derived from the configs. What can be refused without JAX is refused before it is imported."""

import os
import sys
from collections.abc import Sequence

from zero_jax.config import InspectConfig, PlanConfig, TrainConfig

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""
DOES_NOT_FIT = 3
"""Exit status of a plan that does not fit: an answer, and no error."""


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command of `args` (default: those of the process) and returns its exit status.

    0, or 1 for a run that failed, 2 for wrong input (one message on standard error), 3 for a plan that does not fit,
    130 after Ctrl-C.
    """
    try:
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


def _parse(args: Sequence[str] | None) -> TrainConfig | PlanConfig:
    try:
        import tyro
    except ImportError as error:
        raise ValueError(f"{error}: the command line needs pip install 'zero-jax[train]'.") from error
    return tyro.extras.subcommand_cli_from_dict(
        {"train": TrainConfig, "plan": PlanConfig, "inspect": InspectConfig}, prog="python -m zero_jax", args=args,
        description="ZeRO for JAX: any Flax model, any stage, the numbers of one device.")


def _run(config: TrainConfig | PlanConfig) -> int:
    config.check()
    if isinstance(config, TrainConfig) and not isinstance(config, InspectConfig):
        from zero_jax.train import train  # imports JAX

        return INTERRUPTED if train(config).interrupted else 0
    if isinstance(config, PlanConfig):
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # XLA's own words on programs that do not fit
    from zero_jax.planning import inspect_command, plan_command

    if isinstance(config, PlanConfig):
        return 0 if plan_command(config) else DOES_NOT_FIT
    inspect_command(config)
    return 0
