"""XLA:GPU's options for copies to and from host memory: by copy engines beside compute, or by kernels after it.

XLA:GPU copies a slice of host memory by a copy engine where its pass `dynamic-slice-annotator` has written beside it
which rows a loop takes (`host_slices`), else by a kernel. Of jax 0.10.2 these rows are others in a backward pass; of
0.11.2 and 0.12.0.1 they are right in the programs of this library, which is checked in each before it runs.

Whatever copies, a CUDA graph has it wait: XLA makes graphs (command buffers) of what stands between the start of a copy
and its end, and runs all commands of a graph one after another (openxla/xla pull request 48900). Without graphs the
copies of `partition_activations="cpu"` took 2.8 of a step's 54.7 ms on an H100 in the place of 12.2 of 64.1
(docs/results.md, "Copies beside compute").
"""

import os
import re
from typing import Any

import jax

from zero_jax.xla.host_slices import host_slices
from zero_jax.xla.overlap import pipelined
from zero_jax.xla.platform import is_gpu

ANNOTATOR = "dynamic-slice-annotator"
"""The pass of XLA:GPU that writes which rows of host memory a loop takes."""

_IN_FLIGHT = {"xla_gpu_experimental_parallel_async_compute_limit": 16}
"""As it comes XLA:GPU has two copies in flight at a time."""


class WrongRows(Exception):
    """A compiled program would copy other rows of host memory than it should."""


def copy_options(device: jax.Device, *, engines: bool) -> dict[str, Any]:
    """XLA's options by which slices of host memory in loops are copied on `device`.

    engines: by copy engines, beside compute. Else by kernels that take their index as it is; passes that XLA_FLAGS
    turns off stay off.
    """
    if not is_gpu(device):
        return {}
    if engines:
        return {"xla_gpu_enable_command_buffer": "", **_IN_FLIGHT}
    others = re.findall(r"--xla_disable_hlo_passes=(\S+)", os.environ.get("XLA_FLAGS", ""))
    return {"xla_disable_hlo_passes": ",".join(dict.fromkeys([*",".join(others).split(","), ANNOTATOR])).lstrip(",")}


def host_prefetch_options(device: jax.Device, *, parameters: bool = False) -> dict[str, Any]:
    """XLA's options by which an iteration of a loop reads the next one's parameters or checkpoints from host memory.

    XLA:GPU moves the reads to the iteration before, where they are beside products, and the writes to the iteration
    after. As it comes it has two copies in flight at a time: of six reads of a layer four then wait at the top of an
    iteration, with nothing beside them (1.5B of 4 layers on `h100:8`). XLA:TPU moves reads so by itself.

    parameters: whether they are there. By itself XLA:GPU reduces a layer's gradients an iteration later, and holds them
    whole until then: 70.8 GiB in place of 52.6 of a trillion parameters on 64 H100. Then it does not; with checkpoints
    there alone jax 0.12 would move none of their reads without it.
    """
    if not is_gpu(device):
        return {}
    in_iteration = pipelined("reduce_scatter", on=False) if parameters else {}
    return {"xla_gpu_enable_pipelined_host_offloading": True, **in_iteration, **_IN_FLIGHT}


def check_rows(program: str) -> None:
    """Raises WrongRows for a compiled program whose loops would copy other rows of host memory than their index has."""
    wrong = [each for each in host_slices(program) if not each.is_right]
    if wrong:
        raise WrongRows(f"{wrong[0]}" + f", and {len(wrong) - 1} more" * (len(wrong) > 1))
