"""XLA's options by which communication runs beside compute.

XLA:GPU and the compiler for TPU7x make collectives asynchronous by themselves, those for v5p and v6e when asked: then
the SparseCores send and receive while the TensorCores compute. That for v5e sends within products: gathers by itself,
when asked reductions, and within elementwise work what finds no product. In a loop over layers a device still waits for
what a layer begins with, unless the iteration before has gathered it: XLA's pipeliners do that when asked
(`buffered_loop_options`, `prefetch_options`).
"""

from collections.abc import Mapping
from typing import Any

import jax

from zero_jax.arguments import shown
from zero_jax.errors import UsageError
from zero_jax.xla.platform import SPARSE_CORES, WITHIN_PRODUCTS, Platform, is_gpu

Overlap = bool | str | Mapping[str, Any]
"""What `overlap_options` takes: True, False, "auto", or a mapping."""

_ASKED_NAMES = " and ".join(dict.fromkeys(SPARSE_CORES.values()))

_BY_ITSELF = "its compiler overlaps communication with compute by itself"
_REASONS = {
    "cpu": "its collectives block", "TPU7x": _BY_ITSELF,
    **dict.fromkeys(("gpu", "cuda", "rocm"), f"{_BY_ITSELF}, and loops over layers gather ahead unless overlap=False"),
    "TPU v4": "its compiler makes no collective asynchronous, whatever it is asked",
    **dict.fromkeys(WITHIN_PRODUCTS, "its compiler hides no all-reduce, and stage 0 sends nothing else")}

_SPARSE_CORES: dict[str, Any] = {
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": True,
    "xla_tpu_enable_sparse_core_collective_offload_all_reduce": True,
    "xla_tpu_use_tc_device_shape_on_sc": True,
    "xla_tpu_enable_async_collective_fusion": True,
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": False,  # else these gathers stay on the TensorCore
}
_BEST_FIT: dict[str, Any] = {"xla_tpu_buffer_assignment_enable_fast_merge_fallback": False}
"""Temporaries are laid out by the better of two searches for best fits. Else libtpu takes the first layout of a faster
search that fits the chip, and counts what it leaves unused twice besides: of 1.5B at stage 3 on v5p, of which 2.71 GB
are alive at one time, it takes 3.47 GB and tells 4.85, and with these 2.72 and 3.36."""
_ALL_TO_ALLS: dict[str, Any] = {"xla_tpu_enable_sparse_core_collective_offload_dense_all_to_all": True}
"""Of quantised gradients alone: libtpu fails to compile some of those that XLA's partitioner makes of a model
("RET_CHECK failure ... num_blocks_per_replica")."""
_QUEUE: dict[str, Any] = {"xla_tpu_enable_sparse_core_offload_queuing_in_lhs": True}
"""One may start while another is sent. Else reductions that are ready wait until they have nothing beside them: 36.8 in
place of 18.0 ms of exposed time, for 0.7 % more temporaries (8 layers of 6.7B at stage 3 on v5p). Where no loop runs
over the layers XLA:TPU then starts their gathers all at once, and has the whole model in memory: not for those."""
_GATHERS: dict[str, Any] = {
    "xla_tpu_enable_sparse_core_collective_offload_all_gather": True,
    "xla_tpu_enable_sparse_core_collective_offload_2d_all_gather": True,
    "xla_tpu_enable_all_gather_offload_tracing": True,
}


_WITHIN_OTHER_WORK: dict[str, Any] = {
    "xla_enable_async_reduce_scatter_fusion": True,
    "xla_tpu_enable_async_collective_fusion_fuse_reduce_scatter": True,
    "xla_tpu_decompose_every_reduce_scatters_hlos": True,  # only such are sent within a product
    "xla_tpu_ars_combiner_threshold_in_bytes": 0,  # else those of a layer are one, which waits for its last gradient
    "xla_tpu_enable_async_collective_fusion_while_loops": False,  # a loop beside a collective crashes libtpu 0.0.42
    "xla_tpu_scoped_vmem_limit_kib": 24576,  # of 16384 a product and what is sent within it take more
    "xla_tpu_enable_async_collective_fusion_fuse_kloop_fusions": True,  # what finds no product, in elementwise work
}
"""Of 2 layers of width 2048 at stage 3 on `v5e:2x4` 99.4 % of the bytes are then asynchronous, 66 without one of the
first two, 71 without the third or the last; without more VMEM XLA finds too little. With collectives within loops
libtpu ends the process ("Check failed: t >= PrimitiveType_MIN" in `CreateAsyncCollectiveFusionInWhile`, those layers at
stage 2), and without them it sends as much asynchronously."""


def overlap_options(device: jax.Device, overlap: Overlap, *, at_once: bool = False, codes: bool = False,
                    scatters: bool = True) -> dict[str, Any]:
    """XLA's options for `overlap`.

    "auto": those of the chip, if its compiler waits to be asked; True: the same, or an error where there are none;
    False: none; a mapping, on any TPU or GPU: these besides those of "auto", or in place of them.

    With libtpu 0.0.42 at least 98 % of the bytes of a small GPT-2 are sent asynchronously, on v5p none without
    (tests/xla/test_overlap.py, test_overlap_v5e.py). It costs memory, since what is sent must not be overwritten, and
    on v5e time to compile: `plan --overlap yes` says how much.

    at_once: whether layers gather their parameters with no loop over them; codes: whether gradients are sent as codes;
    scatters: whether gradients are scattered, as at all stages but 0. Raises UsageError where it would change nothing.
    """
    changes = {} if overlap is True or overlap is False or overlap == "auto" else overlap
    if not isinstance(changes, Mapping) or not all(isinstance(name, str) for name in changes):
        raise UsageError(f"overlap={shown(overlap)}: give \"auto\", True, False, or a mapping of XLA's options for "
                         "the chip, as {\"xla_tpu_enable_async_collective_fusion\": True}.")
    if overlap is False:
        return {}
    own: dict[str, Any] = {}
    if device.device_kind in SPARSE_CORES:
        own = _BEST_FIT | _SPARSE_CORES | _GATHERS | ({} if at_once else _QUEUE) | (_ALL_TO_ALLS if codes else {})
    elif device.device_kind in WITHIN_PRODUCTS and scatters:
        own = _BEST_FIT | _WITHIN_OTHER_WORK
    if overlap != "auto" and not own and not (changes and (device.platform == "tpu" or is_gpu(device))):
        reason = _REASONS.get(device.device_kind) or _REASONS.get(
            device.platform, "nothing is known of its compiler's options")
        raise UsageError(f"overlap={shown(overlap)} changes nothing on {device.device_kind!r}: {reason}. Leave it out; "
                         f"it is for TPU v5e, {_ASKED_NAMES}, and a mapping of XLA's options for GPUs, too.")
    return own | dict(changes)


_PIPELINED: dict[str, Any] = {
    "xla_tpu_enable_collective_pipeliner": True,
    "xla_tpu_enable_ici_ag_pipelining": True,
    "xla_tpu_enable_ici_rs_pipelining": True,
}
"""XLA:TPU's collective pipeliner. Without it the first gathers of an iteration, and the last reductions, have no
product beside them, since the scheduler moves nothing from one iteration of a loop to another."""


def prefetch_options(device: jax.Device, prefetch: bool, overlap: Overlap = "auto") -> dict[str, Any]:
    """XLA's options by which an iteration of a loop gathers the parameters of the next one, forward and backward.

    XLA:TPU's collective pipeliner: it moves the slice of the stacked parameters, the cast and the gather to the
    iteration before, and reductions to the iteration behind, where the time model and `plan` see them beside products.
    overlap: it needs its options, too, since a gather that blocks hides behind nothing. Raises UsageError on other
    devices: on v5e the pipeliner changes next to nothing (0.412 of the bytes asynchronous without, 0.417 with it).
    """
    if not isinstance(prefetch, bool):
        raise UsageError(f"prefetch={shown(prefetch)}: give True or False.")
    if not prefetch:
        return {}
    if device.device_kind not in SPARSE_CORES:
        raise UsageError(f"prefetch=True changes nothing on {device.device_kind!r}: only the compilers for TPU "
                         f"{_ASKED_NAMES} are asked to gather for the next iteration of a loop, and loops on GPUs do "
                         "so unless overlap=False. Leave it out.")
    return dict(_PIPELINED)


def buffered_loop_options(device: jax.Device) -> dict[str, Any]:
    """XLA's options by which a loop gathers for its next iteration, and reduces what the one before made.

    Double buffering unrolls loops twice. Predicted for a GPT-2 of 24 layers of width 2048 at stage 3 on `h100:8`, one
    sequence a device: 25.5 in place of 29.3 ms, and 1,139 in place of 1,236 MiB of temporaries (jax 0.10.2).
    """
    if not is_gpu(device):
        return {}
    return {"xla_gpu_enable_while_loop_double_buffering": True, **pipelined("all_gather", "reduce_scatter")}


def pipelined(*kinds: str, on: bool = True) -> dict[str, Any]:
    """XLA:GPU's options by which loops send these collectives an iteration earlier or later, or do not."""
    if jax.__version_info__ < (0, 12):
        return {f"xla_gpu_enable_pipelined_{kind}": on for kind in kinds}
    return {f"xla_gpu_pipeline_{kind}": f"COLLECTIVE_PIPELINING_MODE_{'ON' if on else 'OFF'}" for kind in kinds}


def reduction_options(device: jax.Device, num_shards: int) -> dict[str, Any]:
    """XLA's options by which a GPU reduces gradients in several parts, where no loop runs over the layers.

    XLA:GPU combines the reductions of all layers into one, behind the last of their gradients, with nothing beside it.
    num_shards: over how many devices; the threshold counts what is left on each of them. 32 MiB of gradients are one
    part, as long as half a MiB of it is left: smaller parts are sent at less than the links' rate (docs/results.md).
    """
    if not is_gpu(device) or num_shards == 1:
        return {}
    return {"xla_gpu_reduce_scatter_combine_threshold_bytes": max(2**25 // num_shards, 2**19)}


def blocks(platform: Platform, overlap: Overlap) -> bool:
    """Whether all-reduces block for all that `overlap` asks for: on TPU v4 and v5e, and where it is False."""
    return platform.is_tpu and platform.kind != "TPU7x" and not (platform.has_sparse_cores and overlap is not False)


def concurrent_options(device: jax.Device) -> dict[str, Any]:
    """XLA's options by which what is sent between slices runs beside what is sent in one: two collectives at a time.

    XLA:GPU has one in flight: in an iteration of backward it would send to other slices when the iteration's reductions
    are done, with nothing beside it (4 layers of width 512 on `h100:2x8`). SparseCores of TPUs queue them.
    """
    return {"xla_gpu_experimental_parallel_collective_overlap_limit": 2} if is_gpu(device) else {}
