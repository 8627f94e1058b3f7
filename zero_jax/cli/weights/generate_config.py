"""The configuration of `generate`. Nothing here imports JAX, so that bad input is refused at once."""

import dataclasses
from pathlib import Path
from typing import Literal

from zero_jax.checkpoint.object_store import check_scheme, is_remote, numbers_in
from zero_jax.cli.environment import checkpoints_of
from zero_jax.data.tokenizer import Tokenizer, load_tokenizer
from zero_jax.errors import UsageError


@dataclasses.dataclass(frozen=True)
class GenerateConfig:
    """Continue prompts with the model of a checkpoint, whose module has a decoder(config), as gpt2 and llama have."""

    checkpoint: str
    """Folder of the run, or of its checkpoints, as runs/train or gs://bucket/folder."""

    prompt: tuple[str, ...]
    """Texts to continue; of a run on files of tokens without a tokenizer, ids with spaces between them."""

    template: Literal["auto", "chat", "none"] = "auto"
    """How a prompt is read. chat: as a user's message, in the run's chat template; none: as a text; auto: chat for a
    run that was trained on messages. What a run of responses generates ends where a response does."""

    tokens: int = 100
    """Tokens to generate; with the prompt at most the model's max_length."""

    temperature: float = 0.7
    """Divides the logits; 0 takes the most likely token each time."""

    seed: int = 0
    """Of the draws."""

    at: int | None = None
    """The checkpoint's number. None: the latest."""

    ema: bool = False
    """Of the moving average in place of the parameters."""

    tokenizer: Path | None = None
    """The run's tokenizer, as for train. None: bytes, or ids, as the run read its data."""

    model: str | None = None
    """MODULE:PRESET of the run. None: as the checkpoint says, if that is one of ours: importing a module runs it, and a
    checkpoint may come from anywhere."""

    def __post_init__(self) -> None:
        check_scheme(self.checkpoint)
        object.__setattr__(self, "checkpoint", checkpoints_of(self.checkpoint))
        if self.tokenizer is not None:
            object.__setattr__(self, "tokenizer", Path(self.tokenizer))
        if self.template not in ("auto", "chat", "none"):
            raise UsageError(f"template={self.template!r}: give auto, chat or none.")
        if not self.prompt or "" in self.prompt:
            raise UsageError("prompt is empty: give a text to continue.")
        for name, low, high in (("tokens", 1, 1 << 20), ("temperature", 0, 100), ("seed", 0, 2**32 - 1),
                                ("at", 0, 1 << 62)):
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise UsageError(f"{name}={value} is not within {low} to {high}.")

    def check(self) -> Tokenizer | None:
        """The tokenizer, if one is given; raises ValueError for what is wrong and known before JAX is imported."""
        if is_remote(self.checkpoint):
            numbers_in(self.checkpoint)
        elif not Path(self.checkpoint).expanduser().is_dir():
            raise UsageError(f"checkpoint={self.checkpoint}: no such folder.")
        return None if self.tokenizer is None else load_tokenizer(self.tokenizer)
