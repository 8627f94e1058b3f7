"""Batches by number: rows of a token array, or examples of several sources, in an order of the position and the seed.

Batch k is a pure function of (data, seed, k), so a run is resumed by a number, without replaying. NumPy and not grain's
iterators: those shard by process, whereas here the sharding of the batch decides which rows a process reads. `prefetch`
reads ahead in a thread.
"""

import functools
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from zero_jax.arguments import shown, whole
from zero_jax.data.mixture import Mixture, check_weights
from zero_jax.data.objectives import random_order
from zero_jax.errors import UsageError

Row = dict[str, np.ndarray]

_FINGERPRINT_BLOCKS, _BLOCK_TOKENS = 16, 256  # few: each block is one seek in a mapped file
_ORDER_CHECKED = 64


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


class Batches(NumberedBatches):
    """An endless iterator of {"inputs": int32 (batch, length), "targets": int32 (batch, length)}.

    The inputs of window w are tokens[w * length : (w + 1) * length]; its targets are the same shifted by one. Windows
    do not overlap, `num_windows` = (num_tokens - 1) // length; an incomplete last window is left out. Each epoch is a
    new permutation of all windows, cut into `batches_per_epoch` = num_windows // batch_size batches; the remainder is
    dropped (other windows every epoch). So an epoch has every window at most once, and exactly once where batch_size
    divides num_windows. The order is the same on every platform and NumPy version.

    With `complete`, for an evaluation, an epoch has every target once, by "weights", float32 (batch, length): the last
    window ends with the tokens, with weights of 0 where it overlaps the one before it, and the last batch is filled up.

    With a `sharding`, as `NamedSharding(mesh, P("data"))`, each process reads only the rows of its own devices,
    and all processes must build the same `Batches` and take the same positions.

    >>> batches = Batches(np.arange(13, dtype=np.uint8), batch_size=2, length=3, seed=0)
    >>> batches.num_windows, batches.batches_per_epoch, batches[0]["inputs"].shape
    (4, 2, (2, 3))
    """

    def __init__(
        self,
        tokens: np.ndarray,
        *,
        batch_size: int,
        length: int,
        seed: int = 0,
        sharding: jax.sharding.Sharding | None = None,
        vocab_size: int | None = None,
        complete: bool = False,
    ) -> None:
        """Nothing is read yet.

        Args:
          tokens: (num_tokens,) of any integer dtype; a `np.memmap` stays one.
          batch_size: sequences in a batch, over all processes.
          length: tokens in a sequence.
          seed: of the permutations; not negative.
          sharding: of all arrays, whose shape is (batch_size, length); see above.
          vocab_size: where given, every row that is read must be within 0..vocab_size - 1
            (XLA clamps or drops an id outside, in silence).
          complete: see above.

        Raises ValueError for tokens of another rank or dtype, too few tokens for one batch, and
        a batch_size that does not divide over the sharding.
        """
        if not isinstance(tokens, np.ndarray) or tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            kind = f"{tokens.dtype} {tokens.shape}" if hasattr(tokens, "shape") else type(tokens)
            raise UsageError(f"tokens: {kind} is not a 1-D numpy array of integers; read them with "
                             "zero_jax.data.corpus.load, or give np.asarray(ids).ravel()")
        self.tokens = tokens
        self.batch_size = whole("batch_size", batch_size, 1)
        self.length = whole("length", length, 1)
        self.seed = whole("seed", seed, 0)
        self.sharding = sharding
        self.vocab_size = vocab_size
        self._complete, targets = complete, max(0, len(tokens) - 1)
        self.num_windows = targets // self.length
        self.num_windows += bool(complete and self.num_windows and targets % self.length)
        self.batches_per_epoch = (self.num_windows + (self.batch_size - 1) * complete) // self.batch_size
        self._ordered = -1, np.empty(0, np.int64)  # the epoch last asked for; replaced at once, since threads read
        if not self.batches_per_epoch:
            needed = self.batch_size * self.length + 1
            raise UsageError(f"{len(tokens)} tokens hold {self.num_windows} windows of length={self.length}, fewer "
                             f"than batch_size={self.batch_size} which needs {needed} tokens; use a smaller batch_size "
                             "or length, or more text")
        names = ("inputs", "targets", *["weights"] * complete)
        self.shapes = {name: ((self.batch_size, self.length), np.dtype(np.float32 if name == "weights" else np.int32))
                       for name in names}
        self._check_shapes()

    def _rows(self, position: int, start: int, stop: int) -> Row:
        """As `NumberedBatches`."""
        windows = self._windows(position)[start:stop]
        tokens = self._read(windows)
        rows = {"inputs": tokens[:, :-1].copy(), "targets": tokens[:, 1:].copy()}
        return rows | ({"weights": self._weights(windows)} if self._complete else {})

    def _windows(self, position: int) -> np.ndarray:
        """Numbers of the windows of one batch: int64 (batch_size,)."""
        epoch, k = divmod(position, self.batches_per_epoch)
        ordered, permutation = self._ordered
        if epoch != ordered:
            permutation = random_order((self.seed, epoch), self.num_windows)
            self._ordered = epoch, permutation
        chosen = permutation[k * self.batch_size : (k + 1) * self.batch_size]
        return np.pad(chosen, (0, self.batch_size - len(chosen)), constant_values=-1)  # -1: with weights of 0

    def _starts(self, windows: np.ndarray) -> np.ndarray:
        """Where windows begin: the last one before its place, where fewer tokens than `length` are left there."""
        return np.clip(windows * self.length, 0, len(self.tokens) - 1 - self.length)

    def _weights(self, windows: np.ndarray) -> np.ndarray:
        """1 for the targets of each window that no other one has: float32 (len(windows), length)."""
        places = self._starts(windows)[:, None] + np.arange(self.length)
        return ((places >= windows[:, None] * self.length) & (windows[:, None] >= 0)).astype(np.float32)

    def _read(self, windows: np.ndarray) -> np.ndarray:
        """Inputs and the last target of each window: int32 (len(windows), length + 1)."""
        starts = self._starts(windows)
        rows = np.stack([self.tokens[i : i + self.length + 1] for i in starts])
        low, high = int(rows.min()), int(rows.max())
        limit = 2**31 if self.vocab_size is None else self.vocab_size
        if low < 0 or high >= limit:
            raise UsageError(f"windows at tokens {starts.tolist()[:8]}... hold ids {low}..{high}, but 0..{limit - 1} "
                             f"are allowed (vocab_size={self.vocab_size}); give the vocab_size of the tokenizer that "
                             "wrote them, or their true dtype")
        return rows.astype(np.int32)

    def _identity(self) -> dict[str, int]:
        """The options, and the CRC-32 of 16 evenly spaced blocks of 256 tokens.

        The standard library of another Python, cut to the same size, has the same num_tokens and other text.
        """
        num_tokens, fingerprint = len(self.tokens), 0
        last = max(0, num_tokens - _BLOCK_TOKENS)
        for i in range(_FINGERPRINT_BLOCKS):
            start = i * last // (_FINGERPRINT_BLOCKS - 1)
            block = self.tokens[start : start + _BLOCK_TOKENS].astype("<i8")
            fingerprint = zlib.crc32(block.tobytes(), fingerprint)
        return {
            "seed": self.seed,
            "batch_size": self.batch_size,
            "length": self.length,
            "num_tokens": num_tokens,
            "fingerprint": fingerprint,
        }


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
