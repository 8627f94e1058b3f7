"""What a loss reports beside its value: how the metrics of microbatches become those of a step."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp

from zero_jax.arguments import shown
from zero_jax.errors import UsageError
from zero_jax.sharding.batch import add_weighted
from zero_jax.typing import Metrics, Scalar

REDUCTIONS = ("mean", "sum", "max", "min")
OWNED = r"loss|grad_norm|bad|skipped|stopped|loss_scale|learning_rate(_\d+)?"
"""The names of a step's own metrics."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Metric:
    """A metric of a loss, and how those of microbatches are combined: `{"max_error": Metric(error.max(), "max")}`.

    A loss sees one microbatch at a time under `accumulate`, and with `reduce="once"` each device's rows alone. A bare
    value is `Metric(value, "mean")`. Shape and dtype are kept, but for the mean of integers, which is float32 where
    there are microbatches.

    value: an array of any shape, the same for every microbatch. reduce: "mean" (weighted by the loss's weight where it
    returns one), "sum", "max" or "min", elementwise. Raises ValueError for another.
    """

    value: Any
    reduce: str = dataclasses.field(default="mean", metadata={"static": True})

    def __post_init__(self) -> None:
        if not isinstance(self.reduce, str) or self.reduce not in REDUCTIONS:
            raise UsageError(f"Metric(reduce={shown(self.reduce)}): give one of {', '.join(REDUCTIONS)}.")


def as_metrics(metrics: Any) -> Metrics:
    """The dict that a loss returned, each value a `Metric` of an array; traceable.

    Raises ValueError for what is no dict, and for names that the step itself reports.
    """
    if not isinstance(metrics, dict):
        raise UsageError(f"The loss returned {type(metrics).__name__} as its second item: give (scalar, {{name: "
                         "metric}), or with a third item the floating scalar that it is a mean over.")
    if unnamed := [name for name in metrics if not isinstance(name, str)]:
        raise UsageError(f"The loss returned a metric under {shown(unnamed[0])}: give it a str for a name.")
    if taken := [name for name in metrics if re.fullmatch(OWNED, name)]:
        raise UsageError(f"The loss returned a metric {taken[0]!r}, which the step reports itself: give it another "
                         "name.")
    for name, value in metrics.items():
        leaves = jax.tree.leaves(value, is_leaf=lambda leaf: leaf is None or _is_metric(leaf))
        for leaf in [leaf.value if _is_metric(leaf) else leaf for leaf in leaves]:
            if not is_array(leaf):
                raise UsageError(f"The loss returned a {type(leaf).__name__} as its metric {shown(name)}: give an "
                                 "array or a zero_jax.Metric, or leave it out.")
    return jax.tree.map(_as_metric, metrics, is_leaf=_is_metric)


def is_array(value: Any) -> bool:
    """Whether `value` is an array, traced or not, or a number, of a dtype that JAX has."""
    if value is None or isinstance(value, (str, bytes, list, tuple, dict, type)):  # None and types stand for dtypes
        return False
    try:
        return jnp.result_type(value) is not None
    except (TypeError, ValueError):
        return False


def values(metrics: Any) -> Any:
    """`metrics`, or any other tree, with the value in place of each `Metric`."""
    return jax.tree.map(lambda metric: metric.value if _is_metric(metric) else metric, metrics, is_leaf=_is_metric)


def combine(metrics: Metrics, weights: jax.Array, divisor: Scalar) -> Metrics:
    """The metrics of all microbatches as one; every value has the dims of `weights` before its own.

    What is not finite of a microbatch of weight 0 is left out: a sum over no token, divided by their number.

    divisor: the sum of `weights`; where that is 0, 1, or NaN where so is the loss.
    """
    dims = tuple(range(weights.ndim))

    def one(metric: Metric) -> Metric:
        value = metric.value
        if not jnp.issubdtype(value.dtype, jnp.number) and value.dtype != bool or metric.reduce in ("max", "min") and (
                jnp.issubdtype(value.dtype, jnp.complexfloating)):
            raise UsageError(f"The loss returned a metric of {value.dtype}, which has no {metric.reduce} over "
                             "microbatches: leave it out, or give real numbers.")
        share = weights.reshape(*weights.shape, *[1] * (value.ndim - weights.ndim))
        if metric.reduce != "mean":  # a count of padding, say, counts where there is nothing else
            counts = jnp.isfinite(value) | (share != 0) | jnp.all(weights == 0)
            if metric.reduce == "sum":
                dtype = jnp.int32 if value.dtype == bool else value.dtype
                return Metric(jnp.sum(jnp.where(counts, value, jnp.zeros_like(value)), dims, dtype=dtype), "sum")
            run, none = (jnp.max, -jnp.inf) if metric.reduce == "max" else (jnp.min, jnp.inf)
            floats = jnp.issubdtype(value.dtype, jnp.floating)
            return Metric(run(jnp.where(counts, value, none) if floats else value, dims), metric.reduce)
        narrow = value.dtype.itemsize == 1  # which JAX does not promote
        mean = jnp.sum(add_weighted(0, value.astype(jnp.float32) if narrow else value, share), dims) / divisor
        return Metric(mean.astype(value.dtype) if jnp.issubdtype(value.dtype, jnp.inexact) else mean)

    return jax.tree.map(one, metrics, is_leaf=_is_metric)


def _as_metric(value: Any) -> Metric:
    metric = value if _is_metric(value) else Metric(value)
    return Metric(jnp.asarray(metric.value), metric.reduce)


def _is_metric(value: Any) -> bool:
    return isinstance(value, Metric)
