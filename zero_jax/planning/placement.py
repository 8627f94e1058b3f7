"""Where to store the state of a step: of the placements that fit the memory the one of least predicted time."""

import dataclasses
import math
import os
import tempfile
from collections.abc import Callable
from typing import Any

from jax.sharding import Mesh

from zero_jax.arguments import shown, whole
from zero_jax.disk.generations import available_bytes
from zero_jax.distributed.agreement import broadcast_from_first, devices_on_host
from zero_jax.errors import UsageError
from zero_jax.offload.disk_leaves import disk_traffic
from zero_jax.offload.offload import Offload, host_share
from zero_jax.planning.disk_rate import agreed_disk, used_disk_rate
from zero_jax.planning.host_link import measured_link, with_measured_link
from zero_jax.planning.memory import Transformer
from zero_jax.planning.offload_choice import (
    DISK,
    Candidate,
    OffloadArgument,
    OffloadChoice,
    choose,
    lack_text,
)
from zero_jax.planning.plan import Plan, examine, local_devices
from zero_jax.sharding.mesh import default_mesh, make_mesh
from zero_jax.step.make import make_zero_train_step
from zero_jax.step.step import ZeroTrainStep
from zero_jax.xla.devices import target_devices
from zero_jax.xla.live_chip import is_live, memory_limit, topology_of
from zero_jax.xla.targets import Target, target_of

TRIES = 2
"""Shares of the states that are compiled to find the least that has to be in host memory."""


def choose_offload(model: Any, stage: int, batch: Any, *, mesh: Mesh | None = None, target: str | Target | None = None,
                   memory_bytes: int | None = None, disk: str | os.PathLike[str] | None = None, **options: Any
                   ) -> OffloadChoice:
    """Which of no offload, "optimizer", a share of it, "parameters", "gradients" and files fits and is to be fastest.

        choice = choose_offload(model, 3, batch, precision="bf16")
        step = make_zero_train_step(model, 3, precision="bf16", offload=choice.offload)

    Compiles the step with each of them, which takes as long as compiling it so many times; nothing runs but copies of
    256 MiB to each live accelerator and back, which measure its link to the host, and where files are compared half a
    GiB in a file of no name in `disk`, once in a process, which measures that. A share is looked for where all
    states fit on the host and not on the device: what fits on the device stays there. "gradients", which moves what
    "parameters" does and more, is compared where nothing else fits. Files in `disk` are compared where neither the
    device nor the host's memory holds all states: they wait for more, of what is slower.

    Times are predicted from the compiled programs (`xla.timing`, `planning.transfers`) where `zero_jax/xla/chips`
    has the devices' rates; for others the placement that moves the least is taken: no offload, a share, "optimizer",
    "parameters", "gradients", files. In a run of several processes memory, link and what is free on the disk are those
    of process 0; the rate of the disk is that of the slowest.

    Args:
      model: as for `make_zero_train_step`.
      stage: ZeRO's, 0 to 3.
      batch: the global batch, as arrays or `jax.ShapeDtypeStruct`s.
      mesh: as for `make_zero_train_step`. Default: all devices of `target`, or else that of `make_zero_train_step`.
      target: the topology of the mesh's devices, for a chip file of one's own or a target without a mesh: "h100:8".
        Default: as the devices call themselves.
      memory_bytes: what a step may use of each device. Default: what live devices say (`memory_stats`), or a target
        topology's figure. Simulated devices have none: it has to be given.
      disk: a folder on a local disk for `Offload(disk=...)`, which may not exist yet; the states take at most what is
        free there, or, of a target, what its chip file says. None: no files; where they were an option, `refused` and
        the error have the size that they need.
      **options: of `make_zero_train_step`, but for `offload`.

    Raises ValueError where the memory is not known, and where none of them fits, with what each lacks.
    """
    if "offload" in options:
        raise UsageError(f"choose_offload(offload={shown(options['offload'])}): that is what is chosen: leave it out.")
    if memory_bytes is not None:
        memory_bytes = whole("memory_bytes", memory_bytes, 1)
    target = target_of(target) if isinstance(target, str) else target
    if mesh is None:
        mesh = default_mesh() if target is None else make_mesh(devices=target_devices(target))

    def make(offload: OffloadArgument) -> ZeroTrainStep:
        return make_zero_train_step(model, stage, mesh=mesh, offload=offload, **options)

    return choose_for(make, batch, target=target, memory_bytes=memory_bytes, disk=disk)


def choose_for(make: Callable[[OffloadArgument], ZeroTrainStep], batch: Any, *, target: Target | None = None,
               memory_bytes: int | None = None, disk: str | os.PathLike[str] | None = None,
               transformer: Transformer | None = None) -> OffloadChoice:
    """`choose_offload` for the step that `make` makes with a placement; transformer: as `examine` takes it."""
    def files() -> Offload:
        if disk is None:
            raise without_disk(make, batch, target, "give a folder on a local disk as disk= (--offload-disk)")
        return Offload(disk=disk)

    plain = make(None)
    mesh = plain.mesh
    if target is not None and mesh.size != target.num_devices:
        raise UsageError(f"target={target.text!r} has {target.num_devices} devices, and the mesh {dict(mesh.shape)} "
                         f"{mesh.size}: give the target of the mesh's devices, or one of the two.")
    device_limit, host_limit, disk_limit = limits(mesh, target, disk)
    live = topology_of(list(mesh.devices.flat)) if target is None and is_live(mesh.local_devices[0]) else None
    target, memory_bytes = target or live or topology_of(list(mesh.devices.flat)), memory_bytes or device_limit
    notes = tuple[str, ...]()
    if live is not None and live.chip.host_link_bandwidth:
        (rate,) = broadcast_from_first([round(measured_link(mesh.local_devices))])
        target, notes = with_measured_link(live, rate)
    if memory_bytes is None and target is None:
        kind = mesh.devices.flat[0].device_kind
        raise UsageError(f"choose_offload: devices of kind {kind!r} do not say how much memory they have: give "
                         "memory_bytes=, what a step may use of each, or target=\"h100:8\", say, to choose for others.")

    disk_rate, disk_notes = None, tuple[str, ...]()

    def plan_of(offload: OffloadArgument) -> Plan:
        nonlocal disk_rate, disk_notes
        if live is not None and disk is not None and isinstance(offload, Offload) and offload.disk is not None:
            disk_rate, disk_notes = used_disk_rate(live, disk, agreed_disk(disk))
        return examine(make(offload), batch, target, transformer, memory_bytes=memory_bytes,
                       host_memory_bytes=host_limit, disk_memory_bytes=disk_limit, disk_rate=disk_rate)

    choice = compare(plan_of, files)
    if not choice.plan.fits:
        lacks = [f"{each.text}: {lack_text(each.plan)}" for each in choice.candidates]
        lacks += [f"offload={name}: {why}" for name, why in choice.refused.items()]
        raise UsageError(f"choose_offload: {choice.reason}: give more devices, a smaller batch or remat=\"full\"; "
                         + "; ".join(lacks))
    return dataclasses.replace(choice, notes=(*notes, *disk_notes))


def files_on(target: Target, make: Callable[[OffloadArgument], ZeroTrainStep], batch: Any) -> Offload:
    """Files on the disks of a target's hosts, which are only planned; raises UsageError where they have none."""
    if not target.chip.disk_bytes:
        raise without_disk(make, batch, target, f"the file of {target.text} has no disk_bytes")
    return Offload(disk=tempfile.gettempdir())  # nothing is written there


def without_disk(make: Callable[[OffloadArgument], ZeroTrainStep], batch: Any, target: Target | None, advice: str
                 ) -> UsageError:
    """Why states in files are not compared, with what they would take of disks."""
    step = make(Offload(disk=tempfile.gettempdir()))
    local = local_devices(step.mesh, target)
    size = disk_traffic(step.layout(batch), local).stored
    return UsageError(f"not compared, since no disk is known: files would take {size:,} bytes of disks for each "
                      f"device, {size * local:,} on a host, two generations: {advice}")


def compare(plan_of: Callable[[OffloadArgument], Plan], files: Callable[[], Offload]) -> OffloadChoice:
    """The choice among all placements that a step can have.

    plan_of: of one placement. files: the placement in files. Both raise UsageError where the step cannot have it.
    "gradients" is compiled where nothing that moves less fits. Files are where neither the device nor the host's memory
    holds all states: they pass the same link as the host's memory, and wait for a disk besides.
    """
    none, refused = Candidate(None, plan_of(None)), dict[str, str]()

    def tried(name: str, placement: Callable[[], OffloadArgument]) -> list[Candidate]:
        try:
            offload = placement()
            return [Candidate(offload, plan_of(offload))]
        except UsageError as error:
            refused[name] = str(error)
            return []

    states = tried("optimizer", lambda: "optimizer")
    sharded = none.plan.layout.stage.shards_params
    params = tried("parameters", lambda: "parameters") if sharded else []
    # In the order of what they move, which counts where no times are known.
    shares = _shares(plan_of, states[0].plan) if states and states[0].plan.fits and not none.plan.fits else []
    nothing_fits = not any(each.plan.fits for each in (none, *shares, *states, *params))
    grads = tried("gradients", lambda: "gradients") if sharded and nothing_fits else []
    disk = [] if any(each.plan.fits for each in (none, *states)) else tried(DISK, files)
    candidates = (none, *shares, *states, *params, *grads, *disk)
    chosen, reason = choose(candidates)
    return OffloadChoice(chosen, reason, candidates, refused)


def _shares(plan_of: Callable[[OffloadArgument], Plan], plan: Plan) -> list[Candidate]:
    """The least share of the states on the host that fits, and before it those that were tried.

    plan: with all of them there. Every byte that stays on the device is one that a step does not wait for.
    """
    shares, total = list[Candidate](), plan.layout.host_bytes
    for _ in range(TRIES):
        share = max(1, math.ceil(1000 * (plan.layout.host_bytes - plan.free_bytes) / total)) / 1000
        if share >= 1:
            break
        offload = Offload(fraction=share)
        plan = plan_of(offload)
        shares.append(Candidate(offload, plan))
        if plan.fits:
            break
    return shares


def limits(mesh: Mesh, target: Target | None, disk: str | os.PathLike[str] | None
           ) -> tuple[int | None, int | None, int | None]:
    """Bytes that a program may use of each live device, of its host, and of `disk`; None: not known, or `target`'s."""
    if not is_live(mesh.local_devices[0]):
        if target is None:
            kind = mesh.devices.flat[0].device_kind
            raise UsageError(f"choose_offload: the mesh is of devices of kind {kind!r}, whose rates are not known: "
                             "give their target=\"./mychip.toml:4x8\", say.")
        return None, None, None
    local = devices_on_host(mesh)
    device, host, files = (each or None for each in broadcast_from_first([
        memory_limit(mesh.local_devices) or 0, host_share(local),
        0 if disk is None else max(1, available_bytes(disk) // local)]))
    return device, host, files
