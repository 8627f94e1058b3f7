"""ZeRO-100B on its own cluster, compiled: Table 3, Figure 6, 170B and Turing-NLG with this library's real step.

    python scripts/paper/zero100b.py            # the paper's sizes, 8 compilations: 10 minutes on 2 cores
    python scripts/paper/zero100b.py --search   # and the deepest model of each configuration: an hour

25 DGX-2 of 16 V100 with 32 GB, model parallelism 16, N_d = 25, fp16. Today's toolchains no longer compile for Volta:
the target has its memory, rates and topology on Ampere, the oldest architecture that they compile for. Vocabularies are
padded to divide by 16, as Megatron does. The exit status is 1 if a configuration of the paper does not fit, or if the
order of sizes contradicts the paper's.

This library's stages 1 and 2 are one program where a batch is one microbatch, since gradients are scattered as they
arise: its P_os has the memory of P_os+g, so that C1 is C3 here, and C2 is C4.
"""

import argparse
import dataclasses
import sys
import time

import jax
import jax.numpy as jnp
from printed import TABLE_3, TABLE_3_ORDER
from rich import box
from rich.table import Table
from runs import RUNS

import zero_jax
from models import gpt2
from models.gpt2 import PRESETS
from zero_jax.cli.reports.report import make_console
from zero_jax.planning.search import deepest
from zero_jax.xla.targets import target_of

LENGTH, VOCAB = 1024, 50304
TARGET, TURING = target_of("v100-32gb:25x16"), target_of("v100-32gb:16x16")


@dataclasses.dataclass(frozen=True)
class Case:
    """A configuration: its model, its options, and the paper's GB per GPU (states + checkpoints)."""

    name: str
    config: gpt2.Config
    stage: int
    batch: int
    options: dict
    paper: str = ""
    tensor: int = 16
    target: object = TARGET

    def build(self, layers=None):
        """The model, with `layers` layers."""
        config = dataclasses.replace(self.config, vocab_size=VOCAB)
        return gpt2.build(config if layers is None else dataclasses.replace(config, num_layers=layers))

    def arguments(self):
        """The arguments of `zero_jax.plan` after the model."""
        shape = (self.batch * self.target.num_devices // self.tensor, LENGTH)
        batch = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name in ("inputs", "targets")}
        return self.stage, self.target, batch, {
            "tensor": self.tensor, "precision": "fp16",
            "parallelism": zero_jax.Parallelism(tensor_rules=gpt2.tensor_rules(self.config)), **self.options}


def cases():
    """C1 to C5 at the sizes of Figure 6, 170B, and Turing-NLG."""
    for run in RUNS:
        if run.figure == 6:
            stage, split, host = TABLE_3[run.system][:3]
            states, checkpoints = TABLE_3[run.system][5:7]
            options = {"partition_activations": "cpu" if host else split}
            yield Case(run.system, run.config, stage, run.batch, options, f"{states} + {checkpoints}")
    largest = next(run for run in RUNS if (run.figure, run.preset) == (8, "170b"))
    yield Case("170B", largest.config, 2, largest.batch, {"partition_activations": "cpu"}, "fits")
    yield Case("Turing-NLG", PRESETS["17b"], 1, 8, {}, "trained", tensor=4, target=TURING)
    yield Case("C5, stage 3", PRESETS["150b"], 3, 16, {"partition_activations": "cpu"}, "")


def billions(config, layers=None):
    """The paper's measure of size: 12 L h^2."""
    return 12 * (layers or config.num_layers) * config.width**2 / 1e9


def table(title):
    """An empty table of plans."""
    columns = Table(title=title, box=box.SIMPLE, title_justify="left")
    for name in ("", "layers x hidden", "12Lh^2", "stage", "P_a", "state GB", "temp GB", "host GB", "needed GB",
                 "of GB", "fits", "paper: GB", "seconds"):
        columns.add_column(name, justify="left" if not name else "right")
    return columns


def row(case, plan, seconds, layers=None):
    """A plan as a row of the table."""
    state = plan.layout.device_bytes
    numbers = (state, plan.needed_bytes - state, plan.host_bytes, plan.needed_bytes, plan.memory_bytes)
    return (case.name, f"{layers or case.config.num_layers} x {case.config.width}",
            f"{billions(case.config, layers):.1f}B", str(case.stage),
            str(case.options.get("partition_activations", "")),
            *(f"{number / 1e9:.2f}" for number in numbers), "yes" if plan.fits else "NO", case.paper, f"{seconds:.0f}")


def main():
    """Compiles, prints, and returns whether the results agree with the paper."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--search", action="store_true", help="find the deepest model of each configuration")
    parser.add_argument("--only", nargs="*", default=[], help="names of configurations")
    args = parser.parse_args()
    console, wrong, deepest_of = make_console(120), [], {}
    chosen = [case for case in cases() if not args.only or case.name in args.only]
    if unknown := set(args.only) - {case.name for case in chosen}:
        parser.error(f"--only {sorted(unknown)}: there are {[case.name for case in cases()]}.")
    shown = table("The paper's configurations, compiled: bytes per GPU")
    for case in chosen:
        began = time.perf_counter()
        stage, target, batch, options = case.arguments()
        with console.status(f"{case.name}: compiling {billions(case.config):.0f}B ..."):
            plan = zero_jax.plan(case.build(), stage, target, batch, **options)
        shown.add_row(*row(case, plan, time.perf_counter() - began))
        if not plan.fits:
            wrong.append(f"{case.name} does not fit")
    console.print(shown)
    if args.search:
        shown = table("The deepest model of the same width that fits")
        for case in chosen:
            began = time.perf_counter()
            stage, target, batch, options = case.arguments()
            with console.status(f"{case.name}: searching ..."):
                result = deepest(case.build, stage, target, batch, **options)
            deepest_of[case.name] = billions(case.config, result.size)
            shown.add_row(*row(case, result.plan, time.perf_counter() - began, result.size))
        console.print(shown)
        order = [name for name in TABLE_3_ORDER.split(" < ") if name in deepest_of]
        sizes = [deepest_of[name] for name in order]
        if len(order) > 1:
            console.print(f"{' < '.join(order)} in size: {', '.join(f'{size:.0f}B' for size in sizes)}")
        if sizes != sorted(sizes):
            wrong.append("the order of sizes contradicts the paper's")
    for line in wrong:
        console.print(f"[red]{line}[/red]")
    return not wrong


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
