"""The options of a step that `train`, `inspect` and `plan` share: communication, tiles, mesh, attention. No JAX."""

import dataclasses
import re
from typing import TYPE_CHECKING, Any, Literal

from zero_jax.arguments import patterns
from zero_jax.cli.model_lookup import ModelChoice
from zero_jax.cli.options.choices import Count, Gather, Reduce, settle
from zero_jax.cli.options.combinations import check_kernel
from zero_jax.errors import UsageError

if TYPE_CHECKING:
    from zero_jax.gather.quantized.policy import Communication

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
        settle(self, CommunicationOptions)
        if len(self.quantize_gradients) > 2:
            raise UsageError(f"quantize_gradients={' '.join(self.quantize_gradients)}: give one format, or two: inside "
                             "a node and across nodes.")

    @property
    def communication(self) -> "Communication | None":
        """The policy; None where nothing is quantised."""
        from zero_jax.gather.quantized.policy import Communication

        weights = None if self.quantize_weights == "no" else self.quantize_weights
        gradients: Any = self.quantize_gradients or None
        return Communication(weights, gradients) if weights or gradients else None


_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_HOW = ("give PATTERN=TILES for each parameter, as mlp/up/kernel=16, or one size, as 512MiB, above which a gathered "
        "copy is made in tiles")


@dataclasses.dataclass(frozen=True)
class TilingOptions:
    """Which products are computed in tiles (memory-centric tiling, ZeRO-Infinity); none by default."""

    tiling: tuple[str, ...] = ()
    """At stage 3: the products whose weights are gathered, multiplied and dropped in tiles: PATTERN=TILES for each, as
    mlp/up/kernel=16; or one size, as 512MiB, above which a layer's gathered weight is in tiles."""

    def check_tiling(self) -> None:
        """Raises UsageError for what is neither."""
        settle(self, TilingOptions)
        self.tiles  # noqa: B018 (raises)

    @property
    def tiles(self) -> dict[str, int] | int | None:
        """What `make_zero_train_step(tiling=...)` takes."""
        if not self.tiling:
            return None
        if len(self.tiling) == 1 and (size := re.fullmatch(r"(\d{1,9}(?:\.\d{1,3})?)([KMG]iB)", self.tiling[0])):
            number = round(float(size[1]) * _UNITS[size[2]])
            if number < 2**10:
                raise UsageError(f"tiling={self.tiling[0]}: give at least 1KiB.")
            return number
        tiles: dict[str, int] = {}
        for text in self.tiling:
            pattern, _, count = text.rpartition("=")
            if not (pattern and re.fullmatch(r"[0-9]{1,6}", count) and int(count) > 1):
                raise UsageError(f"tiling={text}: {_HOW}, and at least 2 tiles.")
            if pattern in tiles:
                raise UsageError(f"tiling: {pattern} is given twice.")
            tiles[pattern] = int(count)
        patterns("tiling", tuple(tiles), "mlp/up/kernel")
        return tiles


@dataclasses.dataclass(frozen=True)
class MicrobatchOptions:
    """Into how many parts a batch is cut, and how often each device sends for them."""

    accumulate: Count = 1
    """Microbatches of a step, one after another: only one's activations are in memory at a time."""

    reduce: Reduce = "auto"
    """Reduce-scatter every microbatch's gradient and sum the shards, or sum on each device and reduce once. auto: what
    is predicted fastest, with gather=auto, of what leaves half of a known device's memory to activations."""

    gather: Gather = "auto"
    """At stage 3: gather parameters at each use, in forward alone, which keeps them for backward, or once a step into a
    copy that all microbatches read; auto: as with reduce=auto."""

    loss_chunks: Count = 1
    """The loss of the next token in so many parts, so that logits (tokens x vocabulary) never exist whole; they are
    computed once more for the backward pass."""


@dataclasses.dataclass(frozen=True)
class ParallelOptions:
    """Over which groups of devices a model, its sequences and its activations are split."""

    replica: Count = 1
    """Hybrid sharding: the number of device groups, each of which stores a complete set of shards."""

    tensor: Count = 1
    """Devices over which the model's tensor_rules split it (tensor parallelism); they share their sequences."""

    context: Count = 1
    """Devices over which each sequence is split."""

    sequence_parallel: bool = False
    """Split activations between tensor-parallel products along the sequence."""

    partition_activations: Literal["no", "yes", "cpu"] = "no"
    """Split checkpointed activations over the tensor axis (P_a); cpu: also offload them to host memory."""


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
        settle(self, AttentionOptions)
        if self.attention == "auto":
            return
        if not hasattr(choice.config, "attention"):
            raise UsageError(f"attention={self.attention}: {choice.name} has no field 'attention' in its config: leave "
                             "it out.")
        if self.attention != "xla" and getattr(choice.config, "attention_softcap", None) is not None:
            raise UsageError(f"attention={self.attention}: {choice.name} caps its scores, which only XLA's attention "
                             "does: give auto or xla.")
        check_kernel(self, platform)
