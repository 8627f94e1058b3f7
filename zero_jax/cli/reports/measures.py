"""What a run counts and what its evaluations measure, as its log, its lines and its report show them. No JAX."""

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Measure:
    """A number of an evaluation. name: in the log, after `validation_`. label: in words. percent: a fraction."""

    name: str
    label: str
    percent: bool = False

    def text(self, value: float) -> str:
        """A value as it is shown.

        >>> Measure("accuracy", "accuracy", percent=True).text(0.3125), Measure("loss", "loss").text(1234.5)
        ('31.2 %', '1,234.500')
        """
        return f"{100 * value:.1f} %" if self.percent else f"{value:,.3f}"


@dataclasses.dataclass(frozen=True)
class Measures:
    """items: what a run counts: tokens, images. unit: of the loss. beside: what evaluations measure beside the loss."""

    items: str
    unit: str
    beside: tuple[Measure, ...]

    @property
    def rate(self) -> str:
        """The name of the speed in the log."""
        return f"{self.items}_per_second"

    def shown(self, metrics: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
        """The values in `metrics` of what is measured beside the loss, as text, by label."""
        return {each.label: each.text(metrics[prefix + each.name]) for each in self.beside
                if prefix + each.name in metrics}


TEXT = Measures("tokens", "nats per token", (
    Measure("perplexity", "perplexity"), Measure("accuracy", "accuracy", percent=True)))
"""Of the next token of a text."""
