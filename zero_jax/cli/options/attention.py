"""The option of `train` and `plan` that chooses the kernel of attention. No JAX."""

import dataclasses
from typing import Literal, get_args

from zero_jax.cli.model_lookup import ModelChoice, nearest
from zero_jax.cli.options.combinations import check_kernel
from zero_jax.errors import UsageError

AttentionName = Literal["auto", "xla", "cudnn", "splash"]


@dataclasses.dataclass(frozen=True)
class AttentionOptions:
    """Which kernel computes attention."""

    attention: AttentionName = "auto"
    """The kernel of attention: cudnn (GPU), splash (TPU) or xla; auto: the devices' own where it takes the arrays."""

    def check_attention(self, choice: ModelChoice, platform: str | None) -> None:
        """Raises UsageError where a kernel is asked for that the model cannot take, or that the devices do not have.

        platform: of the devices: "cuda", "tpu" or "cpu"; None: not known before JAX starts.
        """
        if self.attention not in get_args(AttentionName):
            raise UsageError(f"attention={self.attention!r} is unknown"
                             f"{nearest(self.attention, [*get_args(AttentionName)])}")
        if self.attention == "auto":
            return
        if not hasattr(choice.config, "attention"):
            raise UsageError(f"attention={self.attention}: {choice.name} has no field 'attention' in its config: leave "
                             "it out.")
        if self.attention != "xla" and getattr(choice.config, "attention_softcap", None) is not None:
            raise UsageError(f"attention={self.attention}: {choice.name} caps its scores, which only XLA's attention "
                             "does: give auto or xla.")
        check_kernel(self, platform)
