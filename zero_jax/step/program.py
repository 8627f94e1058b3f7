"""A compiled program of a step, which does without `overlap`, or copy engines, where XLA fails to compile with them."""

import functools
import re
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from zero_jax.distributed.agreement import check_same
from zero_jax.xla.host_copies import WrongRows, check_rows

_ADDRESSES = re.compile(r"\d{10,}")
"""Numbers in the text of a program that may be addresses of a process, as those of callbacks."""


class Program:
    """What `jax.jit` makes of a function of a step; made anew where the options of the step change before it ran."""

    def __init__(self, function: Callable[..., Any], options: Callable[[], dict[str, Any]],
                 does_without: Callable[[Exception], bool], is_checked: Callable[[], bool], *, shared: bool,
                 **arguments: Any):
        """As `jax.jit(function, **arguments)`.

        options: the step's options of XLA. does_without: whether they were changed for an error of XLA's or of check.
        is_checked: whether the rows of host memory that it copies are to be checked before it runs. shared: whether
        several processes run it together, of which each then compares what it compiles with the others.
        """
        self._compared: set[Any] | None = set() if shared else None
        self._function, self._options, self._does_without, self._arguments = function, options, does_without, arguments
        self._is_checked, self._checked = is_checked, set[Any]()
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
        if self._has_run and not self._is_checked():
            return self._jitted(*args)
        try:
            result = self._once(*args)
        except (jax.errors.JaxRuntimeError, WrongRows) as error:
            if not self._does_without(error):
                raise
            result = self._once(*args)
        self._has_run = True
        return result

    def _once(self, *args: Any) -> Any:
        """The function's result, by a program that is checked before it runs, for each shape of a batch."""
        if self._is_checked() and (types := _types(args[1:])) not in self._checked:
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
        if self._made_with != (options := self._options()):
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


def warn_without_overlap(error: Exception) -> None:
    """Tells that a step goes on without overlap, and why."""
    warnings.warn("XLA failed to compile this step with the options by which it overlaps communication with compute: "
                  "it goes on without them, more slowly. overlap=False leaves them out from the start, and a mapping "
                  f"changes them. XLA says: {str(error).splitlines()[0][:300]}", RuntimeWarning, stacklevel=2)


def warn_without_copy_engines(error: Exception) -> None:
    """Tells that a step goes on with kernels that copy, and why."""
    warnings.warn("XLA compiled this step to copy other rows of host memory than it should, with copy engines: it goes "
                  f"on with kernels in their place, more slowly. Please report it: {error}", RuntimeWarning,
                  stacklevel=2)
