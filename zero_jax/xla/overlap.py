"""XLA's options with which the SparseCores of a TPU send and receive while its TensorCores compute.

XLA:GPU and the compiler for TPU7x overlap communication with compute by themselves, those for v5p and v6e when asked.
"""

from collections.abc import Mapping
from typing import Any

import jax

from zero_jax.arguments import shown
from zero_jax.errors import UsageError

ASKED = {"TPU v5": "v5p", "TPU v6 lite": "v6e"}
"""Kinds of devices whose compiler makes collectives asynchronous when asked, and their usual names."""

_BY_ITSELF = "its compiler overlaps communication with compute by itself"
_REASONS = {
    "cpu": "its collectives block", "gpu": _BY_ITSELF, "cuda": _BY_ITSELF, "rocm": _BY_ITSELF, "TPU7x": _BY_ITSELF,
    "TPU v4": "its compiler makes no collective asynchronous, whatever it is asked",
    "TPU v5 lite": "it has no SparseCores, and its compiler overlaps what it can by itself"}

_SPARSE_CORES: dict[str, Any] = {
    **dict.fromkeys((f"xla_tpu_enable_sparse_core_collective_offload_{kind}" for kind in (
        "all_gather", "2d_all_gather", "reduce_scatter", "all_reduce")), True),
    "xla_tpu_use_tc_device_shape_on_sc": True, "xla_tpu_enable_all_gather_offload_tracing": True,
    "xla_tpu_enable_async_collective_fusion": True,
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": False,  # else these gathers stay on the TensorCore
}


def overlap_options(device: jax.Device, overlap: bool | Mapping[str, Any]) -> dict[str, Any]:
    """XLA's options for `overlap`: True: those of the chip; a mapping: these besides, or in place of them.

    With libtpu 0.0.42 at least 98 % of the bytes of a small GPT-2 are sent asynchronously, none without
    (tests/xla/test_overlap.py). It costs memory, since what is sent must not be overwritten: `plan --overlap` says how
    much. Raises UsageError where it would change nothing.
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
                         f"it is for TPU {' and '.join(ASKED.values())}.")
    return _SPARSE_CORES | dict(changes)
