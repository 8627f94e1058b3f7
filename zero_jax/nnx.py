"""NNX modules: parameters whose `on_get_value` hook gathers them where the module reads them."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx, traverse_util

from zero_jax.once import OnceEach
from zero_jax.reads import Read, trace_reads


@dataclasses.dataclass(frozen=True)
class OnRead:
    """A Variable hook. A loop's body sees a slice of a stacked variable: the leading dims are gone."""

    use: Any
    ndim: int
    once: OnceEach

    def __call__(self, variable: Any, value: Any) -> Any:
        """`value`, read through the use that fits its rank."""
        use = self.use
        for _ in range(self.ndim - jnp.ndim(value)):
            use = use.drop_dim(0)
        return self.once(use, value)


class Nnx:
    """An NNX module as pure functions of `params` (a dict tree), `variables` (all that is no `nnx.Param`).

    `model`: a module, whose values become the initial state, or a function of `rngs: nnx.Rngs` that makes
    one, so that the state can be born sharded.
    """

    def __init__(self, model: Any):
        self._model = model
        module = model
        if not isinstance(model, nnx.Module):
            module = nnx.eval_shape(lambda: _construct(model, jax.random.key(0)))
        if not isinstance(module, nnx.Module):
            raise ValueError(f"model={model!r} made {type(module).__name__}, which is no Flax module.")
        self._graphdef, self._params, self._variables = nnx.split(module, nnx.Param, ...)
        self.metadata = {"/".join(map(str, path)): tuple(names) for path, variable in _flat(self._params)
                         if (names := variable.get_metadata("out_sharding", None))}
        self.given: Any = ()
        if isinstance(model, nnx.Module):
            self._refuse_abstract()
            self.given = (_values(self._params), _values(self._variables))

    def init(self, fun: Callable[..., Any], rng: jax.Array, batch: Any, given: Any) -> tuple[Any, Any]:
        """(params, variables); traceable. A module keeps its own values, and `rng` reseeds its random streams."""
        if not isinstance(self._model, nnx.Module):
            _, params, variables = nnx.split(_construct(self._model, rng), nnx.Param, ...)
            return _values(params), _values(variables)
        params, variables = given
        return params, _values(_reseeded(_with_values(self._variables, _replaced, variables), rng))

    def run(self, fun: Callable[..., Any], params: Any, variables: Any, rng: Any, batch: Any, uses: Any,
            *, train: bool = True) -> tuple[Any, Any]:
        """(`fun(module, batch)`, new variables); each parameter is read through its leaf of `uses`."""
        once = OnceEach()

        def hook(variable: Any, value: Any, use: Any) -> Any:
            if use is None:
                return variable.replace(value)
            return variable.replace(value, on_get_value=(OnRead(use, value.ndim, once),))

        stored = _with_values(self._params, hook, params, uses)
        model = nnx.merge(self._graphdef, stored, _with_values(self._variables, _replaced, variables))
        if not train:
            model.eval()
        out = fun(model, batch)
        new = dict(nnx.to_flat_state(nnx.state(model)))
        return out, traverse_util.unflatten_dict({path: _value(new[path]) for path, _ in _flat(self._variables)})

    def reads(self, fun: Callable[..., Any], params: Any, variables: Any, rng: Any, batch: Any) -> dict[str, Read]:
        """How `fun` reads each parameter. Every argument is abstract."""

        def run(uses: Any, params: Any, variables: Any, rng: Any, batch: Any) -> Any:
            return self.run(fun, params, variables, rng, batch, uses)

        return trace_reads(run, (params, variables, rng, batch), frozenset())

    def _refuse_abstract(self) -> None:
        for path, variable in [*_flat(self._params), *_flat(self._variables)]:
            if isinstance(_value(variable), jax.ShapeDtypeStruct):
                raise ValueError(
                    f"{type(self._model).__name__}: {'/'.join(map(str, path))} is abstract, so the model has no values "
                    "to start from. Give a constructed module, or a function of rngs that constructs one.")


def _construct(factory: Callable[..., Any], key: jax.Array) -> Any:
    rngs = nnx.Rngs(key)
    target: Any = factory
    while isinstance(target, functools.partial):
        target = target.func
    # A module's class has the signature of its metaclass, which takes anything.
    signature = inspect.signature(target.__init__ if isinstance(target, type) else target)
    return factory(rngs=rngs) if "rngs" in signature.parameters else factory(rngs)


def _flat(state: Any) -> list[tuple[Any, Any]]:
    return list(nnx.to_flat_state(state))


def _value(variable: Any) -> Any:
    return variable.get_raw_value() if isinstance(variable, nnx.Variable) else variable


def _values(state: Any) -> dict[str, Any]:
    return traverse_util.unflatten_dict({path: _value(variable) for path, variable in _flat(state)})


def _replaced(variable: Any, value: Any) -> Any:
    return variable.replace(value) if isinstance(variable, nnx.Variable) else value


def _with_values(state: Any, put: Callable[..., Any], *trees: Any) -> Any:
    """`state` with `put(variable, *leaves)` for each variable, the leaves taken from dict trees (None: no tree)."""
    flat = [{} if tree is None else traverse_util.flatten_dict(tree) for tree in trees]
    return nnx.from_flat_state(
        [(path, put(variable, *(leaves.get(path) for leaves in flat))) for path, variable in _flat(state)])


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
