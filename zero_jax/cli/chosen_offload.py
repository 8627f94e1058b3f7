"""The placement that `offload=auto` stands for: of those that fit the devices the one of least predicted time."""

import dataclasses
from pathlib import Path
from typing import TypeVar

import jax

from zero_jax.cli.objectives.objective import Objective
from zero_jax.cli.step_from_config import step_of
from zero_jax.cli.train_config import TrainConfig
from zero_jax.disk.generations import records_in
from zero_jax.distributed.agreement import all_or_none, on_any
from zero_jax.errors import UsageError
from zero_jax.offload.offload import Offload
from zero_jax.planning.memory import Transformer
from zero_jax.planning.offload_choice import DISK, OffloadArgument, OffloadChoice
from zero_jax.planning.placement import choose_for
from zero_jax.step.step import ZeroTrainStep
from zero_jax.xla.targets import Target

Config = TypeVar("Config", bound=TrainConfig)


def with_chosen_offload(config: Config, objective: Objective, devices: list[jax.Device], *,
                        target: Target | None = None, transformer: Transformer | None = None
                        ) -> tuple[Config, OffloadChoice | None]:
    """`config` with a placement in place of `offload=auto`, and the choice; as it is, and None, where it names one.

    Raises ValueError where no placement fits, and where the states of a run to resume are in files that it would not
    use.
    """
    if config.offload != "auto":
        return config, None

    def placed(offload: OffloadArgument) -> Config:
        if isinstance(offload, Offload) and offload.disk is not None:
            return dataclasses.replace(config, offload=DISK, offload_disk=Path(offload.disk), offload_gib=None)
        share = offload.fraction if isinstance(offload, Offload) else 1.0
        name = "optimizer" if isinstance(offload, Offload) else offload or "no"
        return dataclasses.replace(config, offload=name, offload_fraction=share, offload_disk=None, offload_gib=None)

    def make(offload: OffloadArgument) -> ZeroTrainStep:
        return step_of(placed(offload), objective.choice, devices, loss=objective.loss)

    limit = None if config.offload_gib is None else round(config.offload_gib * 2**30)
    choice = choose_for(make, objective.batch_shapes(), target=target, memory_bytes=limit, disk=config.offload_disk,
                        transformer=transformer)
    if config.resume and config.offload_disk is not None and choice.name != DISK and on_any(
            bool(all_or_none(lambda: records_in(config.offload_disk)))):
        raise UsageError(f"offload=auto: {choice.reason}; and offload_disk={config.offload_disk} has the states of a "
                         "run: give offload=disk to go on from them, or leave offload_disk out.")
    return placed(choice.offload), choice
