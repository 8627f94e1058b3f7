"""State, temporaries and communication of train steps compiled for target topologies, as a Markdown table.

    python scripts/tables/communication.py --out communication.md    # an hour on 2 cores; no accelerator
    python scripts/tables/communication.py --targets h100:8 --models 1.5b --stages 3 --out communication.md
    python scripts/tables/communication.py --targets v5p:2x2x2 --no-overlap --out communication.md
    python scripts/tables/communication.py --targets v6e:4x4 --models 1.5b 6.7b --resume --out communication.md

Each step is compiled by the target's own compiler and compared with its contract (`step.verify`). State and temporaries
are per device. "Measured over ideal" is the bytes that each device sends in a step over the paper's: 2
(stages 1 and 2, one program) or 3 (stage 3) elements per parameter, in bf16 on a ring. Then follow the shares of those
bytes that are asynchronous, and that all-reduces send; and, predicted from the compiled schedule (xla/timing.py),
the milliseconds in which nothing but communication runs, and those of the step. Rows are written as they come, to --out
and as JSON beside it; rows that the JSON has from earlier runs stay, so that a table can be made in parts. Of a step
that does not fit, the compiler reports the temporaries alone. --no-overlap: steps with overlap=False, which is another
program on v5e, v5p and v6e.
"""

import argparse
import dataclasses
import json
import math
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

import zero_jax
from models import gpt2, resnet
from zero_jax.planning.plan import examine
from zero_jax.stages import STAGES
from zero_jax.xla import devices as xla_devices
from zero_jax.xla.targets import target_of

LENGTH = 1024
TARGETS = ("h100:8", "h100:16x8", "h100:128x8", "v5p:2x2x2", "v5p:4x4x8", "v5p:8x8x16", "v5e:16x16")
MODELS = {"1.5b": gpt2, "6.7b": gpt2, "resnet50": resnet}
HEADER = ("target", "model", "stage", "state MiB", "ideal MiB", "temporaries MiB", "measured over ideal",
          "asynchronous", "all-reduced", "exposed ms", "step ms", "contract", "CPU s")


@dataclasses.dataclass(frozen=True)
class Row:
    """One compiled step; bytes are of one device.

    state, ideal_state, temporaries: in memory. sent, ideal_sent, asynchronous, all_reduced: communication of a step.
    exposed, step_seconds: predicted; 0 where it does not fit. seconds: of CPU time, to make it. refused: why it does
    not fit, or "". violations: of the contract. overlap: False where the step was made with `overlap=False`.
    """

    target: str
    mesh: dict[str, int]
    model: str
    stages: tuple[int, ...]
    params: int
    state: int
    ideal_state: float
    temporaries: int
    sent: float
    ideal_sent: float
    asynchronous: float
    all_reduced: float
    exposed: float
    step_seconds: float
    seconds: float
    refused: str
    violations: tuple[str, ...]
    notes: tuple[str, ...]
    overlap: bool = True

    @property
    def name(self) -> tuple[str, str, tuple[int, ...], bool]:
        return self.target, self.model, self.stages, self.overlap

    def __str__(self) -> str:
        cells = (
            self.target + ", overlap=False" * (not self.overlap), self.model, ", ".join(map(str, self.stages)),
            *(f"{size / 2**20:,.1f}" for size in (self.state, self.ideal_state, self.temporaries)),
            *self._communication(), f"{self.seconds:.0f}")
        return f"| {' | '.join(cells)} |"

    def _communication(self) -> tuple[str, ...]:
        """Measured over ideal, the asynchronous and the all-reduced share, predicted times, and the contract."""
        if self.refused:
            return *"-----", "does not fit"
        shares = (f"{share / self.sent:.1%}" for share in (self.asynchronous, self.all_reduced))
        times = (f"{seconds * 1e3:,.1f}" for seconds in (self.exposed, self.step_seconds))
        return f"{self.sent / self.ideal_sent:.3f}", *shares, *times, "broken" if self.violations else "kept"


def classify(model, batch):
    logits = model(batch["images"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


def batch_of(model, size):
    """One example for each of `size` devices."""
    if MODELS[model] is resnet:
        return {"images": jax.ShapeDtypeStruct((size, 224, 224, 3), jnp.float32),
                "labels": jax.ShapeDtypeStruct((size,), jnp.int32)}
    return {name: jax.ShapeDtypeStruct((size, LENGTH), jnp.int32) for name in ("inputs", "targets")}


def step_of(target, model, stage, overlap):
    """(step, batch) on the target's default mesh."""
    devices, module = xla_devices.target_devices(target), MODELS[model]
    step = zero_jax.make_zero_train_step(
        module.build(module.PRESETS[model]), stage, loss=classify if module is resnet else None, precision="bf16",
        mesh=zero_jax.make_mesh(devices=devices),
        communication=zero_jax.Communication(overlap="auto" if overlap else False))
    return step, batch_of(model, len(devices))


def measure(target, model, stages, overlap=True):
    began = time.process_time()
    step, batch = step_of(target, model, stages[0], overlap)
    plan = examine(step, batch, target_of(target), compare=False)
    layout, devices = plan.layout, plan.num_devices
    num_params, state = layout.num_params, layout.device_bytes
    traffic = plan.communication.results if plan.communication else ()
    sent = [(c, c.communication_bytes * c.count) for result in traffic for c in result.collectives]
    return Row(
        target, dict(step.mesh.shape), model, stages, num_params, state,
        step.stage.state_bytes(num_params, devices, low_precision=True), max(0, plan.needed_bytes - state),
        math.fsum(size for _, size in sent), step.stage.communication * num_params * 2 * (devices - 1) / devices,
        math.fsum(size for c, size in sent if c.asynchronous),
        math.fsum(size for c, size in sent if c.kind == "all-reduce"),
        sum(plan.timing.exposed_seconds.values()) if plan.timing else 0.0, plan.timing.seconds if plan.timing else 0.0,
        time.process_time() - began, plan.refused, plan.communication.violations if plan.communication else (),
        tuple(note for result in traffic for note in result.notes), overlap)


def earlier(out):
    """The rows of `out` that earlier runs have measured."""
    if out is None or not out.with_suffix(".json").exists():
        return []
    rows = json.loads(out.with_suffix(".json").read_text())
    return [Row(**{name: tuple(value) if isinstance(value, list) else value for name, value in row.items()})
            for row in rows]


def place(row):
    """By which rows are sorted: the order of the whole table."""
    models, targets = list(MODELS), list(TARGETS)
    target = targets.index(row.target) if row.target in targets else len(targets)
    return models.index(row.model), target, row.target, not row.overlap, row.stages


def write(rows, out):
    lines = [f"jax {jax.__version__}; one sequence of {LENGTH} tokens or one image on each device; bf16 with fp32 "
             "master and Adam", "", f"| {' | '.join(HEADER)} |", "| --- " * len(HEADER) + "|", *map(str, rows)]
    out.write_text("\n".join(lines) + "\n")
    out.with_suffix(".json").write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", nargs="+", default=TARGETS)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--stages", nargs="+", type=int, default=[1, 2, 3], choices=[row.number for row in STAGES])
    parser.add_argument("--no-overlap", action="store_true", help="with overlap=False")
    parser.add_argument("--resume", action="store_true", help="without the rows that the JSON beside --out has")
    parser.add_argument("--out", type=Path, help="a Markdown file; JSON goes beside it")
    args = parser.parse_args()
    if args.resume and not args.out:
        parser.error("--resume reads the rows beside --out: give both")
    together = tuple(stage for stage in args.stages if stage in (1, 2))  # one program (zero_jax/stages.py says why)
    programs = [(stage,) for stage in args.stages if stage not in (1, 2)] + [together] * bool(together)
    rows = {row.name: row for row in earlier(args.out)}
    for model in args.models:
        for target in args.targets:
            for stages in sorted(programs):
                if args.resume and (target, model, stages, not args.no_overlap) in rows:
                    continue
                row = measure(target, model, stages, not args.no_overlap)
                rows[row.name] = row
                print(row, *row.violations, sep="\n  ", flush=True)
                if args.out:
                    write(sorted(rows.values(), key=place), args.out)


if __name__ == "__main__":
    main()
