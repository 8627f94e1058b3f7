"""Responses to prompts: learned from instructions, or by which of two is better (DPO, arXiv 2305.18290)."""

import functools
import itertools
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from zero_jax.cli.environment import shown_text
from zero_jax.cli.objectives.objective import Objective, RunData, batches_of
from zero_jax.cli.objectives.text import counts_text
from zero_jax.cli.reports.measures import TEXT, Measure, Measures
from zero_jax.cli.training.evaluation import continued
from zero_jax.data import extras
from zero_jax.data.conversations import instructions, load_template, preference, read_rows
from zero_jax.data.documents import Tokenized
from zero_jax.data.response_rows import (
    Example,
    PairRows,
    ResponseRows,
    encode,
    encode_rows,
    fitting,
    fitting_pairs,
    response_text,
    split_examples,
)
from zero_jax.distributed.agreement import all_or_none, is_first
from zero_jax.distributed.initialize import on_host, put_global
from zero_jax.errors import UsageError, few
from zero_jax.step.losses import dpo_by_pair, dpo_loss, response_log_probs
from zero_jax.step.step import ZeroTrainStep
from zero_jax.typing import Loss

HEAD_ROWS = 100
"""Of each name in the data, that are looked at before devices are used."""
BATCH = 512
"""Examples that are tokenized at once."""

T = TypeVar("T")


class Responses(Objective):
    """An objective whose examples have responses: options and first rows, rows as examples, answers of the model.

    parse: an example of (row, template, where).
    """

    model_kind = "next token"
    parse: Callable[..., Any]

    def check(self) -> None:
        """As `Objective`, and the first lines of the data."""
        config, name = self.config, f"objective={self.name}"
        if config.data == ("python",):
            raise UsageError(f"{name}: give --data: JSON lines or Parquet with responses.")
        for option, default in (("data_weights", None), ("max_bytes", None), ("text_field", "text"), ("context", 1)):
            if getattr(config, option) != default:
                raise UsageError(f"{option}={getattr(config, option)}: {name} does not take it: leave it out.")
        extras.check_installed("grain", name)
        tokenizer = config.run_tokenizer()
        if isinstance(tokenizer, Tokenized):
            raise UsageError(f"{name}: data={config.data[0]} is a folder of tokens, in which prompts and responses are "
                             "one: give its JSON lines or Parquet and the tokenizer.")
        self.tokenizer, self.template = tokenizer, load_template(config.tokenizer)
        for each in (*config.data, *config.eval_data):
            for where, row in itertools.islice(read_rows(each), HEAD_ROWS):
                self.parse(row, self.template, where)
        self.choice.check(seq_len=config.seq_len, vocab_size=tokenizer.vocab_size)

    @property
    def pad(self) -> int:
        """What fills rows up."""
        return self.tokenizer.specials.pad or 0

    def examples(self, names: Sequence[str]) -> Iterator[list[Any]]:
        """What `parse` makes of all rows of `names`, some hundred at a time. Raises ValueError for no rows."""
        examples = (self.parse(row, self.template, where) for where, row in read_rows(names))
        some = False
        while part := list(itertools.islice(examples, BATCH)):
            some = True
            yield part
        if not some:
            raise UsageError(f"data: {', '.join(names)}: no line has an example.")

    def parts(self, read: Callable[[tuple[str, ...]], tuple[list[T], int, int]], why: str
              ) -> tuple[list[T], list[T], str]:
        """(Examples to train on, those held out, a line: how many, what became of long ones, which fields are unread).

        read: of names of data: the examples, how many were cut, how many were left out, and that is `why`.
        """
        config = self.config
        train, cut, left_out = read(config.data)
        if config.eval_data:
            held_out, *more = read(config.eval_data)
            cut, left_out = cut + more[0], left_out + more[1]
        else:
            train, held_out = split_examples(train, config.eval_fraction, config.batch_size)
        text = counts_text(len(train), len(held_out), "examples")
        text += f" {cut:,} are longer than a row, and cut at their end." * bool(cut)
        text += f" {left_out:,} are left out: {why}." * bool(left_out)
        unread = self.template.unread
        return train, held_out, text + f" Fields that are not read: {few(sorted(unread), 20)}." * bool(unread)

    def samples(self, step: ZeroTrainStep, state: Any, data: RunData) -> tuple[str, ...]:
        """The model's responses to held-out prompts, beside those of the data."""
        config, tokenizer, template = self.config, self.tokenizer, self.template
        texts, devices = [], step.batch_sharding.num_devices
        for each in data.held_out[:config.samples]:
            if not 0 < len(each.prompt) < config.seq_len:
                continue
            new = continued(config, self.choice, step, state, np.tile(each.prompt, (devices, 1)))[0]
            said = shown_text(response_text(new.tolist(), template if template.used else None, tokenizer))
            prompt, wanted = (shown_text(tokenizer.decode(ids)) for ids in (each.prompt, each.answer))
            texts.append(f"--- held-out prompt:\n{prompt}\n--- its response:\n{wanted}\n--- the model's:\n{said}")
        return tuple(texts)

    def noted(self) -> dict[str, str]:
        """The template of messages, for `generate`."""
        return {"chat": self.template.fingerprint} if self.template.used else {}


class Instruct(Responses):
    """The tokens of responses, each from those before it; prompts are read and not learned."""

    name, parse = "instruct", staticmethod(instructions)
    measures = Measures("tokens", "nats per token of a response", TEXT.beside)

    def check(self) -> None:
        """As `Objective`, and the first lines of the data."""
        if self.config.documents == "concatenate":
            raise UsageError("objective=instruct with documents=concatenate: rows that are cut anywhere would have "
                             "responses without their prompts: leave it out, which packs, or give documents=pad.")
        super().check()

    def describe(self) -> str:
        """As `Objective`."""
        return f"responses to prompts ({self.template.name})"

    def load_data(self) -> RunData:
        """Of JSON lines or Parquet; examples that are too long are cut, and left out where no response is left."""
        config = self.config

        def examples(names: tuple[str, ...]) -> tuple[list[Example], int, int]:
            return fitting((each for part in self.examples(names) for each in encode_rows(part, self.tokenizer)),
                           config.seq_len)

        train, held_out, what = self.parts(examples, "no response began within a row")
        sets = [[ResponseRows(part, config.seq_len, pack=config.documents == "pack", pad=self.pad)]
                for part in (train, held_out)]
        batches = batches_of(config, *sets, name=self.name, vocab_size=self.vocab_size)
        tokens, responses = (sum(numbers) for numbers in zip(*(
            (len(each.tokens), int(each.response.sum())) for each in train), strict=True))
        if further := sum(not each.begins for part in (train, held_out) for each in part):
            what += (f" {further:,} of them are further responses of a conversation, each after the text that the "
                     f"model then reads: {self.template.name} writes earlier messages otherwise.")
        summary = (f"{what} {responses:,} of {tokens:,} tokens are responses; rows are "
                   f"{sets[0][0].used_fraction:.1%} tokens, the rest padding ({config.documents}).")
        return RunData(batches, summary, held_out, self.tokenizer.decode)


class Preferences(Responses):
    """DPO (arXiv 2305.18290).

    The log-probabilities of the reference, the model as the run finds it, are computed once for all pairs before the
    first step, and kept in the run's folder for a resumed one.
    """

    name, parse = "preferences", staticmethod(preference)
    measures = Measures("pairs", "nats per pair", (
        Measure("accuracy", "accuracy", percent=True), Measure("margin", "margin")))

    def check(self) -> None:
        """As `Objective`, and the first lines of the data."""
        if self.config.documents != "concatenate":
            raise UsageError(f"documents={self.config.documents}: objective=preferences has a row for each response: "
                             "leave it out.")
        super().check()

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

    def load_data(self) -> RunData:
        """Of JSON lines or Parquet; pairs that are too long are cut, and left out where no two responses are."""
        config = self.config

        def pairs(names: tuple[str, ...]) -> tuple[list[tuple[Example, Example]], int, int]:
            encoded = (encode([one for pair in part for one in pair], self.tokenizer) for part in self.examples(names))
            return fitting_pairs(((part[k], part[k + 1]) for part in encoded for k in range(0, len(part), 2)),
                                 config.seq_len)

        train, held_out, what = self.parts(pairs, "no response began within a row, or both are the same in it")
        self._rows = [PairRows(part, config.seq_len, pad=self.pad) for part in (train, held_out)]
        batches = batches_of(config, *([rows] for rows in self._rows), name=self.name, vocab_size=self.vocab_size)
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
