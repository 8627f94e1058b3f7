"""Which of two responses is better: direct preference optimization, held to the model that the run starts from."""

import functools
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zero_jax.cli.objectives.objective import Objective, RunData
from zero_jax.cli.reports.measures import Measure, Measures
from zero_jax.cli.response_data import answers, check_responses, counted, example_parts, read_examples
from zero_jax.data.conversations import preference
from zero_jax.data.example_batches import ExampleBatches
from zero_jax.data.response_rows import Example, PairRows, encode, fitting_pairs
from zero_jax.distributed.agreement import all_or_none, is_first
from zero_jax.distributed.initialize import on_host, put_global
from zero_jax.errors import UsageError
from zero_jax.step.losses import dpo_by_pair, dpo_loss, response_log_probs
from zero_jax.step.step import ZeroTrainStep
from zero_jax.typing import Loss


class Preferences(Objective):
    """DPO (arXiv 2305.18290).

    The log-probabilities of the reference, the model as the run finds it, are computed once for all pairs before the
    first step, and kept in the run's folder for a resumed one.
    """

    name, model_kind = "preferences", "next token"
    measures = Measures("pairs", "nats per pair", (
        Measure("accuracy", "accuracy", percent=True), Measure("margin", "margin")))

    def check(self) -> None:
        """As `Objective`, and the first lines of the data."""
        if self.config.documents != "concatenate":
            raise UsageError(f"documents={self.config.documents}: objective=preferences has a row for each response: "
                             "leave it out.")
        self.tokenizer, self.template = check_responses(self, preference)

    def describe(self) -> str:
        """As `Objective`."""
        return f"which of two responses is better ({self.template.name}), by DPO with beta {self.config.dpo_beta:g}"

    def batch_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """As `dpo_loss` takes them."""
        shape = (self.config.batch_size, 2, self.config.seq_len)
        return {"inputs": jax.ShapeDtypeStruct(shape, jnp.int32), "targets": jax.ShapeDtypeStruct(shape, jnp.int32),
                "weights": jax.ShapeDtypeStruct(shape, jnp.float32),
                "reference": jax.ShapeDtypeStruct(shape[:2], jnp.float32)}

    @property
    def loss(self) -> Loss:
        """`dpo_loss`."""
        return functools.partial(dpo_loss, beta=self.config.dpo_beta)

    @property
    def items_per_step(self) -> int:
        """Pairs."""
        return self.config.batch_size

    @property
    def batch_text(self) -> str:
        """As `Objective`."""
        return f"{self.config.batch_size} pairs of up to {self.config.seq_len} tokens"

    def sums(self, model: Any, batch: Any) -> dict[str, jax.Array]:
        """Of `loss`, `accuracy` (the chosen response gained more on the reference) and `margin`, over the pairs.

        A pair without a weight is none.
        """
        pairs, counts = dpo_by_pair(model, batch, beta=self.config.dpo_beta), (batch["weights"] > 0).any((1, 2))
        return {name: jnp.where(counts, value, 0).sum() for name, value in pairs.items()} | {
            "weight": counts.sum().astype(jnp.float32)}

    def metrics(self, means: Mapping[str, float]) -> dict[str, float]:
        """Without a perplexity."""
        return dict(means)

    def load_data(self) -> RunData:
        """Of JSON lines or Parquet; pairs that are too long are cut, and left out where no two responses are."""
        config = self.config

        def pairs(names: tuple[str, ...]) -> tuple[list[tuple[Example, Example]], int, int]:
            read = read_examples(names, lambda row, where: preference(row, self.template, where))
            encoded = (encode([one for pair in part for one in pair], self.tokenizer) for part in read)
            return fitting_pairs(((part[k], part[k + 1]) for part in encoded for k in range(0, len(part), 2)),
                                 config.seq_len)

        train, held_out, cut, left_out = example_parts(config, pairs)
        pad = self.tokenizer.specials.pad or 0
        self._rows = [PairRows(part, config.seq_len, pad=pad) for part in (train, held_out)]

        def batches(sharding: Any) -> tuple[ExampleBatches, ExampleBatches]:
            shape = {"batch_size": config.batch_size, "sharding": sharding, "name": "preferences",
                     "vocab_size": getattr(self.choice.config, "vocab_size", None)}
            return (ExampleBatches([self._rows[0]], seed=config.seed, **shape),
                    ExampleBatches([self._rows[1]], complete=True, **shape))

        why = "no response began within a row, or both are the same in it"
        what = counted(train, held_out, cut=cut, left_out=left_out, unread=self.template.unread, why=why)
        return RunData(batches, what, [chosen for chosen, _ in held_out], self.tokenizer.decode)

    def prepare(self, step: ZeroTrainStep, state: Any, *, resumed: bool) -> str:
        """The reference of all pairs: of `state`, or if `resumed` as the run has kept it."""
        path = self.config.out / "reference.npz"
        if resumed:
            all_or_none(lambda: self._read_reference(path))
            return f"Reference: the log-probabilities in {path}."
        for rows in self._rows:
            self._compute_reference(rows, step, state)
        kept: Any = {f"{name}_{k}": value for k, rows in enumerate(self._rows)
                     for name, value in (("pairs", rows.reference), ("data", np.int64(rows.fingerprint)))}
        all_or_none(lambda: np.savez(path, **kept) if is_first() else None)
        return (f"Reference: the log-probabilities of {sum(rows.num_examples for rows in self._rows):,} pairs under "
                f"the model that the run starts from, in {path}.")

    def samples(self, step: ZeroTrainStep, state: Any, data: RunData) -> tuple[str, ...]:
        """Responses of the model to held-out prompts, beside the chosen ones."""
        return answers(self.config, self.choice, step, state, data.held_out[:self.config.samples], self.tokenizer,
                       self.template)

    def noted(self) -> dict[str, str]:
        """The template of messages, for `generate`."""
        return {"chat": self.template.fingerprint} if self.template.used else {}

    def _compute_reference(self, rows: PairRows, step: ZeroTrainStep, state: Any) -> None:
        evaluate, size = step.evaluator(response_log_probs), self.config.batch_size
        for start in range(0, rows.num_examples, size):
            numbers = np.arange(start, start + size) % rows.num_examples  # the last batch is filled up
            each = [rows.row(int(number)) for number in numbers]
            batch = {name: np.stack([row[name] for row in each]) for name in each[0]}
            found = on_host(evaluate(state, put_global(batch, step.batch_sharding)))
            count = min(size, rows.num_examples - start)
            rows.reference[start:start + count] = found[:count]

    def _read_reference(self, path: Path) -> None:
        try:
            with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
                kept = [(file[f"pairs_{k}"], int(file[f"data_{k}"])) for k in range(len(self._rows))]
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise UsageError(f"{path} cannot be read ({error}): the run cannot be resumed without the "
                             "log-probabilities of its reference: start it again in another folder.") from error
        for rows, (reference, fingerprint) in zip(self._rows, kept, strict=True):
            if reference.shape != rows.reference.shape or fingerprint != rows.fingerprint:
                raise UsageError(f"{path} is of other pairs than the data: give those of that run.")
            rows.reference[...] = reference
