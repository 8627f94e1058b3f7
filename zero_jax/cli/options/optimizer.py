"""The options of the optimizer, which `train`, `inspect` and `plan` share. No JAX."""

import dataclasses
from typing import Annotated, Literal

from zero_jax.cli.options.choices import Optimizer, Within
from zero_jax.errors import UsageError

Beta = Annotated[float, Within(0, 1 - 1e-9)]


@dataclasses.dataclass(frozen=True)
class OptimizerOptions:
    """Which optimizer updates the parameters, and how it stores its state."""

    optimizer: Optimizer = "adamw"
    """AdamW's state is 8 bytes per parameter, that of the others less. muon: of kernels, by Muon, each whole on the
    device that owns it, and of the rest by AdamW. schedule-free: AdamW with an average of its own in place of a decay
    of the learning rate; evaluation, generate and export take that average."""

    moments: Literal[8, 16] | None = None
    """Bits of each number of the optimizer's moments, which are rounded at random: 16 is bfloat16, 8 has a scale for
    each block of 128. None: as the optimizer stores them, in 32 where it does not say otherwise."""

    betas: tuple[Beta, ...] = ()
    """Decays of the averages of gradients and of their squares, as 0.9,0.95. Empty: the optimizer's own."""

    eps: Annotated[float | None, Within(0, 1)] = None
    """What is added to what Adam divides by. None: the optimizer's own, 1e-8 or with lamb 1e-6."""

    def check_optimizer(self, schedule: str = "constant") -> None:
        """Raises UsageError for betas that are not two, and for a schedule that schedule-free is in place of."""
        if len(self.betas) not in (0, 2):
            raise UsageError(f"betas={self.betas}: give two, as 0.9,0.95.")
        if self.optimizer != "schedule-free":
            return
        if self.betas and not self.betas[0]:
            raise UsageError(f"betas={self.betas}: schedule-free divides by the first: give one above 0, as 0.9,0.95.")
        if schedule != "constant":
            raise UsageError(f"optimizer=schedule-free with schedule={schedule}: its average is in place of a decay: "
                             "give schedule=constant.")
