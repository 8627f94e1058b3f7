"""Figures 2 to 4 of the ZeRO paper, predicted: the throughput of its runs on 25 DGX-2, by zero_jax.xla.timing.

    python scripts/paper/throughput.py              # a second; writes runs/paper/figures2to4.png
    python scripts/paper/throughput.py --compile    # and GPT-2 1.5B, compiled for 8 H100s and for a v5p slice: minutes

Every run is one of runs.py, by formula (`transformer_workload`): ZeRO as P_os+g with P_a, Megatron and DDP as
stage 0. TFlops are Megatron's count, recomputation included, as the paper's. One constant is fitted, on one figure,
and one, the 12.5 GB/s of a ring across nodes, is the paper's; "all cards" is without it. Each printed number is
beside its prediction. The exit status is 1 if the shape of a figure does not hold.
"""

import argparse
import dataclasses
import math
import statistics
import sys
from pathlib import Path

import arithmetic
import jax
import jax.numpy as jnp
import workload
from rich import box
from rich.table import Table
from runs import RUNS, Run

import zero_jax
from models import gpt2
from models.gpt2 import PRESETS
from zero_jax.cli.reports.report import make_console
from zero_jax.xla import devices as xla_devices
from zero_jax.xla import timing
from zero_jax.xla.schedule import schedule
from zero_jax.xla.targets import target_of

TARGET, LENGTH = target_of("v100-32gb:25x16"), 1024
# Figure 5. GPUs and batch are not in the paper: its authors' announcement (February 2020) has 256, and 512 in all.
TURING = Run(5, "17b", 256, 4, 28, 8, 512)


def predict(run, rates=None):
    config, groups = run.config, run.gpus // run.tensor_parallel
    step = workload.transformer_workload(
        layers=config.num_layers, hidden=config.width, heads=run.heads, batch=run.batch, length=LENGTH,
        vocab=config.vocab_size, data=groups, tensor=run.tensor_parallel, stage=0 if run.baseline else 2,
        split_checkpoints=not run.baseline)
    return step.predict(TARGET, rates or workload.DGX2_RATES)


def tflops(timing):
    """TFlops of a GPU, recomputation included."""
    return timing.hfu * TARGET.chip.peak_flops["bf16"] / 1e12


@dataclasses.dataclass(frozen=True)
class Predictions:
    """What the figures show, from the timings of `RUNS`."""

    timings: dict

    def of(self, figure, *, baseline=False):
        """TFlops per GPU by preset, or by the number of GPUs in Figure 3."""
        return {run.gpus if figure == 3 else run.preset: tflops(timing) for run, timing in self.timings.items()
                if run.figure == figure and run.baseline == baseline}

    @property
    def ratios(self):
        """ZeRO over Megatron, by preset."""
        slow = self.of(2, baseline=True)
        return {preset: fast / slow[preset] for preset, fast in self.of(2).items()}

    @property
    def best_ratio(self):
        """The largest of them up to 100B."""
        return max(ratio for preset, ratio in self.ratios.items() if float(preset.rstrip("b")) <= 100)

    @property
    def aggregate(self):
        """PFlops of Figure 3 by the number of GPUs."""
        return {gpus: gpus * each / 1e3 for gpus, each in self.of(3).items()}

    @property
    def middle(self):
        """TFlops per GPU of 8B to 100B in Figure 2."""
        return [each for preset, each in self.of(2).items() if 8 <= float(preset.rstrip("b")) <= 100]


def known(p):
    """(what, printed, ours, note): a leading > or < is a bound."""
    return (
        ("100B on 400 GPUs, TFlops per GPU", "38", p.of(2)["100b"], "fitted: Rates.matmul; the paper has > 38"),
        ("8B to 100B on 400 GPUs, mean, PFlops", "15", 0.4 * statistics.mean(p.middle), ""),
        ("Megatron 40B across two DGX-2, TFlops per GPU", "5", p.of(2, baseline=True)["40b"], ""),
        ("ZeRO over Megatron up to 100B, at most", "10", p.best_ratio, "the paper: up to 10x"),
        ("60B, PFlops of 128 GPUs over those of 64", ">2", p.aggregate[128] / p.aggregate[64], ""),
        ("60B, PFlops of 256 GPUs over those of 128", ">2", p.aggregate[256] / p.aggregate[128],
         "both have batch 48, so nothing is gained"),
        ("1.5B to 13B, no MP, mean, TFlops per GPU", ">40", statistics.mean(p.of(4).values()), ""),
        ("DDP 1.38B, 128 GPUs, TFlops per GPU", "<20", p.of(4, baseline=True)["1.38b"], ""),
        ("DDP 1.16B, 128 GPUs, TFlops per GPU", "<20", p.of(4, baseline=True)["1.16b"],
         "the paper says < 20 of its largest, 1.4B"),
        ("Turing-NLG 17B, 256 GPUs, TFlops per GPU", "41.4", tflops(predict(TURING)), "batch not from the paper"),
    )


def error(printed, ours):
    """Relative error; of a bound that holds 0."""
    if printed.startswith((">", "<")):
        bound = float(printed[1:])
        return 0.0 if (ours > bound) == (printed[0] == ">") else ours / bound - 1
    return ours / float(printed) - 1


def shapes(p):
    """(what, whether it holds)."""
    inside, outside = (
        [p.ratios[run.preset] for run in RUNS if run.figure == 2 and run.baseline
         and (run.tensor_parallel > TARGET.chip.gpu.gpus_per_host) == crosses] for crosses in (False, True))
    linear = p.aggregate[64] / 64
    last = [p.of(2)[preset] for preset in ("100b", "120b", "140b", "170b")]
    yield "Fig. 2: ZeRO is faster at every size", min(p.ratios.values()) > 1
    yield "Fig. 2: by less than 2 where Megatron fits a node, by 5 or more where it does not", (
        max(inside) < 2 and min(outside) > 5)
    yield "Fig. 2: at most by 5 to 20 up to 100B", 5 < p.best_ratio < 20
    yield "Fig. 2: 8B to 100B run at 15 PFlops on average, within a fifth", 12 < 0.4 * statistics.mean(p.middle) < 18
    yield "Fig. 2: beyond 100B ZeRO loses a little, with smaller batches", (
        last == sorted(last, reverse=True) and last[-1] > 0.8 * last[0])
    yield "Fig. 3: more than linear from 64 GPUs on", all(
        total > linear * gpus for gpus, total in p.aggregate.items() if gpus > 64)
    yield "Fig. 3: 128 GPUs do more than twice of 64, 256 twice of 128 within 1 %", (
        p.aggregate[128] > 2 * p.aggregate[64] and p.aggregate[256] > 1.98 * p.aggregate[128])
    yield "Fig. 4: above 40 TFlops per GPU on average", statistics.mean(p.of(4).values()) > 40
    yield "Fig. 4: DDP's largest has less than 20, and less than any of ZeRO", (
        p.of(4, baseline=True)["1.38b"] < min(20, *p.of(4).values()))


def make_table(title, columns):
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left")
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index == 0 or not name else "right")
    return table


def runs_table(figure, p):
    """The runs of a figure; column "all cards" gives each group the whole network of a node."""
    table = make_table(f"Figure {figure}", (
        "model", "system", "GPUs", "MP", "batch", "step s", "TFlops/GPU", "PFlops", "bound", "exposed", "all cards"))
    ideal = dataclasses.replace(workload.DGX2_RATES, ring=math.inf)
    for run, timed in p.timings.items():
        if run.figure == figure:
            waits = ", ".join(f"{link} {wait / timed.seconds:.0%}" for link, wait in timed.exposed_seconds.items())
            table.add_row(*map(str, (
                run.preset, run.system, run.gpus, run.tensor_parallel, run.batch, f"{timed.seconds:.2f}",
                f"{tflops(timed):.1f}", f"{tflops(timed) * run.gpus / 1e3:.2f}", timed.bound, waits,
                f"{tflops(predict(run, ideal)):.1f}")))
    return table


def known_table(p):
    table = make_table("What the paper prints", ("", "paper", "ours", "error", ""))
    for what, printed, ours, note in known(p):
        table.add_row(what, printed, f"{ours:.4g}", f"{error(printed, ours):+.1%}", note)
    return table


def draw(p, path):
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import, and needed once
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    first, second, third = figure.subplots(1, 3)
    zero, megatron = p.of(2), p.of(2, baseline=True)
    first.bar([at - 0.2 for at in range(len(zero))], zero.values(), 0.4, label="ZeRO")
    first.bar([at + 0.2 for at in range(len(zero))], megatron.values(), 0.4, label="Megatron")
    for at, (preset, ratio) in enumerate(p.ratios.items()):
        first.annotate(f"{ratio:.1f}x", (at, zero[preset]), ha="center", va="bottom")
    first.plot(list(zero).index("40b") + 0.2, 5, "k_", markersize=16, label="paper: Megatron 40B")
    first.axhline(38, linestyle="--", color="gray", label="paper: 38, ZeRO 8B to 100B")
    first.set(title="Fig. 2, predicted: up to 400 GPUs", ylabel="TFlops per GPU")
    first.set_xticks(range(len(zero)), zero)
    gpus, totals = zip(*p.aggregate.items(), strict=True)
    second.plot(gpus, totals, marker="o", label="60B, ZeRO")
    second.plot(gpus, [totals[0] * each / gpus[0] for each in gpus], linestyle="--", color="gray", label="linear")
    second.set(title="Fig. 3, predicted: 60B", xlabel="GPUs", ylabel="PFlops")
    third.bar(p.of(4).keys(), p.of(4).values(), label="ZeRO, no MP")
    third.bar([f"{name}, DDP" for name in p.of(4, baseline=True)], p.of(4, baseline=True).values(), label="DDP")
    third.axhline(40, linestyle="--", color="gray", label="paper: 40 on average")
    third.set(title="Fig. 4, predicted: 128 GPUs", ylabel="TFlops per GPU")
    third.tick_params(axis="x", rotation=60)
    for axes, top in ((first, 65), (second, 18), (third, 60)):  # space for the legends
        axes.set_ylim(0, top)
        axes.legend(loc="upper left", ncols=2, fontsize="small")
    figure.savefig(path)


def compiled(name, preset="1.5b", batch=8, stage=3):
    """The `Timing` of a compiled step with `batch` sequences on each device."""
    mesh, config = zero_jax.make_mesh(devices=xla_devices.target_devices(name)), PRESETS[preset]
    fields = {field: jax.ShapeDtypeStruct((batch * mesh.size, LENGTH), jnp.int32) for field in ("inputs", "targets")}
    step = zero_jax.make_zero_train_step(gpt2.build(config), stage, mesh=mesh, precision="bf16")
    options = xla_devices.compiler_options(mesh.devices.flat[0])
    events = schedule(step.lower(fields).compile(compiler_options=options).as_text())
    tokens = batch * mesh.size * LENGTH
    each = arithmetic.train_flops_per_token(
        config.num_params, config.num_layers, config.width, LENGTH, recompute=False)
    return timing.predict(events, target_of(name), [xla_devices.coords(device) for device in mesh.devices.flat],
                          tokens=tokens, model_flops=tokens * each)


def compiled_table(names):
    table = make_table("GPT-2 1.5B compiled: stage 3, bf16, 8 sequences of 1024 tokens on each device", (
        "target", "step s", "FLOPs alone", "HBM alone", "links alone", "bound by", "bound", "tokens/s", "MFU", "HFU"))
    for name in names:
        try:
            timed = compiled(name)
        except (ValueError, jax.errors.JaxRuntimeError) as reason:  # no compiler, or one too new for this JAX
            table.add_row(name, str(reason).partition("\n")[0][:90])
            continue
        spent, links = (", ".join(f"{what} {seconds:.3f}" for what, seconds in part.items())
                       for part in (timed.spent, timed.communication_seconds))
        table.add_row(name, f"{timed.seconds:.3f}", f"{timed.compute_seconds:.3f}", f"{timed.hbm_seconds:.3f}", links,
                      spent, timed.bound, f"{timed.tokens_per_second:,.0f}", f"{timed.mfu:.3f}", f"{timed.hfu:.3f}")
    return table


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/paper"), help="folder for figures2to4.png")
    parser.add_argument("--compile", action="store_true", help="predict compiled steps of h100:8 and v5p:2x2x2 too")
    args = parser.parse_args(argv)
    console = make_console(120)
    p = Predictions({run: predict(run) for run in RUNS if run.figure in (2, 3, 4)})
    for figure in (2, 3, 4):
        console.print(runs_table(figure, p))
    console.print(known_table(p))
    checks = dict(shapes(p))
    for what, holds in checks.items():
        console.print(f"{'holds' if holds else 'WRONG'}: {what}", soft_wrap=True)
    args.out.mkdir(parents=True, exist_ok=True)
    draw(p, args.out / "figures2to4.png")
    if args.compile:
        console.print(compiled_table(("h100:8", "v5p:2x2x2")))
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
