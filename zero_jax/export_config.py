"""What the command export is told. Nothing here imports JAX, so that a mistake is answered at once."""

import dataclasses
from pathlib import Path
from typing import Literal

from zero_jax.safetensors_file import check_target


@dataclasses.dataclass(frozen=True)
class ExportConfig:
    """Write the parameters of a checkpoint as safetensors, for inference or for another library."""

    checkpoint: Path
    """Folder of the run's checkpoints, as runs/train/checkpoints."""

    out: Path
    """The file, *.safetensors; with more than --max-file-bytes several, and an index."""

    at: int | None = None
    """The checkpoint's number. None: the latest."""

    dtype: Literal["fp32", "bf16", "stored"] = "fp32"
    """Of floating tensors."""

    names: Literal["own", "huggingface"] = "own"
    """Of the tensors: those of the model here, as blocks/qkv/kernel, or Hugging Face's, where its module tells them."""

    ema: bool = False
    """The moving average in place of the parameters."""

    model: str | None = None
    """MODULE:PRESET of the run. None: as the checkpoint says, if that is one of the package models: a module runs when
    it is imported, and a checkpoint may come from anywhere."""

    max_file_bytes: int = 5 << 30
    """Of tensors in one file."""

    def __post_init__(self) -> None:
        for name in ("checkpoint", "out"):
            object.__setattr__(self, name, Path(getattr(self, name)).expanduser())
        if self.max_file_bytes < 1:
            raise ValueError(f"max_file_bytes={self.max_file_bytes}: give at least 1.")
        if self.at is not None and self.at < 0:
            raise ValueError(f"at={self.at}: give the number of a checkpoint, from 0 on.")

    def check(self) -> None:
        """Raises ValueError for what can be seen to be wrong before JAX starts."""
        if not self.checkpoint.is_dir():
            raise ValueError(f"checkpoint={self.checkpoint}: no such folder.")
        check_target(self.out)
