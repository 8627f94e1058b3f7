"""The devices of a collective, in each of XLA's notations for replica groups and permutes."""

import math
import re
from collections.abc import Mapping

import numpy as np


def first_group(attributes: str, num_devices: int) -> tuple[int, ...]:
    """Return the first of the replica groups, in any notation (tests/xla/test_parser.py has each)."""
    if mesh := re.search(
        r"replica_groups=mesh\[([^]]*)\](?:, device_ids=\(((?:[^()]|\([^()]*\))*)\))? ?\{([^}]*)\}",
        attributes,
    ):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", mesh[1])}
        refs = re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", mesh[3])
        axes = [(name, int(before or 1), int(size or sizes[name])) for name, before, size in refs]
        return _mesh_group(sizes, axes, _device_ids(mesh[2], math.prod(sizes.values())))
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", attributes):
        shape = [int(size) for size in iota[1].split(",")]
        return tuple(_device_ids(iota[2], math.prod(shape)).reshape(-1, shape[-1])[0].tolist())
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", attributes):
        return tuple(int(device) for device in listed[1].split(","))
    return tuple(range(num_devices))  # "{}" or no attribute: all devices


def mesh_axes(group: tuple[int, ...], sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Names of the mesh axes along which the coordinates of `group` differ.

    A group that is not a whole sub-grid, such as a part of one axis, still gives the axes that vary.

    Args:
        group: partition numbers. Under jit these are positions in `mesh.devices.flat`, whatever ids the devices have.
        sizes: axis name -> size, in the order of the mesh, the first varying slowest: `mesh.shape`.
    """
    if not group:
        return ()
    coordinates = np.unravel_index(list(group), tuple(sizes.values()))
    return tuple(name for name, along in zip(sizes, coordinates, strict=True) if np.ptp(along) > 0)


def group_order(group: tuple[int, ...], sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes of `group`, that along which its devices count up last first: the major one.

    () for a part of an axis, and for devices in another order than that of the mesh along each axis.
    """
    coordinates = dict(zip(sizes, np.unravel_index(list(group), tuple(sizes.values())), strict=True))
    axes = mesh_axes(group, sizes)
    order = tuple(sorted(axes, key=lambda axis: -int(np.argmax(coordinates[axis] != coordinates[axis][0]))))
    expected = list(np.ndindex(*(sizes[axis] for axis in order)))
    return order if list(zip(*(coordinates[axis] for axis in order), strict=True)) == expected else ()


def _device_ids(text: str | None, num_devices: int) -> np.ndarray:
    """`[4,2]T(1,0)` = 0..7 as 4x2, transposed, flat; `0,3,1,2` = itself; None = in order."""
    iota = re.match(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text or f"[{num_devices}]")
    if iota is None:
        return np.array([int(device) for device in re.findall(r"\d+", text or "")])
    dims = [int(size) for size in iota[1].split(",")]
    order = [int(dim) for dim in iota[2].split(",")] if iota[2] else range(len(dims))
    return np.arange(num_devices).reshape(dims).transpose(order).reshape(-1)


def _mesh_group(sizes: dict[str, int], axes: list[tuple[str, int, int]], ids) -> tuple[int, ...]:
    """First group over `axes`, each (name, size before the part, size of the part)."""
    dims: list[int] = []
    position: dict[int, int] = {}
    for name, size in sizes.items():
        done = 1
        for which, (_, before, part) in sorted(enumerate(axes), key=lambda item: item[1][1]):
            if axes[which][0] != name:
                continue
            dims += [before // done, part]
            position[which], done = len(dims) - 1, before * part
        dims.append(size // done)
    picked = [position[i] for i in range(len(axes))]
    index = tuple(slice(None) if dim in picked else 0 for dim in range(len(dims)))
    first = ids.reshape(dims)[index]
    group = first.transpose([sorted(picked).index(dim) for dim in picked]).reshape(-1)
    return tuple(int(device) for device in group)


def ring(attributes: str) -> tuple[int, ...]:
    """Devices reached from the first sender of a permute; a device that keeps its own data sends nothing."""
    # A GPU send carries its pairs in a quoted attribute, so this looks at the raw text.
    pairs = re.search(r'source_target_pairs="?\{((?:\{\d+,\d+\},?)*)\}', attributes)
    sends = re.findall(r"\{(\d+),(\d+)\}", pairs[1] if pairs else "")
    targets = {int(source): int(target) for source, target in sends if source != target}
    ring: list[int] = []
    device = next(iter(targets), None)
    while device is not None and device not in ring:
        ring.append(device)
        device = targets.get(device)
    return tuple(ring)
