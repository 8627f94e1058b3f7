"""Each parameter is gathered and read once per trace: a weight that is read twice (tied, say) is sent once."""

from typing import Any

from zero_jax.jaxpr.equations import current_trace
from zero_jax.sharding.gather import Encoded


class GatherCache:
    """Reads parameters through their uses, and caches what is read, by trace: no value may leave its trace."""

    def __init__(self) -> None:
        self._read: dict[Any, list[tuple[Any, Any, Any]]] = {}

    def __call__(self, use: Any, value: Any) -> Any:
        """`value` as the model reads it, gathered and read at the first call with these two in this trace.

        Args:
          use: a `gather.ParamUse`, or an `AccessRecorder`.
          value: the stored array, or an `Encoded`, which is made anew wherever a loop hands it on.
        """
        array = value.stored if isinstance(value, Encoded) else value
        trace = current_trace()
        entries = self._read.setdefault((id(array), use), [])
        for _, known_trace, read in entries:
            if known_trace == trace:
                return read
        entries.append((array, trace, use.read(*use.gather(value))))  # holding `array` keeps its id from another's
        return entries[-1][2]
