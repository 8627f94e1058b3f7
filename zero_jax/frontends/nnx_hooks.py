"""The hooks with which an NNX Variable hands a model what it stores: gathered, sliced by loops, or computed."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from zero_jax.frontends.param_flow import GatherCache
from zero_jax.frontends.trace_access import gathered_up_front
from zero_jax.sharding.gather import Encoded
from zero_jax.sharding.param_access import ParamAccess


@dataclasses.dataclass(frozen=True)
class OnRead:
    """A Variable hook. A loop's body sees a slice of a stacked variable: the leading dims are gone."""

    use: Any
    ndim: int
    cache: GatherCache

    def __call__(self, variable: Any, value: Any) -> Any:
        """`value`, read through the use that fits its rank; what Flax prints in its place is no array."""
        array = value.stored if isinstance(value, Encoded) else value
        if not isinstance(array, (jax.Array, np.ndarray)):
            return value
        use = self.use
        for _ in range(self.ndim - jnp.ndim(array)):
            use = use.drop_dim(0)
        return self.cache(use, value)


@dataclasses.dataclass(frozen=True)
class OnComposedRead:
    """The hook of a Variable whose value is the tuple of what it is computed from, where it is read.

    reads: for each of these its own hook, or None where it is read as it is.
    """

    reads: tuple[OnRead | None, ...]
    build: Callable[..., Any]

    def __call__(self, variable: Any, value: Any) -> Any:
        """The parameter; what Flax prints in its place is no tuple."""
        if not isinstance(value, tuple):
            return value
        return self.build(*[part if read is None else read(variable, part)
                            for read, part in zip(self.reads, value, strict=True)])


@functools.lru_cache
def reading_whole(cls: Any) -> Any:
    """The Variable class `cls`, all of whose reads go through its hooks, and of the whole value.

    Flax's `variable[index]` takes the part first and calls the hook with that, and `variable.astype` is the stored
    array's own: an embedding that is read so would be gathered up front.
    """
    def get_value(self: Any, **index: Any) -> Any:
        value = cls.get_value(self)
        return value[index["index"]] if index.get("index", ...) is not ... else value

    def attribute(self: Any, name: str) -> Any:
        if name.startswith("_") or name in self.get_metadata():
            return cls.__getattr__(self, name)
        return getattr(cls.get_value(self), name)

    names = {"get_value": get_value, "__getattr__": attribute, "__module__": cls.__module__,
             "__qualname__": cls.__qualname__}
    return type(cls)(cls.__name__, (cls,), names)


def restore_bridged_classes(model: nnx.Module) -> None:
    """Gives the variables of wrapped Linen modules (`nnx.bridge.ToNNX`) their own classes back.

    Flax tells the collection of each by its exact class, and reads all of it at each call, through the hooks.
    """
    for _, node in nnx.iter_graph(model):
        if isinstance(node, nnx.bridge.ToNNX):
            for _, variable in nnx.iter_graph(node):
                own = type(variable).__mro__[1]
                if isinstance(variable, nnx.Variable) and type(variable) is reading_whole(own):
                    object.__setattr__(variable, "__class__", own)


def readable(value: Any, use: Any, read: ParamAccess | None, cache: GatherCache) -> tuple[Any, OnRead | None]:
    """What a model holds of the stored `value`, and the hook with which it reads it; None: as it is."""
    if use is None:
        return value, None
    held = use.encoded(value, read.stacked if read else ())
    return (cache(use, held), None) if gathered_up_front(read, use) else (held, OnRead(use, value.ndim, cache))
