"""Linen modules: parameters in boxes that open where the module asks for them."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
from flax import errors, struct
from flax.core import meta, unfreeze

from zero_jax.once import OnceEach
from zero_jax.reads import Read, smallest_plain, trace_reads
from zero_jax.tree import map_named, named_leaves, path_name


@struct.dataclass
class Stored(meta.AxisMetadata[Any]):
    """A parameter in its storage layout; `self.param` unboxes it, in the bodies of lifted loops too."""

    value: Any
    use: Any = struct.field(pytree_node=False)
    once: OnceEach = struct.field(pytree_node=False)

    def unbox(self) -> Any:
        """The parameter as the module reads it."""
        return self.once(self.use, self.value)

    def replace_boxed(self, val: Any) -> "Stored":
        """The same box around another value."""
        return dataclasses.replace(self, value=val)

    def add_axis(self, index: int, params: dict[Any, Any]) -> "Stored":
        """The box on the way out of a lifted loop."""
        return dataclasses.replace(self, use=self.use.add_dim(index))

    def remove_axis(self, index: int, params: dict[Any, Any]) -> "Stored":
        """The box on the way into a lifted loop over dim `index`."""
        return dataclasses.replace(self, use=self.use.drop_dim(index))


class Linen:
    """A Linen module as pure functions of `params` (a dict tree), `variables` (its other collections) and a key."""

    def __init__(self, module: nn.Module, streams: Sequence[str]):
        self._module = module
        self._streams = tuple(streams)
        self._transient: tuple[str, ...] = ()
        self._on_entry: frozenset[str] = frozenset()
        self.metadata: dict[str, tuple[Any, ...]] = {}

    given: Any = ()

    def init(self, fun: Callable[..., Any], rng: jax.Array, batch: Any, given: Any) -> tuple[Any, Any]:
        """(params, variables), by running `fun(bound module, batch)`; traceable."""
        keys = {"params": jax.random.fold_in(rng, 0), **self._keys(jax.random.fold_in(rng, 1))}
        with _missing_streams_explained(self._streams):
            collections = unfreeze(nn.init(fun, self._module)(keys, batch))
        boxes = jax.tree.leaves_with_path(collections.get("params", {}), is_leaf=_is_partitioned)
        self.metadata = {path_name(path): box.names for path, box in boxes if _is_partitioned(box)}
        collections = {name: meta.unbox(tree) for name, tree in collections.items()}
        params = collections.pop("params", {})
        return params, {name: tree for name, tree in collections.items() if name not in self._transient}

    def run(self, fun: Callable[..., Any], params: Any, variables: Any, rng: Any, batch: Any, uses: Any,
            *, on_entry: frozenset[str] | None = None, train: bool = True) -> tuple[Any, Any]:
        """(`fun(bound module, batch)`, new variables); each parameter is read through its leaf of `uses`.

        Parameters in `on_entry` (default: as `reads` found) are given to the module already used; None in place of a
        use, or of all of them, means as it is.
        """
        once = OnceEach()
        plain = self._on_entry if on_entry is None else on_entry

        def box(name: str, value: Any, use: Any) -> Any:
            if use is None:
                return value
            return once(use, value) if name in plain else Stored(value, use, once)

        boxed = params if uses is None else map_named(box, params, uses)
        keys = {} if rng is None else self._keys(rng)
        mutable = [*variables, *self._transient]
        with _missing_streams_explained(self._streams):
            out, new = nn.apply(fun, self._module, mutable=mutable)({"params": boxed, **variables}, batch, rngs=keys)
        new = {name: meta.unbox(tree) for name, tree in unfreeze(new).items()}
        return out, {name: new.get(name, variables[name]) for name in variables}

    def reads(self, fun: Callable[..., Any], params: Any, variables: Any, rng: Any, batch: Any) -> dict[str, Read]:
        """How `fun` reads each parameter. Every argument is abstract.

        It also settles which collections start empty at every step: those that a run would grow (`sow`).
        """
        self._transient = self._grown(fun, params, variables, rng, batch)
        variables = {name: tree for name, tree in variables.items() if name not in self._transient}
        found: dict[frozenset[str], dict[str, Read]] = {}

        def works(on_entry: frozenset[str]) -> bool:
            def run(uses: Any, params: Any, variables: Any, rng: Any, batch: Any) -> Any:
                return self.run(fun, params, variables, rng, batch, uses, on_entry=on_entry)

            try:
                found[on_entry] = trace_reads(run, (params, variables, rng, batch), on_entry)
            except Exception:  # whatever a module does with a box that it did not expect
                return False
            return True

        on_entry = smallest_plain(works, [name for name, _ in named_leaves(params)])
        if on_entry not in found and not works(on_entry):
            raise ValueError(f"The parameters of {type(self._module).__name__} cannot be read through boxes.")
        self._on_entry = on_entry
        return found[on_entry]

    def _grown(self, fun: Callable[..., Any], params: Any, variables: Any, rng: Any, batch: Any) -> tuple[str, ...]:
        _, new = jax.eval_shape(lambda p, v, r, b: self.run(fun, p, v, r, b, None), params, variables, rng, batch)
        return tuple(name for name in variables if jax.tree.structure(new[name]) != jax.tree.structure(variables[name]))

    def _keys(self, rng: jax.Array) -> dict[str, jax.Array]:
        return {name: jax.random.fold_in(rng, i) for i, name in enumerate(self._streams)}


def _is_partitioned(leaf: Any) -> bool:
    return isinstance(leaf, meta.Partitioned)


class _missing_streams_explained:
    """Names the argument to mend where a module asks for an RNG stream that it was not given."""

    def __init__(self, streams: tuple[str, ...]):
        self._streams = streams

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if isinstance(error, errors.InvalidRngError):
            raise ValueError(
                f"{error} The step gives the RNG streams {self._streams}: name the others in "
                "make_zero_train_step(..., streams=(...)).") from error
