"""What stands in for the CUDA toolkit where XLA compiles for GPUs that this machine does not have.

XLA:GPU starts `ptxas` once for each kernel: 142 processes and half of the CPU time for the step of a small GPT-2. And
it does not compile at all where it finds neither that nor libdevice, the toolkit's library of functions. A program that
never runs needs no machine code, and XLA decides nothing by it: the scheduled text and the memory are the same
(tests/xla/test_assembler.py), but for the size of the code.
"""

import atexit
import functools
import pathlib
import shutil
import tempfile
from typing import Any

import jax

from zero_jax.xla.platform import is_gpu

_VERSION = "Cuda compilation tools, release 13.0, V13.0.88"  # XLA asks how much of PTX it may use
# $1 and $3: as XLA:GPU calls both, `ptxas INPUT -o OUTPUT ...`.
_SCRIPT = f"""#!/bin/sh
if [ "$1" = --version ]; then echo "{_VERSION}"; else : > "$3"; fi
"""


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


def no_machine_code(device: jax.Device) -> dict[str, Any]:
    """XLA's option to write no machine code for `device`, a GPU of a target topology; nothing for any other device."""
    return {"xla_gpu_cuda_data_dir": _toolkit()} if is_described_gpu(device) else {}
