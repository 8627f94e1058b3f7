"""XLA's options by which a step's communication runs beside its compute, by what its layers are."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from zero_jax.layout.layout import Layout
from zero_jax.step.options import StepOptions
from zero_jax.xla.overlap import (
    buffered_loop_options,
    overlap_options,
    pipelined,
    prefetch_options,
    reduction_options,
)
from zero_jax.xla.platform import is_gpu


def with_overlap(layout: Layout, options: StepOptions) -> Layout:
    """`layout` with what it says of the gradient and its overlap, and whether whole weights come in chunks."""
    note = ", ".join(f"{name}={value}" for name, value in step_overlap_options(options, layout).items())
    stage, platform = options.stage, layout.axes.built_for
    # At stages 1 and 2, beside their update.
    in_chunks = (stage.shards_optimizer and not stage.shards_params and layout.mesh.size > 1
                 and options.communication.overlap is not False
                 and (platform.has_sparse_cores or platform.sends_within_products))
    return dataclasses.replace(layout, overlap_note=note, gathers_in_chunks=in_chunks)


def overlaps_by_default(options: StepOptions, layout: Layout) -> bool:
    """Whether XLA's options are those that `overlap="auto"` gives, and nothing else that was asked for needs them."""
    return options.communication.overlap == "auto" and not options.communication.prefetch and bool(
        overlap_options(layout.mesh.devices.flat[0], "auto", scatters=options.stage.shards_optimizer))


def step_overlap_options(options: StepOptions, layout: Layout) -> dict[str, Any]:
    """For a step of these options and this layout, whose `reads` tell whether loops run over layers.

    None on one device, where nothing is sent.
    """
    device, in_loops = layout.mesh.devices.flat[0], any(access.stacked for access in layout.reads.values())
    sent = options.communication
    overlap = False if sent.overlap == "auto" and layout.mesh.size == 1 else sent.overlap
    codes = sent.gradients is not None
    scatters = options.stage.shards_optimizer and not codes  # codes are sent by all-to-alls, which nothing combines
    in_parts = scatters and not in_loops and sent.combine_bytes is None and overlap is not False
    # Unrolled twice, loops read nothing from host memory an iteration ahead, write blocks by indices unknown, and have
    # two tiles of a weight; reduced an iteration later, the gradient of a tile is there beside that of the next.
    buffered = (in_loops and overlap is not False and layout.mesh.size > 1 and not layout.tiles
                and options.host_offload is None and options.partition_activations != "cpu")
    return ((reduction_options(device, layout.num_shards) if in_parts else {})
            | overlap_options(device, overlap, at_once=options.stage.shards_params and not in_loops, codes=codes,
                              scatters=options.stage.shards_optimizer)
            | prefetch_options(device, sent.prefetch, sent.overlap)
            | (buffered_loop_options(device) if buffered else {})
            | (pipelined("reduce_scatter", on=False) if layout.tiles and is_gpu(device) else {})
            | (dict(sent.overlap) if isinstance(sent.overlap, Mapping) else {}))
