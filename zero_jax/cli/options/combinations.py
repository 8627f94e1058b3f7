"""What does not go together on the command line: the rows of a step, in the words of its flags, and those of a run."""

import dataclasses
from typing import Any

from zero_jax.cli.environment import simulates
from zero_jax.cli.options.diloco import DiLoCoOptions
from zero_jax.cli.options.lora import LoraOptions
from zero_jax.combinations import FACTS, TABLE, Arguments, Row, Values, among, check, given, left, other

FLAGS = {
    "prefetch": "prefetch_weights", "communication.weights": "quantize_weights",
    "communication.gradients": "quantize_gradients", "copy": "precision", "float16": "precision", "fp8": "precision",
    "hpz_axes": "hpz", "offload.parameters": "offload", "offload.gradients": "offload", "offload.disk": "offload",
    "attention.kernel": "attention", "guard": "max_bad_steps", "lora": "lora_rank"}
"""An option of the table of a step -> the field of a config, where it is no longer the same name with _ for a dot."""

RUN = (
    # Where the state is.
    Row((among("offload", "disk"), left("offload_disk")), "the states have no folder on a local disk",
        "give {offload_disk=/mnt/nvme/run}, say"),
    Row((given("offload_disk"), other("offload", "disk", "auto")), "nothing is in files",
        "give {offload=disk}, or leave {offload_disk} out"),
    Row((given("local_checkpoints"), among("offload", "disk")), "the files are such a copy",
        "leave {local_checkpoints} out"),
    Row((given("check_replicas"), among("offload", "disk")), "what is in files cannot be compared on the devices",
        "leave {check_replicas} out"),
    Row((given("offload_gib"), other("offload", "auto")), "it is what that is to fit", "give both, or leave it out"),
    Row((among("offload", "auto"), left("offload_gib"), left("target"), given("simulated")),
        "simulated devices have no memory of their own to fit",
        "give {offload_gib}, or name the placement; zero-jax plan --target h100:8 --offload auto chooses for "
        "accelerators"),
    Row((given("offload_fraction"), other("offload", "optimizer")),
        "it is the share of what that puts into host memory",
        "give both, or leave it out"),
    # Slices that train by themselves.
    Row((given("check_replicas"), given("diloco.every")), "slices differ from each other between two averages",
        "leave {check_replicas} out"),
    Row((given("lora"), given("diloco.every")), "adapters are small enough to be averaged in every step"),
    Row((given("float16"), given("diloco.every")), "its loss scale skips steps, which a slice would do by itself",
        "give {precision=bf16}"),
    *(Row((given(field.name), left("diloco.every")), "no slices are averaged",
          "say after how many steps they are, or leave it out")
      for field in dataclasses.fields(DiLoCoOptions) if field.name not in ("diloco_every", "diloco_mix")),
    *(Row((given(field.name), left("lora")), "there are no adapters", "give {lora=16}, say, or leave it out")
      for field in dataclasses.fields(LoraOptions) if field.name != "lora_rank"),
    # Optimizers, and what they store.
    Row((given("betas"), among("optimizer", "adafactor", "sgd-momentum")), "it has no two such averages",
        "leave {betas} out"),
    Row((given("eps"), among("optimizer", "adafactor", "sgd-momentum", "lion", "lion-bf16-momentum")),
        "it divides by no such sum", "leave {eps} out"),
    Row((given("moments"), among("optimizer", "adamw-bf16-momentum", "lion-bf16-momentum")),
        "it says by itself how its momentum is stored", "give {optimizer=adamw} or {optimizer=lion}"),
    Row((given("moments"), among("optimizer", "muon")), "the momentum of a whole matrix is stored in float32",
        "leave {moments} out"),
    Row((given("moments"), among("optimizer", "schedule-free")), "what it stores are parameters, and no moments",
        "leave {moments} out"),
    Row((given("moments"), among("precision", "bf16-stochastic")), "that stores them in bfloat16 already",
        "leave {moments} out, or give {precision=bf16}"),
    Row((among("optimizer", "schedule-free"), given("ema")), "it keeps such an average by itself", "leave {ema} out"),
    Row((among("optimizer", "schedule-free"), among("precision", "bf16-stochastic")),
        "its average is of parameters in float32", "give {precision=bf16}"),
    Row((among("optimizer", "muon", "schedule-free"), given("diloco.every")),
        "what it stores is not averaged over slices", "give {optimizer=adamw}"),
    Row((among("optimizer", "muon", "schedule-free"), among("offload", "parameters", "gradients", "disk", "auto")),
        "what it stores was compared in host memory alone", "give {offload=optimizer}, or {optimizer=adamw}"),
    Row((among("optimizer", "muon"), given("lora")), "adapters are no matrices of the model",
        "give {optimizer=adamw}"),
    # A run, and what it keeps.
    Row((given("check_replicas"), among("stage", 3), left("replica")),
        "each device stores a shard of its own, and there are no copies to compare",
        "give {replica=2} or more, a lower stage, or leave it out"),
    Row((given("hang_exit"), left("hang_after")), "nothing says when a step hangs", "give {hang_after=600}, say"),
    Row((given("local_checkpoints"), left("local_every")), "they belong together", "give both, or neither"),
    Row((given("local_every"), left("local_checkpoints")), "they belong together", "give both, or neither"),
    Row((given("max_to_keep"), among("save_every", 0)), "nothing is saved", "leave {max_to_keep} out"),
    Row((given("save_to"), among("save_every", 0), left("resume")), "nothing is saved or read", "leave {save_to} out"),
    Row((given("target"), left("dry_run")), "a run is on the devices that are here"),
    Row((given("decay"), other("schedule", "wsd")), "others decay in all steps or in none",
        "leave {decay} out, or give {schedule=wsd}"),
    Row((given("final_rate"), among("schedule", "constant")), "that stays at its peak",
        "leave {final_rate} out, or give another schedule"),
    Row((given("eval_fraction"), given("eval_data")), "nothing is held out of the data then"),
    # A plan of several steps.
    Row((given("communication.weights", "communication.gradients", "gather", "tiling"), given("every_stage")),
        "that compiles every stage, and not all have it"),
    Row((among("offload", "parameters", "gradients", "auto"), given("other_steps")),
        "that compiles other stages and sizes"),
)
"""Options of a run or a plan beside those of its step."""


class Flags(Arguments):
    """How the command line names options. config: what was given."""

    facts = {**FACTS, "simulated": "on simulated devices", "every_stage": "with {}",
             "other_steps": "with {}"}

    def __init__(self, config: Any):
        self.config = config

    def option(self, name: str, value: str = "") -> str:
        """A flag, with a value."""
        field = FLAGS.get(name, name.replace(".", "_"))
        return f"--{field.replace('_', '-')}{' ' * bool(value)}{value}"

    def value(self, value: Any) -> str:
        """As it is typed."""
        return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)

    def shown(self, name: str, values: Values) -> str:
        """A flag with its value in the config."""
        value = getattr(self.config, FLAGS.get(name, name.replace(".", "_")))
        return self.option(name, "" if isinstance(value, bool) else self.value(value)).replace(
            "--", "--no-" if value is False else "--")


def values_of(config: Any) -> dict[str, Any]:
    """The options of a `TrainConfig` or `PlanConfig` as the tables name them; those that have their default are None.

    What is known once JAX has started is left out.
    """
    own = {field.name: None if value == field.default or value == [] else "no" if value is False else value
           for field in dataclasses.fields(config) for value in (getattr(config, field.name),)}
    gradients, placed, precision = config.quantize_gradients, config.offload, config.precision
    switches = {"yes": True, "no": False}
    if "search" in own:
        varied = config.search if config.search in ("fit", "layers") else None  # mesh tries what goes together
        several = varied and f"--search {varied}"
        own |= {"every_stage": None if several == "--search layers" else several, "other_steps": several}
    return own | {
        **{name: own[field] for name, field in FLAGS.items() if field in own},
        **{name.replace("diloco_", "diloco."): value for name, value in own.items() if name.startswith("diloco_")},
        "stage": config.stage, "overlap": switches.get(config.overlap, "auto"),
        "partition_activations": switches.get(config.partition_activations, config.partition_activations),
        "copy": precision in ("bf16", "fp16", "bf16-fp8"),
        "fp8": precision == "bf16-fp8" or None, "float16": precision == "fp16" or None,
        "one_hop": len(set(gradients)) > 1 and "search" not in own and config.replica == config.context == 1,
        "offload.parameters": "host" if placed in ("parameters", "gradients") else None,
        "offload.gradients": "host" if placed == "gradients" else None, "offload.disk": placed == "disk",
        "simulated": simulates()}


def check_combinations(config: Any) -> None:
    """Raises UsageError for options of a `TrainConfig` or `PlanConfig` that do not go together."""
    check(values_of(config), Flags(config), (*TABLE, *RUN))


def check_kernel(config: Any, platform: str | None) -> None:
    """Raises UsageError for a kernel of attention that the devices do not have; None: not known before JAX starts."""
    if platform is not None:
        check({"attention.kernel": config.attention, "platform": platform}, Flags(config))
