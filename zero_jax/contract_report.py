"""What a stage promises, what a program sends for it, and both as text."""

import dataclasses
from collections.abc import Mapping

from zero_jax.hlo_collective import Collective


@dataclasses.dataclass(frozen=True)
class Promise:
    """One kind of traffic: what for, as which collectives, over which axes, and how much of it.

    kinds: as what it is meant to travel; another kind is noted, and it is bytes that break a promise. wire_bytes: what
    each device sends per step, by rings. pieces: elements of each buffer that may travel (of whole matrices: sorted
    dims) -> the parameter that it is; empty where anything small may. key: short for the purpose.
    """

    purpose: str
    kinds: tuple[str, ...]
    axes: tuple[str, ...]
    wire_bytes: float
    pieces: Mapping[int | tuple[int, ...], str] = dataclasses.field(default_factory=dict, repr=False)
    key: str = ""


@dataclasses.dataclass(frozen=True)
class Contract:
    """All that one step of a layout may send.

    mesh: sizes of the mesh's axes, in its order. platform: as JAX has it. slack: bytes by which parameters or gradients
    may exceed their promise, since small leaves are padded or all-reduced.
    """

    stage: int
    mesh: Mapping[str, int]
    platform: str
    slack: float
    promises: tuple[Promise, ...]

    def promise(self, key: str) -> Promise | None:
        """The promise of this key, if there is one."""
        return next((promise for promise in self.promises if promise.key == key), None)

    @property
    def wire_bytes(self) -> float:
        """Promised bytes that each device sends per step."""
        return sum(promise.wire_bytes for promise in self.promises)


@dataclasses.dataclass(frozen=True)
class Kept:
    """A promise beside what the program sends for it. notes: where the backend did it in another way."""

    promise: Promise
    collectives: tuple[Collective, ...]
    notes: tuple[str, ...] = ()

    @property
    def wire_bytes(self) -> float:
        """Bytes that each device sends for it per step."""
        return sum(c.wire_bytes * c.count for c in self.collectives)


@dataclasses.dataclass(frozen=True)
class Report:
    """How a program keeps its contract: one `Kept` for each promise, and what breaks it in words."""

    contract: Contract
    kept: tuple[Kept, ...]
    violations: tuple[str, ...]

    @property
    def wire_bytes(self) -> float:
        """Bytes that each device sends per step."""
        return sum(kept.wire_bytes for kept in self.kept)

    def __str__(self) -> str:
        lines = [f"stage {self.contract.stage} on {dict(self.contract.mesh)}: {self.wire_bytes:,.0f} bytes sent per "
                 f"device and step, {self.contract.wire_bytes:,.0f} promised"]
        for kept in self.kept:
            kinds = ", ".join(sorted({c.kind for c in kept.collectives})) or "none"
            lines.append(f"  {kept.promise.purpose}: {kept.wire_bytes:,.0f} of {kept.promise.wire_bytes:,.0f} bytes "
                         f"over {' x '.join(kept.promise.axes) or 'no axis'} ({kinds})")
            lines += [f"    {note}" for note in kept.notes]
        return "\n".join([*lines, *(f"  BROKEN: {line}" for line in self.violations)])
