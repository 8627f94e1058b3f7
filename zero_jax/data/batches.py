"""A 1-D token array as global batches, in an order that depends on the position and the seed only.

Batch k is a pure function of (tokens, seed, k), so a run is resumed by a number, without replaying. NumPy and not
grain: grain would replace `_windows`, but it shards by process, whereas here the sharding
of the batch decides which rows a process reads. `prefetch` reads ahead in a thread.
"""

import zlib

import jax
import numpy as np

from zero_jax.arguments import whole
from zero_jax.data.objectives import random_order
from zero_jax.data.positions import NumberedBatches, Row
from zero_jax.errors import UsageError

_FINGERPRINT_BLOCKS, _BLOCK_TOKENS = 16, 256  # few: each block is one seek in a mapped file


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
