"""What `Checkpoints` ask of a step of any kind: its state in arrays, whose layout is that of the step."""

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

    def from_memory(self, state: ZeroState) -> ZeroState:
        """`state`, as `in_memory` returns it, as this step takes it; with files it is written there."""
        return state
