"""The interface of an objective: data to batches, a loss, what evaluations measure, and samples at the end."""

import abc
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zero_jax.cli.model_lookup import ModelChoice
from zero_jax.cli.reports.measures import TEXT, Measures
from zero_jax.cli.train_config import TrainConfig
from zero_jax.cli.training.evaluation import token_sums
from zero_jax.data.batches import ExampleBatches, NumberedBatches
from zero_jax.errors import UsageError
from zero_jax.step.step import ZeroTrainStep
from zero_jax.typing import Loss


@dataclasses.dataclass(frozen=True)
class RunData:
    """The data of a run.

    batches: from the sharding of a batch to the batches of training and of evaluation. summary: a line for the user.
    held_out: what samples are taken from, of a kind that the objective knows. text: of ids, where data are text.
    baselines: losses to compare that of the evaluation with, by the name of what has them.
    """

    batches: Callable[[Any], tuple[NumberedBatches, NumberedBatches]]
    summary: str
    held_out: Any
    text: Callable[[Any], str] = str
    baselines: Mapping[str, float] = dataclasses.field(default_factory=dict)


class Objective(abc.ABC):
    """What a run trains its model to do.

    Attributes:
      name: as the option `objective` has it. model_kind: what `kind_of` says of the models that it is for.
      measures: what is counted, and what evaluations measure.
    """

    name: str
    model_kind: str
    measures: Measures = TEXT

    def __init__(self, config: TrainConfig, choice: ModelChoice):
        """Of a run; nothing is read yet."""
        self.config, self.choice = config, choice

    @abc.abstractmethod
    def check(self) -> None:
        """Raises ValueError for what is wrong with options, model or data and can be known before devices are used."""

    @abc.abstractmethod
    def describe(self) -> str:
        """What is predicted of what, in a few words."""

    @abc.abstractmethod
    def load_data(self) -> RunData:
        """Reads the data; raises ValueError for what is wrong with them, or too little."""

    def batch_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The arrays of a batch, all examples of a step, abstract: rows of tokens unless the objective says otherwise.

        Of documents in rows also what separates them.
        """
        return token_shapes(self.config.batch_size, self.config.seq_len, self.config.batch_arrays)

    def sums(self, model: Any, batch: Any) -> dict[str, jax.Array]:
        """Of a batch: sums of `loss` and of what is measured, and the `weight` that they are to be divided by: float32.

        For `ZeroTrainStep.evaluator`. Of text: `loss` and `accuracy` (the likeliest token is the target).
        """
        return token_sums(model, batch)

    @property
    def vocab_size(self) -> int | None:
        """Of the model, where it says."""
        return getattr(self.choice.config, "vocab_size", None)

    @property
    def loss(self) -> Loss | None:
        """The loss of a step, as `make_zero_train_step` takes it; None: that of the next token."""
        return self.choice.loss

    @property
    def items_per_step(self) -> int:
        """What a step takes, in `measures.items`."""
        return self.config.batch_size * self.config.seq_len

    @property
    def batch_text(self) -> str:
        """A batch in words."""
        return f"{self.config.batch_size} sequences of {self.config.seq_len} tokens"

    @property
    def length(self) -> int | None:
        """Positions of a sequence that the model attends over, where that is known."""
        return self.config.seq_len

    def prepare(self, step: ZeroTrainStep, state: Any, *, resumed: bool) -> str:
        """Called once with the state before the first step; returns a line for the user.

        resumed: that is not the state from which the run started.
        """
        return ""

    def metrics(self, means: Mapping[str, float]) -> dict[str, float]:
        """What an evaluation reports, from its sums over their weight, in order."""
        counts_tokens = "perplexity" in {each.name for each in self.measures.beside}
        return with_perplexity(means) if counts_tokens else dict(means)

    def noted(self) -> dict[str, str]:
        """What checkpoints say of the data beside the options of the run; called once the data are loaded."""
        return {}

    def samples(self, step: ZeroTrainStep, state: Any, data: RunData) -> tuple[str, ...]:
        """What the trained model makes of held-out examples, as text; `config.samples` of them at most."""
        return ()


def batches_of(config: TrainConfig, train: Sequence[Any], held_out: Sequence[Any], *, name: str = "", make: Any = None,
               eval_make: Any = None, vocab_size: int | None = None, weights: Any = None, eval_weights: Any = None
               ) -> Callable[[Any], tuple[NumberedBatches, NumberedBatches]]:
    """A function of a batch's sharding to the batches of sources to train on, and of those held out (each once).

    The other arguments are those of `ExampleBatches`; eval_make: None: as `make`.
    """
    def batches(sharding: Any) -> tuple[NumberedBatches, NumberedBatches]:
        shape: Any = {"batch_size": config.batch_size, "sharding": sharding, "vocab_size": vocab_size, "name": name}
        return (ExampleBatches(train, seed=config.seed, make=make, weights=weights, **shape),
                ExampleBatches(held_out, make=eval_make or make, weights=eval_weights, complete=True, **shape))

    return batches


def with_perplexity(means: Mapping[str, float]) -> dict[str, float]:
    """`means` with `perplexity`, the exponential of their loss, after that."""
    loss = means["loss"]
    perplexity = math.inf if loss >= 700 else math.exp(loss)  # beyond which exp overflows
    return {"loss": loss, "perplexity": perplexity} | {name: means[name] for name in means if name != "loss"}


def check_text(objective: Objective, vocab_size: int | None, *, max_length: bool = True) -> None:
    """Raises ValueError for data that are images, and for sequences and ids that the model does not take.

    max_length: the model's is the longest sequence that it takes.
    """
    config = objective.config
    if config.reads_images:
        raise UsageError(f"data={config.data[0]} are images, and {objective.choice.name} reads text: give a text, or "
                         "a model of images, as vit:digits.")
    objective.choice.check(seq_len=config.seq_len if max_length else 1, vocab_size=vocab_size)


def token_shapes(batch_size: int, length: int, arrays: Mapping[str, str]) -> dict[str, jax.ShapeDtypeStruct]:
    """Arrays (batch_size, length) of these dtypes."""
    return {name: jax.ShapeDtypeStruct((batch_size, length), jnp.dtype(dtype)) for name, dtype in arrays.items()}
