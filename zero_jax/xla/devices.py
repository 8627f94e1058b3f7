"""Devices of target topologies: ahead-of-time compilation for GPUs and TPU slices that this machine does not have.

`jax.jit(...).lower(shapes on them).compile(compiler_options=compiler_options(device))` gives the scheduled program of
an H100 or a TPU pod, and its memory, on a laptop. The chips are described in `zero_jax.xla.chip`.
"""

import atexit
import contextlib
import dataclasses
import functools
import importlib.metadata
import importlib.util
import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental import topologies

from zero_jax.errors import UsageError
from zero_jax.xla.chip import Chip, Gpu
from zero_jax.xla.live_chip import chip_of_kind
from zero_jax.xla.platform import is_gpu
from zero_jax.xla.process_memory import limit_percent
from zero_jax.xla.targets import Target, known_targets, target_of

__all__ = ["compiler_options", "coords", "target_devices", "known_targets", "missing_compiler"]


@dataclasses.dataclass(frozen=True)
class _Compiler:
    """What a platform needs: an installed module, its pip extra, and the environment it reads."""

    module: str
    extra: str
    environment: dict[str, str]


_COMPILERS = {
    "cuda": _Compiler("jax_plugins.xla_cuda13", "zero-jax[gpu-compiler]", {
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}),  # no CUDA library is loaded
    "tpu": _Compiler("libtpu", "zero-jax[tpu-compiler]", {
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # else only one process at a time can compile
        # Off a TPU host libtpu warns on stderr that it cannot determine these. Any value will do: the topology that is
        # compiled for does not depend on them.
        "TPU_WORKER_HOSTNAMES": "localhost", "TPU_ACCELERATOR_TYPE": "v5litepod-8"}),
}

# What stands in for the CUDA toolkit. XLA:GPU starts `ptxas` once for each kernel: 142 processes and half of the CPU
# time for the step of a small GPT-2. It compiles nothing where it finds neither that nor libdevice, the toolkit's
# library of functions. A program that never runs needs no machine code, and XLA decides nothing by it: the scheduled
# text and the memory are the same (tests/xla/test_devices_no_toolkit.py), but for the size of the code.
_VERSION = "Cuda compilation tools, release 13.0, V13.0.88"  # XLA asks how much of PTX it may use
# $1 and $3: as XLA:GPU calls both, `ptxas INPUT -o OUTPUT ...`.
_SCRIPT = f"""#!/bin/sh
if [ "$1" = --version ]; then echo "{_VERSION}"; else : > "$3"; fi
"""

# XLA's device description, as text of its protocol buffer GpuTargetConfigProto. The limits are those of every
# data center GPU since Volta (CUDA C programming guide, compute capabilities).
_GPU_DESCRIPTION = """
platform_name: "CUDA"
device_description_str: "{name}"
gpu_device_info {{
  name: "{name}"
  device_vendor: "NVIDIA Corporation"
  platform_version: "Compute Capability {capability}"
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {extension} }}
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
  core_count: {gpu.core_count}
  fpus_per_core: {gpu.fpus_per_core}
  clock_rate_ghz: {gpu.clock_ghz}
  device_memory_size: {chip.memory_bytes}
  memory_bandwidth: {chip.memory_bandwidth:.0f}
  l2_cache_size: {gpu.l2_bytes}
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {gpu.shared_bytes_per_block}
  shared_memory_per_core: {gpu.shared_bytes_per_core}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  device_address_bits: 64
}}
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
"""


def target_devices(target: str | Target) -> list[jax.Device]:
    """Devices of the topology `target`, for compiling only, in XLA's order; the same objects in every call.

    `h100:8` is one host of 8 GPUs, `h100:16x8` 16 hosts of 8, `v5e:2x4` and `v5p:4x4x8` TPU slices
    by their torus, with wrap-around links where the real slice has them. For a mesh, order TPU
    devices with `jax.experimental.mesh_utils.create_device_mesh`.

    Raises ValueError for an unknown target, an impossible slice, or a compiler that is not installed.
    """
    return list(_devices(_target(target)))


def compiler_options(device: jax.Device) -> dict[str, Any]:
    """Options for `.compile(compiler_options=...)` on a `device` of a target topology; none for an attached one.

    GPU autotuning times kernels, so without a GPU it has to be off; nor is machine code written. TPU and CPU need no
    option.
    """
    return {"xla_gpu_autotune_level": 0, "xla_gpu_cuda_data_dir": _toolkit()} if is_described_gpu(device) else {}


def compiled_for(lowered: jax.stages.Lowered, device: jax.Device, options: dict[str, Any]) -> jax.stages.Compiled:
    """`lowered`, compiled for `device`, of a target topology or attached, with `options` beside `compiler_options`.

    XLA:GPU fails to tile some products in Triton (of head dim 96 on Ampere, for one): those are left to cuBLAS.
    """
    options = compiler_options(device) | options
    try:
        return lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        if "output tile sizes" not in str(error):
            raise
        return lowered.compile(compiler_options=options | {"xla_gpu_enable_triton_gemm": False})


def combine_options(device: jax.Device, combine_bytes: int | None) -> dict[str, Any]:
    """XLA's options that combine collectives up to `combine_bytes`; None: XLA's own thresholds.

    On a GPU all-gathers, all-reduces and reduce-scatters; on a TPU all-reduces alone, since it combines no others.
    Raises ValueError for a backend without such an option.
    """
    if combine_bytes is None:
        return {}
    if isinstance(combine_bytes, bool) or not isinstance(combine_bytes, int) or combine_bytes < 0:
        raise UsageError(f"combine_bytes={combine_bytes!r}: give the bytes of the largest buffer, 0 or more, or None.")
    names = {"gpu": _COMBINES_GPU, "cuda": _COMBINES_GPU, "tpu": ("xla_jf_crs_combiner_threshold_in_bytes",)}
    if device.platform not in names:
        raise UsageError(f"combine_bytes={combine_bytes}: XLA has no option on {device.platform!r} for the size up to "
                         "which it combines collectives: leave it out.")
    return dict.fromkeys(names[device.platform], combine_bytes)


def memory_options(device: jax.Device, state_bytes: int) -> dict[str, Any]:
    """XLA's option that gives it the memory that the process has of a GPU: see `process_memory`.

    state_bytes: of the program's arguments, on each device.
    """
    chip = chip_of_kind(device.device_kind) if is_gpu(device) else None
    percent = limit_percent(chip, state_bytes) if chip else None
    return {} if percent is None else {"xla_gpu_memory_limit_slop_factor": percent}


_COMBINES_GPU = tuple(
    f"xla_gpu_{kind}_combine_threshold_bytes" for kind in ("all_gather", "all_reduce", "reduce_scatter"))


def missing_compiler(target: str | Target) -> str | None:
    """What to `pip install` to compile for `target`: an extra, or the libtpu of this JAX; None: nothing."""
    chip = _target(target).chip
    compiler = _COMPILERS[chip.platform]
    try:
        installed = importlib.util.find_spec(compiler.module) is not None
    except ModuleNotFoundError:  # of the parent package
        installed = False
    return _pinned_libtpu(chip) if installed else compiler.extra


def coords(device: jax.Device) -> tuple[int, ...]:
    """Coordinates of `device` as `Target.link` takes them: torus coordinates and core of a TPU, else (host, number)."""
    if device.platform == "tpu":
        return (*device.coords, device.core_on_chip)
    return device.process_index, device.id


@functools.cache
def _devices(target: Target) -> tuple[jax.Device, ...]:
    chip = target.chip
    if extra := missing_compiler(target):
        raise UsageError(f"no compiler for {target.text!r} is installed: pip install '{extra}'")
    try:
        with _environment(_COMPILERS[chip.platform].environment):
            if chip.gpu:
                topology = topologies.get_topology_desc(  # partitions x hosts x GPUs per host
                    "", platform="cuda", target_config=_gpu_description(chip, chip.gpu),
                    topology="1x{}x{}".format(*target.dims))
            else:
                topology = _tpu_topology(target)
    except jax.errors.JaxRuntimeError as error:
        raise UsageError(f"the compiler knows no slice {target.text!r}: {error}") from error
    return tuple(topology.devices)


def _tpu_topology(target: Target) -> topologies.TopologyDescription:
    tpu = target.chip.tpu
    assert tpu is not None
    options = {"chip_config_name": tpu.chip_config} if tpu.chip_config else {}
    wrap = (*target.wrap, False)[:3]  # three dims, whatever the torus has
    return topologies.get_topology_desc(
        f"{tpu.topology}:{'x'.join(map(str, target.dims))}", platform="tpu", wrap=wrap, **options)


def _gpu_description(chip: Chip, gpu: Gpu) -> str:
    capability = gpu.compile_as or gpu.capability
    major, minor = capability.rstrip("a").split(".")
    extension = "ACCELERATED_FEATURES" if capability.endswith("a") else "NONE"
    return _GPU_DESCRIPTION.format(
        name=chip.name, chip=chip, gpu=gpu, capability=capability, major=major, minor=minor, extension=extension)


def _pinned_libtpu(chip: Chip) -> str | None:
    """The libtpu to install where `chip` needs the one that this JAX pins, and another is installed."""
    if chip.tpu is None or _numbers(jax.__version__) >= _numbers(chip.tpu.min_jax):
        return None
    installed = importlib.metadata.version("libtpu")
    pins = re.findall(r"libtpu==([\d.]+)\.\*", " ".join(importlib.metadata.requires("jax") or ()))
    return f"libtpu=={pins[0]}.*" if pins and _numbers(installed) > _numbers(pins[0]) else None


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:3]]


def _target(target: str | Target) -> Target:
    return target if isinstance(target, Target) else target_of(target)


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Set the variables that are unset, then unset them: a TPU attached to this process must not see these values."""
    added = [name for name in variables if name not in os.environ]
    os.environ.update({name: variables[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


@functools.cache
def _toolkit() -> str:
    """A folder that XLA takes for that of a CUDA toolkit; it is removed when the process ends."""
    folder = tempfile.mkdtemp(prefix="zero_jax_no_machine_code_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    programs = pathlib.Path(folder, "bin")
    programs.mkdir()
    for name in ("ptxas", "nvlink"):
        (programs / name).write_text(_SCRIPT)
        (programs / name).chmod(0o755)
    library = pathlib.Path(folder, "nvvm", "libdevice")
    library.mkdir(parents=True)
    (library / "libdevice.10.bc").touch()  # LLVM takes a file without text for a module without functions
    return folder


def is_described_gpu(device: jax.Device) -> bool:
    """Whether `device` is a GPU of a target topology, for which programs are compiled and cannot run."""
    return is_gpu(device) and device.client.runtime_type == "compile_only_runtime"
