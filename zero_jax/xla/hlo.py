"""Compiled HLO text -> the collectives it runs: bytes, groups, trip counts, overlap.

The text is parsed and walked from ENTRY: a loop body counts as often as the loop runs, a `-start` / `-done` pair counts
once, fusions are entered. Three backends print the same operation in different ways (tests/xla/test_hlo.py has
excerpts), and a regex over lines is wrong on each of them:

- CPU emits no reduce-scatter under `jit`: an all-reduce followed by a slice stays an "all-reduce" here.
- GPU combines many leaves into one collective of many operands, and splits it into start and done.
- TPU prints a reduce-scatter as a fusion that calls `all-reduce-scatter` (an all-reduce whose users are slices) or as a
  ring of collective-permutes in a loop; it repeats an asynchronous all-gather in each fusion that carries it along
  (same `chain_id`); it prints no `known_trip_count`.
"""

from collections.abc import Iterable

from zero_jax.errors import UsageError
from zero_jax.xla import events
from zero_jax.xla.collective import KINDS, Collective, total_bytes
from zero_jax.xla.schedule import schedule

__all__ = ["KINDS", "Collective", "collectives", "communication_bytes"]


def collectives(text: str) -> list[Collective]:
    """Every collective that `text` runs, in the order of the schedule.

    Of a conditional, only the branch that sends most is listed: one execution runs one branch, so the sum is an upper
    bound that never counts two. Raises ValueError if `text` is not an HLO module.

    Args:
        text: `jitted.lower(...).compile().as_text()`, of CPU, GPU or TPU.
    """
    return list(events.collectives(schedule(text)))


def communication_bytes(text: str, *, kinds: Iterable[str] | None = None) -> float:
    """Bytes that each device sends in one run of `text`: the sum of `communication_bytes * count`.

    Raises ValueError for a kind that is none of `KINDS`.
    """
    counted = set(KINDS if kinds is None else kinds)
    if unknown := counted - set(KINDS):
        raise UsageError(f"unknown kinds of collectives {sorted(unknown)}; known: {', '.join(KINDS)}")
    return float(total_bytes(each for each in collectives(text) if each.kind in counted))
