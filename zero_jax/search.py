"""What fits a target: the smallest stage, the largest batch, the least rematerialisation, the deepest model."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from zero_jax.planner import Plan, plan
from zero_jax.stages import STAGES
from zero_jax.targets import Target


@dataclasses.dataclass(frozen=True)
class Found:
    """The best that fits, and all that was compiled on the way.

    model: key of the model in what was searched; size: what was searched for, such as examples per device or layers.
    """

    model: str
    size: int
    plan: Plan | None
    tried: tuple[Plan, ...]


def search(
    models: Mapping[str, Any], target: Target, batch: Callable[[int], Any], *,
    stages: Sequence[int] = range(len(STAGES)), largest_batch: int = 1024,
    on_plan: Callable[[str, Plan], None] = lambda name, plan: None, **options: Any
) -> Found:
    """The smallest stage that fits, with it the largest batch per device, and for that the least rematerialisation.

    Args:
      models: models by name, from the least to the most rematerialisation.
      target: described devices.
      batch: from examples per device to the global batch, abstract.
      stages: to choose from, in order.
      largest_batch: examples per device that are enough.
      on_plan: told of each plan as it is made, with its model's name.
      **options: of `planner.plan`.

    `Found.plan` is None if nothing fits.
    """
    tried: list[Plan] = []

    def measure(name: str, stage: int, size: int) -> Plan:
        made = plan(models[name], stage, target, batch(size), **options)
        tried.append(made)
        on_plan(name, made)
        return made

    most = list(models)[-1]
    for stage in stages:
        best: dict[int, Plan] = {}

        def fits(size: int, stage: int = stage, best: dict[int, Plan] = best) -> float:
            best[size] = measure(most, stage, size)
            return _share(best[size])

        size = largest(fits, largest_batch)
        if not size:
            continue
        for name in list(models)[:-1]:
            if (less := measure(name, stage, size)).fits:
                return Found(name, size, less, tuple(tried))
        return Found(most, size, best[size], tuple(tried))
    return Found(most, 0, None, tuple(tried))


def deepest(
    build: Callable[[int], Any], stage: int, target: Target, batch: Any, *, most_layers: int = 100_000,
    on_plan: Callable[[str, Plan], None] = lambda name, plan: None, **options: Any
) -> Found:
    """The most layers that fit at `stage`: `build(num_layers)` makes the model, whose memory grows with them."""
    plans: dict[int, Plan] = {}

    def share(layers: int) -> float:
        plans[layers] = plan(build(layers), stage, target, batch, **options)
        on_plan(f"{layers} layers", plans[layers])
        return _share(plans[layers])

    layers = largest(share, most_layers)
    return Found(f"{layers} layers", layers, plans.get(layers), tuple(plans.values()))


def largest(share: Callable[[int], float], limit: int) -> int:
    """The largest n of 1 to `limit` with `share(n)` at most 1, for a share that grows; 0 if there is none.

    Few n are tried, each once: what the line through the last two says, and its neighbour, where the share grows
    about linearly; else by bisection. An infinite share is of something too large to tell by how much.
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
    return min(max(guess, low + 1), high - 1)


def _share(plan: Plan) -> float:
    """Of the device's memory, or of the host's if that is what lacks."""
    if plan.target is None or plan.memory_bytes is None:
        return 0.0
    if plan.refused and not plan.refused.startswith("RESOURCE_EXHAUSTED"):
        return math.inf  # not compiled: nobody knows its temporaries
    share = plan.needed_bytes / plan.memory_bytes
    return max(share, 1.001) if not plan.fits else share
