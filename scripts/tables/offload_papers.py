"""The tables of ZeRO-Offload and ZeRO-Infinity beside this library's figures, as a page of the documentation.

    python scripts/tables/offload_papers.py           # prints the page; compiles each step: half an hour on a laptop
    python scripts/tables/offload_papers.py --docs    # writes it to docs/offload_scale.md
    python scripts/tables/offload_papers.py --docs --rows h100:7x8    # compiles these; the other rows stay as they are

`--rows` takes numbers (from 1), models and targets; `--rows 0` compiles none.

Derived figures are those of `offload_formulas.py`; compiled ones are of `zero-jax plan`, which needs the compiler for
H100s and the extra `cudnn`: without it attention is XLA's, whose scores do not fit.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import textwrap

import offload_formulas as formulas

from zero_jax.planning.transfers import REACHED
from zero_jax.xla.process_memory import process_bytes, set_fraction
from zero_jax.xla.targets import target_of
from zero_jax.xla.timing import Rates

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "offload_scale.md"
GB, GIB = 1e9, 2**30
DISK = 3.84e12
"""Bytes of NVMe for each GPU: 8 x 3.84 TB in a DGX H100 (its datasheet)."""
V100 = 70e12
DGX2 = {"device": 32e9, "host": 1.5e12 / 16, "disk": 28e12 / 16}
PEERS = (  # where the states are, its bytes, GPUs, published parameters and where
    ("all on each V100", formulas.StateBytes(20), 1, 1.4e9, "PyTorch, 2101.06840"),
    ("ZeRO-Offload, one V100", formulas.StateBytes(2, host=18), 1, 13e9, "2101.06840"),
    ("ZeRO stage 3, a DGX-2", formulas.StateBytes(20), 16, 20e9, "2104.07857, figure 6"),
    ("host memory, a DGX-2", formulas.StateBytes(0, host=20), 16, 70e9, "2104.07857, figure 6"),
    ("NVMe, a DGX-2", formulas.StateBytes(0, disk=20), 16, 1e12, "2104.07857"),
    ("NVMe, 32 DGX-2", formulas.StateBytes(0, disk=20), 512, 32e12, "2104.07857"))
POINTS = (  # model, target, offload, optimizer, --tiling
    ("gpt2:13b", "h100:1", "optimizer", "adamw", ""), ("gpt2:13b", "h100:1", "parameters", "adamw", ""),
    ("llama:3-70b", "h100:8", "optimizer", "adamw", ""), ("llama:3-70b", "h100:8", "parameters", "adamw", ""),
    ("gpt2:1t", "h100:8x8", "parameters", "adamw", ""),
    ("gpt2:1t", "h100:7x8", "parameters", "adamw-bf16-momentum", ""),
    ("gpt2:1t", "h100:6x8", "parameters", "lion-bf16-momentum", ""),
    ("gpt2:1t", "h100:5x8", "parameters", "lion-bf16-momentum", ""),
    ("gpt2:1t", "v5p:4x4x8", "optimizer", "adamw", ""), ("gpt2:1t", "v5p:4x4x8", "parameters", "adamw", ""),
    ("gpt2:1t", "v5p:4x4x4", "optimizer", "lion-bf16-momentum", ""),
    ("gpt2:1t", "v5p:4x4x4", "optimizer", "lion-bf16-momentum", "1GiB"))
TRILLION = 1.008e12
"""Parameters of gpt2:1t."""


def table(head, rows):
    """Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def size(params):
    """A number of parameters, in words."""
    return f"{params / 1e12:.3g}T" if params >= 1e12 else f"{params / 1e9:.3g}B"


def bandwidth_table():
    """What the paper says that an efficiency takes, and the efficiency that this library's targets have by formula."""
    rows = []
    for name, intensity, paper in (
            ("parameters and gradients, 1 x 1024 tokens", formulas.params_intensity(1, 1024), "70 GB/s for 50 %"),
            ("parameters and gradients, 4 x 2048", formulas.params_intensity(4, 2048), ""),
            ("optimizer states, 2 x 1024", formulas.optimizer_intensity(2, 1024), "nearly 1.5 TB/s for 90 %"),
            ("optimizer states, 16 x 4096", formulas.optimizer_intensity(16, 4096), ""),
            ("checkpoints, width 8192", formulas.checkpoints_intensity(8192), "")):
        row = [name, f"{intensity:,.0f}", paper,
               *(f"{formulas.needed_bandwidth(intensity, share, V100) / GB:,.3g}" for share in (0.5, 0.9))]
        for text, devices in (("h100:1", 1), ("h100:8", 8), ("v5p:2x2x2", 8)):
            chip = target_of(text).chip
            # Each device moves its own shard: together as many links as devices; checkpoints are each device's own.
            links = 1 if name.startswith("checkpoints") else devices
            share = formulas.efficiency(intensity, links * chip.host_link_bandwidth * REACHED,
                                        chip.peak_flops["bf16"] * Rates().matmul)
            row.append(f"{share:.0%}")
        rows.append(row)
    return table(["moved", "FLOPs per byte", "the paper, V100", "GB/s for 50 %", "for 90 %", "h100:1", "h100:8",
                  "v5p:2x2x2"], rows)


def peers_table():
    """Published model sizes beside the memory that holds their states."""
    return table(["where", "GPUs", "fits by formula", "published", "in"], [
        # One GPU has all of the host's memory.
        [where, devices, size(states.largest_model(devices, **DGX2 | ({"host": 1.5e12} if devices == 1 else {}))),
         size(published), source] for where, states, devices, published, source in PEERS])


def scale_table():
    """The largest model whose states fit, by placement."""
    rows = []
    for text, devices in (("h100:1", 1), ("h100:8", 8), ("h100:8x8", 64), ("h100:64x8", 512),
                          ("h100:128x8", 1024), ("v5p:4x4x4", 64)):
        chip = target_of(text).chip
        limits = {"device": process_bytes(chip), "host": chip.host_memory_bytes, "disk": DISK}
        rows.append([text, *(size(states.largest_model(devices, **limits)) if chip.gpu or "disk" not in name else ""
                             for name, states in formulas.ZERO_JAX.items())])
    return table(["target", *formulas.ZERO_JAX], rows)


def width_table():
    """The widest layer without tiles."""
    rows = [["contiguous pieces of 2 GB (the paper, figure 6b)", f"{formulas.largest_hidden(2e9):,.0f}", "8K"],
            ["2 GB, 16 tiles", f"{formulas.largest_hidden(2e9, tiles=16):,.0f}", "64K"]]
    for text in ("h100:1", "v5p:2x2x1"):
        chip = target_of(text).chip
        rows.append([f"all of {text}'s memory", f"{formulas.largest_hidden(chip.memory_bytes):,.0f}", ""])
    return table(["memory for the product and its gradient", "width by formula", "published"], rows)


def planned(*options):
    """What `zero-jax plan` says of a step whose blocks are recomputed."""
    done = subprocess.run([sys.executable, "-m", "zero_jax", "plan", *options, "--remat", "full", "--json"],
                          capture_output=True, text=True, check=False)
    if not done.stdout:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout)["plan"]


def rows_of(text):
    """The rows of the compiled table of a page, by what they are of: the first cells, as in `POINTS`."""
    cells = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in text.splitlines()
             if line.startswith(tuple(f"| {point[0]} |" for point in POINTS))]
    return {tuple(row[:5]): row for row in cells}


def compiled_table(wanted):
    """What XLA makes of some steps, and their predicted times.

    wanted: numbers, models and targets of those to compile; the others are as the page has them. None: all.
    """
    rows, known = [], {} if wanted is None else rows_of(PAGE.read_text())
    for number, point in enumerate(POINTS, start=1):
        model, target, offload, optimizer, tiling = point
        if wanted is not None and not {str(number), model, target} & set(wanted):
            if point not in known:
                raise SystemExit(f"{PAGE} has no row {number}, of {' '.join(point)}: name it behind --rows.")
            rows.append(known[point])
            continue
        plan = planned("--model", model, "--target", target, "--offload", offload, "--optimizer", optimizer,
                       *(["--tiling", tiling] if tiling else []))
        moved, timing, violations = plan["transfers"], plan["timing"], plan["communication"]["violations"]
        rows.append([*point, "fits" if plan["fits"] else "does not fit",
                     f"{plan['needed_bytes'] / GIB:.1f} of {plan['memory_bytes'] / GIB:.1f}",
                     f"{plan['host_bytes'] / GIB:.1f} of {target_of(target).chip.host_memory_bytes / GIB:.1f}",
                     f"{timing['seconds']:.3g}", f"{moved['exposed_seconds']:.3g}", f"{timing['mfu']:.1%}",
                     "; ".join(violations) or "kept"])
        print(rows[-1], file=sys.stderr, flush=True)
    return table(["model", "target", "offload", "optimizer", "tiling", "", "GiB of a device", "GiB of its host",
                  "step s", "waits for host s", "MFU", "contract"], rows)


def trillion(state_bytes, devices):
    """GB of the states of 1T on each device's host."""
    return f"{state_bytes * TRILLION / devices / GB:.0f}"


def wrapped(text):
    """`text` with its paragraphs in lines of at most 120 columns; tables and headings as they are."""
    return "\n\n".join(block if block.startswith(("|", "#")) else textwrap.fill(
        " ".join(block.split()), 120, break_long_words=False, break_on_hyphens=False)
        for block in text.strip().split("\n\n")) + "\n"


def page(wanted=None):
    """The whole page; wanted: as `compiled_table` takes it."""
    set_fraction()  # as the command line does
    ten, thirty_two = (formulas.ZERO_JAX["disk"].device * params / 512 / GB for params in (10e12, 32e12))
    half = {name: states.device * 10e12 / 1024 / GB for name, states in formulas.ZERO_JAX.items()}
    return wrapped(f"""# Model scale with host memory and disks

The tables of [ZeRO-Offload](https://arxiv.org/abs/2101.06840) and [ZeRO-Infinity](https://arxiv.org/abs/2104.07857)
beside this library's figures. *Derived* is what follows from a formula, *published* what a paper measured, *compiled*
what XLA's compiler for the target allocates, *predicted* a time computed from the compiled program; nothing here was
measured on an accelerator by us.

`python scripts/tables/offload_papers.py --docs` writes this page.

## Bandwidth and efficiency (derived)

ZeRO-Infinity, section 4: efficiency is `intensity x bandwidth / (intensity x bandwidth + peak)`, of data that nothing
hides. The first two columns of bandwidth are for a V100 at the paper's 70 TFLOP/s. The targets have
{Rates().matmul:.0%} of their bf16 peak, and {REACHED:.0%} of the link of each device to its host, all of which move
shards at once.

{bandwidth_table()}

The formula has 16 bytes of optimizer states for each parameter read and written. This library moves 12 each way with
`optimizer`, and runs the update on the device; ZeRO-Offload computes it on the host and moves 2 (gradients down,
parameters up), so that of two machines with slow links and fast processors its step is shorter. What hides the copies,
as reading a layer ahead, is not in the formula; `plan` has it.

## Published model sizes (derived beside published)

A DGX-2 has 16 V100 of 32 GB, 1.5 TB of host memory and 28 TB of NVMe. The states of a parameter take 20 bytes
(ZeRO-Infinity's equation 2); the bound leaves nothing for activations.

{peers_table()}

Others, as published: 40B on one V100 with ZeRO-3 Offload and 1.5 TB of host memory (DeepSpeed's announcement of March
2021), 25B on one GH200 (SuperOffload).

## This library's bound (derived)

Parameters with AdamW and bf16 at stage 3 whose states fit, by placement; disks of {DISK / 1e12:.2f} TB for each GPU.
Activations, gathered layers and XLA's temporaries come off that.

{scale_table()}

With `disk`, as with `optimizer`, parameters and gradients stay on the device: 10T on 512 H100 take {ten:.0f} GB of the
{process_bytes(target_of("h100:1").chip) / GB:.0f} that a process has there, and 32T {thirty_two:.0f} GB, which does not
fit. Of 1,024 H100 10T take
{half["disk"]:.0f} GB of each, or {half["parameters"]:.0f} with `parameters`. On 512 V100 ZeRO-Infinity published 32T
(above): its parameters and gradients are on NVMe, where this library puts states alone.

## Compiled

One sequence on each device: 1024 tokens (gpt2), 8192 (llama). Each block is recomputed. Rows with 78.1 GiB of an H100
were compiled with `XLA_PYTHON_CLIENT_MEM_FRACTION=0.987`; `zero-jax plan` by itself counts 72.8 (92 %).

{compiled_table(wanted)}

The times of `h100:7x8` and `h100:5x8` are of before [an H100 was measured](results.md#on-one-gpu): with the copies of
both directions at once, and what is read ahead hidden. Those of the other H100s count the copies in full.

On fewer than 64 H100s host memory is what 1T lacks. AdamW's 14 bytes for each of 1.008T parameters (4 of master
weights, 8 of moments, 2 of what the model reads) are {trillion(14, 56)} GB on each of 56, of 250, and
{trillion(14, 48)} on each of 48. With its momentum in bf16 they are 12: {trillion(12, 56)} GB on each of 56, which
fits, and {trillion(12, 48)} on each of 48, which is 0.8 % more than there is; with both moments in bf16
(`narrow_moments`) {trillion(10, 48)} (derived). Lion with its momentum in bf16 has 8 bytes, {trillion(8, 40)} GB on
each of 40 and {trillion(8, 32)} on each of 32, 0.8 % more than there is. Bf16 gradients take {trillion(2, 56)},
{trillion(2, 48)} and {trillion(2, 40)} GB of each device (derived). Most weights of this model have no dim that 56 or
48 divides; they are stored padded.

Slices of v5p have 4, 8, 32, 64, 128 chips and more, whose hosts have 112 GB for each. AdamW's states of 1T take 12
bytes there with `optimizer`, {trillion(12, 128)} GB on each of 128 and {trillion(12, 64)} on each of 64, and 14 with
`parameters`, {trillion(14, 128)} on each of 128: 128 chips are the fewest by these, and with the momentum in bf16, of
which 64 chips would have {trillion(10, 64)}, too. Lion's 6 bytes are {trillion(6, 64)} on each of 64 (derived), which
their hosts hold. There the device's memory is short: beside weights and gradients of {trillion(4, 64)} GB a step has
53 GiB of temporaries. With products in tiles of at most 1 GiB it fits. On 32 chips all of the 10 bytes are
{trillion(10, 32)} GB, of the 215 that a chip and its host have.

## Width of a layer (derived)

The largest product of a block, width x 4 width, and its gradient take 16 bytes x width^2 in 16 bits (ZeRO-Infinity,
equation 4). The paper's 64K with 16 tiles exceeds what the equation gives for 2 GB: its tiles and their gradients are
apart. XLA allocates buffers once, so that fragments do not limit a width here.

{width_table()}

Compiled, on each of 8 H100s, one product of 65,536 x 65,536 with parameters in host memory takes 9,237 MiB of
temporaries whole, 2,198 in 16 tiles and 1,622 in 32, of which 1,024 are the shard of its gradient ([products in
tiles](guide/offload.md#products-in-tiles), `python scripts/tables/tiling.py --offload parameters`).
""")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--docs", action="store_true")
    parser.add_argument("--rows", nargs="+")
    arguments = parser.parse_args()
    text = page(arguments.rows)
    if arguments.docs:
        PAGE.write_text(text)
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
