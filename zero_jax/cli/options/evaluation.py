"""The options of evaluation, and of the text that a run generates. Nothing here imports JAX."""

import dataclasses

from zero_jax.errors import UsageError

EVAL_FRACTION = 0.05


@dataclasses.dataclass(frozen=True)
class EvaluationOptions:
    """On what the model is evaluated, and how often."""

    eval_data: tuple[str, ...] = ()
    """A separate evaluation set, as data. None: a part of data is held out."""

    eval_fraction: float = EVAL_FRACTION
    """The part of data that is held out, where there is no eval_data: its end, or that of each of several sources."""

    eval_every: int = 100
    """Steps between evaluations (loss, perplexity, accuracy), each on the same batches."""

    eval_batches: int = 16
    """Batches of an evaluation, at most."""

    samples: int = 2
    """Continuations of held-out text to print at the end."""

    def check_evaluation(self) -> None:
        """Raises ValueError for values out of range."""
        for name in ("eval_every", "eval_batches"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)}: give at least 1.")
        if not 0 < self.eval_fraction < 1:
            raise UsageError(f"eval_fraction={self.eval_fraction}: give a fraction between 0 and 1, as 0.05.")
        if not 0 <= self.samples <= 64:
            raise UsageError(f"samples={self.samples} is not within 0 to 64.")
        object.__setattr__(self, "eval_data",
                           (self.eval_data,) if isinstance(self.eval_data, str) else tuple(self.eval_data))
        if "" in self.eval_data:
            raise UsageError('eval_data is empty: name files, or "python".')
