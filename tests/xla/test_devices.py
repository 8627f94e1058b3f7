"""Devices of target topologies: what they are, how they are refused, and that importing does nothing."""

import os
import re
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import mesh_utils, topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support.covering import weekly
from support.oracle import slow

import zero_jax
from zero_jax.xla import devices as xla_devices
from zero_jax.xla.targets import target_of

# The larger example of each chip has what the smaller one has, and several hosts.
EXAMPLES = xla_devices.known_targets()
LARGEST = {example.split(":")[0]: example for example in EXAMPLES}.values()
SLOW = ("v5e:16x16", "v6e:16x16", "tpu7x:4x4x4")
"""Which take a second and more; the smaller ones of these chips are in the matrix, and in other tests."""
BIG = {"v5p:16x16x24": 6144, "v5p:8x8x16": 1024, "h100:512x8": 4096, "tpu7x:8x8x8": 1024}


def devices_or_skip(target: str) -> list[jax.Device]:
    if extra := xla_devices.missing_compiler(target):
        pytest.skip(f"needs {extra}")
    return xla_devices.target_devices(target)


@pytest.mark.parametrize("target", EXAMPLES)
def test_target_devices(target):
    """The devices and hosts that the target counts without JAX are those that the compiler gives."""
    devices, expected = devices_or_skip(target), target_of(target)
    assert (len(devices), len({d.process_index for d in devices})) == (expected.num_devices, expected.num_hosts)
    assert {d.platform for d in devices} == {"gpu" if expected.chip.gpu else "tpu"}
    assert xla_devices.target_devices(target) == devices  # the same clients, so that meshes compare equal
    assert xla_devices.target_devices(expected) == devices


@pytest.mark.parametrize("target", BIG)
def test_devices_of_big_slices(target):
    assert len(devices_or_skip(target)) == target_of(target).num_devices == BIG[target]


@pytest.mark.parametrize("target", [slow(target) if target in SLOW else target for target in LARGEST])
def test_compile(target):
    """Every chip compiles a matrix product and a gather of its factor, which memory and text tell."""
    devices = devices_or_skip(target)
    mesh = Mesh(mesh_utils.create_device_mesh((len(devices),), devices), ("x",))
    n = 16 * len(devices)
    x = jax.ShapeDtypeStruct((n, n), jnp.bfloat16, sharding=NamedSharding(mesh, P("x")))

    def product(x: jax.Array) -> jax.Array:
        whole = jax.lax.with_sharding_constraint(x * 2, NamedSharding(mesh, P()))
        return jax.nn.gelu(x @ whole)

    compiled = jax.jit(product).lower(x).compile(compiler_options=xla_devices.compiler_options(devices[0]))
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory.argument_size_in_bytes == memory.output_size_in_bytes == n * n * 2 // len(devices)
    assert "all-gather" in text or "AllGather" in text or "collective-permute" in text


@pytest.mark.parametrize("target", ["v5e:16x16", "v6e:16x16", "v5p:4x4x8", "tpu7x:4x4x8"])
def test_the_mesh_of_a_slice_has_axes_of_its_torus(target):
    devices, expected = devices_or_skip(target), target_of(target)
    mesh = zero_jax.make_mesh(devices=devices).devices
    links = [expected.link([xla_devices.coords(d) for d in group]) for group in (mesh[:, 0], mesh[0])]
    ici = expected.chip.link_bandwidth
    assert [link.bandwidth / ici for link in links] == {
        "v5e:16x16": [2, 2], "v6e:16x16": [2, 2], "v5p:4x4x8": [4, 2],
        "tpu7x:4x4x8": [2, 2],  # over (x, y) each of a chip's two devices has half of four links
    }[target]


@pytest.mark.parametrize(("target", "sizes"), [
    ("v5e:2x4", (8,)), ("v5e:4x4", (4, 4)), ("v5p:2x2x2", (4, 2)), ("v5p:8x8x16", (64, 16)), ("tpu7x:4x4x8", (16, 16)),
    ("h100:16x8", (128,))])
def test_the_mesh_builder_factors_tpu_slices_alone(target, sizes):
    assert zero_jax.make_mesh(devices=devices_or_skip(target)).devices.shape == sizes
    assert zero_jax.make_mesh(4, devices=devices_or_skip(target)).devices.shape == (4,)  # as asked for


def test_links_of_described_gpus():
    devices, target = devices_or_skip("h100:16x8"), target_of("h100:16x8")
    assert target.link([xla_devices.coords(d) for d in devices[8:16]]).name == "nvlink"
    assert target.link([xla_devices.coords(d) for d in devices[7:9]]).name == "network"


def test_coords_of_live_devices():
    assert [xla_devices.coords(d) for d in jax.devices()] == [(0, d.id) for d in jax.devices()]


def test_too_large_for_a_tpu_says_how_large():
    """The planner reads these words."""
    device = devices_or_skip("v5e:2x4")[0]
    x = jax.ShapeDtypeStruct((1 << 20, 1 << 17), jnp.bfloat16, sharding=jax.sharding.SingleDeviceSharding(device))
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        jax.jit(lambda x: x[0] * 2).lower(x).compile()
    assert re.search(r"RESOURCE_EXHAUSTED.*\(256\.00G\) exceeds available HBM \(15\.75G\)", str(error.value))
    assert target_of("v5e:2x4").chip.memory_bytes == 15.75 * 2**30


def gather_emitters(devices: list[jax.Device]) -> list[str]:
    """How TPU gathers over the first two axes of a v5p:4x4x8 made of `devices`."""
    mesh = Mesh(mesh_utils.create_device_mesh((4, 4, 8), devices), ("x", "y", "z"))
    whole, part = NamedSharding(mesh, P()), NamedSharding(mesh, P(("x", "y")))
    x = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16, sharding=part)
    gather = jax.jit(lambda x: jax.lax.with_sharding_constraint(x * 2, whole))
    return re.findall(r'"emitter":"(\w*AllGather\w*)"', gather.lower(x).compile().as_text())


def test_large_slices_have_their_wrap_around_links():
    """A torus dim of 4 closes to a ring: the compiler gathers in another way than over a plane."""
    devices = devices_or_skip("v5p:4x4x8")
    # Negative control: what the plain name of the slice gives has no such links.
    plane = topologies.get_topology_desc("v5p:4x4x8", platform="tpu").devices
    ring, flat = gather_emitters(devices), gather_emitters(plane)
    assert ring and flat and ring != flat


def test_compiler_options():
    assert xla_devices.compiler_options(jax.devices()[0]) == {}
    attached = types.SimpleNamespace(platform="gpu", client=types.SimpleNamespace(runtime_type="pjrt_ifrt"))
    assert xla_devices.compiler_options(attached) == {}  # what is verified there is the program that runs
    described = xla_devices.compiler_options(devices_or_skip("h100:8")[0])
    assert described.keys() == {"xla_gpu_autotune_level", "xla_gpu_cuda_data_dir"}
    assert described["xla_gpu_autotune_level"] == 0
    assert xla_devices.compiler_options(devices_or_skip("v5e:2x4")[0]) == {}


def test_a_slice_that_the_compiler_does_not_know(monkeypatch):
    devices_or_skip("v5e:2x4")
    monkeypatch.setattr("zero_jax.xla.targets._check_slice", lambda *arguments: None)
    with pytest.raises(ValueError, match="the compiler knows no slice 'v5e:3x5'"):
        xla_devices.target_devices("v5e:3x5")


@pytest.mark.parametrize(
    "jax_version, libtpu, missing",
    [
        ("0.10.2", "0.0.51", "libtpu==0.0.42.*"),
        ("0.10.2", "0.0.42.1", None),
        ("0.10.2", "0.0.40", None),
        ("0.12.0.1", "0.0.51", None),
    ],
)
def test_a_libtpu_that_is_too_new_for_jax(jax_version, libtpu, missing, monkeypatch):
    devices_or_skip("v5e:2x4")
    monkeypatch.setattr("jax.__version__", jax_version)
    monkeypatch.setattr("importlib.metadata.version", lambda name: libtpu)
    monkeypatch.setattr("importlib.metadata.requires", lambda name: ["numpy>=2.0", 'libtpu==0.0.42.*; extra == "tpu"'])
    assert xla_devices.missing_compiler("tpu7x:2x2x1") == missing
    assert xla_devices.missing_compiler("v5p:2x2x1") is None


@pytest.mark.parametrize("target, extra", [("h100:3", "gpu-compiler"), ("v5e:4x8", "tpu-compiler")])
def test_missing_compiler_names_the_extra(target, extra, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=rf"pip install 'zero-jax\[{extra}\]'"):
        xla_devices.target_devices(target)


@weekly("target", ["h100:8", "v5e:2x4"])
def test_quiet_and_leaves_no_trace(target):
    """In a fresh process: nothing on stderr, no environment variable left or changed by us."""
    devices_or_skip(target)
    names = "TPU_WORKER_HOSTNAMES TPU_ACCELERATOR_TYPE ALLOW_MULTIPLE_LIBTPU_LOAD XLA_FLAGS".split()
    names.append("JAX_SKIP_CUDA_CONSTRAINTS_CHECK")
    code = f"""
import os, sys
from zero_jax.xla import devices as xla_devices
assert "libtpu" not in sys.modules
xla_devices.target_devices({target!r})
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
