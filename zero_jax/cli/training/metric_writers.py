"""Writers of metrics beside train.jsonl: TensorBoard's event files and Weights & Biases.

tensorboardX and not `clu.metric_writers`, whose TensorBoard writers import TensorFlow or PyTorch.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from zero_jax.errors import UsageError


class MetricWriter(Protocol):
    """What gets the metrics of each step."""

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Metrics of a step by name."""
        ...

    def close(self) -> None:
        """Writes what is left."""
        ...


class TensorBoardWriter:
    """Event files in `folder`; of steps after `after`, which a resumed run takes again, the new ones are shown."""

    def __init__(self, folder: Path, *, after: int):
        from tensorboardX import SummaryWriter  # pyright: ignore[reportMissingImports]

        # A file's name has the second of its start: without the suffix a restart within it would write over the file.
        self._writer = SummaryWriter(str(folder), purge_step=after + 1 if after else None,
                                     filename_suffix=f".{after}")

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """See MetricWriter."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """See MetricWriter."""
        self._writer.close()


class WandbWriter:
    """A run of Weights & Biases; where to, and whether offline, is for its own variables (WANDB_MODE, ...)."""

    def __init__(self, folder: Path, config: Mapping[str, Any]):
        import wandb  # pyright: ignore[reportMissingImports]

        try:
            self._run = wandb.init(project="zero_jax", name=folder.name, dir=str(folder), config=dict(config))
        except Exception as error:  # its own kinds, of no common class: no key, no network
            raise UsageError(f"log_to=wandb: {error}. WANDB_MODE=offline in the environment keeps the run in "
                             f"{folder}/wandb.") from error

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """See MetricWriter."""
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        """See MetricWriter."""
        self._run.finish()


@contextlib.contextmanager
def metric_writers(names: tuple[str, ...], folder: Path, config: Mapping[str, Any], *, after: int
                   ) -> Iterator[list[MetricWriter]]:
    """The writers of these names, open until the end of the `with`.

    Args:
      names: of `tensorboard` and `wandb`.
      folder: of the run.
      config: its options, as plain JSON.
      after: the step from which it continues; 0 for a new one.
    """
    writers: list[MetricWriter] = []
    try:
        for name in names:
            writers.append(WandbWriter(folder, config) if name == "wandb" else
                           TensorBoardWriter(folder / "tensorboard", after=after))
        yield writers
    finally:
        for writer in writers:
            writer.close()


def scalars_of(row: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a line of the log, without its step.

    >>> scalars_of({"step": 3, "loss": 0.5, "mfu": None, "config": {}})
    {'loss': 0.5}
    """
    return {name: value for name, value in row.items()
            if name != "step" and isinstance(value, (int, float)) and math.isfinite(value)}
