"""The options of quantised communication, which `train`, `inspect` and `plan` share. No JAX."""

import dataclasses
from typing import TYPE_CHECKING, Any, Literal, get_args

from zero_jax.errors import UsageError

if TYPE_CHECKING:
    from zero_jax.sharding.quantized.policy import Communication

WeightFormat = Literal["no", "int8", "fp8", "int4"]
GradientFormat = Literal["int8", "fp8", "int4", "fp4"]


@dataclasses.dataclass(frozen=True)
class CommunicationOptions:
    """In which formats weights are gathered and gradients reduced (ZeRO++)."""

    quantize_weights: WeightFormat = "no"
    """Gather weights as codes of this format: at stage 3, and with bf16 or fp16 at stages 1 and 2."""

    quantize_gradients: tuple[GradientFormat, ...] = ()
    """Reduce gradients as codes of this format; two formats: inside a node and across nodes."""

    def check_quantized(self) -> None:
        """Raises UsageError for unknown formats, and too many."""
        object.__setattr__(self, "quantize_gradients", tuple(self.quantize_gradients))
        gradients = self.quantize_gradients
        for name, value, known in (
                ("quantize_weights", self.quantize_weights, get_args(WeightFormat)),
                *(("quantize_gradients", each, get_args(GradientFormat)) for each in gradients)):
            if value not in known:
                raise UsageError(f"{name}={value!r} is unknown: give {', '.join(known)}.")
        if len(gradients) > 2:
            raise UsageError(f"quantize_gradients={' '.join(gradients)}: give one format, or two: inside a node and "
                             "across nodes.")

    @property
    def communication(self) -> "Communication | None":
        """The policy; None where nothing is quantised."""
        from zero_jax.sharding.quantized.policy import Communication

        weights = None if self.quantize_weights == "no" else self.quantize_weights
        gradients: Any = self.quantize_gradients or None
        return Communication(weights, gradients) if weights or gradients else None
