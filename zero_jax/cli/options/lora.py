"""The options of LoRA, which `train`, `inspect` and `plan` share. JAX is imported only where a model is traced."""

import dataclasses
from typing import Annotated, Any, Literal

from zero_jax.cli.model_lookup import ModelChoice
from zero_jax.cli.options.choices import Within


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

    lora_base: Literal["model", "int8", "nf4"] = "model"
    """The frozen kernels: in the precision in which the model reads them, or as codes of int8 or nf4 (QLoRA)."""

    lora_trainable: tuple[str, ...] = ()
    """Patterns of parameters that are trained as a whole beside the adapters, as ln_f."""

    def adapted(self, model: Any) -> Any:
        """`model` with the adapters of these options; the model itself where there are none."""
        if self.lora_rank is None:
            return model
        from zero_jax.frontends.lora import ALL_LINEAR, lora

        return lora(model, self.lora_rank, self.lora_targets or ALL_LINEAR, alpha=self.lora_alpha,
                    dropout=self.lora_dropout, trainable=self.lora_trainable,
                    base=None if self.lora_base == "model" else self.lora_base)

    def check_adapters(self, choice: ModelChoice) -> None:
        """Raises UsageError for targets that match no kernel, with the nearest names, and for a rank too large.

        The model is traced, without any device.
        """
        if self.lora_rank is None:
            return
        import jax
        import jax.numpy as jnp

        from zero_jax.frontends.model_functions import to_model_functions
        from zero_jax.step.losses import next_token_loss, with_key

        loss: Any = choice.loss or next_token_loss
        if choice.batch_shapes is not None:
            batch = choice.batch_shapes(choice.config, 1, None)
        else:
            batch = {name: jax.ShapeDtypeStruct((1, 8), jnp.int32) for name in ("inputs", "targets")}
        functions = to_model_functions(self.adapted(choice.build(choice.config)), ("dropout",))

        def init(rng: Any, given: Any, batch: Any) -> Any:
            return functions.init(with_key(loss, rng), rng, batch, given)

        jax.eval_shape(init, jax.eval_shape(lambda: jax.random.key(0)), functions.given, batch)
