"""The configuration of `export`. Nothing here imports JAX, so that bad input is refused at once."""

import dataclasses
from pathlib import Path
from typing import Literal

from zero_jax.checkpoint.object_store import check_scheme, is_remote, numbers_in
from zero_jax.cli.environment import check_folder
from zero_jax.errors import UsageError
from zero_jax.interop.safetensors_file import check_target


@dataclasses.dataclass(frozen=True)
class ExportConfig:
    """Write the parameters of a checkpoint as safetensors, for inference or for another library."""

    checkpoint: str
    """Folder of the run's checkpoints, as runs/train/checkpoints or gs://bucket/folder."""

    out: Path
    """The file, *.safetensors; above --max-file-bytes several files and an index. Or, with --names huggingface, a
    folder that transformers loads: model.safetensors, and config.json where it has none; a tokenizer's files stay."""

    at: int | None = None
    """The checkpoint's number. None: the latest."""

    dtype: Literal["fp32", "bf16", "stored"] = "fp32"
    """Dtype of floating tensors; stored: as the checkpoint has them."""

    names: Literal["own", "huggingface"] = "own"
    """Names of the tensors: ours, as blocks/qkv/kernel, or Hugging Face's, where the model's module defines them."""

    ema: bool = False
    """Export the moving average in place of the parameters."""

    model: str | None = None
    """MODULE:PRESET of the run. None: as the checkpoint says, if that is one of ours: importing a module runs it, and a
    checkpoint may come from anywhere."""

    max_file_bytes: int = 5 << 30
    """Largest size of the tensors in one file, in bytes."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "out", Path(self.out).expanduser())
        check_scheme(self.checkpoint)
        if self.max_file_bytes < 1:
            raise UsageError(f"max_file_bytes={self.max_file_bytes}: give at least 1.")
        if self.at is not None and self.at < 0:
            raise UsageError(f"at={self.at}: give the number of a checkpoint, from 0 on.")

    def check(self) -> None:
        """Raises ValueError for what is wrong and can be known before JAX is imported."""
        if is_remote(self.checkpoint):
            numbers_in(self.checkpoint)
        elif not Path(self.checkpoint).expanduser().is_dir():
            raise UsageError(f"checkpoint={self.checkpoint}: no such folder.")
        if not self.to_folder:
            check_target(self.out)
        elif self.out.is_dir():
            check_target(self.file)
        else:
            check_folder("out", self.out)

    @property
    def to_folder(self) -> bool:
        """Whether `out` is a folder for transformers, rather than a file."""
        return self.names == "huggingface" and (self.out.is_dir() or not self.out.suffix)

    @property
    def file(self) -> Path:
        """The file of the tensors, also where an index is written beside it."""
        return self.out / "model.safetensors" if self.to_folder else self.out
