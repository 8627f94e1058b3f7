"""What a run is, in its first lines: model, parameters, mesh, stage, batch, FLOPs, memory and communication."""

from zero_jax.cli.objectives.objective import Objective
from zero_jax.cli.reports.report import size_text
from zero_jax.planning.flops import StepFlops
from zero_jax.stages import STAGES
from zero_jax.step.compiled import CompiledStep


def head_lines(objective: Objective, compiled: CompiledStep, flops: StepFlops, device_kind: str, platform: str
               ) -> list[str]:
    """The first lines of a run, a sentence each."""
    config, layout, report = objective.config, compiled.layout, compiled.report
    mesh = " x ".join(f"{name} {size}" for name, size in layout.mesh.shape.items())
    count, items = objective.items_per_step, objective.measures.items
    default = "" if config.objective else f", which {config.model.partition(':')[0]} is made for"
    microbatches = f" in {config.accumulate} microbatches" if config.accumulate > 1 else ""
    # What a CPU calls itself says nothing.
    kind = "" if platform == "cpu" else f" ({device_kind})"
    peak = (f"the peak of a {platform if platform == 'cpu' else device_kind} is not known: MFU and HFU are n/a"
            if flops.peak is None else f"peak of a device {flops.peak / 1e12:,.0f} TFLOP/s in bf16")
    notes = "".join(f"; {note}" for result in report.results for note in result.notes)
    program = ("in the compiled program not known, for it calls kernels that cannot be counted" if flops.program is None
               else f"{flops.program / 1e9:,.1f} G of the compiled program ({flops.program / (flops.model or 1):.2f} "
               "of them, with what it recomputes)")
    return [
        f"Model: {config.model}, {layout.num_params:,} {'trained ' * bool(layout.state.frozen)}parameters, computing "
        f"in {config.precision}.",
        f"Mesh: {mesh}, {layout.mesh.size} {platform} devices{kind}; stage {config.stage} "
        f"({STAGES[config.stage].name}), {layout.num_shards} shards.",
        f"Objective: {objective.name} ({objective.describe()}){default}.",
        f"Batch: {objective.batch_text} ({count:,} {items}){microbatches}; "
        f"{config.steps} steps ({count * config.steps:,} {items}).",
        *([f"Tokenizer: {config.tokenizer}."] if config.tokenizer is not None else []),
        f"FLOPs of a step: {flops.model / 1e9:,.1f} G of the model, {program}; {peak}.",
        f"Memory of a device by the compiled step: {size_text(memory_bytes(compiled))}, of it "
        f"{size_text(layout.device_bytes)} state.",
        f"Communication: {size_text(report.communication_bytes)} sent by each device per step; the stage's budget is "
        f"{size_text(report.contract.communication_bytes)}{notes}.",
    ]


def evaluation_line(held_out: int, most: int) -> str:
    """How many batches an evaluation takes, of those `held_out`, at most `most`: a sentence."""
    taken = "all" if most >= held_out else f"{most:,} of the"
    return f"Evaluation: {taken} {held_out:,} {'batch' if held_out == 1 else 'batches'} held out (eval_batches={most})."


def memory_bytes(compiled: CompiledStep) -> int:
    """Device memory that a step needs on each device; that of the state where the backend does not report it."""
    return compiled.layout.device_bytes if compiled.memory is None else compiled.device_bytes
