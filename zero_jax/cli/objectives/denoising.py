"""Text with something taken out: masked tokens (BERT, arXiv 1810.04805), spans cut out (T5, arXiv 1910.10683)."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zero_jax.cli.objectives.objective import Objective, RunData, check_text, token_shapes
from zero_jax.cli.objectives.text import document_data
from zero_jax.cli.options.data import is_token_file
from zero_jax.cli.reports.measures import TEXT, Measures
from zero_jax.cli.step_from_config import evaluator_of
from zero_jax.cli.training.evaluation import held_out_rows, label_sums, marked_text
from zero_jax.data import extras
from zero_jax.data.documents import Documents, Tokenized
from zero_jax.data.objectives import Key, SpanLengths, lengths_of_inputs, masked_language, span_corruption
from zero_jax.data.packing import DocumentRows, Windows
from zero_jax.data.tokenizer import ByteTokenizer, SpecialByteTokenizer, Tokenizer
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
        """That of the data; bytes have special tokens beside the 256.

        Raises ValueError for a file of tokens without its tokenizer.
        """
        tokenizer = self.config.run_tokenizer()
        if not isinstance(tokenizer, ByteTokenizer):
            return tokenizer
        for name in filter(is_token_file, (*self.config.data, *self.config.eval_data)):
            raise UsageError(f"data: {name} has tokens, and which of them are masks, sentinels or the end of text is "
                             "not known: give the tokenizer that wrote them.")
        return SpecialByteTokenizer()


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

    def load_data(self) -> RunData:
        """Of documents; those of an evaluation are masked at the same places each time."""
        name = f"masked {self.config.mask_fraction} {self.tokenizer.specials.mask} {self.config.documents}"
        return document_data(self.config, self.tokenizer, rows=self._rows, make=self._masked, name=name,
                             vocab_size=self.vocab_size)

    def samples(self, step: ZeroTrainStep, state: Any, data: RunData) -> tuple[str, ...]:
        """Held-out text with masks, and as the model fills them with the likeliest tokens."""
        if not self.config.samples:
            return ()
        rows = held_out_rows(data.held_out, self.config.samples, self.config.seq_len, step)
        masks = np.stack([self._masked({"inputs": row}, (self.config.seed, k))["weights"] > 0
                          for k, row in enumerate(rows)])
        mask = self.tokenizer.specials.mask or 0  # `check` has seen it
        batch = {"inputs": np.where(masks, mask, rows).astype(np.int32)}
        likeliest = on_host(evaluator_of(self.config, step, _likeliest)(
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


SAMPLE_TOKENS = 48
"""The most that a sample generates: each takes a forward pass, as there is no cache."""


class Span(Denoising):
    """The spans of `noise_fraction` that are cut out of a text, each after its sentinel, from what is left."""

    name, model_kind = "span", "two texts"
    measures = Measures("tokens", "nats per target token", TEXT.beside)

    @functools.cached_property
    def lengths(self) -> SpanLengths:
        """Of a window of text, of the encoder's inputs (at most `seq_len`) and of the targets."""
        return lengths_of_inputs(self.config.seq_len, noise=self.config.noise_fraction, span=self.config.span_length)

    def check(self) -> None:
        """As `Objective`; and the tokenizer needs an end of text, and a sentinel for each span."""
        config, specials = self.config, None if self.config.reads_images else self.tokenizer.specials
        check_text(self, None if specials is None else self.tokenizer.vocab_size, max_length=False)
        extras.check_installed("grain", "objective=span")
        if config.documents != "concatenate":
            raise UsageError(f"documents={config.documents}: objective=span cuts windows of text one after another: "
                             "leave it out.")
        assert specials is not None
        if specials.eos is None:
            raise UsageError("objective=span: the tokenizer has no end of text: give one that has, as T5's.")
        if self.lengths.spans > len(specials.sentinels):
            raise UsageError(
                f"objective=span: seq_len={config.seq_len} has {self.lengths.spans} spans, and the tokenizer "
                f"{len(specials.sentinels)} sentinels <extra_id_N>: give a smaller seq_len, a larger span_length, or a "
                "tokenizer with more (tokenize --sentinels 100).")
        for what, size in (("inputs", self.lengths.inputs), ("targets", self.lengths.targets)):
            if size % config.context:
                raise UsageError(f"context={config.context}: seq_len={config.seq_len} makes {size} {what}, which do "
                                 "not divide over it: give another seq_len, or leave context out.")

    def describe(self) -> str:
        """As `Objective`."""
        lengths = self.lengths
        return (f"{100 * self.config.noise_fraction:g} % of {lengths.tokens} tokens, in {lengths.spans} spans that are "
                f"cut out: {lengths.inputs} inputs, {lengths.targets} targets")

    @property
    def items_per_step(self) -> int:
        """Tokens of text, before spans are cut out."""
        return self.config.batch_size * self.lengths.tokens

    @property
    def batch_text(self) -> str:
        """As `Objective`."""
        return f"{self.config.batch_size} windows of {self.lengths.tokens} tokens"

    def batch_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """`inputs` of the encoder, `decoder_inputs` and `targets`, int32."""
        lengths = {"inputs": self.lengths.inputs, "targets": self.lengths.targets,
                   "decoder_inputs": self.lengths.targets}
        return {name: jax.ShapeDtypeStruct((self.config.batch_size, length), jnp.int32)
                for name, length in lengths.items()}

    def sums(self, model: Any, batch: Any) -> dict[str, jax.Array]:
        """Of `loss` and `accuracy` over the targets, sentinels and the end of text included."""
        return label_sums(model(batch["inputs"], batch["decoder_inputs"]), batch)

    def load_data(self) -> RunData:
        """Of windows over documents; those of an evaluation are cut at the same places each time."""
        config = self.config
        return document_data(
            config, self.tokenizer, rows=lambda documents, _: Windows(documents, self.lengths.tokens, causal=False),
            make=self._cut, name=f"span {config.noise_fraction} {config.span_length} {self.tokenizer.specials}",
            vocab_size=self.vocab_size, row_tokens=self.lengths.tokens)

    def samples(self, step: ZeroTrainStep, state: Any, data: RunData) -> tuple[str, ...]:
        """Held-out text with sentinels, and the likeliest spans by the model beside those that were cut out."""
        if not self.config.samples:
            return ()
        rows = held_out_rows(data.held_out, self.config.samples, self.lengths.tokens, step)
        cut = [self._cut({"inputs": row}, (self.config.seed, k)) for k, row in enumerate(rows)]
        inputs, targets = (np.stack([row[name] for row in cut]) for name in ("inputs", "targets"))
        written = np.full_like(targets, self._start)
        likeliest = evaluator_of(self.config, step, _likeliest_next)
        length = min(SAMPLE_TOKENS, targets.shape[1])
        for last in range(length):
            batch = {"inputs": inputs, "decoder_inputs": written, "last": np.full(len(rows), last, np.int32)}
            token = on_host(likeliest(state, put_global(batch, step.batch_sharding)))
            if last + 1 < written.shape[1]:
                written[:, last + 1] = token
        return self._texts(inputs, targets[:, :length], written[:, 1:length + 1], data)

    def _texts(self, inputs: np.ndarray, targets: np.ndarray, written: np.ndarray, data: RunData) -> tuple[str, ...]:
        specials = self.tokenizer.specials
        marks = {specials.eos: "<end>"} | {token: f"<{k}>" for k, token in enumerate(specials.sentinels)}
        text = functools.partial(marked_text, decode=data.text, marks=marks)
        return tuple(f"--- held-out text, with spans cut out:\n{text(inputs[k])}\n--- what was cut out:\n"
                     f"{text(targets[k])}\n--- what the model puts there:\n{text(written[k])}"
                     for k in range(self.config.samples))

    @property
    def _start(self) -> int:
        """What the decoder begins with: padding, as T5 does."""
        return self.tokenizer.specials.pad or 0

    def _cut(self, row: dict[str, np.ndarray], key: Key) -> dict[str, np.ndarray]:
        specials, config = self.tokenizer.specials, self.config
        assert specials.eos is not None
        return span_corruption(row["inputs"], key, sentinels=specials.sentinels, eos=specials.eos,
                               noise=config.noise_fraction, span=config.span_length, start=self._start)


def _likeliest_next(model: Any, batch: Any) -> jax.Array:
    """The likeliest token after position `batch["last"]` of the decoder, int (batch,)."""
    logits = model(batch["inputs"], batch["decoder_inputs"])
    return jnp.take_along_axis(logits, batch["last"][:, None, None], axis=1)[:, 0].argmax(-1)
