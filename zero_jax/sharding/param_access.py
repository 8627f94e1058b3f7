"""How a model accesses one of its parameters, as its trace shows."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class ParamAccess:
    """How a model accesses one parameter.

    stacked: dims over which a scan or vmap of the model runs (stacked layers), so that it reads slices. count: how
    many times it is read; 0 if it is unused. on_entry: it is accessed in a way that cannot be intercepted, and so
    gathered up front. on_entry_if_padded: gathered up front only if it is stored padded or merged. written: the model
    overwrites it. contracted: the dims over which it is summed, where matrix products are all that it is used for.
    """

    stacked: tuple[int, ...] = ()
    count: int = 1
    on_entry: bool = False
    on_entry_if_padded: bool = False
    written: bool = False
    contracted: tuple[int, ...] | None = None
