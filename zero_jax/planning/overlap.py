"""What `overlap=` and `prefetch=` bring to a step and cost it: compiled with XLA's options for it, and without."""

import dataclasses
from typing import Any

from zero_jax.planning.timing import Timing


@dataclasses.dataclass(frozen=True)
class OverlapEffect:
    """A step without and with overlap: each pair is (without, with), of one device.

    Attributes:
        exposed_seconds: predicted, in which nothing but communication runs.
        seconds: predicted, of the step.
        mfu: model FLOPs utilisation.
        temporaries: bytes.
    """

    exposed_seconds: tuple[float, float]
    seconds: tuple[float, float]
    mfu: tuple[float, float]
    temporaries: tuple[int, int]

    @classmethod
    def of(cls, timings: tuple[Timing, Timing], memories: tuple[Any, Any]) -> "OverlapEffect":
        """From the two predictions and the two `memory_analysis()`, without overlap first."""
        before, after = timings
        return cls((sum(before.exposed_seconds.values()), sum(after.exposed_seconds.values())),
                   (before.seconds, after.seconds), (before.mfu, after.mfu),
                   (memories[0].temp_size_in_bytes, memories[1].temp_size_in_bytes))
