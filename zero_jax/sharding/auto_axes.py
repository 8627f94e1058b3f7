"""Meshes and arrays as `jax.make_mesh` and `jax.set_mesh` give them, made such as a step computes with: of Auto axes.

Under Explicit axes the sharding of an array is part of its type, and each operation of a model has to say what it makes
of it. What ZeRO does to the parameters of a model is hidden from it, so the axes under which it runs are Auto.
"""

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import jax
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from zero_jax.errors import UsageError
from zero_jax.state import ZeroState
from zero_jax.tree import path_name
from zero_jax.typing import Pytree

_CONFIG: Any = jax.config
_ONE_AT_A_TIME = threading.RLock()
_ARRAYS = {"rng", "batch", "batches", "gradients", "loss", "variables"}
"""Arguments of a step's methods that are trees of arrays, or no arrays at all."""

_ADVICE = (
    (("is not found in mesh", "if creating a variable with annotation"),
     "the metadata of a parameter names the axes that split it. Name axes of the mesh that `jax.set_mesh` sets, and "
     "make and run the step inside of it; Linen's other names (logical axes) are for steps outside of it"),
    (("not under a mesh context", "requires a non-empty mesh", "mesh cannot be empty"),
     "a PartitionSpec alone, in a model, is one of the mesh in context. Make and run the step inside of `with "
     "jax.set_mesh(mesh)`, or write NamedSharding(step.mesh, spec)"),
    (("can only refer to Auto axes", "of type Auto or Manual", "should match the", "Mesh for all inputs",
      "does not match the specs of the input"),
     "the model is written for Explicit axes, and a step computes on Auto ones, over the same devices. Write "
     "jax.lax.with_sharding_constraint(x, PartitionSpec(...)), inside of `jax.set_mesh`, for jax.sharding.reshard, "
     "out_sharding= and the NamedSharding of a mesh of Explicit axes; and give arrays that the loss or the model "
     "closes over as NumPy's"))
"""What JAX and Flax say of shardings in a model that do not fit the mesh on which it runs (tests/seams), and advice."""

_Function = TypeVar("_Function", bound=Callable[..., Any])


def auto_mesh(mesh: Mesh) -> Mesh:
    """`mesh` with Auto axes, of the same names, over the same devices."""
    return Mesh(mesh.devices, mesh.axis_names) if AxisType.Explicit in mesh.axis_types else mesh


@contextlib.contextmanager
def computing_on(mesh: Mesh) -> Iterator[None]:
    """In it the mesh of `jax.set_mesh` is `mesh`, of Auto axes, if one is set at all; in the trace of a `jit`, too.

    So a `PartitionSpec` alone, in a model, means what it meant outside.
    """
    if jax.sharding.get_abstract_mesh().empty:
        yield
    else:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            yield


def on_auto_axes(tree: Pytree, mesh: Mesh, target: Callable[[str, Any], NamedSharding] | None = None) -> Pytree:
    """`tree`, whose arrays with Explicit axes are such with Auto axes; those of states are so already.

    target: the sharding of each of these arrays, by name, of those that `jax.set_mesh` made replicated over some mesh,
    and of those that `device_put` put on one device; default: that which it has, or inside of a `jit` any.
    """
    def move(path: Any, leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        is_explicit = AxisType.Explicit in _typed_mesh(leaf).axis_types
        if not is_explicit and (target is None or not (_is_replicated(leaf) or _is_on_one_device(leaf, mesh))):
            return leaf
        if target is not None:
            return jax.device_put(leaf, target(path_name(path), leaf))
        own = None if isinstance(leaf, Tracer) else leaf.sharding
        if not isinstance(own, NamedSharding) or own.is_fully_replicated or not isinstance(own.mesh, Mesh):
            return jax.device_put(leaf, NamedSharding(mesh, P()))
        return jax.device_put(leaf, NamedSharding(auto_mesh(own.mesh), own.spec))

    return jax.tree.map_with_path(move, tree, is_leaf=lambda leaf: isinstance(leaf, ZeroState))


def as_context(tree: Pytree) -> Pytree:
    """`tree` with Explicit axes where the mesh of `jax.set_mesh` has them; states keep the axes on which steps compute.

    Inside of a `jit` scalars alone, which are the metrics of a step. Without this, JAX refuses every operation on what
    a step returns, `metrics["loss"] + 1` say.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if AxisType.Explicit not in mesh.axis_types:
        return tree

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        is_same = _typed_mesh(leaf).axis_names == mesh.axis_names
        if isinstance(leaf, Tracer):
            # Its sharding is not known in a trace, and a larger one must not be gathered for this.
            return jax.sharding.reshard(leaf, NamedSharding(mesh, P())) if is_same and not leaf.ndim else leaf
        if not is_same and not _is_replicated(leaf):
            return leaf
        spec = getattr(leaf.sharding, "spec", P()) if is_same else P()
        return jax.device_put(leaf, NamedSharding(jax.sharding.get_mesh(), spec))

    return jax.tree.map(move, tree, is_leaf=lambda leaf: isinstance(leaf, ZeroState))


def in_any_context(function: _Function, at: Any = None) -> _Function:
    """A method of a step, or a function of a `step` or a `layout`, or of `at`: it computes on the mesh of that alone.

    What it returns fits the mesh that is set. Arguments named in `_ARRAYS` may have Explicit axes; where each of a
    batch belongs, `batch_target` of the step says. Of functions of a `state` one runs at a time, whatever their step:
    else two threads find the same state alive, and the second runs on memory that the first donated (SIGSEGV on CPU).
    """
    names = list(inspect.signature(function).parameters)
    owner = next((name for name in ("step", "layout") if name in names), names[0])

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **options}
        of = given.get(owner) if at is None else at
        if of is None or not hasattr(of, "mesh"):
            return function(*args, **options)  # which has its own words for it
        if _CONFIG.jax_disable_jit:
            raise UsageError("jax.disable_jit() or JAX_DISABLE_JIT is set, and a step is a compiled program: leave it "
                             "out around the step. jax.debug.print and jax.debug.callback show values inside of one.")
        for name in _ARRAYS & given.keys():
            target = (of.batch_target(steps=name == "batches") if name in ("batch", "batches")
                      else (lambda name, leaf: NamedSharding(of.mesh, P())) if name == "rng" else None)
            given[name] = on_auto_axes(given[name], of.mesh, target)
        with _ONE_AT_A_TIME if "state" in names else contextlib.nullcontext(), computing_on(of.mesh):
            result = function(*args[len(names):], **given)
        return as_context(result)

    return cast(_Function, call)


@contextlib.contextmanager
def sharding_errors_explained() -> Iterator[None]:
    """Around the trace of a model: says what to write where it says itself how its arrays are sharded."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        text = str(error)
        advice = next((advice for parts, advice in _ADVICE if any(part in text for part in parts)), None)
        if advice is None:
            raise
        raise UsageError(f"A sharding in the model does not fit the mesh of the step: {advice}. JAX says: {text}"
                         ) from error


def _is_replicated(leaf: jax.Array) -> bool:
    """Whether each device of a mesh has all of it: its parts are there already."""
    return (not isinstance(leaf, Tracer) and isinstance(leaf.sharding, NamedSharding)
            and leaf.sharding.is_fully_replicated)


def _is_on_one_device(leaf: jax.Array, mesh: Mesh) -> bool:
    """Whether `device_put` put it on one device, which a `jit` over `mesh` refuses, and one process has all."""
    return (not isinstance(leaf, Tracer) and isinstance(leaf.sharding, SingleDeviceSharding) and leaf.committed
            and not mesh.is_multi_process)


def _typed_mesh(leaf: jax.Array) -> Any:
    """The mesh that is part of the type of an array."""
    return jax.typeof(leaf).sharding.mesh
