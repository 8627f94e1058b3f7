"""Programs for described GPUs need no CUDA toolkit, and are those that the toolkit's assembler would have finished."""

import os
import pathlib
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from support.targets import target_devices

from zero_jax.xla.devices import compiler_options

# Compiles with and without the option; a machine without a toolkit is one where XLA's usual places are empty.
SCRIPT = """
import jax
from zero_jax.xla.devices import compiler_options, target_devices
device = target_devices("h100:8")[0]
value = jax.ShapeDtypeStruct((64, 64), "float32", sharding=jax.sharding.SingleDeviceSharding(device))
compile = jax.jit(lambda x: jax.numpy.tanh(x @ x)).lower(value).compile
print("HloModule" in compile(compiler_options=compiler_options(device)).as_text(), flush=True)
compile(compiler_options={"xla_gpu_autotune_level": 0})
"""
EMPTIED = """
for each in /usr/local/cuda*; do [ -d "$each" ] && mount -t tmpfs none "$(readlink -f "$each")"; done; exec "$@"
"""


def lowered(devices):
    mesh = jax.sharding.Mesh(np.array(devices), "data")
    rows, whole = (NamedSharding(mesh, PartitionSpec(*spec)) for spec in (["data"], []))

    def loss(weights, x):
        return jnp.tanh(x @ weights).sum()

    arguments = [jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=each) for each in (rows, rows)]
    return jax.jit(jax.grad(loss), out_shardings=whole).lower(*arguments)


@pytest.fixture
def devices():
    return target_devices("h100:8")


@pytest.fixture
def logged_toolkit(tmp_path, monkeypatch):
    """Its assembler, first on the PATH, and the file to which that writes when it is started."""
    toolkit = shutil.which("ptxas")
    if toolkit is None:
        pytest.skip("no CUDA toolkit")
    log, folder = tmp_path / "log", tmp_path / "bin"
    folder.mkdir()
    (folder / "ptxas").write_text(f'#!/bin/sh\necho "$@" >> {log}\nexec {toolkit} "$@"\n')
    (folder / "ptxas").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return log


def test_the_program_is_the_toolkits_and_no_assembler_ran(devices, logged_toolkit):
    compiled = lowered(devices).compile
    ours = compiled(compiler_options=compiler_options(devices[0]))
    assert not logged_toolkit.exists()
    theirs = compiled(compiler_options={"xla_gpu_autotune_level": 0})
    assert "-arch=sm_90a" in logged_toolkit.read_text()  # or the line before would hold of anything
    assert ours.as_text() == theirs.as_text()
    kept, other = (each.memory_analysis() for each in (ours, theirs))
    for name in dir(kept):
        if name.endswith("_in_bytes") and name != "generated_code_size_in_bytes":
            assert getattr(kept, name) == getattr(other, name), name


def test_it_is_a_folder_of_this_process_with_programs(devices):
    folder = pathlib.Path(compiler_options(devices[0])["xla_gpu_cuda_data_dir"])
    for name in ("ptxas", "nvlink"):
        version = subprocess.run([folder / "bin" / name, "--version"], capture_output=True, text=True, check=True)
        assert "release 13." in version.stdout


@pytest.mark.slow
def test_a_machine_without_a_toolkit_compiles(devices):
    isolated = ["unshare", "--map-root-user", "--mount", "sh", "-c", EMPTIED, "sh"]
    if subprocess.run([*isolated, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this process may not mount")
    environment = os.environ | {"PATH": "/usr/bin:/bin", "XLA_FLAGS": ""}
    run = subprocess.run([*isolated, sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment,
                         check=False)
    assert run.stdout == "True\n"
    assert run.returncode and ("ptxas" in run.stderr or "libdevice" in run.stderr)  # without the option
