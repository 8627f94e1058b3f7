"""The configuration of `import`. Nothing here imports JAX, so that bad input is refused at once."""

import dataclasses
from pathlib import Path
from typing import Literal

from zero_jax.cli.model_lookup import ModelChoice, find_model
from zero_jax.errors import UsageError
from zero_jax.interop.safetensors_file import check_target, find_tensors


@dataclasses.dataclass(frozen=True)
class ImportConfig:
    """Write the weights of a Hugging Face checkpoint under our names, for --init-from of many runs."""

    model: str
    """MODULE:PRESET that the checkpoint is of, as llama:3.2-1b; or the folder with its config.json."""

    weights: Path
    """A folder with model.safetensors or an index of such files, and config.json, which must agree with the preset; or
    such a file or index."""

    out: Path
    """The file, *.safetensors; above --max-file-bytes several files and an index."""

    dtype: Literal["fp32", "bf16", "stored"] = "stored"
    """Dtype of floating tensors; stored: as the checkpoint has them."""

    max_file_bytes: int = 5 << 30
    """Largest size of the tensors in one file, in bytes."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights", Path(self.weights).expanduser())
        object.__setattr__(self, "out", Path(self.out).expanduser())
        if self.max_file_bytes < 1:
            raise UsageError(f"max_file_bytes={self.max_file_bytes}: give at least 1.")

    def check(self) -> ModelChoice:
        """The model; raises ValueError for what is wrong and can be known before JAX is imported."""
        tensors = find_tensors(self.weights)
        check_target(self.out, new=True)
        choice = find_model(self.model)
        if choice.names is None:
            raise UsageError(f"model={self.model}: its module has no function huggingface(config), which defines the "
                             "names of its published checkpoints.")
        choice.check_weights(self.weights, tensors)
        return choice
