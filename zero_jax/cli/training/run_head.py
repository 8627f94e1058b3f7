"""What a run says of itself: in its first lines, and in a README for whoever finds its folder."""

import shlex
from pathlib import Path

from zero_jax.cli.environment import in_folder_of_run
from zero_jax.cli.model_lookup import ModelChoice, is_folder, short_name
from zero_jax.cli.objectives.objective import Objective
from zero_jax.cli.options.run import WITH_RESPONSES
from zero_jax.cli.reports.report import size_text
from zero_jax.cli.train_config import TrainConfig
from zero_jax.contract.violations import counted_bytes
from zero_jax.planning.flops import StepFlops
from zero_jax.stages import STAGES
from zero_jax.step.compiled import CompiledStep
from zero_jax.xla.platform import GPU
from zero_jax.xla.process_memory import fraction_text


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
    peak = (f"the peak of a {platform if platform == 'cpu' else device_kind} is not known: MFU and HFU are left out"
            if flops.peak is None else f"peak of a device {flops.peak / 1e12:,.0f} TFLOP/s in bf16")
    counted = sum(counted_bytes(result, report.contract) for result in report.results)
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
        *([fraction_text()] if platform in GPU else []),
        f"Communication: {size_text(counted)} sent by each device per step; the stage's budget is "
        f"{size_text(report.contract.communication_bytes)}{notes}.",
    ]


def evaluation_line(held_out: int, most: int) -> str:
    """How many batches an evaluation takes, of those `held_out`, at most `most`: a sentence."""
    taken = "all" if most >= held_out else f"{most:,} of the"
    batches = "batch" if held_out == 1 else "batches"
    return f"Evaluation: {taken} {held_out:,} {batches} held out (--eval-batches {most})."


def memory_bytes(compiled: CompiledStep) -> int:
    """Device memory that a step needs on each device; that of the state where the backend does not report it."""
    return compiled.layout.device_bytes if compiled.memory is None else compiled.device_bytes


def folder_text(config: TrainConfig, choice: ModelChoice) -> str:
    """A README for the folder of a run: its files, and the commands that use them. choice: its model."""
    files = {
        "config.toml": "all options of the run; `--config` takes it",
        "train.jsonl": "a line of JSON for each step and each evaluation, between one of options and one of results",
        "loss.png": "the curves of the loss, drawn when the run ends",
        "report.html": "results, curves, memory, communication, options and versions, when the run ends" * config.html,
        "checkpoints/": "the newest states, by step" * (config.save_every > 0 and config.save_to is None),
        "tensorboard/": "metrics for `tensorboard --logdir`" * ("tensorboard" in config.log_to),
        "wandb/": "what Weights & Biases keeps here" * ("wandb" in config.log_to),
        "profile/": "a trace of steps {} to {} for xprof, and summary.txt".format(*config.profile_steps)
                    if config.profile else "",
    }
    width = max(map(len, files))
    listed = "".join(f"  {name:{width}}  {what}\n" for name, what in files.items() if what)
    elsewhere = f"Checkpoints are in {config.save_to}.\n" if config.save_to is not None else ""
    file, saved = shlex.quote(f"{config.out}/config.toml"), shlex.quote(str(config.checkpoints))
    ours = is_folder(config.model) or short_name(config.model.partition(":")[0]) is not None
    named = f"--checkpoint {saved}" + f" --model {config.model}" * (not ours)  # importing a module runs it
    prompt = "'1 2 3'" if config.token_file and config.tokenizer is None else "TEXT"
    kept, adapters = config.save_every > 0, config.lora_rank is not None
    merge = " --merge" * adapters
    commands = {
        "go on where it was interrupted": f"train --config {file} --resume",
        "go on where it ended": f"train --config {file} --resume --steps {2 * config.steps}",
        "the same run again": f"train --config {file} --out ANOTHER_FOLDER",
        "text from its model": f"generate {named} --prompt {prompt}" * (kept and choice.decoder is not None),
        "a talk with its model": f"chat {named}" * (
            kept and choice.decoder is not None and config.objective in WITH_RESPONSES),
        "its adapters as PEFT's": f"export {named} --out ADAPTER_FOLDER" * (kept and adapters),
        "its model as safetensors": f"export{merge} {named} --out model.safetensors" * kept,
        "its model as a folder that transformers loads":
            f"export{merge} {named} --names huggingface --out MODEL_FOLDER" * (kept and choice.names is not None)}
    said = "".join(f"  {what}:\n    python -m zero_jax {command}\n" for what, command in commands.items() if command)
    return (f"A training run of {config.model} by zero_jax: {config.steps} steps at ZeRO stage {config.stage}.\n\n"
            f"{listed}{elsewhere}\n{said}")


def write_readme(config: TrainConfig, choice: ModelChoice) -> Path:
    """Writes README.txt into the folder of the run; raises ValueError where it cannot be written."""
    path = config.out / "README.txt"
    with in_folder_of_run(path):
        path.write_text(folder_text(config, choice), encoding="utf-8")
    return path
