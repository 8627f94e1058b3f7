"""What `Checkpoints` ask of a step of any kind: its state in arrays, whose layout is that of the step."""

from collections.abc import Sequence
from typing import Any, Protocol

import jax

from zero_jax.sharding.layout import Layout
from zero_jax.state import ZeroState
from zero_jax.typing import Batch


class LeavesToRead(Protocol):
    """The leaves of a checkpoint as a step stores them."""

    def leaves(self, names: Sequence[str]) -> dict[str, Any]:
        """The leaves `names`, together."""
        ...

    def leaf(self, name: str) -> jax.Array:
        """A leaf that is in files."""
        ...

    def check(self) -> None:
        """Raises where what was read, all leaves by now, is not as it was saved."""
        ...


class StateInArrays:
    """A step with no file of its own. `DiskTrainStep` is the other kind."""

    def layout(self, batch: Batch = None) -> Layout:
        """How every leaf of the state is stored; `batch` may be left out once that is known."""
        raise NotImplementedError

    def in_memory(self, state: ZeroState) -> tuple[ZeroState, Layout]:
        """`state` with every leaf in an array, and the layout of that; without files it is what is given."""
        return state, self.layout()

    def in_files(self, state: ZeroState) -> Any:
        """The files (`DiskStates`) that have a part of `state`, to be read leaf by leaf; None where nothing is."""
        return None

    def from_leaves(self, source: LeavesToRead) -> ZeroState:
        """The state that `source` reads leaf by leaf; only of a step with files."""
        raise NotImplementedError
