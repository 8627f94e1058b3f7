"""What a user may hand to a step, checked before anything compiles: one clear ValueError for each mistake."""

import ast
import contextlib
import functools
import inspect
import linecache
import re
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh

from zero_jax.arguments import shown
from zero_jax.distributed.agreement import check_same, spans_processes
from zero_jax.errors import UsageError, few
from zero_jax.frontends.model_functions import ModelFunctions, is_function
from zero_jax.layout.batch_layout import BatchLayout
from zero_jax.layout.layout import Layout
from zero_jax.offload.disk_leaves import expanded
from zero_jax.sharding.batch import Accumulation
from zero_jax.state import ZeroState
from zero_jax.step.guard import Guard
from zero_jax.step.losses import next_token_loss
from zero_jax.step.metrics import is_array
from zero_jax.tree import as_numbers, named_leaves
from zero_jax.typing import Batch, Gradients, Loss, Pytree, Variables


def check_loss(loss: Any, call: str = "loss(model, batch)") -> None:
    """Raises ValueError for what cannot be called as `call` says."""
    if not callable(loss):
        raise UsageError(f"loss={shown(loss)} is a {type(loss).__name__}: give a function {call}.")
    try:
        signature = inspect.signature(loss)
    except (TypeError, ValueError):  # of a builtin
        return
    try:
        signature.bind(*[None] * (call.count(",") + 1), **({"rng": None} if "rng" in signature.parameters else {}))
    except TypeError as error:
        raise UsageError(f"The loss takes {signature}, and it is called as {call}, with rng=key "
                         "where it takes rng: bind its other arguments with functools.partial, and let the batch hold "
                         "what changes.") from error


@contextlib.contextmanager
def loss_errors_explained(loss: Loss, batch: Batch, model: ModelFunctions) -> Iterator[None]:
    """Around the first trace of a loss: says what to do where it takes parameters, or a key that no batch has."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        if message := _no_mapping(error, batch) or _missing_key(error, batch) or (
                None if is_function(model) else _called_with_params(error, loss)):
            raise UsageError(message) from error
        raise


@contextlib.contextmanager
def microbatch_errors_explained(loss: Loss, accumulation: Accumulation) -> Iterator[None]:
    """Around the trace of a loss that took the whole batch, with microbatches of it."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if isinstance(error, UsageError) or getattr(_target(loss), "__code__", None) not in _frames_of(error):
            raise
        raise UsageError(
            f"The loss takes a batch, and not a microbatch of accumulate={accumulation.microbatches}, reduce="
            f"\"{accumulation.reduce}\" ({type(error).__name__}: {error}): take sizes from the arrays, as x.shape[0], "
            "in the place of numbers. A loss over pairs of examples is then one over the pairs of each microbatch; "
            "give accumulate=1 for all pairs of the batch.") from error


def _no_mapping(error: Exception, batch: Batch) -> str | None:
    """What to say of a name that is looked up in a batch of one array."""
    found = re.search(r"string indexing; got idx=('.*?')", str(error)) if isinstance(error, TypeError) else None
    if found is None or isinstance(batch, Mapping) or len(jax.tree.leaves(batch)) != 1:
        return None
    return f"The loss reads {found[1]} of the batch, which is one array: give a dict, as {{{found[1]}: array, ...}}."


def _missing_key(error: Exception, batch: Batch) -> str | None:
    """What to say of a KeyError that is of the batch; None where another dict raised it."""
    if not isinstance(error, KeyError) or not isinstance(batch, Mapping) or error.__traceback__ is None:
        return None
    innermost = error.__traceback__
    while innermost.tb_next is not None:
        innermost = innermost.tb_next
    frame = innermost.tb_frame
    line, end_line, start, end = list(frame.f_code.co_positions())[innermost.tb_lasti // 2]
    if line is None or line != end_line:
        return None
    try:  # the source of the expression that raised, as batch["inputs"]
        subscript = ast.parse(linecache.getline(frame.f_code.co_filename, line)[start:end], mode="eval").body
    except SyntaxError:
        return None
    subscripted = subscript.value if isinstance(subscript, ast.Subscript) else None
    value = frame.f_locals.get(subscripted.id) if isinstance(subscripted, ast.Name) else None
    if not isinstance(value, Mapping) or value.keys() != batch.keys():
        return None
    return (f"{frame.f_code.co_name} reads batch[{error.args[0]!r}], and the batch has "
            f"{', '.join(map(repr, batch))}: name its leaves so, or give a loss=... that reads these.")


def _called_with_params(error: Exception, loss: Loss) -> str | None:
    """What to say of an error of `loss(params, batch)`: it subscripts a module, or hands it to `apply`."""
    target = _target(loss)
    first = next(iter(getattr(getattr(target, "__code__", None), "co_varnames", ())), "")
    unlikely = type(error).__module__ == "builtins" and not isinstance(error, (TypeError, AttributeError))
    named = re.search("param|variables|weights", first) and not unlikely
    subscripted = isinstance(error, TypeError) and re.search("is not (subscriptable|iterable)", str(error))
    is_its_own = getattr(target, "__code__", None) in _frames_of(error)[-3:]  # or of Flax, called from there
    if not (named or subscripted and is_its_own
            or type(error).__name__ == "ApplyScopeInvalidVariablesTypeError"):
        return None
    return (f"The loss is called as loss(model, batch) with a model that has its parameters, and not as loss(params, "
            f"batch): write model(batch[...]) for model.apply({{\"params\": params}}, batch[...]). "
            f"{getattr(target, '__qualname__', repr(target))} raised {type(error).__name__}: {error}")


def _target(function: Any) -> Any:
    """The function that a `functools.partial` calls."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _frames_of(error: Exception) -> list[Any]:
    """The code of each frame that `error` came through, the innermost last."""
    return [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]


def is_traced(state: ZeroState, batch: Batch) -> bool:
    """Whether a call is part of a trace, as of the user's own `jit` or `scan`."""
    return isinstance(state.step, Tracer) or any(
        isinstance(leaf, Tracer) for leaf in jax.tree.leaves(batch))


def check_is_state(state: Any) -> None:
    """Raises ValueError for anything but a `ZeroState`, and for one that was donated.

    A leaf of each field is looked at: 8 microseconds, where all of 156 leaves would take 85. XLA on CPU ends the
    process (SIGSEGV) where it runs on a buffer that was donated.
    """
    if not isinstance(state, ZeroState):
        raise UsageError(f"state is a {type(state).__name__}: give the ZeroState that step.init or the last step "
                         "returned.")
    for field in (state.step, state.params, state.weights, state.opt_state, state.ema, state.rng):
        leaf = _first_leaf(field)
        if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.is_deleted():
            raise UsageError(
                "This state was donated to an earlier call, which reused its memory: go on from the state that call "
                "returned, as in state, metrics = step(state, batch). To keep one, copy it first: "
                "jax.tree.map(jnp.copy, state).")


def _first_leaf(tree: Pytree) -> Any:
    """A leaf of nested dicts and tuples; None of an empty tree. `jax.tree.leaves` would visit all of them."""
    if isinstance(tree, (dict, tuple, list)):
        children = tree.values() if isinstance(tree, dict) else tree
        return next((leaf for child in children if (leaf := _first_leaf(child)) is not None), None)
    return tree


def check_state(state: ZeroState, layout: Layout, error: Exception | None = None) -> None:
    """Raises ValueError where `state`, of arrays or tracers, is not stored as `layout` says; names the first leaf.

    error: with which a program refused the state: that of XLA:GPU where NumPy looks at host memory is explained.
    """
    if "external reference" in str(error):
        raise UsageError(
            "A leaf of this state is in host memory and NumPy looks at it in place (np.asarray, or np.array without a "
            "copy), so that the step cannot update it there: keep a copy instead, as np.array(leaf, copy=True), and "
            "drop what looks at the leaf before the next step.") from error
    wanted, given = dict(named_leaves(layout.state)), dict(named_leaves(expanded(layout, state)))
    what = f"This state is not of this step (stage {layout.stage.number} on {layout.axes.sizes})"
    todo = ("Give a state of this step.init; step.with_params takes another's parameters, and zero_jax.Checkpoints "
            "restores at any stage and mesh.")
    if missing := [name for name in wanted if name not in given]:
        raise UsageError(f"{what}: it lacks {few(missing)}. {todo}")
    if extra := [name for name in given if name not in wanted]:
        raise UsageError(f"{what}: it has {few(extra)} in addition. {todo}")
    for name, like in wanted.items():
        leaf = given[name]
        if np.shape(leaf) != like.shape or dtype_of(leaf) != like.dtype:
            raise UsageError(f"{what}: {name} is {dtype_of(leaf)} {np.shape(leaf)}, and is stored as "
                             f"{like.dtype} {like.shape} here. {todo}")
        committed = isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and getattr(leaf, "committed", True)
        if committed and not leaf.sharding.is_equivalent_to(like.sharding, leaf.ndim):
            raise UsageError(f"{what}: {name} is sharded as {leaf.sharding}, and as {like.sharding} here. {todo}")


def check_same_batch(batch: Batch, first: Batch | None) -> None:
    """Raises ValueError where keys or dtypes are not those of the first batch, of `jax.ShapeDtypeStruct`s; None: none.

    Other sizes are another program of the same step, which compiles once each.
    """
    if first is None:
        return
    wanted, given = dict(named_leaves(first)), dict(named_leaves(batch))
    missing, extra = [name for name in wanted if name not in given], [name for name in given if name not in wanted]
    if missing or extra:
        what = [f"{how} {few(names)}" for how, names in (("lacks", missing), ("has in addition", extra)) if names]
        raise UsageError(f"This batch {' and '.join(what)}, beside the first batch of this step: give all leaves in "
                         "every batch (weights of ones, say), or make another step of the same model.")
    for name, like in wanted.items():
        if dtype_of(given[name]) != like.dtype:
            raise UsageError(f"batch[{name!r}] is {dtype_of(given[name])}, and was {like.dtype} in the first "
                             "batch of this step: convert it, or make another step of the same model.")


def check_values(batch: Batch, loss: Loss, batches: BatchLayout, *, steps: bool = False, whole: bool = False) -> None:
    """Raises ValueError for integers of Python's or NumPy's that JAX would change, or the default loss misread.

    JAX cuts 64-bit integers to their last 32 bits without a word. Arrays that are on devices are not looked at: that
    would wait for them. Raises for what is of one process alone, too: steps: of several batches; whole: of one that is
    on every device, as it is.
    """
    def is_checked(leaf: Any) -> bool:
        if isinstance(leaf, (np.ndarray, np.generic)):
            return leaf.size > 0 and leaf.dtype.kind in "iu"
        return isinstance(leaf, int) and not isinstance(leaf, bool)

    leaves = jax.tree.leaves(batch)
    if not leaves:
        raise UsageError("The batch is empty: give a pytree of arrays whose leading dim is the global batch.")
    if whole:
        _check_same_values(batch, batches.axes.mesh)
    else:
        batches.check_global(batch, steps=steps)
    if not any(map(is_checked, leaves)):
        return
    for name, leaf in named_leaves(batch):
        if not is_checked(leaf):
            continue
        values = np.array([leaf], object) if isinstance(leaf, int) else leaf
        dtype = np.dtype(np.int64) if isinstance(leaf, int) else leaf.dtype
        kept = jax.dtypes.canonicalize_dtype(dtype)
        if kept != dtype or isinstance(leaf, int):
            limits = np.iinfo(kept)
            if values.max() > limits.max or values.min() < limits.min:
                raise UsageError(f"batch[{name!r}] holds integers from {values.min()} to {values.max()}, and JAX keeps "
                                 f"{limits.bits} bits: give indices below 2**{limits.bits - (limits.min < 0)}"
                                 + (", or set jax_enable_x64." if limits.bits < 64 else "."))
        if loss is next_token_loss and name in ("inputs", "targets") and values.min() < 0:
            raise UsageError(f"batch[{name!r}] holds {values.min()}, and a negative id counts from the end of the "
                             "vocabulary: give 0 and a 0 in batch[\"weights\"] for what is no token.")


def _check_same_values(batch: Batch, mesh: Mesh) -> None:
    """Raises ValueError where processes give other values for a batch that all devices have; all of them call it."""
    if spans_processes(mesh):
        own = [np.asarray(as_numbers(leaf)) for leaf in map(jnp.asarray, jax.tree.leaves(batch))
               if leaf.is_fully_addressable]
        check_same("The batch, which does not divide over the devices and is computed whole on each of them,",
                   b"".join(f"{leaf.shape}".encode() + leaf.tobytes() for leaf in own),
                   "give all processes the same rows")


@contextlib.contextmanager
def state_explained(state: ZeroState, layout: Layout) -> Iterator[None]:
    """What is raised within is `check_state`'s error where `state` is not stored as `layout` says."""
    try:
        yield
    except (TypeError, ValueError) as error:
        check_state(state, layout, error)
        raise


def check_step(step: Any, *states: Any) -> None:
    """Raises ValueError for anything but a step and states, alive; steps are told from other things by a method."""
    if not hasattr(step, "layout"):
        raise UsageError(f"step is a {type(step).__name__}: give the step that zero_jax.make_zero_train_step returned; "
                         "it comes before the state and the batch.")
    for state in states:
        check_is_state(state)


def dtype_of(leaf: Any) -> Any:
    """The dtype that JAX gives `leaf`; keys have one that `result_type` does not know."""
    return leaf.dtype if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)) else jnp.result_type(leaf)


def check_update(gradients: Gradients, loss: Any, variables: Variables | None, layout: Layout, guard: Guard | None
                 ) -> None:
    """Raises ValueError for what `apply_gradients` cannot take, or would take for something else."""
    check_stored("gradients", gradients, layout.state.params, "a tree as step.gradients returns it")
    known, given = ({name: (np.shape(leaf), dtype_of(leaf)) for name, leaf in named_leaves(tree)}
                    for tree in (layout.state.variables, layout.state.variables if variables is None else variables))
    if wrong := [name for name in {**known, **given} if known.get(name) != given.get(name)]:
        raise UsageError(f"variables differ from those of the state in {few(wrong)}: give a tree as step.gradients "
                         "returns it.")
    if loss is None and guard is not None and guard.spike is not None:
        raise UsageError("apply_gradients without loss: this step's guard looks for spikes of it: give "
                         "loss=metrics[\"loss\"].")
    if loss is not None and not (
            is_array(loss) and np.shape(loss) == () and np.can_cast(dtype_of(loss), jnp.float32, "same_kind")):
        raise UsageError(f"apply_gradients(loss={shown(loss)}): give a real scalar, as metrics[\"loss\"].")


def check_stored(what: str, given: Pytree, like: Pytree, todo: str) -> None:
    """Raises ValueError unless `given` has a leaf for each of the parameters `like`, of its stored shape.

    No complex number or integer becomes a floating one.
    """
    wanted, leaves = dict(named_leaves(like)), dict(named_leaves(given))
    if wrong := sorted(wanted.keys() ^ leaves.keys()) or [
            name for name, leaf in wanted.items() if np.shape(leaves[name]) != leaf.shape]:
        raise UsageError(f"{what} differ from the parameters as they are stored in {few(wrong)}: give {todo}.")
    for name, leaf in wanted.items():
        if not _keeps_values(dtype := dtype_of(leaves[name]), leaf.dtype):
            raise UsageError(f"{what}: {name} has dtype {dtype}, and the parameter has {leaf.dtype}: give {todo}.")


def _keeps_values(given: Any, stored: Any) -> bool:
    """Whether a leaf of dtype `given` is one of `stored` but for rounding; no complex number becomes a real one."""
    if not jnp.issubdtype(stored, jnp.inexact):
        return given == stored
    return jnp.issubdtype(given, jnp.floating) or jnp.issubdtype(given, jnp.inexact) and jnp.issubdtype(
        stored, jnp.complexfloating)
