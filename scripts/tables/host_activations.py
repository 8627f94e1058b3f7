"""Checkpoints of activations on the device, in host memory, and there without reading ahead, compiled.

    python scripts/tables/host_activations.py                        # GPT-2 124M, 8 sequences for each of 8 H100
    python scripts/tables/host_activations.py --targets v5e:2x4

`remat="full"` at stage 3 in bf16. `checkpoints` is the input of each block by formula; `ahead` is what backward's loop
reads of them for its next iteration.
"""

import argparse

import jax
import jax.numpy as jnp

import zero_jax
from models import gpt2
from zero_jax.xla.devices import target_devices
from zero_jax.xla.host_copies import host_prefetch_options

MIB = 2**20
COLUMNS = ("target", "checkpoints", "by formula MiB", "temporaries MiB", "host MiB", "read MiB", "ahead MiB",
           "device MiB", "contract")
WAYS = {"device": {}, "host": {"partition_activations": "cpu"}, "host, waiting": {"partition_activations": "cpu"}}


def row(target, model, rows, way):
    """A line of the table."""
    config, mesh = gpt2.PRESETS[model], zero_jax.make_mesh(devices=target_devices(target))
    step = zero_jax.make_zero_train_step(gpt2.build(config), 3, mesh=mesh, precision="bf16", remat="full", **WAYS[way])
    batch = {name: jax.ShapeDtypeStruct((rows * mesh.size, config.max_length), jnp.int32)
             for name in ("inputs", "targets")}
    step.layout(batch)  # by which XLA's options are known
    if "waiting" in way:
        for name in host_prefetch_options(mesh.devices.flat[0]):
            step.programs.compiler_options.pop(name)
    compiled = step.compiled_step(batch)
    reads = () if compiled.host_use is None else compiled.host_use.stack_reads
    formula = config.num_layers * rows * config.max_length * config.width * 2
    sizes = (formula, compiled.memory.temp_size_in_bytes, compiled.memory.host_temp_size_in_bytes,
             sum(read.bytes * read.runs for read in reads),
             sum(read.bytes * read.runs for read in reads if read.is_ahead), compiled.device_bytes)
    cells = [target, way, *(f"{size / MIB:,.0f}" for size in sizes),
             "; ".join(compiled.report.violations) or "kept"]
    return "| " + " | ".join(cells) + " |"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", nargs="+", default=["h100:8"])
    parser.add_argument("--model", default="124m", choices=sorted(gpt2.PRESETS))
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--batch-per-device", type=int, default=8)
    arguments = parser.parse_args()
    print("| " + " | ".join(COLUMNS) + " |\n" + "| --- " * len(COLUMNS) + "|")
    for target in arguments.targets:
        for way in arguments.ways:
            if way == "host, waiting" and target_devices(target)[0].platform == "tpu":
                continue
            print(row(target, arguments.model, arguments.batch_per_device, way), flush=True)


if __name__ == "__main__":
    main()
