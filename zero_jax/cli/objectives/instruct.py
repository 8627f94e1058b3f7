"""Responses to prompts: instruction data, with a loss on the responses alone."""

from typing import Any

import jax

from zero_jax.cli.objectives.objective import Objective, RunData, token_shapes
from zero_jax.cli.reports.measures import TEXT, Measures
from zero_jax.cli.response_data import answers, check_responses, counted, example_parts, read_examples
from zero_jax.cli.training.evaluation import token_sums
from zero_jax.data.conversations import instruction
from zero_jax.data.example_batches import ExampleBatches
from zero_jax.data.response_rows import Example, ResponseRows, encode, fitting
from zero_jax.errors import UsageError
from zero_jax.step.step import ZeroTrainStep


class Instruct(Objective):
    """The tokens of responses, each from those before it; prompts are read and not learned."""

    name, model_kind = "instruct", "next token"
    measures = Measures("tokens", "nats per token of a response", TEXT.beside)

    def check(self) -> None:
        """As `Objective`, and the first lines of the data."""
        config = self.config
        if config.documents == "concatenate":
            raise UsageError("objective=instruct with documents=concatenate: rows that are cut anywhere would have "
                             "responses without their prompts: give documents=pack or documents=pad.")
        self.tokenizer, self.template = check_responses(self, instruction)

    def describe(self) -> str:
        """As `Objective`."""
        return f"responses to prompts ({self.template.name})"

    def batch_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """`inputs`, `targets` and `weights`, (batch, sequence); of packed examples also what tells them apart."""
        return token_shapes(self.config.batch_size, self.config.seq_len, self.config.batch_arrays)

    def sums(self, model: Any, batch: Any) -> dict[str, jax.Array]:
        """Of `loss` and `accuracy` over the tokens of responses."""
        return token_sums(model, batch)

    def load_data(self) -> RunData:
        """Of JSON lines or Parquet; examples that are too long are cut, and left out where no response is left."""
        config = self.config

        def examples(names: tuple[str, ...]) -> tuple[list[Example], int, int]:
            read = read_examples(names, lambda row, where: instruction(row, self.template, where))
            return fitting((each for part in read for each in encode(part, self.tokenizer)), config.seq_len)

        train, held_out, cut, left_out = example_parts(config, examples)
        pad = self.tokenizer.specials.pad or 0
        sets = [ResponseRows(part, config.seq_len, pack=config.documents == "pack", pad=pad)
                for part in (train, held_out)]

        def batches(sharding: Any) -> tuple[ExampleBatches, ExampleBatches]:
            shape = {"batch_size": config.batch_size, "sharding": sharding, "name": "instruct",
                     "vocab_size": getattr(self.choice.config, "vocab_size", None)}
            return (ExampleBatches([sets[0]], seed=config.seed, **shape),
                    ExampleBatches([sets[1]], complete=True, **shape))

        tokens, responses = (sum(numbers) for numbers in zip(*(
            (len(each.tokens), int(each.response.sum())) for each in train), strict=True))
        what = counted(train, held_out, cut=cut, left_out=left_out, unread=self.template.unread)
        summary = (f"{what} {responses:,} of {tokens:,} tokens are responses; rows are "
                   f"{sets[0].used_fraction:.1%} tokens, the rest padding ({config.documents}).")
        return RunData(batches, summary, held_out, self.tokenizer.decode)

    def samples(self, step: ZeroTrainStep, state: Any, data: RunData) -> tuple[str, ...]:
        """Responses of the model to held-out prompts."""
        return answers(self.config, self.choice, step, state, data.held_out[:self.config.samples],
                       self.tokenizer, self.template)

    def noted(self) -> dict[str, str]:
        """The template of messages, for `generate`."""
        return {"chat": self.template.fingerprint} if self.template.used else {}

