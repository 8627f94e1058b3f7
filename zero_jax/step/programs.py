"""The compiled programs of a step, with XLA's options for them, which are left out where XLA fails by them."""

import dataclasses
import functools
import re
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from zero_jax.distributed.agreement import check_same, spans_processes
from zero_jax.sharding.host_arrays import HOST
from zero_jax.step.functions import StepFunctions
from zero_jax.step.overlap import overlaps_by_default, step_overlap_options, with_overlap
from zero_jax.tree import named_leaves
from zero_jax.xla.devices import compiled_for, memory_options
from zero_jax.xla.host_copies import WrongRows, check_rows
from zero_jax.xla.host_memory import lists_memories, set_memory_kinds

_ADDRESSES = re.compile(r"\d{10,}")
"""Numbers in the text of a program that may be addresses of a process, as those of callbacks."""


class Programs:
    """The programs that a step compiled, by what they are for; all of them of the same `functions`."""

    def __init__(self, functions: StepFunctions):
        """functions: whose `options` change where XLA fails by one of them."""
        self.functions = functions
        self._programs: dict[Any, Any] = {}

    def __len__(self) -> int:
        return len(self._programs)

    @functools.cached_property
    def compiler_options(self) -> dict[str, Any]:
        """XLA's options for the programs of the step, whose layout is known."""
        options, layout, axes = self.functions.options, self.functions.layout(), self.functions.axes
        return (options.compiler_options(axes) | step_overlap_options(options, layout)
                | memory_options(axes.mesh.devices.flat[0], layout.device_bytes))

    def get(self, key: Any, function: Any, in_shardings: Any, out_shardings: Any, *,
            more_options: Callable[[], dict[str, Any]] = dict, **arguments: Any) -> "Program":
        """The program of `key`: `jax.jit(function, in_shardings, out_shardings, **arguments)`, made once.

        more_options: of XLA's, for this program.
        """
        if key not in self._programs:
            if self.writes_memory_kinds:
                arguments["keep_unused"] = True  # so that a program's arguments are the leaves of the state and batch
            if in_shardings is not None:
                arguments["in_shardings"] = in_shardings
            self._programs[key] = Program(self, function, more_options, out_shardings=out_shardings, **arguments)
        return self._programs[key]

    def compile(self, lower: Callable[[], jax.stages.Lowered],
                more_options: Callable[[], dict[str, Any]] = dict) -> jax.stages.Compiled:
        """`lower()` compiled for the mesh's devices, and once more where the step `does_without` what it asked for."""
        def once() -> jax.stages.Compiled:
            lowered = lower()
            compiled = compiled_for(lowered, self.functions.mesh.devices.flat[0],
                                    self.compiler_options | more_options())
            if self.uses_copy_engines:
                check_rows(compiled.as_text() or "")
            return compiled

        try:
            return once()
        except (jax.errors.JaxRuntimeError, WrongRows) as error:
            if not self.does_without(error):
                raise
            return once()

    @property
    def uses_copy_engines(self) -> bool:
        """Whether rows of host memory are copied by engines, and so to be checked."""
        return self.functions.options.uses_copy_engines(self.functions.axes)

    def does_without(self, error: Exception) -> bool:
        """Whether the step has none of XLA's options from here on that this error may be of."""
        functions = self.functions
        if isinstance(error, WrongRows):
            warnings.warn("XLA compiled this step to copy other rows of host memory than it should, with copy engines: "
                          f"it goes on with kernels in their place, more slowly. Please report it: {error}",
                          RuntimeWarning, stacklevel=2)
            functions.options = dataclasses.replace(functions.options, copy_engines=False)
        elif overlaps_by_default(functions.options, functions.layout()) and may_be_of_overlap(error):
            warnings.warn("XLA failed to compile this step with the options by which it overlaps communication with "
                          "compute: it goes on without them, more slowly. overlap=False leaves them out from the "
                          f"start, and a mapping changes them. XLA says: {str(error).splitlines()[0][:300]}",
                          RuntimeWarning, stacklevel=2)
            functions.options = dataclasses.replace(functions.options, communication=dataclasses.replace(
                functions.options.communication, overlap=False))
            functions.known_layout = with_overlap(functions.layout(), functions.options)
        else:
            return False
        del self.compiler_options
        return True

    @property
    def writes_memory_kinds(self) -> bool:
        """Whether memory kinds are to be written on a lowered program, since JAX drops them for these devices."""
        return self.functions.options.host_offload is not None and not lists_memories(
            self.functions.mesh.devices.flat[0])

    def with_memory_kinds(self, lowered: jax.stages.Lowered, *, of_arguments: bool = True) -> jax.stages.Lowered:
        """`lowered`, a function of the state to a state, with the memory of each leaf written on it."""
        if not self.writes_memory_kinds:
            return lowered
        layout = self.functions.layout()
        kinds = [HOST if name in layout.host else None for name, _ in named_leaves(layout.state)]
        return set_memory_kinds(lowered, kinds if of_arguments else (), kinds)


class Program:
    """What `jax.jit` makes of a function of a step; made anew where the options of the step change before it ran."""

    def __init__(self, programs: Programs, function: Callable[..., Any], more_options: Callable[[], dict[str, Any]],
                 **arguments: Any):
        """As `jax.jit(function, **arguments)`, with the options of `programs` and `more_options()`.

        Several processes that run it together compare what each of them compiles.
        """
        shared = spans_processes(programs.functions.mesh)
        self._compared: set[Any] | None = set() if shared else None
        self._programs, self._function, self._more_options = programs, function, more_options
        self._arguments, self._checked = arguments, set[Any]()
        self._made_with: dict[str, Any] | None = None
        self._jitted: Any = None
        self._has_run = False

    def __call__(self, *args: Any) -> Any:
        """The function's result. Raises UsageError where processes that run it together would compile others."""
        if self._compared is not None and (types := _types(args[1:])) not in self._compared:
            check_same("The program of a step", _ADDRESSES.sub("", self.lower(*args).as_text()),
                       "give all processes the same options, optimizer (with all of its numbers), model and loss, "
                       "and batches of one global shape, to which all of them give the same number of rows")
            self._compared.add(types)
        if self._has_run and not self._programs.uses_copy_engines:
            return self._jitted(*args)
        try:
            result = self._once(*args)
        except (jax.errors.JaxRuntimeError, WrongRows) as error:
            if not self._programs.does_without(error):
                raise
            result = self._once(*args)
        self._has_run = True
        return result

    def _once(self, *args: Any) -> Any:
        """The function's result, by a program that is checked before it runs, for each shape of a batch."""
        if self._programs.uses_copy_engines and (types := _types(args[1:])) not in self._checked:
            check_rows(self._current().lower(*args).compile().as_text() or "")
            self._checked.add(types)
        return self._current()(*args)

    def lower(self, *args: Any) -> jax.stages.Lowered:
        """As `jax.jit`'s."""
        return self._current().lower(*args)

    def trace(self, *args: Any) -> Any:
        """As `jax.jit`'s."""
        return self._current().trace(*args)

    def _current(self) -> Any:
        if self._made_with != (options := self._programs.compiler_options | self._more_options()):
            # A function of its own: JAX keeps what it has traced of one, whatever the options.
            @functools.wraps(self._function)
            def traced(*args: Any) -> Any:
                return self._function(*args)

            self._jitted = jax.jit(traced, compiler_options=options or None, **self._arguments)
            self._made_with = options
        return self._jitted


def _types(args: Any) -> Any:
    leaves, tree = jax.tree.flatten(args)
    return tree, tuple((np.shape(leaf), getattr(leaf, "dtype", type(leaf))) for leaf in leaves)


def may_be_of_overlap(error: Exception) -> bool:
    """Whether options by which XLA:TPU overlaps may be why it failed: not where a program does not fit in memory."""
    text = str(error)
    return any(each in text for each in ("INTERNAL", "UNIMPLEMENTED", "INVALID_ARGUMENT", "ScopedVmem"))
