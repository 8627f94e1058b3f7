"""Models that others wrote, installed from a registry, unedited and small: numbers, bytes and times at stages 0 to 3.

    pip install -e '.[third-party,gpu-compiler,tpu-compiler]'            # and google-tunix, for its models
    python scripts/reliability/third_party.py --out third_party.tsv      # no accelerator
    python scripts/reliability/third_party.py --only gpt2 t5 --stages 3 --targets
    python scripts/reliability/third_party.py --traces                   # the times to trace alone, by stage

Each model runs in a process of its own, so that one which fails is a row with its error. Columns: parameters in
thousands; the largest relative difference of three losses from a plain Flax and Optax loop on one device, of all stages
on eight simulated ones; parameters above 4096 elements that stay replicated at stage 3, and that are gathered before
the model runs; for each target, the bytes that each device sends in a step over the paper's, the worst of stages 1 to
3, with a ! where the contract is broken or stage 0 sends more than jit alone does; the CPU time to trace (layout,
initialisation and step, lowered; the least of three interleaved with the plain loop's, behind one that does not count),
and to compile for eight simulated devices, over that of the plain loop's.
Exits 1 if a model fails, is further off than 1e-4, or breaks its contract.
"""

import argparse
import importlib.metadata
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from third_party_measures import measure
from third_party_models import CASES

ROOT = Path(__file__).parents[2]
TOLERANCE = 1e-4
QUICK = ["--xla_backend_optimization_level=0", *["--xla_cpu_use_fusion_emitters=false"] * importlib.metadata.version(
    "jaxlib").startswith("0.10.")]
"""XLA flags: programs of simulated devices compile in a third of the time, and send the same."""


def cells(row: dict[str, Any], targets: list[str]) -> list[str]:
    """A row of the table."""
    if "error" in row:
        return [row["model"], "", "failed", *[""] * (4 + len(targets)), row["error"].splitlines()[-1][:90]]
    ratios = []
    for target in targets:
        stages = row["targets"][target].values()
        broken = "!" if any(each["violations"] for each in stages) else ""
        worst = max((each["ratio"] for stage, each in row["targets"][target].items() if int(stage)), default=math.nan)
        ratios.append(f"{worst:.3f}{broken}")
    counts = (str(len(row[key])) if key in row else "" for key in ("replicated", "up_front"))  # of stage 3
    return [row["model"], f"{row['params'] / 1e3:,.0f}", f"{row['worst_loss']:.0e}", *counts, *ratios,
            f"{row['trace_s'] / row['plain_trace_s']:.1f}", f"{row['compile_s'] / row['plain_compile_s']:.1f}",
            "; ".join(filter(None, (row["package"], row["note"])))]


def is_right(row: dict[str, Any]) -> bool:
    """Whether a model trains on the numbers of one device and keeps its contracts."""
    return "error" not in row and row["worst_loss"] <= TOLERANCE and row["worst_norm"] <= 10 * TOLERANCE and not any(
        each["violations"] for stages in row["targets"].values() for each in stages.values())


def run(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """`measure` in a process of its own; an error is a row."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-W", "ignore", __file__, "--worker", file.name, "--only", name, "--stages",
                   *map(str, args.stages), "--targets", *args.targets]
        command += ["--precision", args.precision] if args.precision else []
        command += ["--traces"] if args.traces else []
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=1800, env={
            **os.environ, "XLA_FLAGS": " ".join(QUICK), "JAX_PLATFORMS": "cpu", "TRANSFORMERS_VERBOSITY": "error",
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])})
        written = Path(file.name).read_text()
    if done.returncode or not written:
        return {"model": name, "error": done.stderr.strip() or f"status {done.returncode}"}
    return json.loads(written)


def print_traces(args: argparse.Namespace) -> int:
    """The times to trace alone: of the plain loop in seconds, and of each stage over it."""
    print("\t".join(["model", "plain s", *(f"stage {stage} x" for stage in args.stages)]), flush=True)
    failed = 0
    for name in args.only:
        row = run(name, args)
        failed += "error" in row
        print("\t".join([name, "failed", row["error"].splitlines()[-1][:90]] if "error" in row else [
            name, f"{row['plain_trace_s']:.2f}",
            *(f"{row['traces_s'][str(stage)] / row['plain_trace_s']:.2f}" for stage in args.stages)]), flush=True)
    return min(failed, 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), help="these models; default: all")
    parser.add_argument("--stages", nargs="*", type=int, default=[0, 1, 2, 3])
    parser.add_argument("--targets", nargs="*", default=["h100:8", "v5e:2x4"], help="may be none")
    parser.add_argument("--precision", help="of the steps for targets; default: as the model declares")
    parser.add_argument("--traces", action="store_true", help="only the times to trace, by stage")
    parser.add_argument("--out", type=Path, help="a TSV file; JSON with every stage goes beside it")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        args.worker.write_text(json.dumps(measure(
            args.only[0], args.stages, args.targets, args.precision, traces_only=args.traces)))
        return 0
    if args.traces:
        return print_traces(args)
    header = ["model", "params k", "loss off by", "replicated", "up front",
              *(f"{target} over ideal" for target in args.targets), "trace x", "compile x", "from"]
    rows, lines = [], ["\t".join(header)]
    print(lines[0], flush=True)
    for name in args.only:
        rows.append(run(name, args))
        lines.append("\t".join(cells(rows[-1], args.targets)))
        print(lines[-1], flush=True)
        if args.out:
            args.out.write_text("\n".join(lines) + "\n")
            args.out.with_suffix(".json").write_text(json.dumps(rows, indent=1))
    right = sum(map(is_right, rows))
    print(f"{right} of {len(rows)} are right")
    return 0 if right == len(rows) else 1


if __name__ == "__main__":
    os.environ.setdefault("MALLOC_ARENA_MAX", "2")
    sys.exit(main())
