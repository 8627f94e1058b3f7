"""Compiled HLO text -> the collectives it runs: bytes, groups, trip counts, overlap.

The text is read as a structure and walked from ENTRY: a loop body counts as often as the loop runs,
a `-start` / `-done` pair counts once, a fusion is looked into. Three backends spell the same thing
in different ways (tests/test_hlo.py has excerpts), and a regex over lines is wrong on each of them:

- CPU never scatters under `jit`: an all-reduce followed by a slice stays an "all-reduce" here.
- GPU fuses many leaves into one collective of many operands, and splits it into start and done.
- TPU spells a reduce-scatter as a fusion that calls `all-reduce-scatter` (an all-reduce whose users
  are slices) or as a ring of collective-permutes in a loop; it repeats an asynchronous all-gather
  in each fusion that carries it along (same `chain_id`); it prints no `known_trip_count`.
"""

from collections.abc import Iterable

from zero_jax import hlo_schedule
from zero_jax.hlo_collective import KINDS, Collective

__all__ = ["KINDS", "Collective", "collectives", "wire_bytes"]


def collectives(text: str) -> list[Collective]:
    """Every collective that `text` runs, in the order of the schedule.

    Of a conditional, only the branch that sends most is listed: one execution runs one branch, so
    the sum is an upper bound that never counts two. Raises ValueError if `text` is no HLO module.

    Args:
        text: `jitted.lower(...).compile().as_text()`, of CPU, GPU or TPU.
    """
    return list(hlo_schedule.collectives(hlo_schedule.schedule(text)))


def wire_bytes(text: str, *, kinds: Iterable[str] | None = None) -> float:
    """Bytes that each device sends in one run of `text`: the sum of `wire_bytes * count`.

    Raises ValueError for a kind that is none of `KINDS`.
    """
    wanted = set(KINDS if kinds is None else kinds)
    if unknown := wanted - set(KINDS):
        raise ValueError(
            f"unknown kinds of collectives {sorted(unknown)}; known: {', '.join(KINDS)}"
        )
    return float(sum(c.wire_bytes * c.count for c in collectives(text) if c.kind in wanted))
