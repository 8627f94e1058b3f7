"""A compiled step as data: its text, memory, layout and contract, compiled once, parsed once, and handed down."""

import dataclasses
import functools
from typing import Any

from zero_jax.contract.host import HostUse, host_use
from zero_jax.contract.memory import gathered_at_once, gathered_limit
from zero_jax.contract.report import Contract, Report
from zero_jax.contract.verify import check, kept
from zero_jax.layout.layout import Layout
from zero_jax.xla import events
from zero_jax.xla.collective import Collective
from zero_jax.xla.devices import coords
from zero_jax.xla.events import Event
from zero_jax.xla.host_slices import HostSlice, host_slices
from zero_jax.xla.live_chip import topology_of
from zero_jax.xla.parser import Module, parse
from zero_jax.xla.platform import GPU
from zero_jax.xla.schedule import schedule
from zero_jax.xla.targets import Target
from zero_jax.xla.timing import Timing, predict


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """What XLA made of a step; `ZeroTrainStep.compiled_step(batch)` makes one.

    What is read from the text is read when it is first asked for, and kept.

    Attributes:
        text: the scheduled HLO module.
        memory: `jax.stages.Compiled.memory_analysis()`; None where the backend tells none.
        layout: of the state that the step takes and returns.
        contract: what the step may send.
    """

    text: str = dataclasses.field(repr=False)
    memory: Any = dataclasses.field(repr=False)
    layout: Layout = dataclasses.field(repr=False)
    contract: Contract = dataclasses.field(repr=False)

    @functools.cached_property
    def module(self) -> Module:
        """The parsed text."""
        return parse(self.text)

    @functools.cached_property
    def schedule(self) -> tuple[Event, ...]:
        """What runs, in order: work, starts and ends of collectives, loops."""
        return schedule(self.module)

    @functools.cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """Every collective that one step runs, in the order of the schedule."""
        return tuple(events.collectives(self.schedule))

    @functools.cached_property
    def report(self) -> Report:
        """The collectives, the state and the gathered parameters beside the contract."""
        return check(self.collectives, self.contract, self.gathered_bytes, self.host_slices, self.host_use)

    @property
    def timing(self) -> Timing | None:
        """The predicted time of the step by the chip file of its devices; None where there is none."""
        topology = topology_of(list(self.layout.mesh.devices.flat))
        return None if topology is None else self.timing_on(topology)

    def timing_on(self, target: Target, **work: Any) -> Timing:
        """The predicted time of the step by the chip of `target`, where its devices are. work: as of `predict`."""
        return predict(self.schedule, target, [coords(device) for device in self.layout.mesh.devices.flat], **work)

    @functools.cached_property
    def host_slices(self) -> tuple[HostSlice, ...]:
        """The slices of host memory that its loops read and write; of a program for GPUs, where they may be wrong."""
        return tuple(host_slices(self.module)) if self.contract.platform in GPU else ()

    @functools.cached_property
    def host_use(self) -> HostUse | None:
        """What it keeps in the host's memory; None where that is not known, or nothing is offloaded."""
        return host_use(self.module, self.memory) if self.contract.host else None

    @functools.cached_property
    def gathered_bytes(self) -> int:
        """The most that gathered parameters take on a device at one time.

        0 where all temporaries together are no more than the contract allows these, or are not known.
        """
        temporaries = 0 if self.memory is None else self.memory.temp_size_in_bytes
        return gathered_at_once(self.module) if temporaries > gathered_limit(self.collectives, self.contract) else 0

    def verify(self) -> Report:
        """`report`; raises ContractError (a ValueError) if the step sends more than its contract says, or does less."""
        return kept(self.report)

    @property
    def device_bytes(self) -> int:
        """Device memory that one step needs on each device: state, batch, temporaries and code.

        What is updated in place counts once.
        """
        memory = self.memory
        return (memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
                + memory.temp_size_in_bytes + memory.generated_code_size_in_bytes - self._simulated_host_bytes)

    @property
    def host_bytes(self) -> int:
        """Host memory that one step needs for each device."""
        memory = self.memory
        return (memory.host_argument_size_in_bytes + memory.host_output_size_in_bytes
                - memory.host_alias_size_in_bytes + memory.host_temp_size_in_bytes + self._simulated_host_bytes)

    @property
    def _simulated_host_bytes(self) -> int:
        """What of the host's memory XLA:CPU counts as a device's, since simulated devices have one memory for both."""
        return self.layout.host_bytes + self.layout.host_gradient_bytes if self.contract.platform == "cpu" else 0
