"""Memory of each device and of its host with states and parameters in host memory, compiled, as a Markdown table.

    python scripts/tables/offload.py                             # GPT-2 1.5B on 8 H100, stage 3: three minutes
    python scripts/tables/offload.py --model 124m --target v5p:2x2x1 --stages 1 2
    python scripts/tables/offload.py --model 1t --target h100:8x8 --offload parameters --remat full --docs

`--docs` puts the table into docs/guide/offload.md, in the place of the one that the same arguments made.
`params up` is what comes up of parameters in a step, `ahead` what of it loops read an iteration ahead. `ideal` is what
the offloaded leaves take unpadded and divided by the devices that shard them; `update` are the temporaries, alive at
one time, of what the streamed update reads, computes and writes. With `--accumulate` each device has
`--batch-per-device` sequences in each microbatch, and `sums down` and `sums up` are what backward writes and reads of
the gradients' sums.
"""

import argparse
import dataclasses
import pathlib
import re
import shlex
import sys

import jax
import jax.numpy as jnp

import zero_jax
from models import gpt2
from zero_jax.contract.host import bytes_of
from zero_jax.offload.host_update import STREAM_SCOPE
from zero_jax.sharding.partition import parts_of
from zero_jax.xla.devices import target_devices
from zero_jax.xla.liveness import Buffers

MIB, GIB = 2**20, 2**30
GUIDE = pathlib.Path(__file__).parents[2] / "docs" / "guide" / "offload.md"
COLUMNS = ("target", "model", "stage", "offload", "device GiB", "state MiB", "temporaries MiB", "host MiB",
           "over ideal", "in place MiB", "host temporaries MiB", "update MiB", "params up MiB", "ahead MiB", "contract")


NOT_UPDATE = ("while", "get-tuple-element", "tuple", "parameter",
              # Of a gradient, which XLA may name after what reads it.
              "reduce-scatter-start", "reduce-scatter-done", "reduce-scatter")


def update_bytes(module):
    """The most bytes of temporaries that the streamed update holds at one time."""
    buffers = Buffers(module)
    of_update = [each for each in buffers.temporaries
                 if any(STREAM_SCOPE in buffers.module.metadata(value.instruction)[0] for value in each.values
                        if value.instruction.opcode not in NOT_UPDATE)]
    return sum(each.bytes for each in buffers.at_peak(of_update)[1])


def param_reads(compiled):
    """What comes up of parameters in a step, and what of it an iteration ahead, as two cells."""
    budget = compiled.contract.host
    if budget is None or not budget.param_bytes:
        return ["", ""]
    reads = compiled.host_use.param_reads(budget)
    return [f"{sum(read.bytes * read.runs for read in some) / MIB:,.1f}"
            for some in (reads, [read for read in reads if read.is_ahead])]


def gradient_sums(compiled):
    """What backward writes to host memory of sums over microbatches, and reads, as two cells."""
    budget, use = compiled.contract.host, compiled.host_use
    if budget is None or not budget.gradients:
        return ["", ""]
    return [f"{bytes_of(some) / MIB:,.1f}" for some in (use.writes, use.stack_reads)]


def row(target, model, stage, offload, batch_per_device, remat, vocab, accumulate):
    """A line of the table."""
    config = gpt2.PRESETS[model] if vocab is None else dataclasses.replace(gpt2.PRESETS[model], vocab_size=vocab)
    mesh = zero_jax.make_mesh(devices=target_devices(target))
    step = zero_jax.make_zero_train_step(gpt2.build(config), stage, mesh=mesh, precision="bf16", offload=offload,
                                          remat=remat, accumulate=accumulate)
    shape = (batch_per_device * accumulate * mesh.size, config.max_length)
    batch = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name in ("inputs", "targets")}
    compiled, layout = step.compiled_step(batch), step.layout(batch)
    memory = compiled.memory
    ideal = sum(each.bytes / parts_of(each.spec, mesh.shape) for each in layout.placements() if each.memory == "host")
    cells = [target, model, str(stage), offload or "none", f"{compiled.device_bytes / GIB:.3f}",
             f"{layout.device_bytes / MIB:,.0f}", f"{memory.temp_size_in_bytes / MIB:,.0f}",
             f"{memory.host_argument_size_in_bytes / MIB:,.1f}",
             f"{memory.host_argument_size_in_bytes / ideal:.4f}" if ideal else "",
             f"{memory.host_alias_size_in_bytes / MIB:,.1f}", f"{memory.host_temp_size_in_bytes / MIB:,.1f}",
             f"{update_bytes(compiled.module) / MIB:,.1f}" if offload else "", *param_reads(compiled),
             *(gradient_sums(compiled) if accumulate > 1 else []),
             "kept" if not compiled.report.violations else "; ".join(compiled.report.violations)]
    return "| " + " | ".join(cells) + " |"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="h100:8")
    parser.add_argument("--model", default="1.5b", choices=sorted(gpt2.PRESETS))
    parser.add_argument("--stages", type=int, nargs="+", default=[3])
    parser.add_argument("--batch-per-device", type=int, default=1)
    parser.add_argument("--offload", nargs="+", default=["none", "optimizer", "parameters"])
    parser.add_argument("--remat")
    parser.add_argument("--vocab-size", type=int)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--docs", action="store_true")
    arguments = parser.parse_args()
    sums = ("sums down MiB", "sums up MiB") if arguments.accumulate > 1 else ()
    columns = (*COLUMNS[:-1], *sums, COLUMNS[-1])
    lines = ["| " + " | ".join(columns) + " |", "| --- " * len(columns) + "|"]
    print("\n".join(lines))
    for stage in arguments.stages:
        for offload in arguments.offload:
            if offload not in ("parameters", "gradients") or stage == 3:
                lines.append(row(arguments.target, arguments.model, stage, None if offload == "none" else offload,
                                 arguments.batch_per_device, arguments.remat, arguments.vocab_size,
                                 arguments.accumulate))
                print(lines[-1], flush=True)
    if arguments.docs:
        put_into_docs([each for each in sys.argv[1:] if each != "--docs"], lines)


def put_into_docs(arguments, lines):
    """Writes the table that `arguments` made between its command and the next blank line of the guide."""
    command = shlex.join(["python", "scripts/tables/offload.py", *arguments])
    text, count = re.subn(rf"(`{re.escape(command)}`[^|]*\n\n)(?:\|.*\n)+",
                          lambda match: match[1] + "\n".join(lines) + "\n", GUIDE.read_text())
    if count != 1:
        raise SystemExit(f"{GUIDE} has {count} tables behind `{command}`, not one.")
    GUIDE.write_text(text)


if __name__ == "__main__":
    main()
