"""Memory of each device and of its host with the optimizer's states in host memory, compiled, as a Markdown table.

    python scripts/tables/offload.py                             # GPT-2 1.5B on 8 H100, stage 3: three minutes
    python scripts/tables/offload.py --model 124m --target v5p:2x2x1 --stages 1 2

`ideal` is what the offloaded leaves take unpadded and divided by the devices that shard them; `update` are the
temporaries, alive at one time, of what the streamed update reads, computes and writes.
"""

import argparse

import jax
import jax.numpy as jnp

import zero_jax
from models import gpt2
from zero_jax.optim.streamed_update import STREAM_SCOPE
from zero_jax.sharding.partition import parts_of
from zero_jax.xla.devices import target_devices
from zero_jax.xla.liveness import Buffers

MIB, GIB = 2**20, 2**30


def update_bytes(module):
    """The most bytes of temporaries that the streamed update holds at one time."""
    buffers = Buffers(module)
    of_update = [each for each in buffers.temporaries
                 if any(STREAM_SCOPE in buffers.module.metadata(value.instruction)[0] for value in each.values
                        if value.instruction.opcode not in ("while", "get-tuple-element", "tuple", "parameter"))]
    return sum(each.bytes for each in buffers.at_peak(of_update)[1])


def row(target, model, stage, offload, batch_per_device):
    """A line of the table."""
    config = gpt2.PRESETS[model]
    mesh = zero_jax.make_mesh(devices=target_devices(target))
    step = zero_jax.make_zero_train_step(gpt2.build(config), stage, mesh=mesh, precision="bf16", offload=offload)
    shape = (batch_per_device * mesh.size, config.max_length)
    batch = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name in ("inputs", "targets")}
    compiled, layout = step.compiled_step(batch), step.layout(batch)
    memory = compiled.memory
    ideal = sum(each.bytes / parts_of(each.spec, mesh.shape) for each in layout.placements() if each.memory == "host")
    cells = [target, model, str(stage), offload or "none", f"{compiled.device_bytes / GIB:.3f}",
             f"{layout.device_bytes / MIB:,.0f}", f"{memory.temp_size_in_bytes / MIB:,.0f}",
             f"{memory.host_argument_size_in_bytes / MIB:,.1f}",
             f"{memory.host_argument_size_in_bytes / ideal:.4f}" if ideal else "",
             f"{memory.host_alias_size_in_bytes / MIB:,.1f}", f"{memory.host_temp_size_in_bytes / MIB:,.1f}",
             f"{update_bytes(compiled.module) / MIB:,.1f}" if offload else "",
             "kept" if not compiled.report.violations else "; ".join(compiled.report.violations)]
    return "| " + " | ".join(cells) + " |"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="h100:8")
    parser.add_argument("--model", default="1.5b", choices=sorted(gpt2.PRESETS))
    parser.add_argument("--stages", type=int, nargs="+", default=[3])
    parser.add_argument("--batch-per-device", type=int, default=1)
    arguments = parser.parse_args()
    names = ("target", "model", "stage", "offload", "device GiB", "state MiB", "temporaries MiB", "host MiB",
             "over ideal", "in place MiB", "host temporaries MiB", "update MiB", "contract")
    print("| " + " | ".join(names) + " |\n" + "| --- " * len(names) + "|")
    for stage in arguments.stages:
        for offload in (None, "optimizer"):
            print(row(arguments.target, arguments.model, stage, offload, arguments.batch_per_device), flush=True)


if __name__ == "__main__":
    main()
