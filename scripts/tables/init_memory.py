"""Device memory of `init` with parameters in files, compiled piece by piece, beside that of all at once, as a table.

    python scripts/tables/init_memory.py                         # GPT-2 1T, 10T and 32T on 512 H100: five minutes
    python scripts/tables/init_memory.py --models 124m --target h100:8
    python scripts/tables/init_memory.py --docs                  # puts the table into docs/offload_scale.md

Models of 10T and more have the axis `tensor` of 8 and 50,304 tokens, as in the table of their steps. `at once` is the
program that makes all fp32 parameters, sharded, as `init` does without parameters in files (of the optimizer's states
that are in memory none is counted). `largest piece` is the program that takes the most of those that `init` runs one
after another, with what it makes; `stays` is what of the state stays in device memory beside them. `save` and `restore`
are the programs that take the most of those by which a checkpoint of it is saved and restored, leaf by leaf and layer
by layer, with what they are given and return.
"""

import argparse
import dataclasses
import pathlib
import tempfile

import jax
import jax.numpy as jnp

import zero_jax
from models import gpt2
from zero_jax.checkpoint.logical_pieces import LogicalPieces
from zero_jax.checkpoint.logical_state import logical_state_of
from zero_jax.sharding.memory.disk_leaves import in_arrays
from zero_jax.xla.devices import target_devices
from zero_jax.xla.targets import target_of

MIB, GIB = 2**20, 2**30
PAGE = pathlib.Path(__file__).parents[2] / "docs" / "offload_scale.md"
COLUMNS = ("model", "target", "parameters", "at once GiB", "largest piece MiB", "which", "stays MiB", "pieces",
           "save MiB", "restore MiB")


def device_bytes(lowered):
    """Bytes that a program takes on each device: of what it makes and on the way; it reads keys."""
    memory = lowered.compile().memory_analysis()
    return memory.temp_size_in_bytes + memory.output_size_in_bytes


def checkpoint_bytes(layout, layers):
    """Bytes that the largest programs of saving and of restoring what is in files take on each device.

    layers: names of the stacked parameters. Their moments have their shape and dtype, and so their programs.
    """
    pieces, sizes = LogicalPieces(logical_state_of(in_arrays(layout))), [0, 0]
    moments = [each.removeprefix("params") for each in layers]
    others = [each for each in layout.disk if not each.startswith("weights/") and each not in layers and not (
        each.startswith("opt_state/") and each.endswith(tuple(moments)))]
    for each, layer in [*((each, True) for each in sorted(layers)), *((each, False) for each in sorted(others))]:
        for at, lowered in enumerate(pieces.lower(each, layer=layer)):
            memory = lowered.compile().memory_analysis()
            sizes[at] = max(sizes[at], memory.argument_size_in_bytes + memory.temp_size_in_bytes
                            + memory.output_size_in_bytes)
    return sizes


def row(name, target):
    """One row of the table."""
    large = name in ("10t", "32t")
    config = gpt2.PRESETS[name]
    config = dataclasses.replace(config, vocab_size=50304) if large else config
    options = {"tensor_rules": gpt2.tensor_rules(config)} if large else {}
    mesh = zero_jax.make_mesh(devices=target_devices(target_of(target)), **({"tensor": 8} if large else {}))
    tokens = jax.ShapeDtypeStruct((mesh.size, config.max_length), jnp.int32)
    batch = {"inputs": tokens, "targets": tokens}
    step = zero_jax.make_zero_train_step(
        gpt2.build(config), 3, mesh=mesh, precision="bf16", remat="full",
        offload=zero_jax.Offload(disk=tempfile.gettempdir(), parameters="disk"), **options)
    initial, layout = step.initial_values(jax.eval_shape(lambda: jax.random.key(0)), batch), step.layout(batch)
    stacks = {f"params/{each.partition('/')[2]}" for each in layout.disk_layers}
    pieces = {f"a layer of {each.partition('/')[2]}": initial.lower_layer(each) for each in stacks}
    pieces |= {each.partition("/")[2] or each: initial.lower([each]) for each in initial.names if each not in stacks}
    sizes = {piece: device_bytes(lowered) for piece, lowered in sorted(pieces.items())}
    largest = max(sizes, key=sizes.__getitem__)
    whole = device_bytes(initial.lower(initial.names))
    return (f"gpt2:{name}", target, f"{config.num_params / 1e12:.3g}T", f"{whole / GIB:,.2f}",
            f"{sizes[largest] / MIB:,.1f}", largest, f"{layout.device_bytes / MIB:,.1f}", len(sizes),
            *(f"{each / MIB:,.1f}" for each in checkpoint_bytes(layout, stacks)))


def table_of(text):
    """The lines of the table in a page."""
    head = "| " + " | ".join(COLUMNS) + " |\n"
    before, found, behind = text.partition(head)
    if not found:
        raise SystemExit(f"{PAGE} has no table with the columns {', '.join(COLUMNS)}.")
    lines = behind.splitlines(keepends=True)
    end = next((number for number, line in enumerate(lines) if not line.startswith("|")), len(lines))
    return head + "".join(lines[:end])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["1t", "10t", "32t"], choices=sorted(gpt2.PRESETS))
    parser.add_argument("--target", default="h100:64x8")
    parser.add_argument("--docs", action="store_true", help="put the table into docs/offload_scale.md")
    arguments = parser.parse_args()
    lines = [COLUMNS, ("---",) * len(COLUMNS)]
    for name in arguments.models:
        lines.append(row(name, arguments.target))
        print(lines[-1], flush=True)
    table = "".join("| " + " | ".join(map(str, line)) + " |\n" for line in lines)
    if arguments.docs:
        PAGE.write_text(PAGE.read_text().replace(table_of(PAGE.read_text()), table))
    else:
        print(table, end="")


if __name__ == "__main__":
    main()
