"""Each parameter is gathered once per trace: a weight that is read twice (tied, say) is sent once."""

from typing import Any

from zero_jax.jaxpr.equations import current_trace
from zero_jax.sharding.gather import Encoded


class GatherCache:
    """Reads parameters through their uses, and caches what is gathered, by trace: no value may leave its trace."""

    def __init__(self) -> None:
        self._gathered: dict[Any, list[tuple[Any, Any, Any]]] = {}

    def __call__(self, use: Any, value: Any) -> Any:
        """`value` as the model reads it, gathered at the first call with these two in this trace.

        Args:
          use: a `gather.ParamUse`, or an `AccessRecorder`.
          value: the stored array, or an `Encoded`, which is made anew wherever a loop hands it on.
        """
        array = value.stored if isinstance(value, Encoded) else value
        trace = current_trace()
        entries = self._gathered.setdefault((id(array), use), [])
        for _, known_trace, gathered in entries:
            if known_trace == trace:
                return use.read(*gathered)
        entries.append((array, trace, use.gather(value)))  # holding `array` keeps its id from being used again
        return use.read(*entries[-1][2])
