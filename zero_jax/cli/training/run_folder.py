"""What is in the folder of a run, said in it for whoever finds it."""

from pathlib import Path

from zero_jax.cli.train_config import TrainConfig
from zero_jax.errors import UsageError


def folder_text(config: TrainConfig) -> str:
    """A README for the folder of a run: its files, and the commands that use them."""
    files = {
        "config.toml": "all options of the run; `--config` takes it",
        "train.jsonl": "a line of JSON for each step and each evaluation, between one of options and one of results",
        "loss.png": "the curves of the loss, drawn when the run ends",
        "report.html": "results, curves, memory, communication, options and versions, when the run ends" * config.html,
        "checkpoints/": "the newest states, by step" * (config.save_every > 0 and config.save_to is None),
        "tensorboard/": "metrics for `tensorboard --logdir`" * ("tensorboard" in config.log_to),
        "wandb/": "what Weights & Biases keeps here" * ("wandb" in config.log_to),
        "profile/": f"a trace of {(config.profile or '').replace('=', ' ').replace(':', ' to ')} for xprof, and "
                    "summary.txt" if config.profile else "",
    }
    width = max(map(len, files))
    listed = "".join(f"  {name:{width}}  {what}\n" for name, what in files.items() if what)
    elsewhere = f"Checkpoints are in {config.save_to}.\n" if config.save_to is not None else ""
    commands = {
        "go on where it ended": f"train --config {config.out}/config.toml --resume",
        "the same run again": f"train --config {config.out}/config.toml --out ANOTHER_FOLDER",
        "text from its model": f"generate --checkpoint {config.checkpoints} --prompt TEXT" if config.save_every else "",
        **({"its adapters as PEFT's": f"export --checkpoint {config.checkpoints} --out ADAPTER_FOLDER",
            "its model with them as safetensors":
                f"export --merge --checkpoint {config.checkpoints} --out model.safetensors"}
           if config.lora_rank and config.save_every else {}),
        "its parameters as safetensors": f"export --checkpoint {config.checkpoints} --out model.safetensors"
                                         if config.save_every and not config.lora_rank else ""}
    said = "".join(f"  {what}:\n    python -m zero_jax {command}\n" for what, command in commands.items() if command)
    return (f"A training run of {config.model} by zero_jax: {config.steps} steps at ZeRO stage {config.stage}.\n\n"
            f"{listed}{elsewhere}\n{said}")


def write_readme(config: TrainConfig) -> Path:
    """Writes README.txt into the folder of the run; raises ValueError where it cannot be written."""
    path = config.out / "README.txt"
    try:
        path.write_text(folder_text(config), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be written ({error.strerror}): choose another folder with out.") from error
    return path
