"""Functions of parameters: `loss(params, batch)` of any pytree of arrays (plain JAX, Equinox, Haiku)."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from zero_jax.errors import UsageError
from zero_jax.frontends.composition import Composition
from zero_jax.frontends.param_flow import GatherCache
from zero_jax.frontends.trace_access import gathered_up_front, trace_reads
from zero_jax.jaxpr.at_use import AtUse, open_at_use
from zero_jax.jaxpr.equations import trace_with_shape
from zero_jax.sharding.param_access import ParamAccess
from zero_jax.tree import named_leaves


class Functional:
    """Parameters of a pure function, which a state has as nested dicts by their names, as `layers/0/kernel`.

    A use of a parameter is found in the trace of the function: there it is gathered, in the body of a `lax.scan` that
    runs over stacked layers too.

    Attributes:
        values: of the parameters, by name; None where they were given as shapes or as a function of a key.
        is_abstract: whether only shapes are known, so that `init` needs values.
    """

    given: Any = ()
    set_by_gradient: tuple[str, ...] = ()
    composition: Composition = ()

    def __init__(self, params: Any):
        """params: a pytree of arrays or of `jax.ShapeDtypeStruct`s, or a function of a key that makes one."""
        self._make = params if callable(params) and jax.tree.leaves(params) == [params] else lambda rng: params
        self._reads: dict[str, ParamAccess] = {}
        self.metadata: dict[str, tuple[Any, ...]] = {}
        leaves = [] if self._make is params else self._learned(params)
        self.is_abstract = any(isinstance(leaf, jax.ShapeDtypeStruct) for _, leaf in leaves)
        self.values = dict(leaves) if leaves and not self.is_abstract else None

    def _learned(self, params: Any) -> list[tuple[str, Any]]:
        """The leaves of `params` by name, whose structure and shapes are those of the parameters from here on."""
        leaves = [(name or "value", leaf) for name, leaf in named_leaves(params)]
        for name, leaf in leaves:
            if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
                raise UsageError(f"params: {name} is a {type(leaf).__name__} and no array: give the arrays alone, as "
                                 "eqx.partition(model, eqx.is_inexact_array)[0], and put them together in the loss.")
        self._names, self._structure = [name for name, _ in leaves], jax.tree.structure(params)
        self._shapes = {name: leaf.shape for name, leaf in leaves}
        if not leaves or len({*self._names}) < len(leaves) or any(
                other.startswith(f"{name}/") for name in self._names for other in self._names):
            raise UsageError("params: give a pytree of arrays, each of a name of its own, which is no beginning "
                             "of another.")
        return leaves

    def as_given(self, params: Any) -> Any:
        """A dict tree of all parameters, as the user's pytree."""
        leaves = dict(named_leaves(params))
        return jax.tree.unflatten(self._structure, [leaves[name] for name in self._names])

    def named(self, params: Any) -> dict[str, Any]:
        """Values that the user gives, by name; raises ValueError for another pytree than the parameters are."""
        if isinstance(params, Mapping) and {name for name, _ in named_leaves(params)} == {*self._names}:
            return dict(named_leaves(params))
        if jax.tree.structure(params) != self._structure:
            raise UsageError("params: this is another pytree than the parameters of this step: give "
                             f"{len(self._names)} arrays, as the function that it was made of takes them.")
        return dict(zip(self._names, jax.tree.leaves(params), strict=True))

    def init(self, fun: Callable[..., Any], rng: Any, batch: Any, given: Any) -> tuple[Any, Any]:
        """(params as a dict tree, no variables), traceable; zeros where only values or shapes were given."""
        del fun, batch, given
        tree: dict[str, Any] = {}
        for name, leaf in self._learned(self._make(rng)):
            *path, last = name.split("/")
            place = tree
            for key in path:
                place = place.setdefault(key, {})
            place[last] = leaf if isinstance(leaf, Tracer) else jnp.zeros(leaf.shape, leaf.dtype)
        return tree, {}

    def lasting(self, variables: Any) -> Any:
        """As `ModelFunctions.lasting`."""
        return variables

    def run(self, fun: Callable[..., Any], params: Any, variables: Any, rng: Any, batch: Any, uses: Any,
            *, train: bool = True, reads: Mapping[str, ParamAccess] | None = None
            ) -> tuple[Any, Any, dict[str, Any]]:
        """(`fun(params, batch)`, no variables, no parameters that it overwrote), each read where `fun` uses it."""
        del rng, train
        if uses is None:
            return fun(self.as_given(params), batch), variables, {}
        reads, cache, by_name = self._reads if reads is None else reads, GatherCache(), dict(named_leaves(uses))
        values = dict(named_leaves(params))
        dtypes = (by_name[name].dtype if hasattr(by_name.get(name), "dtype") else values[name].dtype
                  for name in self._names)
        likes = [jax.ShapeDtypeStruct(self._shapes[name], dtype)
                 for name, dtype in zip(self._names, dtypes, strict=True)]
        closed, out = trace_with_shape(
            lambda leaves, batch: fun(jax.tree.unflatten(self._structure, leaves), batch), likes, batch)

        def argument(name: str) -> Any:
            use, read = by_name.get(name), reads.get(name)
            if use is None:
                return values[name]
            value = use.encoded(values[name], read.stacked if read else ())
            return cache(use, value) if gathered_up_front(read, use) else AtUse(use, value, cache)

        outs = open_at_use(closed, [*map(argument, self._names), *jax.tree.leaves(batch)])
        return jax.tree.unflatten(jax.tree.structure(out), outs), variables, {}

    def reads(self, fun: Callable[..., Any], params: Any, variables: Any, rng: Any, batch: Any
              ) -> dict[str, ParamAccess]:
        """How `fun` reads each parameter. Every argument is abstract."""
        def run(uses: Any, params: Any, batch: Any) -> Any:
            return self.run(fun, params, variables, rng, batch, uses)[0], {}

        self._reads, _ = trace_reads(run, (params, batch), frozenset())
        return self._reads
