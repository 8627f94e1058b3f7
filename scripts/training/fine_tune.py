"""Fine-tunes the LLaMA of `language_model.py` on functions of packages that it has never seen, in three ways.

    python scripts/training/fine_tune.py --base runs/language_model --out runs/fine_tune

The pairs are the signature of a function and the first line of its docstring, from the sources of numpy, jax, flax and
optax as they are installed. The model is trained on responses alone: with LoRA, with LoRA of a base in nf4, and whole.
Prints the loss on functions that were held out, before and after, as a table.
"""

import argparse
import ast
import hashlib
import importlib.util
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from zero_jax.cli.config_file import as_args
from zero_jax.cli.objectives.choose import objective_of
from zero_jax.cli.reports.report import make_console
from zero_jax.cli.start import first_state
from zero_jax.cli.step_from_config import devices_of, step_of
from zero_jax.cli.train_config import TrainConfig
from zero_jax.cli.training.evaluation import evaluate

PACKAGES = ("numpy", "jax", "flax", "optax")
HELD_OUT = 10
"""One of so many pairs is held out, by a hash of its response."""
LORA = {"lora_rank": 16, "lora_alpha": 32.0}
RUNS: dict[str, dict[str, Any]] = {
    "LoRA, rank 16": {**LORA, "learning_rate": 3e-3},
    "LoRA, rank 16, base in nf4": {**LORA, "lora_base": "nf4", "learning_rate": 3e-3},
    "all parameters": {"learning_rate": 5e-4}}


def pairs() -> Iterator[dict[str, str]]:
    """{"prompt", "completion"} of each function with a docstring of one line or more, in the order of the files."""
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        assert spec is not None and spec.origin is not None
        folder = Path(spec.origin).parent
        for path in sorted(folder.rglob("*.py"), key=lambda path: path.relative_to(folder).as_posix()):
            if not any("test" in part for part in path.relative_to(folder).parts):
                yield from functions(path.read_text(encoding="utf-8"))


def functions(source: str) -> Iterator[dict[str, str]]:
    """Those of one file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and (text := (ast.get_docstring(node) or "").strip()):
            line = text.splitlines()[0].strip()
            if 10 <= len(line) <= 160:
                yield {"prompt": f"def {node.name}({ast.unparse(node.args)}):\n    \"\"\"",
                       "completion": f"{line}\"\"\"\n"}


def write_pairs(out: Path) -> tuple[Path, Path]:
    """train.jsonl and held_out.jsonl in `out`; no response is in both, and none twice."""
    paths = out / "train.jsonl", out / "held_out.jsonl"
    out.mkdir(parents=True, exist_ok=True)
    seen = set[str]()
    with paths[0].open("w") as train, paths[1].open("w") as held_out:
        for pair in pairs():
            number = int(hashlib.sha256(pair["completion"].encode()).hexdigest(), 16)
            if pair["completion"] not in seen:
                print(json.dumps(pair), file=train if number % HELD_OUT else held_out)
            seen.add(pair["completion"])
    return paths


def config_of(args: argparse.Namespace, name: str, options: dict[str, Any]) -> TrainConfig:
    """The options of a run."""
    folder = name.replace(",", "").replace(" ", "-")
    return TrainConfig(
        model=args.model, stage=3, devices=args.devices, init_from=args.base / "library", objective="instruct",
        documents="pack", data=(str(args.out / "train.jsonl"),), eval_data=(str(args.out / "held_out.jsonl"),),
        tokenizer=args.base / "tokens", batch_size=8, seq_len=128, steps=args.steps, warmup=0.1, eval_every=args.steps,
        eval_batches=16, samples=3, save_every=0, weight_decay=0.0, out=args.out / folder, **options)


def flags_of(config: TrainConfig) -> list[str]:
    """`config` as the command line has it: what is not the default."""
    changed = {name: value for name, value in vars(config).items() if value != getattr(TrainConfig(), name)}
    return as_args({name: list(value) if isinstance(value, tuple) else value for name, value in changed.items()})


def before(config: TrainConfig) -> dict[str, float]:
    """What an evaluation measures of the model that a run starts from."""
    objective = objective_of(config)
    data, devices = objective.load_data(), devices_of(config)
    step = step_of(config, objective.choice, devices, loss=objective.loss)
    batches, held_out = data.batches(step.batch_sharding)
    state = first_state(config, objective.choice, step, batches[0], make_console())
    sums = step.evaluator(objective.sums)
    rounds = itertools.islice(held_out.once(), config.eval_batches)
    return dict(objective.metrics(evaluate(lambda batch: sums(state, batch), rounds)))


def trained(config: TrainConfig) -> int:
    """Parameters that a run trains."""
    objective = objective_of(config)
    step = step_of(config, objective.choice, devices_of(config), loss=objective.loss)
    return sum(shape.size for shape in jax.tree.leaves(step.layout(objective.batch_shapes()).state.params))


def after(config: TrainConfig) -> tuple[dict[str, float], int]:
    """(What the last evaluation of a run measured, bytes of its state on a device)."""
    if not (config.out / "report.html").exists():
        subprocess.run([sys.executable, "-m", "zero_jax", "train", *flags_of(config)], check=True)
    rows = [json.loads(line) for line in (config.out / "train.jsonl").read_text().splitlines()]
    return rows[-1]["summary"]["evaluation"], rows[0]["state_bytes_per_device"]


def main() -> None:
    """Writes the pairs, trains, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True, help="the folder of language_model.py")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="llama:11m")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--devices", type=int, default=2)
    args = parser.parse_args()
    counts = [len(path.read_text().splitlines()) for path in write_pairs(args.out)]
    print(f"{counts[0]:,} pairs to train on, {counts[1]:,} held out.\n")
    results = {name: after(config_of(args, name, options)) for name, options in RUNS.items()}
    start = before(config_of(args, "before", {}))
    print("| | trained, 10^3 | state of a device, MiB | held-out loss | perplexity | accuracy |")
    print("| --- | --- | --- | --- | --- | --- |")
    print(f"| before | | | {start['loss']:.3f} | {start['perplexity']:.1f} | {100 * start['accuracy']:.1f} % |")
    for name, (measured, state_bytes) in results.items():
        number = trained(config_of(args, name, RUNS[name]))
        print(f"| {name} | {number / 1e3:,.0f} | {state_bytes / 2**20:.1f} | {measured['validation_loss']:.3f} "
              f"| {measured['validation_perplexity']:.1f} | {100 * measured['validation_accuracy']:.1f} % |")


if __name__ == "__main__":
    main()
