"""How long a number of tokens takes at a predicted speed, and what it costs."""

import dataclasses
import math
from typing import Any

from zero_jax.cli.planning.plan_config import PlanConfig
from zero_jax.cli.planning.prices import price_of
from zero_jax.planning.plan import Plan


@dataclasses.dataclass(frozen=True)
class TrainingCost:
    """Days and dollars of `tokens` at `speed`.

    Attributes:
        tokens: trained on.
        speed: predicted tokens per second of all devices.
        num_devices: that train.
        price: dollars per device-hour; None: not asked for.
        deadline: in days; None: not asked for.
        band: what nine in ten published steps of the chip took over the predicted time; empty: not compared.
    """

    tokens: int
    speed: float
    num_devices: int
    price: float | None = None
    deadline: float | None = None
    band: tuple[float, ...] = ()

    @classmethod
    def of(cls, config: PlanConfig, plan: Plan) -> "TrainingCost | None":
        """Of a plan; None where no number of tokens is asked for, and of a step that does not fit."""
        if config.tokens is None or plan.timing is None or plan.target is None or not plan.fits:
            return None
        price = None if config.prices is None else price_of(config.prices, config.target, plan.target)
        return cls(config.tokens, plan.timing.tokens_per_second, plan.num_devices, price, config.deadline,
                   plan.timing.band)

    @property
    def days(self) -> float:
        """At the predicted speed, without evaluation, checkpoints and failures."""
        return self.tokens / self.speed / 86400

    @property
    def device_hours(self) -> float:
        """Hours of all devices together."""
        return 24 * self.days * self.num_devices

    @property
    def dollars(self) -> float | None:
        """What the device-hours cost; None without a price."""
        return None if self.price is None else self.price * self.device_hours

    @property
    def late(self) -> str:
        """That the deadline is not met, in a line; empty where it is, or there is none."""
        if self.deadline is None or self.days <= self.deadline:
            return ""
        devices = math.ceil(self.num_devices * self.days / self.deadline)
        return (f"The deadline is not met: {self.tokens:,} tokens take {self.days:,.3g} days at {self.speed:,.0f} "
                f"tokens/s, and --deadline is {self.deadline:g}: at least {devices:,} devices as fast as these "
                f"{self.num_devices:,} meet it.")

    def as_json(self) -> dict[str, Any]:
        """As plain JSON."""
        return dataclasses.asdict(self) | {"days": self.days, "device_hours": self.device_hours,
                                           "dollars": self.dollars, "meets_deadline": not self.late}
