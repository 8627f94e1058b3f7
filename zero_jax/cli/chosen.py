"""What "auto" stands for in `offload`, `gather` and `reduce`: of what fits the fastest by prediction."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import jax

from zero_jax.cli.model_lookup import ModelChoice
from zero_jax.cli.objectives.objective import Objective
from zero_jax.cli.planning.plan_config import PlanConfig
from zero_jax.cli.planning.ranking import SEARCHED, decoder_of_step, ranked, remat_of
from zero_jax.cli.reports.report import size_text
from zero_jax.cli.step_from_config import step_of
from zero_jax.cli.train_config import TrainConfig
from zero_jax.disk.generations import records_in
from zero_jax.distributed.agreement import all_or_none, on_any
from zero_jax.errors import UsageError
from zero_jax.layout.layout import Layout
from zero_jax.offload.offload import Offload
from zero_jax.planning.memory import Transformer
from zero_jax.planning.offload_choice import DISK, OffloadArgument, OffloadChoice
from zero_jax.planning.placement import choose_for
from zero_jax.step.step import ZeroTrainStep
from zero_jax.xla.targets import Target

Config = TypeVar("Config", bound=TrainConfig | PlanConfig)
RunConfig = TypeVar("RunConfig", bound=TrainConfig)

SHARE = 0.8
"""Of the memory of a process, which the formula may take: nothing is compiled to confirm it."""
PLACED = {"disk": "optimizer", "gradients": "parameters"}
"""Placements that the formula has no other seconds for."""


def with_chosen_offload(config: RunConfig, objective: Objective, devices: list[jax.Device], *,
                        target: Target | None = None, transformer: Transformer | None = None
                        ) -> tuple[RunConfig, OffloadChoice | None]:
    """`config` with a placement in place of `offload=auto`, and the choice; as it is, and None, where it names one.

    Raises ValueError where no placement fits, and where the states of a run to resume are in files that it would not
    use.
    """
    if config.offload != "auto":
        return config, None

    def placed(offload: OffloadArgument) -> RunConfig:
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


def with_chosen_microbatches(config: Config, layout: Callable[[], Layout], choice: ModelChoice, target: Target | None,
                             *, batch: int, length: int | None) -> tuple[Config, str]:
    """(`config` with what "auto" stands for, why in a sentence; "" where there is nothing to choose).

    Least often is not always fastest. GPT-2 1.5B on h100:8, 8 microbatches of 2 sequences, compiled and predicted:

        gather, reduce   bytes a parameter sent   links exposed   memory-bound   step      device memory
        use, every       42.0                     27 ms           415 ms         786 ms     4.9 GiB
        step, every      15.8                      9 ms           438 ms         785 ms     7.3 GiB
        use, once        29.7                     10 ms           480 ms         832 ms    15.9 GiB
        step, once        3.5                      7 ms           498 ms         841 ms    15.9 GiB

    Sums of whole gradients pass the memory in every microbatch; within a host that costs more than the links save.

    layout: of no argument, that of the step with "use" and "every". target: the topology of its devices; None: not
    known. batch, length: sequences of a step, and their tokens.
    """
    least = config.with_microbatches()
    if config.accumulate == 1 or least == config or config.offload == "auto":
        return least, ""
    head, needs_least = f"Of {config.accumulate} microbatches: ", "; what needs least is taken."
    if target is None:
        return least, f"{head}nothing is known of these devices{needs_least}"
    if length is None:
        return least, f"{head}the model takes no sequences, by which time is estimated{needs_least}"
    stored = layout()
    if stored.num_shards == 1:
        return least, ""
    fixed = {name: getattr(config, name) for name in SEARCHED if getattr(config, name) != "auto"}
    fixed |= {"remat": remat_of(config, choice), "offload": PLACED.get(config.offload, config.offload)}
    try:
        model = decoder_of_step(config, choice, stored, batch=batch, length=length)
    except UsageError as error:
        return least, f"{head}{error.args[0].partition(':')[0]}{needs_least}"
    found, counted = ranked(fixed, model, target, list(stored.mesh.devices.flat), batch=batch, length=length,
                            precision=config.precision, share=SHARE)
    taken, texts = [], []
    for division, each in found:
        try:
            taken.append(config.with_microbatches(division.gather, division.reduce))
        except UsageError:  # does not go together with other options
            continue
        texts.append(f"gather={division.gather}, reduce={division.reduce}: {1e3 * each.seconds:,.4g} ms and "
                     f"{size_text(each.device_bytes)}")
    if not taken:
        return least, f"{head}none fits in {SHARE:.0%} of the memory by formula{needs_least}"
    left = counted - len(taken)
    return taken[0], f"{head}{'; '.join(texts)}, by formula" + f"; {left} do not fit or go together" * (left > 0) + "."
