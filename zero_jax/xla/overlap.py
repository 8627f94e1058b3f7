"""XLA's options by which communication runs beside compute.

XLA:GPU and the compiler for TPU7x make collectives asynchronous by themselves, those for v5p and v6e when asked: then
the SparseCores send and receive while the TensorCores compute. In a loop over layers a GPU still waits for what a layer
begins with, unless the round before has gathered it.
"""

from collections.abc import Mapping
from typing import Any

import jax

from zero_jax.arguments import shown
from zero_jax.errors import UsageError

ASKED = {"TPU v5": "v5p", "TPU v5p": "v5p", "TPU v6 lite": "v6e", "TPU v6e": "v6e"}
"""Kinds of devices whose compiler makes collectives asynchronous when asked, and their usual names.

Libraries know two names of each: target topologies have the first, and a live device may have either.
"""

_BY_ITSELF = "its compiler overlaps communication with compute by itself"
_REASONS = {
    "cpu": "its collectives block", "gpu": _BY_ITSELF, "cuda": _BY_ITSELF, "rocm": _BY_ITSELF, "TPU7x": _BY_ITSELF,
    "TPU v4": "its compiler makes no collective asynchronous, whatever it is asked",
    **dict.fromkeys(("TPU v5 lite", "TPU v5e"),
                    "it has no SparseCores, and its compiler overlaps what it can by itself")}

_SPARSE_CORES: dict[str, Any] = {
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": True,
    "xla_tpu_enable_sparse_core_collective_offload_all_reduce": True,
    "xla_tpu_use_tc_device_shape_on_sc": True,
    "xla_tpu_enable_async_collective_fusion": True,
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": False,  # else these gathers stay on the TensorCore
}
_GATHERS: dict[str, Any] = {
    "xla_tpu_enable_sparse_core_collective_offload_all_gather": True,
    "xla_tpu_enable_sparse_core_collective_offload_2d_all_gather": True,
    "xla_tpu_enable_all_gather_offload_tracing": True,
}
"""Of a step whose layers gather. At stages 1 and 2 the gathers come last, with nothing to hide behind, and a SparseCore
that writes the new weights makes XLA copy the old ones, which it replaces: 1.46 times the temporaries of 1.5B on v5p
for 0.7 % of the step's time (docs/results.md)."""


def overlap_options(device: jax.Device, overlap: bool | Mapping[str, Any], *, gathers: bool = True) -> dict[str, Any]:
    """XLA's options for `overlap`: True: those of the chip; a mapping: these besides, or in place of them.

    With libtpu 0.0.42 at least 98 % of the bytes of a small GPT-2 are sent asynchronously, none without
    (tests/xla/test_overlap.py). It costs memory, since what is sent must not be overwritten: `plan --overlap` says how
    much. gathers: whether layers gather their parameters. Raises UsageError where it would change nothing.
    """
    if overlap is False:
        return {}
    changes = {} if overlap is True else overlap
    if not isinstance(changes, Mapping) or not all(isinstance(name, str) for name in changes):
        raise UsageError(f"overlap={shown(overlap)}: give True, or a mapping of XLA's options for TPUs, as "
                         "{\"xla_tpu_enable_async_collective_fusion\": True}.")
    if device.device_kind not in ASKED:
        reason = _REASONS.get(device.device_kind) or _REASONS.get(
            device.platform, "nothing is known of its compiler's options")
        raise UsageError(f"overlap={shown(overlap)} changes nothing on {device.device_kind!r}: {reason}. Leave it out; "
                         f"it is for TPU {' and '.join(dict.fromkeys(ASKED.values()))}.")
    return _SPARSE_CORES | (_GATHERS if gathers else {}) | dict(changes)


def prefetch_options(device: jax.Device, prefetch: bool) -> dict[str, Any]:
    """XLA's options by which a round of a loop gathers the parameters of the next one, forward and backward.

    XLA:GPU's collective pipeliner: it moves the slice of the stacked parameters, the cast and the gather to the round
    before, where the time model and `plan` see them beside products. Raises UsageError on other devices: XLA:TPU's own
    changes next to nothing (v5e: 0.412 of the bytes asynchronous without, 0.417 with it).
    """
    if not isinstance(prefetch, bool):
        raise UsageError(f"prefetch={shown(prefetch)}: give True or False.")
    if prefetch and device.platform not in ("gpu", "cuda"):
        instead = "; overlap=True lets its SparseCores send." if device.device_kind in ASKED else "."
        raise UsageError(f"prefetch=True changes nothing on {device.device_kind!r}: only the compiler for NVIDIA GPUs "
                         f"gathers for the next round of a loop. Leave it out{instead}")
    return {"xla_gpu_enable_pipelined_all_gather": True} if prefetch else {}
