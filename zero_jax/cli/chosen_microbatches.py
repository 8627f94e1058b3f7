"""The microbatches that `gather` and `reduce` stand for where they are "auto": what is predicted fastest and fits."""

import dataclasses
from collections.abc import Callable
from typing import TypeVar

from zero_jax.cli.planning.plan_config import PlanConfig
from zero_jax.cli.train_config import TrainConfig
from zero_jax.errors import UsageError
from zero_jax.layout.layout import Layout
from zero_jax.planning.microbatches import choose_microbatches
from zero_jax.xla.live_chip import topology_of

Config = TypeVar("Config", bound=TrainConfig | PlanConfig)


def by_hand(config: Config) -> Config:
    """`config` with "use" and "every" in place of "auto"."""
    return with_values(config, "use", "every")


def with_values(config: Config, gather: str, reduce: str) -> Config:
    """`config` with these in place of "auto"."""
    return dataclasses.replace(config, gather=gather if config.gather == "auto" else config.gather,
                               reduce=reduce if config.reduce == "auto" else config.reduce)


def with_chosen_microbatches(config: Config, layout: Callable[[], Layout]) -> tuple[Config, str]:
    """(`config` with what "auto" stands for, why in a sentence; "" where there is nothing to choose).

    layout: of no argument, that of the step of `by_hand(config)`.
    """
    if config.accumulate == 1 or "auto" not in (config.gather, config.reduce) or config.offload == "auto":
        return by_hand(config), ""

    def allowed(gather: str, reduce: str) -> bool:
        try:
            with_values(config, gather, reduce)
        except UsageError:  # does not go together with other options
            return False
        return True

    stored = layout()
    choice, reason = choose_microbatches(
        stored, config.accumulate, topology_of(list(stored.mesh.devices.flat)), allowed=allowed,
        gathers=("step", "use") if config.gather == "auto" else (config.gather,),
        reduces=("once", "every") if config.reduce == "auto" else (config.reduce,))
    return (with_values(config, choice.gather, choice.reduce) if choice else by_hand(config)), reason
