"""What fits a target: the stage, batch and rematerialisation of most tokens per second, and the deepest model."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from zero_jax.planning.plan import Plan, plan
from zero_jax.stages import STAGES
from zero_jax.xla.targets import Target


@dataclasses.dataclass(frozen=True)
class SearchResult:
    """The plan of most tokens per second, or of most layers, that fits, and every plan that was compiled.

    model: key of the model in what was searched; size: what was searched for, such as examples per device or layers;
    limit: the largest size that the search would have tried.
    """

    model: str
    size: int
    plan: Plan | None
    tried: tuple[Plan, ...]
    limit: int


def search(
    models: Mapping[str, Any], target: Target, batch: Callable[[int], Any], *,
    stages: Sequence[int] = range(len(STAGES)), largest_batch: int = 1 << 16,
    on_plan: Callable[[str, Plan], None] = lambda name, plan: None, **options: Any
) -> SearchResult:
    """Of what fits the plan with most predicted tokens per second.

    At each stage the largest batch per device is found, with most rematerialisation and then with less; the answer is
    the fastest of all plans that were tried on the way, which need not be of a largest batch. Of two that are as fast,
    the answer is the earlier.

    Args:
      models: models by name, from the least to the most rematerialisation.
      target: the target topology.
      batch: from examples per device to the global batch, abstract.
      stages: those to try, in order, up to one with which nothing is faster than with those before it, or with which
        `largest_batch` fits without rematerialisation.
      largest_batch: the most examples per device to try.
      on_plan: called with the model's name and each plan.
      **options: of `plan`.

    `SearchResult.plan` is None if nothing fits.
    """
    tried: dict[tuple[int, str, int], Plan] = {}

    def share(size: int, stage: int, name: str) -> float:
        key = stage, name, size
        if key not in tried:
            tried[key] = plan(models[name], stage, target, batch(size), **options)
            on_plan(name, tried[key])
        return _share(tried[key])

    most, *less = reversed(list(models))
    best = SearchResult(most, 0, None, (), largest_batch)
    for stage in stages:
        size = largest(functools.partial(share, stage=stage, name=most), largest_batch)
        for name in less:  # which needs more memory, so that its largest batch is no larger
            if size and share(size, stage, name) > 1:
                size = largest(functools.partial(share, stage=stage, name=name), size - 1)
        before, fitting = best.plan, [key for key, each in tried.items() if each.fits]
        if fitting:
            fastest = max(fitting, key=lambda key: tokens_per_second(tried[key]))
            best = dataclasses.replace(best, model=fastest[1], size=fastest[2], plan=tried[fastest])
        if size == largest_batch or before is not None and before is best.plan:
            break
    return dataclasses.replace(best, tried=tuple(tried.values()))


def tokens_per_second(plan: Plan) -> float:
    """The predicted tokens per second of all devices; 0 where no time is predicted."""
    return plan.timing.tokens_per_second if plan.timing else 0.0


def deepest(
    build: Callable[[int], Any], stage: int, target: Target, batch: Any, *, most_layers: int = 100_000,
    on_plan: Callable[[str, Plan], None] = lambda name, plan: None, **options: Any
) -> SearchResult:
    """The most layers that fit at `stage`: `build(num_layers)` makes the model, whose memory grows with them."""
    plans: dict[int, Plan] = {}

    def share(layers: int) -> float:
        plans[layers] = plan(build(layers), stage, target, batch, **options)
        on_plan(f"{layers} layers", plans[layers])
        return _share(plans[layers])

    layers = largest(share, most_layers)
    return SearchResult(f"{layers} layers", layers, plans.get(layers), tuple(plans.values()), most_layers)


def largest(share: Callable[[int], float], limit: int) -> int:
    """The largest n from 1 to `limit` with `share(n)` at most 1, for a share that grows with n; 0 if there is none.

    The secant method where the share grows about linearly, else bisection; each n is tried once. An infinite share
    means that n is too large by an unknown factor.
    """
    known: dict[int, float] = {}
    low, high, widths = 0, limit + 1, []  # the largest that fits, the smallest that does not
    while high - low > 1:
        widths.append(high - low)
        n = _guess({size: value for size, value in known.items() if math.isfinite(value)}, low, high)
        if high in known and len(widths) > 3 and widths[-1] > widths[-4] / 2:
            n = (low + high) // 2
        known[n] = share(n)
        low, high = (n, high) if known[n] <= 1 else (low, n)
    return low


def _guess(known: Mapping[int, float], low: int, high: int) -> int:
    if len(known) < 2:
        return min(2 * low if low else 1, high - 1)
    (a, at_a), (b, at_b) = sorted(known.items(), key=lambda item: abs(item[1] - 1))[:2]
    slope = (at_b - at_a) / (b - a)
    guess = int(a + (1 - at_a) / slope) if slope > 0 else 2 * low
    if not low < guess < high and low in known and high in known:  # the share grows otherwise there
        guess = int(low + (high - low) * (1 - known[low]) / (known[high] - known[low]))
    return min(max(min(guess, 64 * low), low + 1), high - 1)  # two alike would have the limit as the next


def _share(plan: Plan) -> float:
    """The share of the device's memory that a plan needs; above 1 also where the host's memory is too small."""
    if plan.target is None or plan.memory_bytes is None:
        return 0.0
    if plan.refused and not plan.refused.startswith("RESOURCE_EXHAUSTED"):
        return math.inf  # not compiled: its temporaries are unknown
    share = plan.needed_bytes / plan.memory_bytes
    return max(share, 1.001) if not plan.fits else share
