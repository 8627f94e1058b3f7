"""The next token of a text."""

from typing import Any

import jax
import numpy as np

from zero_jax.cli.objectives.objective import Objective, RunData, check_text, token_shapes
from zero_jax.cli.text_data import counts_text, document_data, ids_text, token_parts
from zero_jax.cli.training.evaluation import token_sums
from zero_jax.cli.training.samples import continuations
from zero_jax.data import corpus
from zero_jax.data.batches import Batches
from zero_jax.data.documents import Documents
from zero_jax.data.objectives import Key, causal
from zero_jax.data.packing import DocumentRows, Windows
from zero_jax.step.step import ZeroTrainStep


class Causal(Objective):
    """Each token from those before it, of text one after another, packed or padded documents."""

    name, model_kind = "causal", "next token"

    def check(self) -> None:
        """As `Objective`."""
        check_text(self, None if self.config.reads_images else self.config.data_vocab_size())

    def describe(self) -> str:
        """As `Objective`."""
        return "the next token"

    def batch_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """`inputs` and `targets`, int32 (batch, sequence); of documents in rows also what tells them apart."""
        return token_shapes(self.config.batch_size, self.config.seq_len, self.config.batch_arrays)

    def sums(self, model: Any, batch: Any) -> dict[str, jax.Array]:
        """Of `loss` and `accuracy` (the likeliest token is the target), over the tokens."""
        return token_sums(model, batch)

    def load_data(self) -> RunData:
        """Of one array of tokens, or of documents. A bigram model is the baseline where the vocabulary is small."""
        return self._documents() if self.config.reads_documents else self._plain()

    def samples(self, step: ZeroTrainStep, state: Any, data: RunData) -> tuple[str, ...]:
        """Continuations of held-out text."""
        return continuations(self.config, self.choice, step, state, data.held_out, data.text)

    def _plain(self) -> RunData:
        config, vocab_size = self.config, self.vocab_size
        tokens = corpus.load(config.data, max_bytes=config.max_bytes, vocab_size=vocab_size)
        train, held_out = token_parts(tokens, config, vocab_size)
        shape: dict[str, Any] = {"batch_size": config.batch_size, "length": config.seq_len, "vocab_size": vocab_size}

        def batches(sharding: Any) -> tuple[Batches, Batches]:
            shape["sharding"] = sharding
            return Batches(train, seed=config.seed, **shape), Batches(held_out, complete=True, **shape)

        return RunData(batches, counts_text(len(train), len(held_out)), held_out,
                       ids_text if config.token_file else corpus.decode,
                       _bigram(vocab_size if config.token_file else corpus.BYTE_VOCAB_SIZE, train, held_out))

    def _documents(self) -> RunData:
        config = self.config
        tokenizer = config.run_tokenizer()
        pad = tokenizer.specials.pad or 0

        def rows(documents: Documents, complete: bool) -> Any:
            if config.documents == "concatenate":
                return Windows(documents, config.seq_len, causal=True, complete=complete)
            return DocumentRows(documents, config.seq_len, pack=config.documents == "pack", causal=True, pad=pad)

        def make(row: dict[str, np.ndarray], _: Key) -> dict[str, np.ndarray]:
            """With weights; where each document has a row, no segments: a target never attends to padding."""
            row = causal(row)
            return {name: array for name, array in row.items()
                    if config.documents != "pad" or name not in ("segment_ids", "positions")}

        return document_data(config, tokenizer, rows=rows, make=make, name=f"causal, {config.documents}",
                             vocab_size=self.vocab_size, baseline=lambda *parts: _bigram(tokenizer.vocab_size, *parts))

    @property
    def vocab_size(self) -> int | None:
        """Of the model, where it says."""
        return getattr(self.choice.config, "vocab_size", None)


def _bigram(vocab_size: int | None, *parts: np.ndarray) -> dict[str, float]:
    if vocab_size is None or vocab_size > 4096:
        return {}  # its table of counts has the square of that
    return {"bigram model": corpus.bigram_loss(*parts, vocab_size=vocab_size)}
