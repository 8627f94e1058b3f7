"""State, temporaries and wire bytes of compiled steps on hardware that is not there, as a Markdown table.

    python scripts/wire_table.py            # three to six minutes on 2 cores; no accelerator

Each step is compiled by the target's own compiler, and read: state and temporaries are per device, wire is what each
device sends, over the paper's 2 psi (stages 1 and 2) or 3 psi (stage 3) in bf16 on a ring, and the largest share of
it that is not a gather or a scatter.
"""

import argparse

import jax
import jax.numpy as jnp

import zero_jax
from models import gpt2
from zero_jax import hardware, hlo
from zero_jax.stages import STAGES


def row(target, preset, stage, length):
    mesh = zero_jax.make_mesh(devices=hardware.describe(target))
    config = gpt2.PRESETS[preset]
    step = zero_jax.make_zero_train_step(gpt2.build(config), stage, mesh=mesh, precision="bf16")
    batch = {name: jax.ShapeDtypeStruct((mesh.size, length), jnp.int32) for name in ("inputs", "targets")}
    compiled = step.lower(batch).compile(compiler_options=hardware.compiler_options(mesh.devices.flat[0]))
    found = hlo.collectives(compiled.as_text())
    theory = STAGES[stage].wire * config.num_params * 2 * (mesh.size - 1) / mesh.size
    sent = sum(c.wire_bytes * c.count for c in found)
    other = sum(c.wire_bytes * c.count for c in found if c.kind not in ("all-gather", "reduce-scatter"))
    temporaries = compiled.memory_analysis().temp_size_in_bytes
    return (f"| {target} | {preset} | {stage} | {step.layout(batch).device_bytes / 2**20:,.0f} | "
            f"{temporaries / 2**20:,.0f} | {sent / 1e6:,.0f} | {sent / theory:.3f} | {other / theory:.3f} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=1024, help="tokens on each device")
    args = parser.parse_args()
    print(f"jax {jax.__version__}, one sequence of {args.length} tokens on each device, bf16 with fp32 master")
    print("| target | model | stage | state MiB | temporaries MiB | wire MB | over theory | not gather or scatter |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for target, presets in {"h100:8": ("124m", "1.5b"), "v5e:2x4": ("124m",)}.items():
        for preset in presets:
            for stage in (1, 2, 3):
                print(row(target, preset, stage, args.length), flush=True)


if __name__ == "__main__":
    main()
