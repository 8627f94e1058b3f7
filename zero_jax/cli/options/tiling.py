"""The option of products in tiles, which `train`, `inspect` and `plan` share. Nothing here imports JAX."""

import dataclasses
import re

from zero_jax.arguments import patterns
from zero_jax.errors import UsageError

_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_HOW = ("give PATTERN=TILES for each parameter, as mlp/up/kernel=16, or one size, as 512MiB, above which a gathered "
        "copy is made in tiles")


@dataclasses.dataclass(frozen=True)
class TilingOptions:
    """Which products are computed in tiles (memory-centric tiling, ZeRO-Infinity); none by default."""

    tiling: tuple[str, ...] = ()
    """At stage 3: the products whose weights are gathered, multiplied and dropped in tiles: PATTERN=TILES for each, as
    mlp/up/kernel=16; or one size, as 512MiB, above which a layer's gathered weight is in tiles."""

    def check_tiling(self) -> None:
        """Raises UsageError for what is neither."""
        object.__setattr__(self, "tiling", tuple(self.tiling))
        self.tiles  # noqa: B018 (raises)

    @property
    def tiles(self) -> dict[str, int] | int | None:
        """What `make_zero_train_step(tiling=...)` takes."""
        if not self.tiling:
            return None
        if len(self.tiling) == 1 and (size := re.fullmatch(r"(\d{1,9}(?:\.\d{1,3})?)([KMG]iB)", self.tiling[0])):
            number = round(float(size[1]) * _UNITS[size[2]])
            if number < 2**10:
                raise UsageError(f"tiling={self.tiling[0]}: give at least 1KiB.")
            return number
        tiles: dict[str, int] = {}
        for text in self.tiling:
            pattern, _, count = text.rpartition("=")
            if not (pattern and re.fullmatch(r"[0-9]{1,6}", count) and int(count) > 1):
                raise UsageError(f"tiling={text}: {_HOW}, and at least 2 tiles.")
            if pattern in tiles:
                raise UsageError(f"tiling: {pattern} is given twice.")
            tiles[pattern] = int(count)
        patterns("tiling", tuple(tiles), "mlp/up/kernel")
        return tiles
