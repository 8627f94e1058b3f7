"""What objectives share that take something out of a text for the model to put back."""

import functools

from zero_jax.cli.objectives.objective import Objective
from zero_jax.cli.text_data import special_tokenizer
from zero_jax.data.tokenized import Tokenized
from zero_jax.data.tokenizer import Tokenizer


class Denoising(Objective):
    """An objective whose tokenizer needs special tokens for what is taken out."""

    @functools.cached_property
    def tokenizer(self) -> Tokenizer | Tokenized:
        """That of the data; bytes have special tokens."""
        return special_tokenizer(self.config)
