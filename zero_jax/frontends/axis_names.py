"""Names of mapped axes that a model written for `jax.pmap` asks for, as `nn.BatchNorm(axis_name="batch")` does.

Under `jit` an array is global, so that what such a model averages over its devices is an average over everything
already. Each name that it asks for is bound to an axis of size one: `pmean` and `psum` leave their argument as it is.
"""

import re
from collections.abc import Callable
from typing import Any

import jax


class BoundAxes:
    """Calls functions with those axis names bound that this or an earlier call was missing."""

    def __init__(self) -> None:
        self.names: tuple[str, ...] = ()

    def __call__(self, fun: Callable[[], Any]) -> Any:
        """`fun()`, a pytree of arrays."""
        while True:
            bound = fun
            for name in self.names:
                bound = _with_axis(bound, name)
            try:
                return bound()
            except NameError as error:
                match = re.match(r"Found an unbound axis name: ([^ ]+?)\.?( |$)", str(error))
                if match is None or match[1] in self.names:
                    raise
                self.names += (match[1],)


def _with_axis(fun: Callable[[], Any], name: str) -> Callable[[], Any]:
    def bound() -> Any:
        mapped = jax.vmap(lambda _: fun(), axis_name=name, axis_size=1, in_axes=None)(0)
        return jax.tree.map(lambda leaf: leaf[0], mapped)

    return bound
