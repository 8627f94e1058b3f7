"""NNX modules: parameters whose `on_get_value` hook gathers them where the module reads them."""

import dataclasses
import functools
import inspect
import math
import re
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util

from zero_jax.arguments import shown
from zero_jax.errors import UsageError
from zero_jax.frontends.axis_names import BoundAxes
from zero_jax.frontends.composition import Composition, name_of
from zero_jax.frontends.param_flow import ComposedUse, GatherCache
from zero_jax.frontends.trace_access import held, trace_reads
from zero_jax.gather.gather import Encoded
from zero_jax.sharding.param_access import ParamAccess


@dataclasses.dataclass(frozen=True)
class OnRead:
    """A Variable hook. A loop's body sees a slice of a stacked variable: the leading dims are gone.

    use: of the variable's value; a `ComposedUse` of one that is the tuple of what it is computed from. ndim: of the
    stored array, or of the first one of that tuple.
    """

    use: Any
    ndim: int
    cache: GatherCache

    def __call__(self, variable: Any, value: Any) -> Any:
        """`value`, read through the use that fits its rank; what Flax prints in its place is no array."""
        first = value
        if isinstance(self.use, ComposedUse):
            first = value[0] if isinstance(value, tuple) else None  # else overwritten, which is refused after the run
        array = first.stored if isinstance(first, Encoded) else first
        if not isinstance(array, (jax.Array, np.ndarray)):
            return value
        use = self.use
        for _ in range(self.ndim - jnp.ndim(array)):
            use = use.drop_dim(0)
        return self.cache(use, value)


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


def is_nnx_jit(function: Any) -> bool:
    """Whether it is what `nnx.jit` returns."""
    return isinstance(function, type(nnx.jit(lambda: None)))


def pure_step(jitted: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """(A `jax.jit` function of states that computes what `nnx.jit`'s does of modules, its arguments).

    It returns the new state of each argument, and what the function returns. A variable that two arguments share is in
    the first.
    """
    donated = [any(info.donated for info in jax.tree.leaves(each, is_leaf=lambda leaf: hasattr(leaf, "donated")))
               for each in jitted.lower(*args).args_info[0]]
    modules = {number: arg for number, arg in enumerate(args) if isinstance(arg, nnx.Pytree)}
    graphdef, state = nnx.split(modules)
    states = {number: state.get(number, nnx.State({})) for number in modules}

    @functools.wraps(jitted.fun)
    def step(*given: Any) -> Any:
        merged = nnx.merge(graphdef, nnx.State({number: given[number] for number in modules if number in state}))
        out = jitted.fun(*[merged.get(number, arg) for number, arg in enumerate(given)])
        new = nnx.state(merged)
        return tuple(new.get(number, nnx.State({})) for number in modules), out

    return (jax.jit(step, donate_argnums=tuple(number for number, each in enumerate(donated) if each)),
            tuple(states.get(number, arg) for number, arg in enumerate(args)))


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


class Nnx:
    """An NNX module as pure functions of `params` (a dict tree), `variables` (all that is no `nnx.Param`).

    `model`: a module, whose values become the initial state, or a function of `rngs: nnx.Rngs` that makes
    one, so that the state is initialised sharded.
    """

    composition: Composition = ()
    set_by_gradient: tuple[str, ...] = ()

    def __init__(self, model: Any):
        self._model = model
        if isinstance(model, nnx.Module):
            if jax.tree.leaves(nnx.state(model, nnx.Intermediate)):  # of an earlier call, which sowed it
                model = nnx.merge(*nnx.split(model))  # of the same arrays
                nnx.pop(model, nnx.Intermediate)
            self._graphdef, self._params, self._variables = nnx.split(model, nnx.Param, ...)
        else:
            self._graphdef, self._params, self._variables = _abstract_split(model)
        self.metadata = {name_of(path): tuple(names) for path, variable in _flat(self._params)
                         if (names := variable.get_metadata("out_sharding", None))}
        self.given: Any = ()
        self._reads: dict[str, ParamAccess] = {}
        self._axes = BoundAxes()
        for path, variable in (*_flat(self._params), *_flat(self._variables)):
            value = _value(variable)
            if isinstance(value, dict) or isinstance(value, (list, tuple)) and isinstance(variable, nnx.Param):
                raise UsageError(f"{name_of(path)} is an nnx.{type(variable).__name__} of a {type(value).__name__}: "
                                 "give each array a variable of its own, in an nnx.Dict or nnx.List, say.")
            if isinstance(value, jax.ShapeDtypeStruct) and isinstance(model, nnx.Module):
                raise UsageError(f"{type(model).__name__}: {name_of(path)} is abstract, so the model has no values to "
                                 "start from. Give a constructed module, or a function of rngs that constructs one.")
        if isinstance(model, nnx.Module):
            self.given = (_values(self._params), _values(self._variables))

    def init(self, fun: Callable[..., Any], rng: jax.Array, batch: Any, given: Any) -> tuple[Any, Any]:
        """(params, variables); traceable. A module keeps its own values, and `rng` reseeds its random streams."""
        if not isinstance(self._model, nnx.Module):
            _, params, variables = nnx.split(_construct(self._model, rng), nnx.Param, ...)
            return _values(params), _values(variables)
        params, variables = given
        return params, self.with_streams(variables, rng)

    def lasting(self, variables: Any) -> Any:
        """All of `variables`."""
        return variables

    def run(self, fun: Callable[..., Any], params: Any, variables: Any, rng: Any, batch: Any, uses: Any,
            *, train: bool = True, reads: Mapping[str, ParamAccess] | None = None, composition: Composition = ()
            ) -> tuple[Any, Any, dict[str, Any]]:
        """(`fun(module, batch)`, new variables, overwritten parameters); each is read through its leaf of `uses`."""
        reads = self._reads if reads is None else reads
        out, new, final = self._axes(lambda: self._run(
            fun, params, variables, batch, uses, reads, composition, train=train))
        return out, new, {name: final[name] for name, read in reads.items() if read.written and name in final}

    def with_streams(self, variables: Any, rng: jax.Array) -> Any:
        """`variables` with the key of every random stream derived from `rng`."""
        return _values(_reseeded(_with_values(self._variables, variables), rng))

    def _run(self, fun: Callable[..., Any], params: Any, variables: Any, batch: Any, uses: Any,
             reads: Mapping[str, ParamAccess], composition: Composition, *, train: bool = True
             ) -> tuple[Any, Any, dict[str, Any]]:
        cache, composed = GatherCache(), {each.path: each for each in composition}
        values, by_path = (dict[Any, Any](traverse_util.flatten_dict(tree or {})) for tree in (params, uses))

        def stored(path: tuple[Any, ...], variable: Any) -> Any:
            if path in composed:
                parts = [held(by_path.get(part), values[part], reads.get(name_of(part)), cache)
                         for part in composed[path].part_paths]
                part_uses, value = zip(*parts, strict=True)
                first = values[composed[path].part_paths[0]]
                use = ComposedUse(part_uses, composed[path].build)
                return _hooked(variable, value, OnRead(use, first.ndim, cache))
            read = reads.get(name_of(path))
            use, value = held(by_path.get(path), values[path], read, cache)
            if use is None:
                return variable.replace(value)
            return _hooked(variable, value, OnRead(use, values[path].ndim, cache), **_true_sizes(use, read))

        model = nnx.merge(self._graphdef, _mapped(self._params, stored),
                          _with_values(self._variables, variables))
        restore_bridged_classes(model)
        if not train:
            model.eval()
        out = fun(model, batch)
        new = dict(nnx.to_flat_state(nnx.state(model)))
        final = {name_of(path): _value(new[path]) for path, _ in _flat(self._params)
                 if path in new and path not in composed}
        for path in composed.keys() & new.keys():
            if not isinstance(_value(new[path]), tuple):
                raise UsageError(f"The model overwrites its parameter {name_of(path)} in its forward pass, which is "
                                 "not stored as such (it has an adapter, or is quantised): leave it out of the "
                                 "targets.")
        own = {path: _value(new.get(path)) for path, _ in _flat(self._variables)}
        for path, before in traverse_util.flatten_dict(variables).items():
            if jax.tree.structure(own.get(path)) != jax.tree.structure(before):
                raise UsageError(f"The model's variable {name_of(path)} has another structure after a run than before: "
                                 "sow into nnx.Intermediate, which starts empty at every step, or an array.")
        return out, traverse_util.unflatten_dict(own), final

    def reads(self, fun: Callable[..., Any], params: Any, variables: Any,
              rng: Any, batch: Any, *, composition: Composition = ()) -> dict[str, ParamAccess]:
        """How `fun` reads each parameter. Every argument is abstract."""
        on_entry: frozenset[str] = frozenset()
        more = on_entry
        while True:
            on_entry |= more
            reads = {name: ParamAccess(on_entry=True) for name in on_entry}

            def run(uses: Any, params: Any, variables: Any, batch: Any) -> Any:
                out, new, final = self._axes(lambda: self._run(
                    fun, params, variables, batch, uses, reads, composition))  # noqa: B023 (called at once)
                return (out, new), final

            self._reads, more = trace_reads(run, (params, variables, batch), on_entry)
            if not more:
                return self._reads


def _hooked(variable: Any, value: Any, on_read: OnRead, **sizes: int) -> Any:
    """`variable` with a value that it reads through `on_read`, then through the hooks of its own."""
    own = variable.get_metadata("on_get_value", ())
    hooked = variable.replace(value, on_get_value=(on_read, *(own if isinstance(own, tuple) else (own,))), **sizes)
    object.__setattr__(hooked, "__class__", reading_whole(type(hooked)))
    return hooked


def _construct(factory: Callable[..., Any], key: jax.Array) -> Any:
    rngs = nnx.Rngs(key)
    target: Any = factory
    while isinstance(target, functools.partial):
        target = target.func
    if isinstance(target, type) and not issubclass(target, nnx.Module):
        raise UsageError(f"model={factory!r} is a class of no Flax module.")
    try:  # a module's class has the signature of its metaclass, which takes anything
        names = inspect.signature(target.__init__ if isinstance(target, type) else factory).parameters
    except ValueError:  # of a builtin
        names = {"": None}
    if not names:
        raise UsageError(f"model={factory!r} takes no argument: give a function of rngs that makes an nnx.Module.")
    try:
        module = factory(rngs=rngs) if "rngs" in names else factory(rngs)
    except Exception as error:
        own = traceback.extract_tb(error.__traceback__)[1:]  # empty where it cannot be called so
        if "rngs" in names or own and not re.search("Rng", str(error)):
            raise
        raise UsageError(f"model={shown(factory)} is neither a Flax module nor a function of rngs that makes an "
                         f"nnx.Module: called with nnx.Rngs it raised {type(error).__name__}: {error}") from error
    return _with_arrays_as_data(module)


def _with_arrays_as_data(module: Any) -> Any:
    """`module`, in which every array is data: Flax takes an array that is being traced for a static attribute."""
    for _, node in nnx.iter_graph(module) if isinstance(module, nnx.Module) else ():
        if isinstance(node, nnx.Module):
            for name, value in list(vars(node).items()):
                if isinstance(value, jax.Array):
                    setattr(node, name, nnx.data(value))
    return module


def _abstract_split(factory: Callable[..., Any]) -> tuple[Any, Any, Any]:
    """The graph, the parameters and the other values of what `factory` makes; the latter two abstract.

    It is split where it is made: `nnx.eval_shape` would put plain arrays among the graph's static attributes.
    """
    graphs = []

    def make() -> tuple[Any, Any]:
        module = _construct(factory, jax.random.key(0))
        if not isinstance(module, nnx.Module):
            what = "an array" if isinstance(module, jax.Array) else type(module).__name__
            raise UsageError(f"model={factory!r} made {what}, which is no Flax module.")
        graphdef, params, variables = nnx.split(module, nnx.Param, ...)
        graphs.append(graphdef)
        return params, variables

    params, variables = jax.eval_shape(make)
    return graphs[0], params, variables


def _flat(state: Any) -> list[tuple[Any, Any]]:
    return list(nnx.to_flat_state(state))


def _value(variable: Any) -> Any:
    return variable.get_raw_value() if isinstance(variable, nnx.Variable) else variable


def _true_sizes(use: Any, read: ParamAccess | None) -> dict[str, int]:
    """`ndim` and `size` of a parameter that is stored in another shape: Flax looks for attributes in metadata first.

    None of one that loops run over, since its slices have others.
    """
    stored_shape = getattr(use, "stored_shape", None)
    if read is None or read.stacked or stored_shape is None or stored_shape.is_identity:
        return {}
    return {"ndim": len(stored_shape.shape), "size": math.prod(stored_shape.shape)}


def _values(state: Any) -> dict[str, Any]:
    return traverse_util.unflatten_dict({path: _value(variable) for path, variable in _flat(state)})


def _mapped(state: Any, fun: Callable[..., Any]) -> Any:
    """`state` with `fun(path, variable)` for each variable."""
    return nnx.from_flat_state([(path, fun(path, variable)) for path, variable in _flat(state)])


def _with_values(state: Any, tree: Any) -> Any:
    """`state` with the values of a dict tree."""
    values = traverse_util.flatten_dict(tree)
    return _mapped(state, lambda path, variable: variable.replace(values.get(path))
                   if isinstance(variable, nnx.Variable) else values.get(path))


def _reseeded(state: Any, rng: jax.Array) -> Any:
    """`state` with the key of every random stream derived from `rng` and the stream's path."""
    flat = []
    for i, (path, variable) in enumerate(_flat(state)):
        if isinstance(variable, nnx.RngKey):
            shape = _value(variable).shape
            key = jax.random.fold_in(rng, i)
            variable = variable.replace(jax.random.split(key, shape) if shape else key)
        flat.append((path, variable))
    return nnx.from_flat_state(flat)
