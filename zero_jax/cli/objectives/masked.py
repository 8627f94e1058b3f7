"""Tokens that are hidden from the model, as BERT has them (arXiv 1810.04805), without its next-sentence prediction."""

import functools
from typing import Any

import jax
import numpy as np

from zero_jax.cli.objectives.objective import Objective, RunData, check_text, token_shapes
from zero_jax.cli.reports.measures import TEXT, Measures
from zero_jax.cli.text_data import document_data, special_tokenizer
from zero_jax.cli.training.evaluation import token_sums
from zero_jax.cli.training.samples import held_out_rows, marked_text
from zero_jax.data import extras
from zero_jax.data.documents import Documents, Tokenized
from zero_jax.data.objectives import Key, masked_language
from zero_jax.data.packing import DocumentRows, Windows
from zero_jax.data.tokenizer import Tokenizer
from zero_jax.distributed.initialize import on_host, put_global
from zero_jax.errors import UsageError
from zero_jax.step.losses import call_model
from zero_jax.step.step import ZeroTrainStep

LOOKED_AT = 1000
"""Rows among which one has a token that may be masked, or the data are refused."""


class Denoising(Objective):
    """An objective whose tokenizer needs special tokens for what is taken out."""

    @functools.cached_property
    def tokenizer(self) -> Tokenizer | Tokenized:
        """That of the data; bytes have special tokens."""
        return special_tokenizer(self.config)


class Masked(Denoising):
    """The tokens of `mask_fraction`, from those before and after them."""

    name, model_kind = "masked", "masked tokens"
    measures = Measures("tokens", "nats per predicted token", TEXT.beside)

    def check(self) -> None:
        """As `Objective`; and the tokenizer needs a mask, and ids of text to put in its place."""
        check_text(self, None if self.config.reads_images else self.tokenizer.vocab_size)
        extras.check_installed("grain", "objective=masked")
        if self.tokenizer.specials.mask is None:
            raise UsageError("objective=masked: the tokenizer has no mask (<|mask|>, <mask>, [MASK], or mask_token of "
                             "tokenizer_config.json): give one that has, as tokenize trains them.")
        if not len(self._replacements):
            raise UsageError("objective=masked: all tokens of the tokenizer are special: give one of text.")

    def describe(self) -> str:
        """As `Objective`."""
        return f"{100 * self.config.mask_fraction:g} % of the tokens, hidden from the model"

    def batch_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """`inputs`, `targets` and `weights`, (batch, sequence); of documents in rows also what tells them apart."""
        rows = {"segment_ids": "int32", "positions": "int32"} if self._in_rows else {}
        return token_shapes(self.config.batch_size, self.config.seq_len,
                            {"inputs": "int32", "targets": "int32", "weights": "float32"} | rows)

    def sums(self, model: Any, batch: Any) -> dict[str, jax.Array]:
        """Of `loss` and `accuracy` over the predicted tokens."""
        return token_sums(model, batch)

    def load_data(self) -> RunData:
        """Of documents; those of an evaluation are masked at the same places each time."""
        name = f"masked {self.config.mask_fraction} {self.tokenizer.specials.mask} {self.config.documents}"
        return document_data(self.config, self.tokenizer, rows=self._rows, make=self._masked, name=name,
                             vocab_size=getattr(self.choice.config, "vocab_size", None))

    def samples(self, step: ZeroTrainStep, state: Any, data: RunData) -> tuple[str, ...]:
        """Held-out text with masks, and as the model fills them with the likeliest tokens."""
        if not self.config.samples:
            return ()
        rows = held_out_rows(data.held_out, self.config.samples, self.config.seq_len, step)
        masks = np.stack([self._masked({"inputs": row}, (self.config.seed, k))["weights"] > 0
                          for k, row in enumerate(rows)])
        mask = self.tokenizer.specials.mask or 0  # `check` has seen it
        batch = {"inputs": np.where(masks, mask, rows).astype(np.int32)}
        likeliest = on_host(step.evaluator(_likeliest, ema=self.config.ema is not None)(
            state, put_global(batch, step.batch_sharding)))
        text = functools.partial(marked_text, decode=data.text, marks={mask: "[?]"})
        return tuple(
            f"--- held-out text, {masks[k].sum()} tokens masked:\n{text(batch['inputs'][k])}\n"
            f"--- filled by the model, {(likeliest[k] == rows[k])[masks[k]].sum()} as they were:\n"
            f"{text(np.where(masks[k], likeliest[k], rows[k]))}" for k in range(self.config.samples))

    @property
    def _in_rows(self) -> bool:
        """Whether rows have documents and padding, to which no token may attend."""
        return self.config.documents != "concatenate"

    @functools.cached_property
    def _replacements(self) -> np.ndarray:
        return np.setdiff1d(np.arange(self.tokenizer.vocab_size), self.tokenizer.specials.ids)

    def _rows(self, documents: Documents, complete: bool) -> Any:
        config, pad = self.config, self.tokenizer.specials.pad or 0
        source = Windows(documents, config.seq_len, causal=False, complete=complete) if not self._in_rows else (
            DocumentRows(documents, config.seq_len, pack=config.documents == "pack", causal=False, pad=pad))
        looked_at = range(min(source.num_examples, LOOKED_AT))
        if looked_at and not any(self._candidates(source.row(k)).any() for k in looked_at):
            raise UsageError(f"Masks leave no token: the first {len(looked_at)} rows have only padding and special "
                             "tokens, and nothing to predict: give text, or the tokenizer that wrote the tokens.")
        return source

    def _candidates(self, row: dict[str, np.ndarray]) -> np.ndarray:
        """Which tokens may be masked, bool (length,): no special ones, no padding, none of weight 0."""
        text = ~np.isin(row["inputs"], self.tokenizer.specials.ids)
        for name in ("segment_ids", "weights"):
            text = text & (row[name] > 0) if name in row else text
        return text

    def _masked(self, row: dict[str, np.ndarray], key: Key) -> dict[str, np.ndarray]:
        """`row` with masks; a row without a candidate, as the end of a document may be, predicts nothing."""
        candidates, mask = self._candidates(row), self.tokenizer.specials.mask
        assert mask is not None
        if not candidates.any():
            return {**row, "targets": row["inputs"], "weights": np.zeros(len(candidates), np.float32)}
        return {**row, **masked_language(row["inputs"], key, mask_id=mask, replacements=self._replacements,
                                         candidates=candidates, fraction=self.config.mask_fraction)}


def _likeliest(model: Any, batch: Any) -> jax.Array:
    return call_model(model, batch).argmax(-1)
