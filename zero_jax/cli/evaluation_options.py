"""The options of evaluation, and of the text that a run generates. Nothing here imports JAX."""

import dataclasses

from zero_jax.cli.data_options import check_data_files, is_token_file
from zero_jax.errors import UsageError


@dataclasses.dataclass(frozen=True)
class EvaluationOptions:
    """On what the model is evaluated, and how often."""

    eval_data: tuple[str, ...] = ()
    """A separate evaluation set, as data. None: a twentieth of data is held out, spread over it."""

    eval_every: int = 100
    """Steps between evaluations (loss, perplexity, accuracy), each on the same batches."""

    eval_batches: int = 16
    """Batches of an evaluation, at most."""

    samples: int = 2
    """Continuations of held-out text to print at the end."""

    def check_eval_data(self, token_file: bool) -> None:
        """Raises ValueError for a set that is not there, or of another kind than data; token_file: that of data."""
        if self.eval_data:
            check_data_files("eval_data", self.eval_data)
            if is_token_file(self.eval_data) != token_file:
                raise UsageError("data and eval_data: one is a file of tokens and the other is text: give two of a "
                                 "kind.")

    def check_evaluation(self) -> None:
        """Raises ValueError for values out of range."""
        for name in ("eval_every", "eval_batches"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)}: give at least 1.")
        if not 0 <= self.samples <= 64:
            raise UsageError(f"samples={self.samples} is not within 0 to 64.")
        object.__setattr__(self, "eval_data",
                           (self.eval_data,) if isinstance(self.eval_data, str) else tuple(self.eval_data))
        if "" in self.eval_data:
            raise UsageError('eval_data is empty: name files, or "python".')
