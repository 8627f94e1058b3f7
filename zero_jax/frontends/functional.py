"""Functions of parameters: `loss(params, batch)` of any pytree of arrays (plain JAX, Equinox, Haiku)."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import traverse_util
from jax.core import Tracer

from zero_jax.errors import UsageError
from zero_jax.frontends.composition import Composition
from zero_jax.frontends.param_flow import ComposedUse, GatherCache
from zero_jax.frontends.trace_access import held, trace_reads
from zero_jax.jaxpr.equations import (
    ClosedJaxpr,
    JaxprEqn,
    bind_in_scope,
    primitive_of,
    run_jaxpr,
    scope_of,
    trace_with_shape,
)
from zero_jax.jaxpr.primitives import JIT, REMAT, SCAN, Checkpoint, Scan, call_jaxpr
from zero_jax.sharding.param_access import ParamAccess
from zero_jax.tree import named_leaves


class WithVariables(NamedTuple):
    """What a loss of parameters and variables is called with in the place of a model."""

    params: Any
    variables: Any


class Changed(NamedTuple):
    """What a loss of parameters and variables returned: its value with metrics, and the new variables."""

    out: Any
    variables: Any


def of_variables(loss: Any, takes_key: bool) -> Callable[..., Any]:
    """`loss(params, variables, batch)`, which returns (what a loss returns, new variables), as `loss(model, batch)`."""
    def changed(out: Any) -> Changed:
        if not isinstance(out, tuple) or len(out) != 2:
            raise UsageError("loss(params, variables, batch) returned no pair: return (loss, new_variables), or "
                             "((loss, {name: metric}), new_variables).")
        return Changed(*out)

    def plain(model: WithVariables, batch: Any) -> Changed:
        return changed(loss(*model, batch))

    def keyed(model: WithVariables, batch: Any, rng: Any) -> Changed:
        return changed(loss(*model, batch, rng=rng))

    return keyed if takes_key else plain


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

    def __init__(self, params: Any, variables: Any = None):
        """As the arguments.

        Args:
          params: a pytree of arrays or of `jax.ShapeDtypeStruct`s, or a function of a key that makes one.
          variables: a dict of arrays beside them, or a function of a key that makes one; None: `fun` takes none.
        """
        self._make = params if _makes(params) else lambda rng: params
        self._make_variables = variables if _makes(variables) else None
        self._has_variables = variables is not None
        if self._make_variables is None and self._has_variables:
            if not isinstance(variables, Mapping) or not all(
                    hasattr(leaf, "dtype") and not isinstance(leaf, jax.ShapeDtypeStruct)
                    for leaf in jax.tree.leaves(variables)):
                raise UsageError("variables: give a dict of arrays, as the state of Haiku's transform_with_state, or a "
                                 "function of a key that makes one.")
            self.given = variables
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

    def is_given(self, params: Any) -> bool:
        """Whether it is a pytree as the user's."""
        return jax.tree.structure(params) == self._structure

    def named(self, params: Any) -> dict[str, Any]:
        """Values that the user gives, by name; raises ValueError for another pytree than the parameters are."""
        if isinstance(params, Mapping) and {name for name, _ in named_leaves(params)} == {*self._names}:
            return dict(named_leaves(params))
        if not self.is_given(params):
            raise UsageError("params: this is another pytree than the parameters of this step: give "
                             f"{len(self._names)} arrays, as the function that it was made of takes them.")
        return dict(zip(self._names, jax.tree.leaves(params), strict=True))

    def init(self, fun: Callable[..., Any], rng: Any, batch: Any, given: Any) -> tuple[Any, Any]:
        """(params as a dict tree, variables), traceable; zeros where only values or shapes were given."""
        del fun, batch
        leaves = {name: leaf if isinstance(leaf, Tracer) else jnp.zeros(leaf.shape, leaf.dtype)
                  for name, leaf in self._learned(self._make(rng))}
        made = given if self._make_variables is None else self._make_variables(rng)
        return traverse_util.unflatten_dict(leaves, sep="/"), dict(made) if self._has_variables else {}

    def lasting(self, variables: Any) -> Any:
        """As `ModelFunctions.lasting`."""
        return variables

    def run(self, fun: Callable[..., Any], params: Any, variables: Any, rng: Any, batch: Any, uses: Any,
            *, train: bool = True, reads: Mapping[str, ParamAccess] | None = None, composition: Composition = ()
            ) -> tuple[Any, Any, dict[str, Any]]:
        """(`fun(params, batch)`, new variables, no parameters that it overwrote), each read where `fun` uses it."""
        del rng, train

        def run(params: Any, variables: Any, batch: Any) -> Any:
            return fun(WithVariables(params, variables) if self._has_variables else params, batch)

        if uses is None and not composition:
            return *self._split(run(self.as_given(params), variables, batch), variables), {}
        reads, cache, composed = self._reads if reads is None else reads, GatherCache(), {
            each.name: each for each in composition}
        values, by_name = dict(named_leaves(params)), dict(named_leaves(uses))

        def part(name: str) -> tuple[Any, Any]:
            """(use, value) of a stored leaf; no use where it is gathered up front, or read as it is."""
            return held(by_name.get(name), values[name], reads.get(name), cache)

        def argument(name: str) -> Any:
            if name not in composed:
                use, value = part(name)
                return value if use is None else _Held(use, value, cache)
            parts, args = zip(*map(part, composed[name].part_names), strict=True)
            return _Held(ComposedUse(parts, composed[name].build), args, cache)

        def as_read(name: str) -> jax.ShapeDtypeStruct:
            """A stored leaf as the loss reads it."""
            use: Any = by_name.get(name)
            shape = use.stored_shape.shape if hasattr(use, "stored_shape") else values[name].shape
            return jax.ShapeDtypeStruct(shape, use.dtype if hasattr(use, "dtype") else values[name].dtype)

        def dtype(name: str) -> Any:
            if name not in composed:
                return as_read(name).dtype
            return jax.eval_shape(composed[name].build, *map(as_read, composed[name].part_names)).dtype

        likes = [jax.ShapeDtypeStruct(self._shapes[name], dtype(name)) for name in self._names]
        closed, out = trace_with_shape(
            lambda leaves, *others: run(jax.tree.unflatten(self._structure, leaves), *others), likes, variables, batch)
        outs = _reading_at_use(closed, [*map(argument, self._names), *jax.tree.leaves((variables, batch))])
        return *self._split(jax.tree.unflatten(jax.tree.structure(out), outs), variables), {}

    def _split(self, out: Any, variables: Any) -> tuple[Any, Any]:
        """(what is of the loss, new variables)."""
        if not isinstance(out, Changed):
            return out, variables
        if jax.tree.structure(dict(out.variables)) != jax.tree.structure(dict(variables)):
            raise UsageError("loss(params, variables, batch) returned other variables than it got: return a dict of "
                             "the same names.")
        return out.out, dict(out.variables)

    def reads(self, fun: Callable[..., Any], params: Any, variables: Any, rng: Any, batch: Any,
              *, composition: Composition = ()) -> dict[str, ParamAccess]:
        """How `fun` reads each parameter. Every argument is abstract."""
        def run(uses: Any, params: Any, variables: Any, batch: Any) -> Any:
            out, new, _ = self.run(fun, params, variables, rng, batch, uses, composition=composition)
            return (out, new), {}

        self._reads, _ = trace_reads(run, (params, variables, batch), frozenset())
        return self._reads


def _makes(value: Any) -> bool:
    """Whether it is a function of a key, and no pytree that can be called, as a module of Equinox."""
    return callable(value) and jax.tree.leaves(value) == [value]


@dataclasses.dataclass(frozen=True)
class _Held:
    """An argument that is read at each use: `value`, a pytree of arrays that loops slice along their first dims."""

    use: Any
    value: Any
    cache: GatherCache


def _reading_at_use(closed: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
    """The results of `closed` on `args`, some of which are `_Held`; traceable.

    One that a scan runs over, or that it, a checkpoint or a call takes, is read within; one that a branch, a `while` or
    a function with a derivative of its own takes, or that a scan carries, before it.
    """
    return list(map(_read, run_jaxpr(closed, args, _bind)))


def _bind(eqn: JaxprEqn, taken: list[Any]) -> Sequence[Any]:
    if not any(isinstance(each, _Held) for each in taken):
        return bind_in_scope(eqn, taken)
    with jax.named_scope(scope_of(eqn)):
        if primitive_of(eqn) == SCAN:
            return _scanned(eqn, taken)
        if primitive_of(eqn) == REMAT:
            checkpoint = Checkpoint.of(eqn)
            return jax.checkpoint(
                lambda *values: _reading_at_use(call_jaxpr(eqn), _around(taken, values)),
                prevent_cse=checkpoint.prevent_cse, policy=checkpoint.policy)(*map(_value, taken))
        if primitive_of(eqn) in (JIT, "closed_call"):
            return _reading_at_use(call_jaxpr(eqn), taken)
        return bind_in_scope(eqn, list(map(_read, taken)))


def _scanned(eqn: JaxprEqn, taken: list[Any]) -> Sequence[Any]:
    scan = Scan.of(eqn)
    consts, carry, scanned = scan.parts(taken)
    inside = [dataclasses.replace(each, use=each.use.drop_dim(0)) if isinstance(each, _Held) else each
              for each in scanned]

    def body(*values: Any) -> list[Any]:
        first = len(consts) + len(carry)
        return _reading_at_use(call_jaxpr(eqn), [*values[:first], *_around(inside, values[first:])])

    return scan.run(body, [*consts, *map(_read, carry), *map(_value, scanned)])


def _read(each: Any) -> Any:
    return each.cache(each.use, each.value) if isinstance(each, _Held) else each


def _value(each: Any) -> Any:
    """What of an argument passes into a loop or a checkpoint; `_around` is the inverse."""
    return each.value if isinstance(each, _Held) else each


def _around(args: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    return [dataclasses.replace(each, value=value) if isinstance(each, _Held) else value
            for each, value in zip(args, values, strict=True)]
