"""Described accelerators: what they are, how they are refused, and that importing does nothing."""

import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import mesh_utils, topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zero_jax import hardware

SIZES = {
    "h100:8": (8, 1),
    "h100:16x8": (128, 16),
    "v5e:2x4": (8, 2),
    "v5e:16x16": (256, 64),
    "v5p:2x2x2": (8, 2),
    "v5p:4x4x8": (128, 32),
}  # devices, hosts


def described(target: str) -> list[jax.Device]:
    if extra := hardware.missing_compiler(target):
        pytest.skip(f"needs {extra}")
    return hardware.describe(target)


def test_sizes_cover_the_table():
    assert tuple(SIZES) == hardware.known_targets()


@pytest.mark.parametrize("target", SIZES)
def test_describe(target):
    devices = described(target)
    assert (len(devices), len({d.process_index for d in devices})) == SIZES[target]
    assert {d.platform for d in devices} == {"gpu" if target.startswith("h100") else "tpu"}
    assert hardware.describe(target) == devices  # the same clients, so that meshes compare equal


@pytest.mark.parametrize("target", ["h100:8", "v5e:2x4", "v5p:2x2x2"])
def test_compile_reports_memory(target):
    device = described(target)[0]
    x = jax.ShapeDtypeStruct(
        (256, 256), jnp.bfloat16, sharding=jax.sharding.SingleDeviceSharding(device)
    )
    options = hardware.compiler_options(device)
    compiled = jax.jit(lambda x: jax.nn.gelu(x @ x)).lower(x).compile(compiler_options=options)
    assert compiled.memory_analysis().argument_size_in_bytes == 256 * 256 * 2


def gather_emitters(devices: list[jax.Device]) -> list[str]:
    """How TPU gathers over the first two axes of a v5p:4x4x8 made of `devices`."""
    mesh = Mesh(mesh_utils.create_device_mesh((4, 4, 8), devices), ("x", "y", "z"))
    whole, part = NamedSharding(mesh, P()), NamedSharding(mesh, P(("x", "y")))
    x = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16, sharding=part)
    gather = jax.jit(lambda x: jax.lax.with_sharding_constraint(x * 2, whole))
    return re.findall(r'"emitter":"(\w*AllGather\w*)"', gather.lower(x).compile().as_text())


def test_large_slices_have_their_wrap_around_links():
    """A torus dim of 4 closes to a ring: the compiler gathers in another way than over a plane."""
    devices = described("v5p:4x4x8")
    # Negative control: what the plain name of the slice gives has no such links.
    plane = topologies.get_topology_desc("v5p:4x4x8", platform="tpu").devices
    ring, flat = gather_emitters(devices), gather_emitters(plane)
    assert ring and flat and ring != flat


def test_compiler_options():
    assert hardware.compiler_options(jax.devices()[0]) == {}
    assert hardware.compiler_options(described("h100:8")[0]) == {"xla_gpu_autotune_level": 0}
    assert hardware.compiler_options(described("v5e:2x4")[0]) == {}


@pytest.mark.parametrize(
    "target, nearest",
    [
        ("h10:8", "h100:8"),
        ("v6e:16x16", "v5e:16x16"),
        ("h100", "h100:8"),
        ("h100:8x8x8", "h100:8"),
        ("h100:0", "h100:8"),
        ("h100:16x", "h100:16x8"),
        ("v5p:2x2", "v5p:2x2x2"),
        ("v5e:-2x4", "v5e:2x4"),
    ],
)
def test_unknown_target_names_the_nearest(target, nearest):
    with pytest.raises(ValueError) as error:
        hardware.describe(target)
    assert repr(target) in str(error.value) and f"nearest is {nearest!r}" in str(error.value)
    assert all(known in str(error.value) for known in SIZES)


def test_a_slice_that_cannot_be():
    described("v5e:2x4")
    with pytest.raises(ValueError, match="v5e:3x5"):
        hardware.describe("v5e:3x5")


@pytest.mark.parametrize("target, extra", [("h100:4", "gpu-compiler"), ("v5e:4x4", "tpu-compiler")])
def test_missing_compiler_names_the_extra(target, extra, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=rf"pip install 'zero-jax\[{extra}\]'"):
        hardware.describe(target)


@pytest.mark.parametrize("target", ["h100:8", "v5e:2x4"])
def test_quiet_and_leaves_no_trace(target):
    """In a fresh process: nothing on stderr, no environment variable left or changed by us."""
    described(target)
    names = "TPU_WORKER_HOSTNAMES TPU_ACCELERATOR_TYPE ALLOW_MULTIPLE_LIBTPU_LOAD XLA_FLAGS".split()
    names.append("JAX_SKIP_CUDA_CONSTRAINTS_CHECK")
    code = f"""
import os, sys
import zero_jax.hardware as hardware
assert "libtpu" not in sys.modules
hardware.describe({target!r})
print([name for name in {names!r} if name in os.environ])
"""
    environment = {name: value for name, value in os.environ.items() if name not in names}
    environment["JAX_PLATFORMS"] = "cpu"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "[]", "")
