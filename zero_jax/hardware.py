"""Described accelerators: devices that need no hardware, only XLA's compiler for them.

`jax.jit(...).lower(shapes on them).compile(compiler_options=compiler_options(device))` gives the
scheduled program of an H100 or a TPU pod and its memory, on a laptop.
"""

import contextlib
import dataclasses
import difflib
import functools
import importlib.resources
import importlib.util
import os
from collections.abc import Iterator

import jax
from jax.experimental import topologies


@dataclasses.dataclass(frozen=True)
class _Chip:
    """A row of the table of targets.

    Attributes:
        platform: "tpu" or "cuda".
        forms: how its targets are written, one per number of dims.
        examples: targets that are compiled for in the tests.
        ring: a torus dim of a multiple of this many chips has its wrap-around links (TPU).
        description: file in zero_jax/targets that describes the device (GPU).
    """

    platform: str
    forms: tuple[str, ...]
    examples: tuple[str, ...]
    ring: int = 0
    description: str = ""


_CHIPS = {
    "h100": _Chip(
        "cuda",
        ("h100:GPUS", "h100:HOSTSxGPUS_PER_HOST"),
        ("h100:8", "h100:16x8"),
        description="h100.txtpb",
    ),
    "v5e": _Chip("tpu", ("v5e:XxY",), ("v5e:2x4", "v5e:16x16"), ring=16),
    "v5p": _Chip("tpu", ("v5p:XxYxZ",), ("v5p:2x2x2", "v5p:4x4x8"), ring=4),
}


@dataclasses.dataclass(frozen=True)
class _Compiler:
    """What a platform needs: an installed module, its pip extra, and the environment it reads."""

    module: str
    extra: str
    environment: dict[str, str]


_COMPILERS = {
    "cuda": _Compiler(
        "jax_plugins.xla_cuda13",
        "zero-jax[gpu-compiler]",
        {
            "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"
        },  # there are no CUDA libraries whose versions matter
    ),
    "tpu": _Compiler(
        "libtpu",
        "zero-jax[tpu-compiler]",
        {
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # else one process at a time may compile
            # Off a TPU host libtpu complains on stderr that it cannot find these out. Any value
            # will do: the described slice does not depend on them.
            "TPU_WORKER_HOSTNAMES": "localhost",
            "TPU_ACCELERATOR_TYPE": "v5litepod-8",
        },
    ),
}


def describe(target: str) -> list[jax.Device]:
    """Devices of `target`, for compiling only, in XLA's order. The same objects each time.

    `h100:8` is one host of 8 GPUs, `h100:16x8` 16 hosts of 8, `v5e:2x4` and `v5p:4x4x8` TPU slices
    by their torus, with wrap-around links where the real slice has them. For a mesh, order TPU
    devices with `jax.experimental.mesh_utils.create_device_mesh`.

    Raises ValueError for an unknown target, a slice that cannot be, or a compiler not installed.
    """
    return list(_devices(target))


def compiler_options(device: jax.Device) -> dict[str, bool | int | float | str]:
    """Options for `.compile(compiler_options=...)` on a described `device`.

    GPU autotuning times kernels, so without a GPU it has to be off. TPU and CPU need nothing.
    """
    return {"xla_gpu_autotune_level": 0} if device.platform in ("gpu", "cuda") else {}


def known_targets() -> tuple[str, ...]:
    """One or two targets of each chip; other sizes are written alike."""
    return tuple(example for chip in _CHIPS.values() for example in chip.examples)


def missing_compiler(target: str) -> str | None:
    """Return the pip extra that `target` needs and that is not installed; None if it compiles."""
    compiler = _COMPILERS[_parse(target)[0].platform]
    try:
        found = importlib.util.find_spec(compiler.module) is not None
    except ModuleNotFoundError:  # of the parent package
        found = False
    return None if found else compiler.extra


@functools.cache
def _devices(target: str) -> tuple[jax.Device, ...]:
    chip, dims = _parse(target)
    if extra := missing_compiler(target):
        raise ValueError(f"no compiler for {target!r} is installed: pip install '{extra}'")
    try:
        with _environment(_COMPILERS[chip.platform].environment):
            if chip.platform == "cuda":
                hosts, gpus = (1, *dims)[-2:]
                files = importlib.resources.files("zero_jax") / "targets"
                described = topologies.get_topology_desc(
                    "",
                    platform="cuda",
                    target_config=(files / chip.description).read_text(),
                    topology=f"1x{hosts}x{gpus}",  # partitions x hosts x GPUs per host
                )
            else:
                # Three dims, whatever the torus has.
                wrap = tuple(dim % chip.ring == 0 for dim in (*dims, 1, 1)[:3])
                described = topologies.get_topology_desc(target, platform="tpu", wrap=wrap)
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"the compiler knows no slice {target!r}: {error}") from error
    return tuple(described.devices)


def _parse(target: str) -> tuple[_Chip, tuple[int, ...]]:
    """`v5p:4x4x8` -> its chip and (4, 4, 8)."""
    name, _, size = target.partition(":")
    known = f"known: {', '.join(known_targets())}"
    if name not in _CHIPS:
        near = _CHIPS[difflib.get_close_matches(name, _CHIPS, n=1, cutoff=0.0)[0]]
        raise ValueError(
            f"unknown target {target!r}, nearest is {_nearest(target, near)!r}; {known}"
        )
    chip = _CHIPS[name]
    dims = tuple(int(dim) if dim.isdecimal() else 0 for dim in size.split("x"))
    if len(dims) not in [form.count("x") + 1 for form in chip.forms] or min(dims) < 1:
        raise ValueError(
            f"target {target!r} is not written as {' or '.join(chip.forms)}, "
            f"nearest is {_nearest(target, chip)!r}; {known}"
        )
    return chip, dims


def _nearest(target: str, chip: _Chip) -> str:
    return difflib.get_close_matches(target, chip.examples, n=1, cutoff=0.0)[0]


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Set what is unset, then undo it: a real TPU in the same process must not see our answers."""
    added = [name for name in variables if name not in os.environ]
    os.environ.update({name: variables[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
