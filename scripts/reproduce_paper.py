"""Every number of the ZeRO paper that is arithmetic, recomputed beside what it prints; and its Figure 1.

    python scripts/reproduce_paper.py               # seconds; writes runs/paper/figure1.png and tables.json
    python scripts/reproduce_paper.py --compile     # and GPT-2 1.5B compiled for 8 H100s that are not there: a minute

A printed number is right if ours is less than one off in its last printed digit, and "about" a number if within an
eighth of it. Errata are checked too: what the paper prints must not follow, and what is said instead must. The exit
status is 1 if anything disagrees. GB are 1e9 bytes.
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import paper_checks as checks
import paper_figures as figures
from paper_checks import FP16, GB, NAMES, OPTIMIZER
from paper_figures import Check, text
from rich import box
from rich.table import Table
from rich.text import Text

import zero_jax
from models import gpt2
from models.gpt2 import PRESETS, RUNS
from zero_jax import accounting, hardware, hlo
from zero_jax.accounting import PAPER, model_state_bytes
from zero_jax.report import make_console


def compiled_evidence(target="h100:8", preset="1.5b", length=1024):
    """State and wire of compiled steps beside the formulas; one sequence of `length` tokens on each device."""
    mesh, config = zero_jax.make_mesh(devices=hardware.describe(target)), PRESETS[preset]
    psi, group = config.num_params, "compiled steps"
    batch = {field: jax.ShapeDtypeStruct((mesh.size, length), jnp.int32) for field in ("inputs", "targets")}
    for stage, name in enumerate(NAMES):
        step = zero_jax.make_zero_train_step(gpt2.build(config), stage, mesh=mesh, precision="bf16")
        compiled = step.lower(batch).compile(compiler_options=hardware.compiler_options(mesh.devices.flat[0]))
        memory, found = compiled.memory_analysis(), hlo.collectives(compiled.as_text())
        state = sum(model_state_bytes(accounting.ZERO_JAX, stage, psi, data=mesh.size).values()) / GB
        placed, temporaries = memory.argument_size_in_bytes / GB, memory.temp_size_in_bytes / GB
        volume = sum(accounting.wire_elements(stage, 1).values())
        sent = sum(c.wire_bytes * c.count for c in found) / (FP16 * psi * (mesh.size - 1) / mesh.size)
        # XLA all-reduces the tied embedding's gradient as a table and as an output layer, each alone.
        twice = 0 if stage else 2 * config.vocab_size * config.width / psi
        where = f"{preset} on {target}, {name}"
        yield Check(group, f"{where}: GB of state", f"{state:.3f}", f"{placed:.3f}", abs(placed / state - 1) < 0.01,
                    f"{temporaries:.2f} GB of temporaries")
        yield Check(group, f"{where}: psi sent", f"{volume + twice:.3f}", f"{sent:.3f}",
                    abs(sent / (volume + twice) - 1) < 0.01,
                    f"{volume} psi, and {twice:.3f} since the tied embedding is reduced twice" if twice else "")


SECTIONS = {
    "Figure 1 and section 5: the formulas": checks.formulas,
    "Table 1: GB of model states per device; in brackets ours, where it has more digits": checks.table_1,
    "Table 1: bold is the smallest N_d that fits 32 GB": checks.table_1_bold,
    "Table 2: the largest model for 32 GB and N_d = 64; in brackets the exact size": checks.table_2,
    "Table 2: what was measured over the formula": checks.table_2_measured,
    "Section 7: elements sent per step and device": checks.wire,
    "Sections 3.2 and 6: activations and buffers": checks.residuals,
    "Table 3 and Figure 6: configurations of ZeRO-100B": checks.table_3,
    "Figure 7: memory": checks.orderings,
    "Run configurations: the appendix's rules, its totals, and GB of states and checkpoints by formula": checks.runs,
    "Sizes": checks.sizes,
    "Headlines": checks.headlines,
    "Other systems": checks.others,
    "Errata: what is printed does not follow, and why": checks.errata,
}


def cell(found):
    """A cell of the paper's own table, bold where it is bold there."""
    value, bold = found.paper.rstrip("*"), found.paper.endswith("*")
    more, wrong = f" ({found.ours})" if value != found.ours else "", "" if found.ok else " WRONG"
    return Text(value + more + wrong, "bold" if bold else "")


def make_table(columns):
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index == 0 or not name else "right")
    return table


def grid(found, rows, columns):
    """The checks in the shape of the paper's table, row by row."""
    table = make_table(columns)
    width = len(columns) - 1
    for index, row in enumerate(rows):
        table.add_row(str(row), *map(cell, found[index * width : (index + 1) * width]))
    return table


def listing(found):
    table = make_table(("", "paper", "ours", "ok", ""))
    for row in found:
        table.add_row(row.what, row.paper, row.ours, "ok" if row.ok else "WRONG", row.note)
    return table


def runs_table(found):
    columns = ("Fig.", "system", "model", "layers x hidden", "12 L h^2", "heads", "GPUs", "MP", "batch", "total", "GB",
               "ok")
    table = make_table(columns)
    for run, row in zip(RUNS, found[: len(RUNS)], strict=True):
        config = run.config
        table.add_row(*map(str, (
            run.figure, run.system, run.preset, f"{config.num_layers} x {config.width}", text(config.num_block_params),
            run.heads, run.gpus, run.tensor_parallel, run.batch, run.total_batch, f"{sum(checks.held_by(run)):.1f}",
            "ok" if row.ok else row.note)))
    return table


def render(section, found):
    if section is checks.table_1:
        columns = [f"{size} {name.removeprefix('P_')}" for size in figures.TABLE_1_SIZES for name in NAMES[1:]]
        return grid(found, figures.TABLE_1, ("N_d", *columns))
    if section is checks.table_2:
        return grid(found, figures.TABLE_2, ("MP", *NAMES))
    return runs_table(found) if section is checks.runs else listing(found)


def draw_figure_1(path):
    """Bytes of parameters, gradients and optimizer states at 7.5B and N_d = 64, as stacked bars."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import, and needed once
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(title="Model states per device: 7.5B parameters, N_d = 64, K = 12", xlabel="GB")
    found = [model_state_bytes(PAPER, stage, figures.FIGURE_1_PARAMS, data=figures.FIGURE_1_DATA) for stage in range(4)]
    names, left = ["baseline", *NAMES[1:]], [0.0] * 4
    for label, parts in (("parameters", ("weights",)), ("gradients", ("gradients",)),
                         ("optimizer states", OPTIMIZER)):
        sizes = [sum(row[part] for part in parts) / GB for row in found]
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
    console, everything = make_console(), []
    sections = SECTIONS | ({"Compiled for hardware that is not there": compiled_evidence} if args.compile else {})
    for title, section in sections.items():
        found = list(section())
        everything += found
        console.print(title, style="bold")
        console.print(render(section, found))
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
    console.print("Not arithmetic, so not here: " + figures.NOT_ARITHMETIC)
    console.print("\n".join(lines))
    console.print(f"{len(everything) - len(wrong)} of {len(everything)} agree; written to {args.out}")
    for row in wrong:
        console.print(f"WRONG: {row.group}: {row.what}: the paper has {row.paper}, ours is {row.ours}. {row.note}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
