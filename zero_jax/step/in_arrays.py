"""What `Checkpoints` ask of a step of any kind: its state in arrays, whose layout is that of the step."""

from typing import Any

from zero_jax.sharding.layout import Layout
from zero_jax.state import ZeroState
from zero_jax.typing import Batch


class StateInArrays:
    """A step with no file of its own. `StepWithFiles` is the other kind."""

    def layout(self, batch: Batch = None) -> Layout:
        """How every leaf of the state is stored; `batch` may be left out once that is known."""
        raise NotImplementedError

    def in_memory(self, state: ZeroState) -> tuple[ZeroState, Layout]:
        """`state` with every leaf in an array, and the layout of that; without files it is what is given."""
        return state, self.layout()

    def in_pieces(self, state: ZeroState) -> Any:
        """What of `state` is in files, to be read in pieces (`CommittedState`); None where nothing is."""
        return None

    def from_pieces(self, source: Any) -> ZeroState:
        """The state that `source` reads in pieces (`PiecesToRead`); only of a step with files."""
        raise NotImplementedError
