"""What a stage may send and must, what a program sends, and both as text."""

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Mapping

from zero_jax.contract.host import HostBudget, HostUse, bytes_ahead, bytes_of
from zero_jax.typing import AxisNames
from zero_jax.xla.collective import Collective, total_bytes
from zero_jax.xla.timing import Timing

CODES = {"u8": 1, "s8": 1, "u32": 4}
"""HLO's dtypes of quantised messages, and the bytes of codes in an element of each: TPUs gather words.

A parameter or gradient is of none of these: what is quantised has a floating dtype, and is never sent as integers."""


@dataclasses.dataclass(frozen=True)
class TrafficBudget:
    """One kind of traffic: its purpose, and how much may be sent for it.

    Attributes:
        purpose: in words.
        kinds: the collectives that are meant to carry it; another kind is noted, but only bytes break a contract.
        axes: the mesh axes that it may cross.
        communication_bytes: what each device may send per step, counted as rings do.
        buffers: elements of each buffer that may be sent (of whole matrices: sorted dims) -> the parameter that it
            holds; empty where anything small may be.
        key: short for the purpose: "gather", "reduce", "rest", "matrices", "activations", "slices" or "outer".
        code_bytes: of `communication_bytes` those that are promised as quantised codes (bytes, `CODES`).
    """

    purpose: str
    kinds: tuple[str, ...]
    axes: AxisNames
    communication_bytes: float
    buffers: Mapping[int | tuple[int, ...], str] = dataclasses.field(default_factory=dict, repr=False)
    key: str = ""
    code_bytes: float = 0.0


@dataclasses.dataclass(frozen=True)
class ParamTraffic:
    """What a step sends for one parameter. Sizes are elements on each device, padding included.

    Attributes:
        name: its path.
        size: of the parameter, whole; under tensor parallelism of a device's part of it.
        gathered: that each device sends to gather it once; 0 where it is stored whole.
        reduced: that each device sends to reduce and scatter its gradient once; 0 where it is frozen.
        read_itemsize: bytes of an element in the dtype in which the model reads it.
        reduce_itemsize: the same of the dtype in which its gradient is reduced.
        gathered_bytes: that each device may send for its gathers in a step.
        reduced_bytes: that each device may send for one reduction of its gradient.
        slices: into how many parts loops cut it, the model's own and those over tiles; each is gathered by itself.
        tiles: how many of these are the tiles of one layer; 1 where it is used whole.
        kept: of what is in tiles, the copies of all layers that forward keeps for backward (hpZ).
        copies: how many parameters have its shape and, but for numbers, its name: layers that no loop runs over.
        is_read: whether the loss reads it.
        up_front: whether it is gathered before the model runs, since its reads cannot be intercepted.
        gathers_codes: whether it is gathered as codes; then `gathered` counts bytes of messages.
        reduces_codes: whether its gradient is reduced as codes; then `reduced` counts bytes of messages.
        splits: of each dim the mesh axes that split its gradient, major first.
    """

    name: str
    size: float
    gathered: float
    reduced: float
    read_itemsize: int
    reduce_itemsize: int
    gathered_bytes: float = 0.0
    reduced_bytes: float = 0.0
    slices: int = 1
    tiles: int = 1
    kept: float = 0.0
    copies: int = 1
    is_read: bool = True
    up_front: bool = False
    gathers_codes: bool = False
    reduces_codes: bool = False
    splits: tuple[AxisNames, ...] = ()

    @property
    def bytes(self) -> float:
        """Of the whole parameter as the model reads it."""
        return self.size * self.read_itemsize


@dataclasses.dataclass(frozen=True)
class StateBudget:
    """The state on each device beside what it takes if all that the stage shards is sharded.

    Attributes:
        device_bytes: as it is stored.
        ideal_bytes: with every leaf that the stage shards in equal parts; with padding where no dim divides.
        replicated: name -> what is wrong with it, of each leaf above a small size that the stage shards and the layout
            does not.
        excess: name -> bytes above its ideal, of the leaves that have most.
    """

    device_bytes: int
    ideal_bytes: float
    replicated: Mapping[str, str] = dataclasses.field(default_factory=dict)
    excess: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Contract:
    """All that one step of a layout may send, and what it must.

    Attributes:
        stage: ZeRO's.
        mesh: the size of each axis of the mesh, in its order.
        platform: as JAX names it.
        slack: bytes by which parameters or gradients may exceed their budget, since small leaves are padded or
            all-reduced.
        budgets: by purpose.
        zero_axes: the mesh axes over which the stage shards; none at stage 0.
        params: what must be sent for each parameter.
        state: what the layout makes of the state.
        num_gathers: in how many microbatches parameters are gathered: 1 where a step gathers them once for all.
        copy_bytes: on each device of the copy of the parameters that a step gathers for its microbatches, or that
            forward keeps for backward.
        num_reductions: how often gradients are reduced in a step.
        context: the mesh axis over which the sequence is split.
        host: what may be in the host's memory; None where nothing is offloaded.
        slices: the mesh axis across which slices train by themselves; empty: there is none.
        slices_in_loops: whether what is sent between slices must be sent in the iterations of the step's loops.
    """

    stage: int
    mesh: Mapping[str, int]
    platform: str
    slack: float
    budgets: tuple[TrafficBudget, ...]
    zero_axes: AxisNames = ()
    params: tuple[ParamTraffic, ...] = ()
    state: StateBudget | None = None
    num_gathers: int = 1
    num_reductions: int = 1
    context: str = ""
    copy_bytes: int = 0
    host: HostBudget | None = None
    slices: str = ""
    slices_in_loops: bool = False

    @functools.cached_property
    def by_name(self) -> Mapping[str, ParamTraffic]:
        """`params` by name."""
        return {each.name: each for each in self.params}

    def served(self, collective: Collective) -> list[ParamTraffic]:
        """The parameters that `collective` gathers, or whose gradients it reduces."""
        return [self.by_name[name] for name in collective.serves if name in self.by_name]

    @property
    def tiles(self) -> int:
        """Parts of a leaf each of which may be padded to a tile: on a TPU those of its largest axis; else 1."""
        return max(self.mesh.values()) if self.platform == "tpu" else 1

    def budget(self, key: str) -> TrafficBudget | None:
        """The budget of this key, if there is one."""
        return next((budget for budget in self.budgets if budget.key == key), None)

    @property
    def communication_bytes(self) -> float:
        """Bytes that each device may send per step."""
        return sum(budget.communication_bytes for budget in self.budgets)


@dataclasses.dataclass(frozen=True)
class TrafficResult:
    """A budget beside what the program sends for it. notes: where the backend did it in another way."""

    budget: TrafficBudget
    collectives: tuple[Collective, ...]
    notes: tuple[str, ...] = ()

    @property
    def communication_bytes(self) -> float:
        """Bytes that each device sends for it per step."""
        return total_bytes(self.collectives)


@dataclasses.dataclass(frozen=True)
class Report:
    """How a program keeps its contract: one `TrafficResult` for each budget, and what breaks it in words.

    seconds: of each result what its collectives are predicted to take alone, and what of that is exposed; empty where
    no chip file is of the devices.
    """

    contract: Contract
    results: tuple[TrafficResult, ...]
    violations: tuple[str, ...]
    host: HostUse | None = None
    seconds: tuple[tuple[float, float], ...] = ()

    def timed(self, timing: Timing | None) -> "Report":
        """This report with the seconds of `timing`; a collective of several purposes is shared among them by bytes."""
        total: defaultdict[tuple[str, str], float] = defaultdict(float)
        for result in self.results:
            for each in result.collectives:
                total[each.computation, each.name] += each.step_bytes

        def seconds(result: TrafficResult, number: int, known: Timing) -> float:
            keys = (((each.computation, each.name), each.step_bytes) for each in result.collectives)
            return sum(known.collectives.get(key, (0.0, 0.0))[number] * sent / total[key] for key, sent in keys if sent)

        return dataclasses.replace(self, seconds=() if timing is None else tuple(
            (seconds(result, 0, timing), seconds(result, 1, timing)) for result in self.results))

    @property
    def communication_bytes(self) -> float:
        """Bytes that each device sends per step."""
        return sum(result.communication_bytes for result in self.results)

    def __str__(self) -> str:
        contract = self.contract
        lines = [f"stage {contract.stage} on {dict(contract.mesh)}: {self.communication_bytes:,.0f} bytes sent per "
                 f"device and step, {contract.communication_bytes:,.0f} promised"]
        if state := contract.state:
            lines.append(f"  state: {state.device_bytes:,} bytes on each device, {state.ideal_bytes:,.0f} if all of it "
                         "that the stage shards were in equal parts")
        if contract.host and self.host:
            lines.append(f"  host memory: {self.host.argument_bytes:,} bytes of state for each device, of "
                         f"{contract.host.state_bytes:,} offloaded, {self.host.alias_bytes:,} of them updated in "
                         f"place; {self.host.temporary_bytes:,} bytes of temporaries")
            if contract.host.param_bytes:
                reads = self.host.param_reads(contract.host)
                lines.append(f"  parameters read from there: {bytes_of(reads):,} of {contract.host.read_bytes:,} "
                             f"bytes, {bytes_ahead(reads):,} of them in loops, an iteration ahead of their use")
            if contract.host.gradients:
                lines.append(f"  gradients that backward writes there: {bytes_of(self.host.writes):,} bytes, and reads "
                             f"as sums over microbatches: {bytes_of(self.host.stack_reads):,}; the update reads "
                             f"{bytes_of(self.host.gradient_reads):,}")
            if contract.host.activations:
                reads = self.host.stack_reads
                lines.append(f"  checkpoints that loops read from there: {bytes_of(reads):,} bytes, "
                             f"{bytes_ahead(reads):,} of them an iteration ahead of their use")
        for number, result in enumerate(self.results):
            budget = result.budget
            kinds = ", ".join(sorted({c.kind for c in result.collectives})) or "none"
            lines.append(
                f"  {budget.purpose}: {result.communication_bytes:,.0f} of {budget.communication_bytes:,.0f} bytes "
                f"over {' x '.join(budget.axes) or 'no axis'} ({kinds})"
                + ("; {:,.2f} ms alone, {:,.2f} ms exposed".format(*(1e3 * each for each in self.seconds[number]))
                   if self.seconds and result.collectives else ""))
            lines += [f"    {note}" for note in result.notes]
        return "\n".join([*lines, *(f"  BROKEN: {line}" for line in self.violations)])
