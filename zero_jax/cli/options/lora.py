"""The options of LoRA, which `train`, `inspect` and `plan` share. No JAX."""

import dataclasses
from typing import Annotated, Any, Literal

from zero_jax.arguments import patterns
from zero_jax.cli.model_lookup import ModelChoice
from zero_jax.cli.options.choices import Within, settle

LoraBase = Literal["model", "int8", "nf4"]


@dataclasses.dataclass(frozen=True)
class LoraOptions:
    """Which low-rank adapters are trained beside a frozen model; none by default."""

    lora_rank: Annotated[int | None, Within(1, 1 << 20)] = None
    """Train low-rank adapters of this rank (LoRA), and not the model, which is stored without gradients and optimizer
    states. None: train the model."""

    lora_targets: tuple[str, ...] = ()
    """Patterns of the names of the kernels to adapt, as attn/[qv] or mlp. Empty: all that matrix products alone use."""

    lora_alpha: Annotated[float | None, Within(1e-6, 1e6)] = None
    """An adapter is multiplied by this over its rank. None: the rank."""

    lora_dropout: Annotated[float, Within(0, 0.99)] = 0.0
    """Fraction of an adapter's inputs that is set to zero in training."""

    lora_base: LoraBase = "model"
    """The frozen kernels: in the precision in which the model reads them, or as codes of int8 or nf4 (QLoRA)."""

    lora_trainable: tuple[str, ...] = ()
    """Patterns of parameters that are trained as a whole beside the adapters, as ln_f."""

    def check_lora(self) -> None:
        """Raises UsageError for values out of range, and for options that cannot take effect."""
        for name in ("lora_targets", "lora_trainable"):
            object.__setattr__(self, name, patterns(name, getattr(self, name), "attn/[qv]"))
        settle(self, LoraOptions)

    def adapted(self, model: Any) -> Any:
        """`model` with the adapters of these options; the model itself where there are none."""
        if self.lora_rank is None:
            return model
        from zero_jax.frontends.lora import ALL_LINEAR, lora

        return lora(model, self.lora_rank, self.lora_targets or ALL_LINEAR, alpha=self.lora_alpha,
                    dropout=self.lora_dropout, trainable=self.lora_trainable,
                    base=None if self.lora_base == "model" else self.lora_base)

    def check_adapters(self, choice: ModelChoice) -> None:
        """Raises UsageError for targets that the model does not have, and for a rank that is too large for one.

        The model is traced, without any device.
        """
        if self.lora_rank is None:
            return
        from zero_jax.cli.lora_check import check_adapters

        check_adapters(self.adapted(choice.build(choice.config)), choice)
