"""What quantised collectives send on H100s, as a Markdown table, from compiled programs.

    python scripts/tables/quantized_bytes.py                        # minutes for each row; no accelerator
    python scripts/tables/quantized_bytes.py --targets h100:16x8    # the rows of one target

A GPT-2 of 4 layers and width 512 (38.9M parameters, vocabulary 50304) at stage 3 in bf16. Bytes are those that each
device sends in a step, per parameter: in all, and across hosts. Ideal: the bits of the formats alone for all
parameters, without scales and without the vectors that travel as they are; across hosts those of groups that have one
GPU of each host. XLA gathers and scatters bf16 in one ring over all GPUs, which crosses hosts with a little more.
ZeRO++ (arXiv 2306.10209, table 1) counts 3 M across nodes for ZeRO-3 and 0.75 M with all three techniques: 0.5 M for
the int8 weights of the forward pass, 0 for those of the backward pass (hpZ), 0.25 M for gradients of 4 bits.
"""

import argparse
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

import zero_jax
from models import gpt2
from zero_jax import Communication
from zero_jax.xla.devices import target_devices

BITS = {None: 16, "int8": 8, "fp8": 8, "int4": 4, "fp4": 4}
MODEL = gpt2.Config(4, 512, 8, remat=True)


@dataclasses.dataclass(frozen=True)
class Row:
    """A target as (hosts, GPUs of each), and what is quantised there. hpz: whether backward gathers inside a host."""

    hosts: int
    weights: str | None = None
    gradients: Any = None
    hpz: bool = False

    @property
    def target(self) -> str:
        """As `plan --target` takes it."""
        return "h100:8" if self.hosts == 1 else f"h100:{self.hosts}x8"

    @property
    def name(self) -> str:
        """What is sent, in words."""
        gradients = "/".join(self.gradients) if isinstance(self.gradients, tuple) else self.gradients
        return f"{self.weights or 'bf16'}, {gradients or 'bf16'}{', hpZ' if self.hpz else ''}"

    @property
    def ideal(self) -> tuple[float, float]:
        """Bytes per parameter in all, and across hosts."""
        inside, across = self.gradients if isinstance(self.gradients, tuple) else (self.gradients,) * 2
        weights = BITS[self.weights] / 8
        if self.hosts == 1:
            return 7 / 8 * (2 * weights + BITS[inside] / 8), 0.0
        remote = (self.hosts - 1) / self.hosts / 8  # each device's eighth goes to the other hosts
        gathers = weights * remote * (1 if self.hpz else 2)
        sums = BITS[across] / 8 * remote
        return gathers + sums + 7 / 8 * (2 * weights + BITS[inside] / 8), gathers + sums


ROWS = [Row(1), Row(1, "int8"), Row(1, "int8", "int8"), Row(1, "int4", "int4"),
        Row(16), Row(16, hpz=True), Row(16, "int8", ("int4", "int8"), hpz=True),
        Row(16, "int8", ("int8", "fp4"), hpz=True), Row(16, "int8", "int4", hpz=True),
        Row(16, "int4", "int4", hpz=True), Row(128), Row(128, "int8", ("int8", "fp4"), hpz=True),
        Row(128, "int8", "int4", hpz=True)]


def measure(row: Row) -> tuple[float, float, float]:
    """Bytes sent per parameter, those across hosts, and the share of them that is asynchronous."""
    mesh = zero_jax.make_mesh(8 if row.hosts == 1 else (row.hosts, 8), devices=target_devices(row.target))
    step = zero_jax.make_zero_train_step(
        gpt2.build(MODEL), 3, mesh=mesh, precision="bf16", communication=Communication(
            hpz_axes="data_1" if row.hpz else (), weights=row.weights, gradients=row.gradients))
    tokens = jax.ShapeDtypeStruct((mesh.size, 1024), jnp.int32)
    compiled = step.compiled_step({"inputs": tokens, "targets": tokens})
    compiled.verify()
    sent = [(c.communication_bytes * c.count, c) for c in compiled.collectives]
    total = sum(size for size, _ in sent)
    # In a ring over all GPUs an eighth of the links leaves a host.
    remote = sum(size / (8 if "data_1" in axes else 1) for size, c in sent if "data_0" in (axes := c.axes(mesh.shape)))
    return (total / MODEL.num_params, remote / MODEL.num_params,
            sum(size for size, c in sent if c.asynchronous) / total)


def main() -> None:
    """Prints a row for each of `ROWS`; those of a target follow the one of bf16."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    targets = list(dict.fromkeys(row.target for row in ROWS))
    parser.add_argument("--targets", nargs="+", default=targets, choices=targets)
    parser.add_argument("--rows", nargs="+", default=[row.name for row in ROWS], help="\"bf16, bf16\" before others")
    args = parser.parse_args()
    print("| GPUs | weights, gradients | bytes | over ideal | asynchronous | across hosts | over ideal | of bf16's |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    base: dict[str, float] = {}
    for row in ROWS:
        if row.target in args.targets and row.name in args.rows:
            total, remote, share = measure(row)
            ideal, ideal_remote = row.ideal
            base.setdefault(row.target, remote)
            across = (f"{remote:.3f} | {remote / ideal_remote:.3f} | {remote / base[row.target]:.3f}" if ideal_remote
                      else "- | - | -")
            print(f"| {row.target} | {row.name} | {total:.3f} | {total / ideal:.3f} | {share:.0%} | {across} |",
                  flush=True)


if __name__ == "__main__":
    main()
