"""The options of slices that train by themselves (DiLoCo). Nothing here imports JAX."""

import dataclasses
from typing import Any, Literal

from zero_jax.diloco.options import OuterOptions
from zero_jax.errors import UsageError

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
"""As `OuterOptions` names them."""


@dataclasses.dataclass(frozen=True)
class DiLoCoOptions:
    """Low-communication training between slices."""

    diloco_every: int | None = None
    """Slices, which --replica says the number of, take steps by themselves and average their movement once in so many
    steps (DiLoCo). None: all devices take each step together."""

    diloco_fragments: int = 1
    """Average the parameters in so many parts, each after a step of its own (streaming DiLoCo)."""

    diloco_overlap: bool = False
    """Send a fragment while the slices compute the next step."""

    diloco_learning_rate: float = 0.7
    """Of the outer optimizer, SGD; 1 without momentum is the mean of the slices."""

    diloco_momentum: float = 0.9
    """Of the outer optimizer. Short runs need less: 0.9 is for hundreds of averages."""

    diloco_nesterov: bool = True
    """Whether that momentum is Nesterov's."""

    diloco_mix: float | None = None
    """With diloco_overlap: what remains of a slice's own parameters where an average arrives. None: 0.5."""

    diloco_dtype: Literal["fp32", "bf16"] = "fp32"
    """In which slices send to each other; parameters and momentum stay in fp32."""

    def check_diloco(self) -> None:
        """Raises UsageError for what cannot take effect."""
        if self.diloco_every is None:
            return
        try:
            self.outer_options()
        except UsageError as error:  # it names the arguments of make_diloco_step
            raise UsageError(f"diloco_{error}") from None
        config: Any = self
        if config.epochs is None and self.diloco_every > config.steps:
            raise UsageError(f"diloco_every={self.diloco_every} is more than steps={config.steps}: the slices would "
                             "never be averaged.")

    def outer_options(self) -> OuterOptions:
        """What `make_diloco_step` is asked for."""
        assert self.diloco_every is not None
        return OuterOptions(self.diloco_every, self.diloco_learning_rate, self.diloco_momentum, self.diloco_nesterov,
                            self.diloco_fragments, self.diloco_overlap, self.diloco_mix,
                            DTYPES[self.diloco_dtype])
