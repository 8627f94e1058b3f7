"""Examples of several sources as global batches: packed or padded documents, masked or corrupted text, images."""

import zlib
from collections.abc import Callable, Sequence
from typing import Protocol

import jax
import numpy as np

from zero_jax.arguments import whole
from zero_jax.data.mixture import Mixture, check_weights
from zero_jax.data.positions import NumberedBatches, Row
from zero_jax.errors import UsageError

_ORDER_CHECKED = 64


class Examples(Protocol):
    """A source: `row(number)` is an example, arrays by name, of the same shapes for all numbers below num_examples.

    fingerprint: another number for other data.
    """

    num_examples: int
    fingerprint: int

    def row(self, number: int) -> Row:
        """Example `number`."""
        ...


class ExampleBatches(NumberedBatches):
    """An endless iterator of batches of the examples of `sources`: {name: (batch_size, ...)}.

    Place i of the run, over all batches, has the example that `Mixture` says, and `make(row, (seed, i))` of it: a batch
    is a pure function of its number, whatever the devices, processes and threads. An epoch, `batches_per_epoch`, has no
    example twice.

    With `complete`, for an evaluation, an epoch has every example of all sources once, and the last batch is filled up
    with examples whose "weights", an array that batches then have, are 0. With `weights` those of each source are
    multiplied by a number, so that its examples together count by its weight.
    """

    def __init__(
        self,
        sources: Sequence[Examples],
        *,
        batch_size: int,
        seed: int = 0,
        weights: Sequence[float] | None = None,
        make: Callable[[Row, tuple[int, int]], Row] | None = None,
        name: str = "",
        sharding: jax.sharding.NamedSharding | None = None,
        vocab_size: int | None = None,
        complete: bool = False,
    ) -> None:
        """The first example is made, for the shapes of all.

        Args:
          sources: of examples with the same names, shapes and dtypes.
          batch_size: examples in a batch, over all processes.
          seed: of the order, and of what `make` draws.
          weights: fractions of the examples that the sources have; None: by their sizes.
          make: from a row and a key to the row of the batch, as one of `objectives`; None: as it is.
          name: of `make` and its settings: a saved position is valid for the same name alone.
          sharding: of all arrays, from the first dimension on; later dimensions of an array are not sharded.
          vocab_size: where given, all integers in "inputs" and "targets" must be within 0..vocab_size - 1.
          complete: see above.

        Raises ValueError for no examples, too few for one batch, weights that are none, and a batch that does not
        divide over the sharding.
        """
        self.sources, self.seed = list(sources), whole("seed", seed, 0)
        self.batch_size = whole("batch_size", batch_size, 1)
        self.sharding, self.vocab_size, self._make, self._name = sharding, vocab_size, make, name
        if not self.sources or not all(source.num_examples for source in self.sources):
            empty = [k for k, source in enumerate(self.sources) if not source.num_examples]
            raise UsageError(f"Sources {empty} have no example of this length: give more data, or a smaller seq_len.")
        sizes = [source.num_examples for source in self.sources]
        if weights is not None:
            check_weights(weights, len(sizes))
        self._mixture = Mixture(sizes, weights=None if complete else weights, seed=self.seed)
        self._complete = [weight * sum(sizes) / size for weight, size in zip(
            weights or [size / sum(sizes) for size in sizes], sizes, strict=True)] if complete else None
        self.batches_per_epoch = (self._mixture.places + (self.batch_size - 1) * complete) // self.batch_size
        if not self.batches_per_epoch:
            raise UsageError(f"Sources with {sizes} examples are fewer than a batch of batch_size={batch_size} takes "
                             "without one twice: give more data, or a smaller batch_size or seq_len.")
        self.shapes = {}
        self.shapes = {name: ((self.batch_size, *array.shape), array.dtype) for name, array in self._row(0).items()}
        self._check_shapes()

    def _rows(self, position: int, start: int, stop: int) -> Row:
        """As `NumberedBatches`."""
        each = [self._row(position * self.batch_size + k) for k in range(start, stop)]
        return {name: np.stack([row[name] for row in each]) for name in self.shapes}

    def _row(self, place: int) -> Row:
        source, example = self._mixture[place]
        what = f"Example {example} of source {source} has"
        row = self._checked(self.sources[source].row(example), what)
        if self._make is not None:
            what = f"What {self._name or 'make'} makes of example {example} of source {source} has"
            row = self._checked(self._make(row, (self.seed, place)), what)
        if self._complete is not None:
            weights = row.get("weights", np.ones(row["targets"].shape, np.float32))
            factor = self._complete[source] * (place < self._mixture.places)
            row = {**row, "weights": (weights * factor).astype(np.float32)}
        found = {name: (array.shape, array.dtype) for name, array in row.items()}
        first = {name: (shape[1:], dtype) for name, (shape, dtype) in self.shapes.items()}
        if self.shapes and found != first:
            raise UsageError(f"{what} {found}, and the first one {first}: give examples of the same names, shapes and "
                             "dtypes.")
        return row

    def _checked(self, row: Row, what: str) -> Row:
        """`row`; raises ValueError for ids beyond the vocabulary, which XLA clamps or drops in silence."""
        if self.vocab_size is None:
            return row
        for name in ("inputs", "targets"):
            ids = row.get(name)
            if ids is not None and ids.dtype.kind in "iu" and ids.size:
                low, high = int(ids.min()), int(ids.max())
                if low < 0 or high >= self.vocab_size:
                    raise UsageError(f"{what} ids {low}..{high}, but 0..{self.vocab_size - 1} are allowed "
                                     f"(vocab_size={self.vocab_size}): tokenizer and model disagree.")
        return row

    def _identity(self) -> dict[str, int]:
        """The options, the CRC-32 of the data, of the objective, and of the first places of the order."""
        order = [self._mixture[place] for place in range(min(_ORDER_CHECKED, self.batch_size * self.batches_per_epoch))]
        return {
            "seed": self.seed, "batch_size": self.batch_size,
            "num_examples": sum(source.num_examples for source in self.sources),
            "fingerprint": zlib.crc32(repr([source.fingerprint for source in self.sources]).encode()),
            "objective": zlib.crc32(repr((self._name, sorted(self.shapes.items(), key=str))).encode()),
            "order": zlib.crc32(np.array(order, "<i8").tobytes()),
        }
