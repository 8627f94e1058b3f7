"""A step compiled for a target topology: whether it fits, what uses the memory, traffic by link, predicted step time.

The step is the real one, compiled by the target's own compiler; no device is needed.
"""

import collections
import dataclasses
import itertools
import math
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from zero_jax.contract.report import Report
from zero_jax.errors import UsageError
from zero_jax.layout.layout import Layout
from zero_jax.offload.disk_leaves import disk_traffic
from zero_jax.planning.flops import model_flops
from zero_jax.planning.formulas import palm_flops
from zero_jax.planning.memory import MemoryReport, Transformer, memory_report
from zero_jax.planning.transfers import Transfers, disk_transfers, transfers_of, with_transfers
from zero_jax.sharding.mesh import make_mesh
from zero_jax.stages import STAGES
from zero_jax.step.compiled import CompiledStep
from zero_jax.step.make import make_zero_train_step
from zero_jax.tree import named_leaves
from zero_jax.xla import devices as xla_devices
from zero_jax.xla.live_chip import topology_of
from zero_jax.xla.process_memory import process_bytes
from zero_jax.xla.targets import Target, target_of
from zero_jax.xla.timing import OverlapEffect, Timing


@dataclasses.dataclass(frozen=True)
class Plan:
    """A step on a target, as compiled; sizes in bytes per device.

    Attributes:
        target: the target topology; None for live devices.
        stage: ZeRO's.
        batch_size: examples of the global batch.
        length: tokens of each; None where they are no texts.
        mesh: sizes of the mesh's axes.
        layout: how each leaf of the state is stored.
        memory_bytes: what a program may use, of a GPU the fraction that a process of JAX gets; None if unknown (live
            CPU devices).
        needed_bytes: what this one needs: state, batch and temporaries.
        host_bytes: what it needs of host memory.
        host_memory_bytes: what its host has for each device; None if unknown.
        refused: what XLA said if it would not compile the step; then what follows is None.
        memory: memory by purpose: by formula, as stored and as compiled.
        communication: what the program sends, checked against the stage's contract.
        links: bytes that each device sends per step, by link and mesh axes.
        timing: the predicted step time; None where no chip file is of the devices.
        compile_seconds: that tracing and compiling took here.
        overlap: what `overlap=` or `prefetch=` changes, for which the step is compiled without it, too; None where
            neither is given, or they are not compared.
        transfers: what it moves from and to host memory or disk; None where that is nothing, or no figures are known.
        disk_bytes: what it needs of the disks of its host for each device, two generations.
        disk_memory_bytes: what these have for each device; None if unknown.
    """

    target: Target | None
    stage: int
    batch_size: int
    mesh: Mapping[str, int]
    layout: Layout = dataclasses.field(repr=False)
    memory_bytes: int | None
    needed_bytes: int
    host_bytes: int
    host_memory_bytes: int | None
    refused: str
    memory: MemoryReport | None = dataclasses.field(repr=False)
    communication: Report | None = dataclasses.field(repr=False)
    links: Mapping[tuple[str, tuple[str, ...]], float]
    timing: Timing | None
    compile_seconds: float
    overlap: OverlapEffect | None = None
    transfers: Transfers | None = None
    disk_bytes: int = 0
    disk_memory_bytes: int | None = None
    length: int | None = None

    @property
    def num_devices(self) -> int:
        """Devices of the mesh."""
        return self.layout.mesh.size

    @property
    def fits(self) -> bool:
        """Whether the step fits into the device's memory, and what it offloads into the host's and on its disks."""
        return not self.refused and not self.lacking_bytes

    @property
    def free_bytes(self) -> int:
        """What is left of a device's memory; negative by what is missing."""
        return (self.memory_bytes or self.needed_bytes) - self.needed_bytes

    @property
    def lacking_bytes(self) -> int:
        """What is missing of a device's memory, its host's and its disks', together; 0 where nothing is."""
        return sum(max(0, size - limit) for size, limit in (
            (self.needed_bytes, self.memory_bytes), (self.host_bytes, self.host_memory_bytes),
            (self.disk_bytes, self.disk_memory_bytes)) if limit is not None)

    @property
    def devices_needed(self) -> int | None:
        """The least devices over which the state leaves room for these temporaries; None where none would do."""
        state = self.layout.device_bytes
        room = (self.memory_bytes or 0) - (self.needed_bytes - state)
        return math.ceil(self.num_devices * state / room) if self.stage and room > 0 else None

    @property
    def advice(self) -> tuple[str, ...]:
        """What to change if it does not fit, with what each change gives, but for placements that give too little."""
        if self.fits:
            return ()
        state, params = self.layout.device_bytes, self.layout.num_params / self.layout.tensor_size
        shards, low = self.layout.num_shards, self.layout.state.weights is not None or self.stage == 3
        temporaries, advice = self.needed_bytes - state, []
        for row in STAGES[self.stage + 1:]:
            advice.append(f"stage {row.number}: {row.state_bytes(params, shards, low_precision=low) / 1e9:,.1f} GB of "
                          f"state instead of {state / 1e9:,.1f} GB")
        names = {row.name for row in self.layout.replicated()}
        uneven = [row for row in self.layout.placements() if row.padding or row.name in names]
        num_shards = shards * self.layout.tensor_size
        if (wasted := sum(row.device_bytes - row.bytes / num_shards for row in uneven)) > 0.1 * state:
            advice.append(f"a mesh of several axes, such as {shards // 4} x 4: {wasted / 1e9:,.1f} GB are padding or "
                          f"copies of {len(uneven)} leaves whose dims do not divide by {shards}, and may by its axes")
        per_device = self.batch_size / self.num_devices
        if per_device > 1:
            advice.append(f"a smaller batch: {temporaries / 1e9:,.1f} GB of temporaries are for {per_device:g} "
                          "examples on each device")
        advice.append("recompute blocks in the backward pass (remat) if the model does not")
        if self.layout.overlap_note:
            advice.append("overlap=False, prefetch=False: collectives wait for compute, and hold less memory")
        rows = self.layout.placements()
        moved = sum(row.device_bytes for row in rows if row.memory == "device")
        if self.stage == 3 and not self.layout.host_params and moved >= self.lacking_bytes:
            advice.append(f"offload=\"parameters\": {moved / 1e9:,.1f} GB of state in host memory")
        moved = sum(row.device_bytes for row in rows if row.name.startswith("opt_state/"))
        if not self.layout.host and moved >= self.lacking_bytes:
            advice.append(f"offload=\"optimizer\": {moved / 1e9:,.1f} GB of optimizer states in host memory")
        if self.devices_needed:
            advice.append(f"more devices, at least {self.devices_needed:,}: {state / 1e9:,.1f} GB of state over "
                          f"{shards} shards")
        return tuple(advice)


def plan(model: Any, stage: int, target: str | Target, batch: Any, *, mesh: int | Sequence[int] = -1, tensor: int = 1,
         context: int = 1, replica: int = 1, transformer: Transformer | None = None, **options: Any) -> Plan:
    """What a train step of `model` would do on `target`; nothing runs, and no accelerator is needed.

    Args:
        model: a Flax model, as for `make_zero_train_step`.
        stage: ZeRO's, 0 to 3.
        target: `h100:16x8`, `v5p:8x8x16`, ... (`zero_jax.xla.targets.known_targets()`), or a file: `./mychip.toml:4x8`.
        batch: the global batch, as arrays or `jax.ShapeDtypeStruct`s.
        mesh: sizes of ZeRO's axes, as `make_mesh(data=...)`; default: all devices, factored along a TPU's torus.
        tensor: size of the axis of tensor parallelism.
        context: size of the axis over which sequences are split.
        replica: size of the axis across which shards are replicated.
        transformer: the model as the paper's formula of activations takes it; None leaves that out.
        **options: of `make_zero_train_step`: optimizer, loss, precision, accumulate and so on.

    Raises ValueError for a target that is unknown or whose compiler is not installed, a mesh that does not match it, a
    batch that does not divide. A step that does not fit is an answer and no error: see `Plan.fits`.
    """
    target = target if isinstance(target, Target) else target_of(target)
    devices = xla_devices.target_devices(target)
    device_mesh = make_mesh(mesh if isinstance(mesh, int) else tuple(mesh), tensor=tensor, context=context,
                            replica=replica, devices=devices)
    if device_mesh.size != target.num_devices:
        raise UsageError(f"mesh={mesh!r} is of {device_mesh.size} devices, and target {target.text!r} has "
                         f"{target.num_devices}: their product must be that.")
    return examine(make_zero_train_step(model, stage, mesh=device_mesh, **options), batch, target, transformer)


def examine(step: Any, batch: Any, target: Target | None = None, transformer: Transformer | None = None, *,
            memory_bytes: int | None = None, host_memory_bytes: int | None = None,
            disk_memory_bytes: int | None = None, disk_rate: float | None = None, compare: bool = True,
            fragment: int | None = None, timed_on: Target | None = None) -> Plan:
    """The plan of an existing step, on the target topology `target` or on live devices (None).

    step: a `ZeroTrainStep` or a `DiLoCoStep`. memory_bytes, host_memory_bytes, disk_memory_bytes: what it may use of
    each device, of its host and of its disks; None: all of the target's chip. disk_rate: bytes/s that a process reads
    and writes together in files; None: as predicted of the target. compare: a step with `overlap=True` or a
    mapping, or with `prefetch=`, is compiled without it, too, for `Plan.overlap`. fragment: that a program of a
    `DiLoCoStep` averages, which is not compared; None: none. timed_on: of live devices the topology by which time is
    predicted; None: what they are by `topology_of`.
    """
    began = time.perf_counter()
    layout, size = step.layout(batch), step.batches.size(batch)
    leaf = next((leaf for name, leaf in named_leaves(batch) if step.batches.is_example(name, leaf)), None)
    known, host_known, disk_known = memory_bytes, host_memory_bytes, disk_memory_bytes
    if target is not None:
        known = known or process_bytes(target.chip)
        host_known = host_known or target.chip.host_memory_bytes
        disk_known = disk_known or target.chip.disk_bytes or None
    is_text = leaf is not None and leaf.ndim > 1 and jnp.issubdtype(leaf.dtype, jnp.integer)
    traffic = disk_traffic(layout, local_devices(step.mesh, target)) if layout.disk else None

    def make_plan(needed: int, host: int = 0, refused: str = "", **compiled_fields: Any) -> Plan:
        return Plan(target=target, stage=step.stage.number, batch_size=size, mesh=dict(step.mesh.shape),
                    layout=layout, length=leaf.shape[1] if leaf is not None and is_text else None,
                    memory_bytes=known, needed_bytes=needed, host_bytes=host, host_memory_bytes=host_known,
                    refused=refused, compile_seconds=time.perf_counter() - began,
                    disk_bytes=traffic.stored if traffic else 0, disk_memory_bytes=disk_known,
                    **({"memory": None, "communication": None, "links": {}, "timing": None} | compiled_fields))

    if known is not None and layout.device_bytes > known:  # no compiler needed to see that
        return make_plan(layout.device_bytes, refused="not compiled: the state alone does not fit")
    if host_known is not None and layout.host_bytes > host_known:
        return make_plan(layout.device_bytes, host=layout.host_bytes, refused=(
            f"not compiled: {layout.host_bytes:,} bytes of state in host memory for each device, whose host has "
            f"{host_known:,} for each"))
    if traffic is not None and disk_known is not None and traffic.stored > disk_known:
        return make_plan(layout.device_bytes, refused=(
            f"not compiled: two generations of state in files are {traffic.stored:,} bytes for each device, whose host "
            f"has {disk_known:,} of disks for each"))
    try:
        compiled = step.compiled_step(batch) if fragment is None else step.compiled_step(batch, fragment)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return make_plan(refused_bytes(str(error)), refused=str(error).splitlines()[0])
    timing, effect, transfers, links = None, None, None, collections.defaultdict[Any, float](float)
    report, topology = compiled.report, target or timed_on or topology_of(list(step.mesh.devices.flat))
    if topology is not None:
        coords = [xla_devices.coords(device) for device in step.mesh.devices.flat]
        tokens = leaf.size if leaf is not None and is_text else size
        work = {"tokens": tokens, "model_flops": model_flops(step, batch),
                "palm_flops": None if transformer is None or layout.state.frozen else tokens * palm_flops(
                    layout.num_params, transformer.layers, transformer.hidden, transformer.length)}
        timing, transfers = timing_of(compiled, topology, disk_rate=disk_rate, **work)
        report = report.timed(timing)
        if compare and fragment is None and step.options.asks_for_overlap:
            plain = step.without_overlap().compiled_step(batch)
            effect = OverlapEffect.of((plain.timing_on(topology, **work), compiled.timing_on(topology, **work)),
                                      (plain.memory, compiled.memory))
        for collective in itertools.chain.from_iterable(each.collectives for each in report.results):
            link = topology.link([coords[device] for device in collective.group]).name
            links[link, collective.axes(step.mesh.shape)] += collective.step_bytes
    return make_plan(compiled.device_bytes, host=compiled.host_bytes, communication=report, timing=timing,
                     overlap=effect, transfers=transfers, links=dict(links),
                     memory=memory_report(layout, compiled, activations=transformer))


def timing_of(compiled: CompiledStep, topology: Target, *, disk_rate: float | None = None, **work: Any
              ) -> tuple[Timing, Transfers | None]:
    """The predicted time of a compiled step with its transfers to host memory or files, and these.

    work: tokens and FLOPs, as of `predict`.
    """
    timing, layout = compiled.timing_on(topology, **work), compiled.layout
    transfers = (disk_transfers(disk_traffic(layout, topology.num_devices // topology.num_hosts), topology, disk_rate)
                 if layout.disk else transfers_of(compiled, topology.chip, timing))
    return with_transfers(timing, transfers), transfers


def local_devices(mesh: Mesh, target: Target | None) -> int:
    """Devices of the mesh that a process has."""
    if target is not None:
        return target.num_devices // target.num_hosts
    return sum(device.process_index == jax.process_index() for device in mesh.devices.flat)


def refused_bytes(message: str) -> int:
    """Bytes that a program needs, from the message with which XLA:TPU refuses it; 0 if it does not say.

    >>> refused_bytes("the total memory required for HLO temporaries (770.27G) exceeds available HBM (15.75G)")
    827071114772
    """
    match = re.search(r"total memory required[^(]*\(([\d.]+)([KMGT]?)\)", message)
    return round(float(match[1]) * 1024 ** " KMGT".index(match[2] or " ")) if match else 0
