"""A step on hardware that is not there: does it fit, what holds the memory, what crosses which link, how long it takes.

The step is the real one, compiled by the target's own compiler; no device is needed.
"""

import collections
import dataclasses
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zero_jax import contract, hardware, hlo_schedule
from zero_jax.flops import traced_flops
from zero_jax.layout import Layout
from zero_jax.memory import MemoryReport, Transformer, memory_report
from zero_jax.mesh import make_mesh
from zero_jax.stages import STAGES
from zero_jax.step import ZeroTrainStep, make_zero_train_step
from zero_jax.targets import Target, target_of
from zero_jax.timing import Timing, predict

RESERVED = {"cuda": 2**30}
"""Bytes of a device that no program gets, by platform: the CUDA context and NCCL's buffers. libtpu's limit has them."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """A step on a target, as compiled; sizes in bytes per device.

    Attributes:
        target: the described machine; None for live devices.
        stage: ZeRO's.
        batch_size: examples of the global batch.
        mesh: sizes of the mesh's axes.
        layout: where each leaf of the state lies.
        memory_bytes: what a program may use; None if unknown (live CPU devices).
        needed_bytes: what this one needs: state, batch and temporaries.
        host_bytes: of host memory.
        refused: what XLA said if it would not compile the step; then what follows is None.
        memory: where all the memory goes, by formula, as placed and as compiled.
        wire: the stage's contract, and how the program keeps it.
        links: bytes that each device sends per step, by link and mesh axes.
        timing: the predicted step time; None for live devices.
        compile_seconds: that tracing and compiling took here.
    """

    target: Target | None
    stage: int
    batch_size: int
    mesh: Mapping[str, int]
    layout: Layout = dataclasses.field(repr=False)
    memory_bytes: int | None
    needed_bytes: int
    host_bytes: int
    refused: str
    memory: MemoryReport | None = dataclasses.field(repr=False)
    wire: contract.Report | None = dataclasses.field(repr=False)
    links: Mapping[tuple[str, tuple[str, ...]], float]
    timing: Timing | None
    compile_seconds: float

    @property
    def num_devices(self) -> int:
        """Devices of the mesh."""
        return self.layout.mesh.size

    @property
    def fits(self) -> bool:
        """Whether the step fits into the device's memory, and its host's part into the host's."""
        host = self.target is None or self.host_bytes <= self.target.chip.host_memory_bytes
        return not self.refused and host and (self.memory_bytes is None or self.needed_bytes <= self.memory_bytes)

    @property
    def free_bytes(self) -> int:
        """What is left of a device's memory; negative by what is missing."""
        return (self.memory_bytes or self.needed_bytes) - self.needed_bytes

    @property
    def advice(self) -> tuple[str, ...]:
        """What to change if it does not fit, with what each change gives; nothing if it fits."""
        if self.fits:
            return ()
        state, params = self.layout.device_bytes, self.layout.num_params / self.layout.model_ways
        shards, low = self.layout.num_shards, self.layout.state.weights is not None or self.stage == 3
        temporaries, found = self.needed_bytes - state, []
        for row in STAGES[self.stage + 1:]:
            found.append(f"stage {row.number}: {row.state_bytes(params, shards, low_precision=low) / 1e9:,.1f} GB of "
                         f"state instead of {state / 1e9:,.1f} GB")
        names = {row.name for row in self.layout.replicated()}
        uneven = [row for row in self.layout.placements() if row.padding or row.name in names]
        ways = shards * self.layout.model_ways
        if (wasted := sum(row.device_bytes - row.bytes / ways for row in uneven)) > 0.1 * state:
            found.append(f"a mesh of several axes, such as {shards // 4} x 4: {wasted / 1e9:,.1f} GB are padding or "
                         f"copies of {len(uneven)} leaves whose dims do not divide by {shards}, and may by its axes")
        per_device = self.batch_size / self.num_devices
        if per_device > 1:
            found.append(f"a smaller batch: {temporaries / 1e9:,.1f} GB of temporaries are for {per_device:g} examples "
                         "on each device")
        found.append("recompute blocks in the backward pass (remat) if the model does not")
        if self.stage:
            found.append(f"more devices: {state / 1e9:,.1f} GB of state over {shards} shards")
        return tuple(found)


def plan(model: Any, stage: int, target: str | Target, batch: Any, *, mesh: int | Sequence[int] = -1, tensor: int = 1,
         context: int = 1, replica: int = 1, transformer: Transformer | None = None, **options: Any) -> Plan:
    """What a train step of `model` would do on `target`; nothing runs, and no accelerator is needed.

    Args:
        model: a Flax model, as for `make_zero_train_step`.
        stage: ZeRO's, 0 to 3.
        target: `h100:16x8`, `v5p:8x8x16`, ... (`zero_jax.targets.known_targets()`), or a file: `./mychip.toml:4x8`.
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
    target = target_of(target) if isinstance(target, str) else target
    devices = hardware.describe(target)
    made = make_mesh(mesh if isinstance(mesh, int) else tuple(mesh), tensor=tensor, context=context, replica=replica,
                     devices=devices)
    if made.size != target.num_devices:
        raise ValueError(f"mesh={mesh!r} is of {made.size} devices, and target {target.text!r} has "
                         f"{target.num_devices}: their product must be that.")
    return examine(make_zero_train_step(model, stage, mesh=made, **options), batch, target, transformer)


def examine(step: ZeroTrainStep, batch: Any, target: Target | None = None,
            transformer: Transformer | None = None) -> Plan:
    """The plan of a step as it stands: on described devices of `target`, or on live ones (None)."""
    began = time.perf_counter()
    layout, leaf = step.layout(batch), jax.tree.leaves(batch)[0]
    known = None if target is None else target.chip.memory_bytes - RESERVED.get(target.chip.platform, 0)

    def made(needed: int, host: int = 0, refused: str = "", **found: Any) -> Plan:
        return Plan(target=target, stage=step.stage.number, batch_size=leaf.shape[0], mesh=dict(step.mesh.shape),
                    layout=layout, memory_bytes=known, needed_bytes=needed, host_bytes=host, refused=refused,
                    compile_seconds=time.perf_counter() - began,
                    **({"memory": None, "wire": None, "links": {}, "timing": None} | found))

    if known is not None and layout.device_bytes > known:  # no compiler needed to see that
        return made(layout.device_bytes, refused="not compiled: the state alone does not fit")
    try:
        compiled = step.compile(batch)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return made(refused_bytes(str(error)), refused=str(error).splitlines()[0])
    text, memory = compiled.as_text() or "", compiled.memory_analysis()
    wire = contract.check(text, step.contract(batch))
    timing, links = None, collections.defaultdict[Any, float](float)
    if target is not None:
        coords = [hardware.coords(device) for device in step.mesh.devices.flat]
        tokens = leaf.size if leaf.ndim > 1 and jnp.issubdtype(leaf.dtype, jnp.integer) else leaf.shape[0]
        forward = traced_flops(jax.make_jaxpr(step.evaluator())(step.abstract_state(batch), step.abstract_batch(batch)))
        timing = predict(hlo_schedule.schedule(text), target, coords, tokens=tokens, model_flops=3 * forward)
        for collective in (c for kept in wire.kept for c in kept.collectives):
            link = target.link([coords[device] for device in collective.group]).name
            links[link, collective.axes(step.mesh.shape)] += collective.wire_bytes * collective.count
    return made(program_bytes(memory), host=_host_bytes(memory), wire=wire, timing=timing, links=dict(links),
                memory=memory_report(layout, compiled, activations=transformer))


def program_bytes(memory: Any) -> int:
    """Bytes of device memory of a program, from `Compiled.memory_analysis()`; what is updated in place counts once."""
    return (memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
            + memory.temp_size_in_bytes + memory.generated_code_size_in_bytes)


def _host_bytes(memory: Any) -> int:
    return (memory.host_argument_size_in_bytes + memory.host_output_size_in_bytes - memory.host_alias_size_in_bytes
            + memory.host_temp_size_in_bytes)


def refused_bytes(message: str) -> int:
    """Bytes that a program needs, from the message with which XLA:TPU refuses it; 0 if it does not say.

    >>> refused_bytes("the total memory required for HLO temporaries (770.27G) exceeds available HBM (15.75G)")
    827071114772
    """
    found = re.search(r"total memory required[^(]*\(([\d.]+)([KMGT]?)\)", message)
    return round(float(found[1]) * 1024 ** " KMGT".index(found[2] or " ")) if found else 0
