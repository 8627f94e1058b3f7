"""The order in which the checkpoints of a folder were saved and restored, and which descends from which.

Numbers do not tell: a run that rolls back saves smaller ones again. Each checkpoint has its place in the history in its
manifest, and in a file that a restore rewrites. The last one saved or restored is the head. The head and the
checkpoints that it descends from are its branch; all others are abandoned.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from zero_jax.files import sealed, unsealed

PLACE, FORMAT = "order.json", "zero_jax order 2"


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of a checkpoint in the history of its folder, whose saves and restores are counted from 1.

    saved: the count of its save. restored: that of the last restore that rolled back to it; 0 where there is none.
    after: the numbers of the checkpoints that it descends from, which may be removed since.
    """

    saved: int
    restored: int
    after: tuple[int, ...]

    @property
    def last(self) -> int:
        """The count of its save or its last restore, whichever is later."""
        return max(self.saved, self.restored)

    def to_json(self) -> dict[str, Any]:
        """This as a dict that `json` can write, with a checksum."""
        return sealed(FORMAT, dataclasses.asdict(self) | {"after": list(self.after)})


def parse_place(body: Any) -> Place | None:
    """The place of which `body` is the JSON; None where it is damaged."""
    try:
        body = unsealed(body, FORMAT, PLACE)
        return Place(int(body["saved"]), int(body["restored"]), tuple(map(int, body["after"])))
    except (ValueError, KeyError, TypeError):
        return None


class History:
    """The checkpoints of a folder by number, each with its place.

    None stands for a place that is damaged: the checkpoint counts as saved right after the one with the next lower
    number, so that a restore comes by it and reports it, and to descend from all with lower numbers.
    """

    def __init__(self, places: Mapping[int, Place | None]):
        self._places: dict[int, Place] = {}
        saved = 0
        for number in sorted(places):
            self._places[number] = place = places[number] or Place(saved, 0, tuple(self._places))
            saved = place.saved

    @property
    def head(self) -> int | None:
        """The last one that was saved or restored; None where there is none."""
        return max(self._places, key=lambda number: (self._places[number].last, number), default=None)

    @property
    def position(self) -> tuple[int, int] | None:
        """(number, count of the last save or restore) of the head; None where there is none."""
        return None if self.head is None else (self.head, self._places[self.head].last)

    def branch(self, number: int | None) -> list[int]:
        """`number` and what it descends from, newest first; empty for None."""
        if number is None:
            return []
        return [number, *sorted((each for each in self._places[number].after if each in self._places), reverse=True)]

    def abandoned(self) -> list[int]:
        """All that is not of the head's branch, newest first."""
        branch = self.branch(self.head)
        return [number for number in self._newest_first() if number not in branch]

    def candidates(self, at: int | None) -> list[int]:
        """What to restore, in this order: `at` (default: the head), what that descends from, and all other ones.

        With `at` only lower numbers; empty where there is no such checkpoint.
        """
        start = self.head if at is None else at
        if start is None or start not in self._places:
            return []
        branch = self.branch(start)
        return branch + [number for number in self._newest_first()
                         if number not in branch and (at is None or number < at)]

    def saved(self, number: int) -> int:
        """The count of the save of a checkpoint."""
        return self._places[number].saved

    def new_place(self, number: int, head: int | None) -> Place:
        """The place of a checkpoint `number` that is saved now, after `head`. It descends from no higher numbers."""
        return Place(self._count() + 1, 0, tuple(each for each in reversed(self.branch(head)) if each < number))

    def restored_place(self, number: int) -> Place:
        """The place of a checkpoint that is restored now."""
        return dataclasses.replace(self._places[number], restored=self._count() + 1)

    def _count(self) -> int:
        return max((place.last for place in self._places.values()), default=0)

    def _newest_first(self) -> list[int]:
        return sorted(self._places, key=lambda number: (self._places[number].saved, number), reverse=True)
