"""Each use of each array once per trace: a weight that is read twice (tied, say) is gathered once."""

from collections.abc import Callable
from typing import Any

from jax.extend.core import get_opaque_trace_state


class OnceEach:
    """Remembers the results of uses; keyed by the trace, so that no value leaves the trace that made it."""

    def __init__(self) -> None:
        self._results: dict[Any, list[tuple[Any, Any, Any]]] = {}

    def __call__(self, use: Callable[[Any], Any], value: Any) -> Any:
        """`use(value)`, computed at the first call with these two in this trace."""
        trace = get_opaque_trace_state(convention="flax")
        made = self._results.setdefault((id(value), use), [])
        for _, seen, result in made:
            if seen == trace:
                return result
        made.append((value, trace, use(value)))  # `value` is kept, so that its id stays its own
        return made[-1][2]
