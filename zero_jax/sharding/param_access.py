"""How a model accesses one of its parameters, as its trace shows."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Tiles:
    """That the parameter `name` is gathered and multiplied in `count` equal parts along `dim`, one after another.

    of_slice: whether they are parts of a slice of it, in a loop of the model's.
    """

    name: str
    dim: int
    count: int
    of_slice: bool = False

    def drop_dim(self, index: int) -> "Tiles":
        """These tiles inside a loop over dim `index`."""
        return dataclasses.replace(self, dim=self.dim - (index < self.dim), of_slice=True)

    def add_dim(self, index: int) -> "Tiles":
        """The inverse of `drop_dim`."""
        return dataclasses.replace(self, dim=self.dim + (index <= self.dim), of_slice=False)


@dataclasses.dataclass(frozen=True)
class ParamAccess:
    """How a model accesses one parameter.

    stacked: dims over which a scan or vmap of the model runs (stacked layers), so that it reads slices. count: how
    many times it is read; 0 if it is unused. on_entry: it is accessed in a way that cannot be intercepted, and so
    gathered up front. on_entry_if_padded: gathered up front only if it is stored padded or merged. written: the model
    overwrites it. contracted: the dims over which it is summed, where matrix products are all that it is used for.
    products: how many these are, 0 where it has other uses, or a vmap of the model runs over it. checkpointed: one is
    inside a checkpoint, so that backward computes it again. tiles: the parts in which it is used, along a dim of the
    whole parameter. derived: the loss itself differentiates by it.
    """

    stacked: tuple[int, ...] = ()
    count: int = 1
    on_entry: bool = False
    on_entry_if_padded: bool = False
    written: bool = False
    contracted: tuple[int, ...] | None = None
    products: int = 0
    checkpointed: bool = False
    tiles: Tiles | None = None
    derived: bool = False

    @property
    def undivided(self) -> tuple[int, ...]:
        """The dims that no mesh axis may shard: those of loops, and that of the tiles."""
        return self.stacked if self.tiles is None else tuple(sorted((*self.stacked, self.tiles.dim)))

    @property
    def num_tiles(self) -> int:
        """The number of tiles: 1 where it has none."""
        return 1 if self.tiles is None else self.tiles.count
