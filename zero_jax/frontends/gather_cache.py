"""Each parameter is gathered once per trace: a weight that is read twice (tied, say) is sent once."""

from typing import Any

from zero_jax.jaxpr.equations import current_trace


class GatherCache:
    """Reads parameters through their uses, and caches what is gathered, by trace: no value may leave its trace."""

    def __init__(self) -> None:
        self._gathered: dict[Any, list[tuple[Any, Any, Any]]] = {}

    def __call__(self, use: Any, value: Any) -> Any:
        """`value` as the model reads it, gathered at the first call with these two in this trace.

        Args:
          use: a `gather.ParamUse`, or an `AccessRecorder`.
          value: the stored array.
        """
        trace = current_trace()
        entries = self._gathered.setdefault((id(value), use), [])
        for _, known_trace, gathered in entries:
            if known_trace == trace:
                return use.read(*gathered)
        entries.append((value, trace, use.gather(value)))  # holding `value` keeps its id from being used again
        return use.read(*entries[-1][2])
