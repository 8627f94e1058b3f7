"""The options of slices that train by themselves (DiLoCo). Nothing here imports JAX."""

import dataclasses
from typing import Any, Literal

from zero_jax.diloco.options import OuterOptions
from zero_jax.errors import UsageError

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
"""As `OuterOptions` names them."""

REFUSED = {
    "ema": "each slice would average parameters of its own, and the outer ones are an average already",
    "max_bad_steps": "a slice cannot skip a step while the others take it",
    "quantize_weights": "that is not known to be right in slices yet; --diloco-dtype bf16 halves what they send",
    "quantize_gradients": "that is not known to be right in slices yet; --diloco-dtype bf16 halves what they send",
    "check_replicas": "slices differ from each other between two averages",
    "lora_rank": "adapters are small enough to be averaged in every step"}
"""The options that go not with slices, and why."""


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
        config: Any = self
        if self.diloco_every is None:
            for field in dataclasses.fields(DiLoCoOptions):
                if (value := getattr(self, field.name)) != field.default:
                    raise UsageError(f"{field.name}={value} without diloco_every: say after how many steps the slices "
                                     "are averaged, or leave it out.")
            return
        if self.diloco_dtype not in DTYPES:
            raise UsageError(f"diloco_dtype={self.diloco_dtype!r} is unknown: give {' or '.join(DTYPES)}.")
        try:
            self.outer_options()
        except UsageError as error:  # it names the arguments of make_diloco_step
            raise UsageError(f"diloco_{error}") from None
        if config.replica < 2:
            raise UsageError(f"diloco_every={self.diloco_every} with replica={config.replica}: there is one slice, and "
                             "no other to average with: give replica=2 or more.")
        if self.diloco_every > config.steps:
            raise UsageError(f"diloco_every={self.diloco_every} is more than steps={config.steps}: the slices would "
                             "never be averaged.")
        for name, why in REFUSED.items():
            if getattr(config, name) not in (None, 0, (), "no"):
                raise UsageError(f"{name} with diloco_every: {why}: leave it out.")
        if config.offload != "no":
            raise UsageError(f"offload={config.offload} with diloco_every: states of slices are in device memory: "
                             "leave it out.")
        if config.precision == "fp16":
            raise UsageError("precision=fp16 with diloco_every: its loss scale skips steps, which a slice would do by "
                             "itself: give precision=bf16.")

    def outer_options(self) -> OuterOptions:
        """What `make_diloco_step` is asked for."""
        assert self.diloco_every is not None
        return OuterOptions(self.diloco_every, self.diloco_learning_rate, self.diloco_momentum, self.diloco_nesterov,
                            self.diloco_fragments, self.diloco_overlap, self.diloco_mix,
                            DTYPES[self.diloco_dtype])
