"""Batches by number: where the next one is, and how a run that is resumed finds it again."""

from collections.abc import Iterator, Mapping
from typing import Any

from zero_jax.arguments import shown, whole
from zero_jax.errors import UsageError


class NumberedBatches:
    """An endless iterator of batches, of which number k is a pure function of k. Subclasses make batch k.

    Attributes:
      batches_per_epoch: the number of batches before an example comes again.
    """

    batches_per_epoch: int
    _position = 0

    def __getitem__(self, position: int) -> dict[str, Any]:
        """Batch number `position` (from 0, without end), without changing `self.position`."""
        raise NotImplementedError

    def _identity(self) -> dict[str, int]:
        """What a saved position is valid for, by name."""
        raise NotImplementedError

    @property
    def position(self) -> int:
        """The number of the next batch, which is how many were returned since the start."""
        return self._position

    def seek(self, position: int) -> None:
        """Continues with batch `position`."""
        self._position = whole("position", position, 0)

    def state(self) -> dict[str, int]:
        """The position, and the values for which it is valid: plain JSON."""
        return {"position": self._position, **self._identity()}

    def restore(self, state: Mapping[str, int]) -> None:
        """Continues where `state` was taken; raises ValueError where the batches are not the same.

        To change batch_size on purpose: `seek(windows read so far // batch_size)`.
        """
        now = self._identity()
        if not isinstance(state, Mapping):
            raise UsageError(f"state={shown(state)} is a {type(state).__name__}: give what "
                             f"{type(self).__name__}.state() returned.")
        missing = sorted({"position", *now} - set(state))
        if missing:
            raise UsageError(f"state lacks {missing}; give what {type(self).__name__}.state() returned")
        wrong = [f"{k}={state[k]} saved but {k}={now[k]} now" for k in now if state[k] != now[k]]
        if wrong:
            raise UsageError(
                f"the saved position belongs to other batches: {'; '.join(wrong)}. Build {type(self).__name__}"
                " from the same tokens with the saved values, or start elsewhere with seek()"
            )
        self.seek(state["position"])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Itself: batches from `position` on, without end."""
        return self

    def __next__(self) -> dict[str, Any]:
        """The batch at `position`, which is incremented."""
        batch = self[self._position]
        self._position += 1
        return batch

    def once(self) -> Iterator[dict[str, Any]]:
        """The batches of the first epoch, always the same, without changing `position`: for validation."""
        return (self[k] for k in range(self.batches_per_epoch))
