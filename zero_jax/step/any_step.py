"""What steps of all kinds have in common: a layout, methods for any mesh context, and a state for `Checkpoints`."""

import inspect
from collections.abc import Sequence
from typing import Any, Protocol

from zero_jax.layout.layout import Layout
from zero_jax.sharding.auto_axes import in_any_context
from zero_jax.state import ZeroState
from zero_jax.typing import Batch


class LeavesToRead(Protocol):
    """The leaves of a checkpoint as a step stores them."""

    def leaves(self, names: Sequence[str]) -> dict[str, Any]:
        """The leaves `names`, together."""
        ...

    def check(self) -> None:
        """Raises where what was read, all leaves by now, is not as it was saved."""
        ...


class AnyStep:
    """A train step with its state in arrays; `DiskTrainStep` has a part of it in files."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Every public method of a step may be called under any `jax.set_mesh`."""
        super().__init_subclass__(**options)
        for name, method in list(vars(cls).items()):
            if inspect.isfunction(method) and (name == "__call__" or not name.startswith("_")):
                setattr(cls, name, in_any_context(method))

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
