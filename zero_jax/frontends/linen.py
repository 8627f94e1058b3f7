"""Linen modules: parameters in boxes that open where the module asks for them."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import errors, struct
from flax.core import meta, unfreeze

from zero_jax.errors import UsageError
from zero_jax.frontends.axis_names import BoundAxes
from zero_jax.frontends.composition import Composed, Composition, group_parts
from zero_jax.frontends.param_flow import ComposedUse, GatherCache
from zero_jax.frontends.trace_access import held, smallest_plain, trace_reads
from zero_jax.jaxpr.equations import current_trace
from zero_jax.sharding.param_access import ParamAccess
from zero_jax.tree import check_are_dicts, map_named, named_leaves, path_name


@struct.dataclass
class Stored(meta.AxisMetadata[Any]):
    """A parameter in its storage layout; `self.param` unboxes it, in the bodies of lifted loops too.

    Where a module meets the box itself, as in `self.variables["params"]`, it stands for the parameter.
    """

    value: Any
    use: Any = struct.field(pytree_node=False)
    cache: GatherCache = struct.field(pytree_node=False)

    def unbox(self) -> Any:
        """The parameter as the module reads it."""
        return self.cache(self.use, self.value)

    def replace_boxed(self, val: Any) -> "Stored":
        """The same box around another value."""
        return dataclasses.replace(self, value=val)

    def add_axis(self, index: int, params: dict[Any, Any]) -> "Stored":
        """The box on the way out of a lifted loop."""
        return dataclasses.replace(self, use=self.use.add_dim(index))

    def remove_axis(self, index: int, params: dict[Any, Any]) -> "Stored":
        """The box on the way into a lifted loop over dim `index`."""
        return dataclasses.replace(self, use=self.use.drop_dim(index))

    def __jax_array__(self) -> jax.Array:
        """The parameter."""
        return self.unbox()

    def __getattr__(self, name: str) -> Any:
        """An attribute of the parameter, as `.T`."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.unbox(), name)


def _of_parameter(name: str) -> Callable[..., Any]:
    def method(self: Stored, *args: Any) -> Any:
        return getattr(self.unbox(), name)(*args)

    return method


_BINARY = ("add", "sub", "mul", "truediv", "matmul", "pow")
for _name in ("getitem", "neg", "len", "iter", *_BINARY, *(f"r{name}" for name in _BINARY)):
    setattr(Stored, f"__{_name}__", _of_parameter(f"__{_name}__"))


@dataclasses.dataclass(frozen=True)
class _Call:
    """A call of a method of a module, or of one within it.

    leaves: of `(args, kwargs)`, whose structure is `tree`: a tuple of the number of a leaf of the batch, a
    `jax.ShapeDtypeStruct` of any other array, and anything else as it is.
    """

    path: tuple[str, ...]
    method: str
    leaves: tuple[Any, ...]
    tree: Any

    def __call__(self, module: Any, batch_leaves: Sequence[Any], key: jax.Array) -> Any:
        """The call, of `module`; other arrays are zeros, and keys are of `key`."""
        def value(leaf: Any) -> Any:
            if isinstance(leaf, tuple):
                return batch_leaves[leaf[0]]
            if not isinstance(leaf, jax.ShapeDtypeStruct):
                return leaf
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                return jax.random.split(key, leaf.shape) if leaf.shape else key
            return jnp.zeros(leaf.shape, leaf.dtype)

        for name in self.path:
            head, _, index = name.rpartition("_")  # of a module in a list or a dict
            module = getattr(module, name) if hasattr(module, name) else (
                getattr(module, head)[int(index) if isinstance(getattr(module, head), Sequence) else index])
        args, kwargs = jax.tree.unflatten(self.tree, map(value, self.leaves))
        return getattr(module, self.method)(*args, **kwargs)


class _CallRecorder:
    """An interceptor of methods that keeps which call raised (`failed`), of those that are within no other.

    makes: the module's calls make its variables: one in another trace than its loss, as within `lax.scan`, raises,
    unless there was one like it before.
    """

    failed: _Call | None = None

    def __init__(self, root: type[nn.Module], *, makes: bool = False):
        self._root, self._makes, self._depth = root, makes, 0
        self._leaves: Sequence[Any] = ()
        self._trace = self._scope = None
        self._made: set[tuple[Any, ...]] = set()

    def watched(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """`fun(module, batch)`, of which this learns the module's scope and the arrays."""
        def run(module: Any, batch: Any) -> Any:
            self._trace, self._scope, self._leaves = current_trace(), module.scope, jax.tree.leaves(batch)
            return fun(module, batch)

        return run

    def __call__(self, next_fun: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        """The call itself."""
        module = context.module
        if context.method_name == "setup":  # which a call, or a look at an attribute, runs by itself
            return next_fun(*args, **kwargs)
        if self._makes and not self._depth and module.scope is not None and module.scope.root is self._scope:
            called = module.path, context.method_name
            if called not in self._made and current_trace() != self._trace:
                raise RuntimeError(f"{called} is called first where its variables would not outlast it.")
            self._made.add(called)
        self._depth += 1
        try:
            return next_fun(*args, **kwargs)
        except Exception:
            path = module.path
            if self._depth == 1 and (path or isinstance(module, self._root)):
                leaves, tree = jax.tree.flatten((args, kwargs))
                self.failed = _Call(path, context.method_name, tuple(map(self._described, leaves)), tree)
            raise
        finally:
            self._depth -= 1

    def _described(self, leaf: Any) -> Any:
        if not isinstance(leaf, (jax.Array, np.ndarray)):
            return leaf
        number = next((i for i, each in enumerate(self._leaves) if each is leaf), None)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if number is None else (number,)


class Linen:
    """A Linen module as pure functions of `params` (a dict tree), `variables` (its other collections) and a key."""

    def __init__(self, module: nn.Module, streams: Sequence[str]):
        self._module = module
        self._streams = tuple(streams)
        self._transient: tuple[str, ...] = ()
        self._reads: dict[str, ParamAccess] = {}
        self._axes = BoundAxes()
        self.metadata: dict[str, tuple[Any, ...]] = {}

    given: Any = ()
    composition: Composition = ()
    set_by_gradient: tuple[str, ...] = ("_overwrite_with_gradient",)  # FP8 scales, as in Flax's `TrainState`

    def init(self, fun: Callable[..., Any], rng: jax.Array, batch: Any, given: Any) -> tuple[Any, Any]:
        """(params, variables), by running `fun(bound module, batch)`; traceable.

        Where `fun` needs values before it calls the module, or calls it first within `lax.scan` and the like, the
        module is initialised by those of its calls that lack variables, whose arguments are zeros unless they are
        leaves of the batch.
        """
        keys = {"params": jax.random.fold_in(rng, 0), **self._keys(jax.random.fold_in(rng, 1))}
        with _missing_streams_explained(self._streams):
            try:
                recorder = _CallRecorder(type(self._module), makes=True)
                with nn.intercept_methods(recorder):
                    collections = self._axes(lambda: nn.init(recorder.watched(fun), self._module)(keys, batch))
            except UsageError:
                raise
            except Exception:  # whatever `fun` does with a module without variables
                collections = self._axes(lambda: self._init_by_calls(fun, keys, batch))
            collections = unfreeze(collections)
        boxes = jax.tree.leaves_with_path(collections.get("params", {}), is_leaf=_is_partitioned)
        self.metadata = {path_name(path): box.names for path, box in boxes if _is_partitioned(box)}
        collections = {name: meta.unbox(tree) for name, tree in collections.items()}
        params = collections.pop("params", {})
        check_are_dicts(params)
        return params, self.lasting(collections)

    def _init_by_calls(self, fun: Callable[..., Any], keys: Any, batch: Any) -> Any:
        """The collections that those calls of the module make which `fun(bound module, batch)` needs, made by them."""

        def init(calls: Sequence[_Call], keys: Any, batch: Any) -> Any:
            leaves = jax.tree.leaves(batch)
            return nn.init(lambda module: [call(module, leaves, keys["params"]) for call in calls], self._module)(keys)

        def failure(calls: Sequence[_Call]) -> tuple[Exception, _Call | None] | None:
            """Why `fun` does not run with what `calls` make, and the outermost call of the module that raised it."""
            collections = jax.eval_shape(functools.partial(init, calls), keys, batch) if calls else {"params": {}}
            recorder = _CallRecorder(type(self._module))
            mutable = [name for name in collections if name != "params"]

            def run(collections: Any, keys: Any, batch: Any) -> Any:
                with nn.intercept_methods(recorder):
                    return nn.apply(recorder.watched(fun), self._module, mutable=mutable)(
                        collections, batch, rngs=keys)

            try:
                jax.eval_shape(run, collections, keys, batch)
            except Exception as error:
                return error, recorder.failed
            return None

        def fits(call: _Call) -> bool:
            try:
                return failure([call]) is None
            except Exception:  # whatever the module does with what it is not called with
                return False

        calls: list[_Call] = []
        while (failed := failure(calls)) is not None:
            error, call = failed
            if call is None and not calls:  # it reads a variable before any call: the module is called with a leaf?
                each = (_Call((), "__call__", ((i,),), jax.tree.structure(((0,), {})))
                        for i in range(len(jax.tree.leaves(batch))))
                call = next(filter(fits, each), None)
            if call is None or call in calls:
                raise error
            calls.append(call)
        return init(calls, keys, batch)

    def lasting(self, variables: Any) -> Any:
        """`variables` without the collections that start empty at every step, which `reads` settles."""
        return {name: tree for name, tree in variables.items() if name not in self._transient}

    def run(self, fun: Callable[..., Any], params: Any, variables: Any, rng: Any, batch: Any, uses: Any,
            *, train: bool = True, reads: Mapping[str, ParamAccess] | None = None, composition: Composition = ()
            ) -> tuple[Any, Any, dict[str, Any]]:
        """(`fun(bound module, batch)`, new variables, none: Linen's parameters are not written); read through `uses`.

        None in place of a use, or of all of them, means as it is.
        """
        reads, cache = self._reads if reads is None else reads, GatherCache()

        def box(name: str, value: Any, use: Any) -> Any:
            use, value = held(use, value, reads.get(name), cache)
            return value if use is None else Stored(value, use, cache)

        def compose(composed: Composed, parts: list[Any]) -> Any:
            uses, values = zip(*[(part.use, part.value) if isinstance(part, Stored) else (None, part)
                                 for part in parts], strict=True)
            boxed = Stored(values, ComposedUse(uses, composed.build), cache)
            on_entry = any(name in reads and reads[name].on_entry for name in composed.part_names)
            return boxed.unbox() if on_entry else boxed

        boxed = params if uses is None else map_named(box, params, uses)
        boxed = group_parts(boxed, composition, compose) if composition else boxed
        keys = {} if rng is None else self._keys(rng)
        mutable = [*variables, *self._transient]
        with _missing_streams_explained(self._streams):
            apply = nn.apply(fun, self._module, mutable=mutable)
            out, new = self._axes(lambda: apply({"params": boxed, **variables}, batch, rngs=keys))
        new = {name: meta.unbox(tree) for name, tree in unfreeze(new).items()}
        return out, {name: new.get(name, variables[name]) for name in variables}, {}

    def reads(self, fun: Callable[..., Any], params: Any, variables: Any,
              rng: Any, batch: Any, *, composition: Composition = ()) -> dict[str, ParamAccess]:
        """How `fun` reads each parameter. Every argument is abstract.

        It also settles which collections start empty at every step: those that a run would grow (`sow`).
        """
        self._transient, grown = (), set[str]()
        traced: dict[frozenset[str], tuple[dict[str, ParamAccess], frozenset[str]]] = {}

        def works(on_entry: frozenset[str]) -> bool:
            reads = {name: ParamAccess(on_entry=True) for name in on_entry}

            def run(uses: Any, params: Any, variables: Any, rng: Any, batch: Any) -> Any:
                out, new, _ = self.run(fun, params, variables, rng, batch, uses, reads=reads, composition=composition)
                grown.update(_grown(variables, new))
                return (out, new), {}

            if on_entry in traced:
                return True
            try:
                traced[on_entry] = trace_reads(run, (params, variables, rng, batch), on_entry)
            except Exception:  # whatever a module does with a box that it did not expect
                return False
            return True

        # Most models need one trace, since nothing of theirs grows.
        if variables and not works(frozenset()):
            grown.update(_grown(variables, self._traced_plainly(
                fun, composition, params, variables, rng, batch)[1]))
        if grown:
            self._transient = tuple(name for name in variables if name in grown)
            variables = self.lasting(variables)
            traced.clear()
        names = [name for name, _ in named_leaves(params)]
        on_entry = smallest_plain(works, names)
        while on_entry in traced or works(on_entry):
            self._reads, more = traced[on_entry]
            if not more:
                return self._reads
            on_entry |= more
        self._traced_plainly(fun, composition, params, variables, rng, batch)  # raises what the model does alone
        raise UsageError(f"The parameters of {type(self._module).__name__} cannot be read through boxes.")

    def _traced_plainly(self, fun: Callable[..., Any], composition: Composition, *args: Any) -> Any:
        return jax.eval_shape(
            lambda p, v, r, b: self.run(fun, p, v, r, b, None, reads={}, composition=composition), *args)

    def _keys(self, rng: jax.Array) -> dict[str, jax.Array]:
        return {name: jax.random.fold_in(rng, i) for i, name in enumerate(self._streams)}


def _grown(variables: Any, new: Any) -> list[str]:
    """The collections to which a run adds."""
    return [name for name in variables if jax.tree.structure(new[name]) != jax.tree.structure(variables[name])]


def _is_partitioned(leaf: Any) -> bool:
    return isinstance(leaf, meta.Partitioned)


@contextlib.contextmanager
def _missing_streams_explained(streams: tuple[str, ...]) -> Iterator[None]:
    """Names the argument to change where a module asks for an RNG stream that it was not given."""
    try:
        yield
    except errors.InvalidRngError as error:
        raise UsageError(
            f"{error} The step gives the RNG streams {streams}: name the others in "
            "make_zero_train_step(..., rng_streams=(...)).") from error
