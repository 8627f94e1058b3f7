"""Every number of the ZeRO paper that is arithmetic, recomputed beside what it prints; and its Figure 1.

    python scripts/paper/tables.py               # seconds; writes runs/paper/figure1.png and tables.json
    python scripts/paper/tables.py --compile     # and GPT-2 1.5B compiled for 8 H100: a minute, no accelerator

A printed number is right if ours differs by less than one in its last printed digit, and "about" a number if within an
eighth of it. Errata are checked too: the printed number must not follow from the formulas, and the corrected one must.
The exit status is 1 if anything disagrees. GB are 1e9 bytes.
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path

import arithmetic
import checks
import jax
import jax.numpy as jnp
import printed as paper
from checks import FP16, GB, NAMES, OPTIMIZER
from printed import Check, text
from rich import box
from rich.table import Table
from rich.text import Text
from runs import RUNS, block_params

import zero_jax
from models import gpt2
from models.gpt2 import PRESETS
from zero_jax.cli.reports.report import make_console
from zero_jax.planning import formulas
from zero_jax.planning.formulas import PAPER, model_state_bytes
from zero_jax.xla import devices as xla_devices
from zero_jax.xla import hlo


def compiled_evidence(target="h100:8", preset="1.5b", length=1024):
    """State and communication of compiled steps beside the formulas; one sequence of `length` tokens per device."""
    mesh, config = zero_jax.make_mesh(devices=xla_devices.target_devices(target)), PRESETS[preset]
    num_params, group = config.num_params, "compiled steps"
    batch = {field: jax.ShapeDtypeStruct((mesh.size, length), jnp.int32) for field in ("inputs", "targets")}
    for stage, name in enumerate(NAMES):
        step = zero_jax.make_zero_train_step(gpt2.build(config), stage, mesh=mesh, precision="bf16")
        compiled = step.lower(batch).compile(compiler_options=xla_devices.compiler_options(mesh.devices.flat[0]))
        memory, collectives = compiled.memory_analysis(), hlo.collectives(compiled.as_text())
        state = sum(model_state_bytes(formulas.ZERO_JAX, stage, num_params, data=mesh.size).values()) / GB
        placed, temporaries = memory.argument_size_in_bytes / GB, memory.temp_size_in_bytes / GB
        volume = sum(arithmetic.communication_elements(stage, 1).values())
        ideal = FP16 * num_params * (mesh.size - 1) / mesh.size
        sent = sum(c.communication_bytes * c.count for c in collectives) / ideal
        # XLA all-reduces the tied embedding's gradient as a table and as an output layer, each alone.
        twice = 0 if stage else 2 * config.vocab_size * config.width / num_params
        where = f"{preset} on {target}, {name}"
        yield Check(group, f"{where}: GB of state", f"{state:.3f}", f"{placed:.3f}", abs(placed / state - 1) < 0.01,
                    f"{temporaries:.2f} GB of temporaries")
        yield Check(group, f"{where}: elements sent per parameter", f"{volume + twice:.3f}", f"{sent:.3f}",
                    abs(sent / (volume + twice) - 1) < 0.01,
                    f"{volume}, and {twice:.3f} since the tied embedding is reduced twice" if twice else "")


SECTIONS = {
    "Figure 1 and section 5: the formulas": checks.model_states,
    "Table 1: GB of model states per device; in brackets ours, where it has more digits": checks.table_1,
    "Table 1: bold is the smallest N_d that fits in 32 GB": checks.table_1_bold,
    "Table 2: the largest model for 32 GB and N_d = 64; in brackets the exact size": checks.table_2,
    "Table 2: what was measured over the formula": checks.table_2_measured,
    "Section 7: elements sent per step and device": checks.communication,
    "Sections 3.2 and 6: activations and buffers": checks.residuals,
    "Table 3 and Figure 6: configurations of ZeRO-100B": checks.table_3,
    "Figure 7: memory": checks.orderings,
    "Run configurations: the appendix's rules, its totals, and GB of states and checkpoints by formula": checks.runs,
    "Sizes": checks.sizes,
    "Headlines": checks.headlines,
    "Other systems": checks.others,
    "Errata: what is printed does not follow, and why": checks.errata,
}


def cell(check):
    """A cell of the paper's own table, bold where it is bold there."""
    value, bold = check.paper.rstrip("*"), check.paper.endswith("*")
    more, wrong = f" ({check.ours})" if value != check.ours else "", "" if check.ok else " WRONG"
    return Text(value + more + wrong, "bold" if bold else "")


def make_table(columns):
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index == 0 or not name else "right")
    return table


def grid(results, rows, columns):
    """The checks `results` in the shape of the paper's table, row by row."""
    table = make_table(columns)
    width = len(columns) - 1
    for index, row in enumerate(rows):
        table.add_row(str(row), *map(cell, results[index * width : (index + 1) * width]))
    return table


def listing(results):
    table = make_table(("", "paper", "ours", "ok", ""))
    for row in results:
        table.add_row(row.what, row.paper, row.ours, "ok" if row.ok else "WRONG", row.note)
    return table


def runs_table(results):
    columns = ("Fig.", "system", "model", "layers x hidden", "12 L h^2", "heads", "GPUs", "MP", "batch", "total", "GB",
               "ok")
    table = make_table(columns)
    for run, row in zip(RUNS, results[: len(RUNS)], strict=True):
        config = run.config
        table.add_row(*map(str, (
            run.figure, run.system, run.preset, f"{config.num_layers} x {config.width}", text(block_params(config)),
            run.heads, run.gpus, run.tensor_parallel, run.batch, run.total_batch,
            f"{sum(checks.memory_of_run(run)):.1f}",
            "ok" if row.ok else row.note)))
    return table


def render(section, results):
    if section is checks.table_1:
        columns = [f"{size} {name.removeprefix('P_')}" for size in paper.TABLE_1_SIZES for name in NAMES[1:]]
        return grid(results, paper.TABLE_1, ("N_d", *columns))
    if section is checks.table_2:
        return grid(results, paper.TABLE_2, ("MP", *NAMES))
    return runs_table(results) if section is checks.runs else listing(results)


def draw_figure_1(path):
    """Bytes of parameters, gradients and optimizer states at 7.5B and N_d = 64, as stacked bars."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import, and needed once
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(title="Model states per device: 7.5B parameters, N_d = 64, K = 12", xlabel="GB")
    stages = [model_state_bytes(PAPER, stage, paper.FIGURE_1_PARAMS, data=paper.FIGURE_1_DATA) for stage in range(4)]
    names, left = ["baseline", *NAMES[1:]], [0.0] * 4
    for label, parts in (("parameters", ("weights",)), ("gradients", ("gradients",)),
                         ("optimizer states", OPTIMIZER)):
        sizes = [sum(row[part] for part in parts) / GB for row in stages]
        axes.barh(names, sizes, left=left, label=label)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    for name, total in zip(names, left, strict=True):
        axes.annotate(f" {total:.1f} GB", (total, name), va="center")
    axes.set_xlim(0, 1.12 * max(left))
    axes.invert_yaxis()
    axes.legend(loc="lower right")
    figure.savefig(path)


def main(argv=None):
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/paper"), help="folder of figure1.png and tables.json")
    parser.add_argument("--compile", action="store_true", help="compiled steps beside the formulas")
    args = parser.parse_args(argv)
    console, everything = make_console(120), []
    sections = SECTIONS | ({"Compiled for a target topology": compiled_evidence} if args.compile else {})
    for title, section in sections.items():
        results = list(section())
        everything += results
        console.print(title, style="bold")
        console.print(render(section, results))
    args.out.mkdir(parents=True, exist_ok=True)
    draw_figure_1(args.out / "figure1.png")
    counts = {}
    for row in everything:
        right, of = counts.get(row.group, (0, 0))
        counts[row.group] = (right + row.ok, of + 1)
    lines = [f"{right} of {of} {group}" for group, (right, of) in counts.items()]
    wrong = [row for row in everything if not row.ok]
    (args.out / "tables.json").write_text(json.dumps(
        {"summary": lines, "wrong": len(wrong), "checks": [dataclasses.asdict(row) for row in everything]}, indent=1))
    console.print("Not arithmetic, so not here: " + paper.NOT_ARITHMETIC)
    console.print("\n".join(lines))
    console.print(f"{len(everything) - len(wrong)} of {len(everything)} agree; written to {args.out}")
    for row in wrong:
        console.print(f"WRONG: {row.group}: {row.what}: the paper has {row.paper}, ours is {row.ours}. {row.note}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
