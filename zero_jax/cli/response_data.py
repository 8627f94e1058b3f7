"""What the objectives with responses share: checks of their options, rows as examples, answers of the model."""

import itertools
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any, TypeVar

import numpy as np

from zero_jax.cli.model_lookup import ModelChoice
from zero_jax.cli.objectives.objective import Objective
from zero_jax.cli.terminal_text import shown_text
from zero_jax.cli.text_data import counts_text
from zero_jax.cli.train_config import TrainConfig
from zero_jax.cli.training.samples import continued
from zero_jax.data import extras
from zero_jax.data.conversations import Template, load_template, read_rows
from zero_jax.data.documents import Tokenized
from zero_jax.data.response_rows import Example, response_text, split_examples
from zero_jax.data.tokenizer import Tokenizer
from zero_jax.errors import UsageError, few
from zero_jax.step.step import ZeroTrainStep

HEAD_ROWS = 100
"""Of each name in the data, that are looked at before devices are used."""
BATCH = 512
"""Examples that are tokenized at once."""

T = TypeVar("T")


def check_responses(objective: Objective, parse: Callable[..., Any]) -> tuple[Tokenizer, Template]:
    """The tokenizer and the template of a run; raises ValueError for options and first rows that do not fit.

    parse: an example of (row, template, where).
    """
    config, name = objective.config, f"objective={objective.name}"
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
    template = load_template(config.tokenizer)
    for each in (*config.data, *config.eval_data):
        for where, row in itertools.islice(read_rows(each), HEAD_ROWS):
            parse(row, template, where)
    objective.choice.check(seq_len=config.seq_len, vocab_size=tokenizer.vocab_size)
    return tokenizer, template


def read_examples(names: Sequence[str], parse: Callable[[Any, str], T]) -> Iterator[list[T]]:
    """What `parse(row, where)` makes of all rows of `names`, some hundred at a time. Raises ValueError for no rows."""
    examples = (parse(row, where) for where, row in read_rows(names))
    some = False
    while part := list(itertools.islice(examples, BATCH)):
        some = True
        yield part
    if not some:
        raise UsageError(f"data: {', '.join(names)}: no line has an example.")


def example_parts(config: TrainConfig, read: Callable[[tuple[str, ...]], tuple[list[T], int, int]]
                  ) -> tuple[list[T], list[T], int, int]:
    """(Examples to train on, those held out, how many of both were cut, how many were left out).

    read: of names of data: the examples, how many were cut, how many were left out.
    """
    kept, cut, left_out = read(config.data)
    if not config.eval_data:
        return *split_examples(kept, config.eval_fraction, config.batch_size), cut, left_out
    held_out, eval_cut, eval_left_out = read(config.eval_data)
    return kept, held_out, cut + eval_cut, left_out + eval_left_out


def counted(train: Sequence[Any], held_out: Sequence[Any], *, cut: int, left_out: int, unread: Set[str],
            why: str = "no response began within a row") -> str:
    """How many examples there are, what became of those that are too long, and which fields of rows are `unread`."""
    text = counts_text(len(train), len(held_out), "examples")
    text += f" {cut:,} are longer than a row, and cut at their end." * bool(cut)
    text += f" {left_out:,} are left out: {why}." * bool(left_out)
    return text + f" Fields that are not read: {few(sorted(unread), 20)}." * bool(unread)


def answers(config: TrainConfig, choice: ModelChoice, step: ZeroTrainStep, state: Any, examples: Sequence[Example],
            tokenizer: Tokenizer, template: Template) -> tuple[str, ...]:
    """The model's responses to the prompts of `examples`, beside those of the data."""
    texts, devices = [], step.batch_sharding.num_devices
    for each in examples:
        if not 0 < len(each.prompt) < config.seq_len:
            continue
        new = continued(config, choice, step, state, np.tile(each.prompt, (devices, 1)))[0]
        said = shown_text(response_text(new.tolist(), template if template.used else None, tokenizer))
        prompt, wanted = (shown_text(tokenizer.decode(ids)) for ids in (each.prompt, each.answer))
        texts.append(f"--- held-out prompt:\n{prompt}\n--- its response:\n{wanted}\n--- the model's:\n{said}")
    return tuple(texts)
