"""Batches by number: where the next one is, how a run that is resumed finds it again, and who makes which rows."""

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from zero_jax.arguments import shown, whole
from zero_jax.errors import UsageError

Row = dict[str, np.ndarray]


class NumberedBatches:
    """An endless iterator of batches, of which number k is a pure function of k. Subclasses make rows of batch k.

    Without a `sharding` batches are NumPy arrays. With one they are global `jax.Array`s whose first dims are sharded by
    it; each process makes only the rows of its own devices, each row once, even where several devices store it.

    Attributes:
      batches_per_epoch: the number of batches before an example comes again.
      batch_size: rows in a batch, over all processes.
      shapes: (shape of a batch, dtype) of each array.
    """

    batches_per_epoch: int
    batch_size: int
    sharding: Any
    shapes: dict[str, tuple[tuple[int, ...], np.dtype[Any]]]
    _position = 0

    def _rows(self, position: int, start: int, stop: int) -> Row:
        """Rows start to stop of batch number `position`: arrays by name."""
        raise NotImplementedError

    def __getitem__(self, position: int) -> dict[str, Any]:
        """Batch number `position` (from 0, without end), without changing `self.position`."""
        position = whole("position", position, 0)
        rows = functools.cache(functools.partial(self._rows, position))  # of replicas and all arrays: made once
        if self.sharding is None:
            return rows(0, self.batch_size)

        def shard(index: Any, name: str) -> np.ndarray:
            start, stop, _ = index[0].indices(self.batch_size)
            return rows(start, stop)[name][(slice(None), *index[1:])]

        return {name: jax.make_array_from_callback(
            shape, self._sharding_of(shape), functools.partial(shard, name=name), dtype=dtype)
            for name, (shape, dtype) in self.shapes.items()}

    def _check_shapes(self) -> None:
        """Raises ValueError for shapes that do not divide over the sharding."""
        for shape, _ in self.shapes.values() if self.sharding is not None else ():
            sharding = self._sharding_of(shape)
            try:
                sharding.shard_shape(shape)
            except ValueError as error:
                raise UsageError(f"a batch of shape {shape} does not divide over {sharding}: change batch_size or "
                                 f"seq_len to a multiple of the devices on its axes ({error})") from error

    def _sharding_of(self, shape: tuple[int, ...]) -> Any:
        if not isinstance(self.sharding, jax.sharding.NamedSharding):
            return self.sharding
        return self.sharding.update(spec=jax.sharding.PartitionSpec(*self.sharding.spec[:len(shape)]))

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
            raise UsageError(f"the saved position belongs to other batches: {'; '.join(wrong)}. Build "
                             f"{type(self).__name__} from the same tokens with the saved values, or start elsewhere "
                             "with seek()")
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
