"""The commands `plan` and `inspect`: a report on a compiled step, for a target topology or for live devices."""

import dataclasses
import json
from typing import Any

from jax.sharding import Mesh
from rich.console import Console

from zero_jax.cli.chosen import with_chosen_microbatches, with_chosen_offload
from zero_jax.cli.config_file import config_text
from zero_jax.cli.model_lookup import ModelChoice
from zero_jax.cli.objectives.choose import objective_of
from zero_jax.cli.planning import plan_report
from zero_jax.cli.planning.mesh_search import MeshSearch, mesh_table, search_mesh
from zero_jax.cli.planning.plan_config import PlanConfig
from zero_jax.cli.planning.remedies import Remedy, remedies, remedy_lines, train_lines
from zero_jax.cli.planning.training_cost import TrainingCost
from zero_jax.cli.reports.report import make_console, state_table
from zero_jax.cli.start import check_start
from zero_jax.cli.step_from_config import (
    abstract_batch,
    attention_text,
    devices_of,
    loss_of,
    optimizer_of,
    residual_options,
    step_of,
    with_attention,
)
from zero_jax.cli.train_config import TrainConfig
from zero_jax.cli.training.run_programs import examine_slices, slices_of
from zero_jax.planning.memory import Transformer
from zero_jax.planning.offload_choice import OffloadArgument, OffloadChoice
from zero_jax.planning.placement import compare, files_on
from zero_jax.planning.plan import Plan, examine
from zero_jax.planning.search import SearchResult, deepest, search, tokens_per_second
from zero_jax.sharding.mesh import make_mesh
from zero_jax.step.make import make_zero_train_step
from zero_jax.step.step import ZeroTrainStep
from zero_jax.xla.devices import target_devices
from zero_jax.xla.live_chip import topology_of
from zero_jax.xla.process_memory import process_bytes
from zero_jax.xla.targets import Target, target_of


def plan_command(config: PlanConfig, *, console: Console | None = None) -> bool:
    """Compiles and prints the plan of `config`; returns whether the step fits, in time for a deadline.

    Raises ValueError for an invalid target, mesh, model or batch.
    """
    console = console or make_console()
    setup, asked = _Setup.of(config), config
    choice, target, options = setup.choice, setup.target, setup.options
    progress = Console(stderr=True, highlight=False)

    def report_trial(name: str, trial: Plan) -> None:
        verdict = plan_report.verdict(trial).splitlines()[0]
        progress.print(f"{name}: {verdict} ({trial.compile_seconds:.0f} s)", soft_wrap=True)

    if config.png is not None:
        config.png.parent.mkdir(parents=True, exist_ok=True)
        first = setup.step(None if config.offload == "auto" else options["offload"]).layout(setup.batch())
        plan_report.draw_stages(config.png, first, process_bytes(target.chip), f"{config.model} on {config.target}: "
                                f"model states over {first.num_shards} shards, by formula")
        progress.print(f"{config.png} is drawn.", soft_wrap=True)
    result: SearchResult | None = None
    if config.search == "layers":
        result = deepest(lambda layers: _model(choice, config, num_layers=layers), config.stage, target,
                         setup.batch(), on_plan=report_trial, **options)
    elif config.search == "fit":
        result = search(_models(choice, config), target, setup.batch, on_plan=report_trial, **options)
    chosen = result.plan if result else None
    placement: OffloadChoice | None = None
    helps: list[Remedy] = []
    divided: MeshSearch | None = None
    if config.search == "mesh":
        batch = config.batch_size or config.batch_per_device * config.groups
        divided = search_mesh(config, setup.step(None).layout(setup.batch(1)), choice, target, batch=batch,
                              length=setup.length, plan_of=lambda other: _Setup.of(other).plan(), on_plan=report_trial)
        if divided.best:
            chosen, config = divided.best.plan, divided.best.config
            setup = _Setup.of(config)
            choice = setup.choice
    elif result is None:
        with progress.status(f"Compiling {config.model} for {config.target} ..."):
            if config.offload == "auto":
                placement = compare(setup.plan_of, lambda: files_on(target, setup.step, setup.batch()))
            chosen = placement.plan if placement else setup.plan_of(options["offload"])
        if not chosen.fits and config.remedies:
            helps = remedies(config, chosen, choice.config, lambda other: _Setup.of(other).plan(), report_trial)
    cost = TrainingCost.of(config, chosen) if chosen else None
    if config.json:
        print(json.dumps(plan_report.finite({
            "model": config.model, "plan": chosen and plan_report.plan_json(chosen), "cost": cost and cost.as_json(),
            "remedies": [{"changes": dict(each.changes), "plan": plan_report.plan_json(each.plan)} for each in helps],
            "placement": placement and {"offload": placement.name, "reason": placement.reason},
            "divisions": divided and divided.as_json(),
            "search": result and {"model": result.model, "size": result.size, "tried": [
                {"stage": each.stage, "batch_size": each.batch_size, "needed_bytes": each.needed_bytes,
                 "fits": each.fits, "tokens_per_second": tokens_per_second(each)} for each in result.tried]}})))
    else:
        if result:
            console.print(plan_report.search_table(result))
        if divided:
            console.print(mesh_table(asked, divided), *divided.lines(target), sep="\n")
        if placement:
            console.print(str(placement), soft_wrap=True)
        if setup.microbatches:
            console.print(setup.microbatches, soft_wrap=True)
        if chosen:
            console.print(plan_report.plan_tables(chosen, advice=not config.remedies))
            console.print(attention_text(choice, batch=chosen.batch_size // config.accumulate, length=setup.length,
                                         precision=config.precision))
        if cost:
            console.print(plan_report.cost_table(cost))
        if chosen and result is None and (chosen.fits or config.remedies):
            lines = train_lines(config, chosen) if chosen.fits else remedy_lines(
                config, chosen, helps)
            console.print(*lines, sep="\n", soft_wrap=True)
    if cost and cost.late:
        progress.print(cost.late, soft_wrap=True)
    return chosen is not None and chosen.fits and not (cost and cost.late)


@dataclasses.dataclass(frozen=True)
class _Setup:
    """What `plan` compiles: options are those of `zero_jax.plan`, length the tokens of a sequence."""

    config: PlanConfig
    target: Target
    choice: ModelChoice
    length: int | None
    mesh: Mesh
    options: dict[str, Any]
    microbatches: str = ""

    @classmethod
    def of(cls, config: PlanConfig) -> "_Setup":
        """Of a configuration, with what its `gather` and `reduce` stand for; raises ValueError for what is wrong."""
        first = cls._of(config.with_microbatches())
        settled, why = with_chosen_microbatches(config, lambda: first.step(first.options["offload"]).layout(
            first.batch()), first.choice, first.target, batch=config.sequences * config.groups, length=first.length)
        return dataclasses.replace(cls._of(settled), microbatches=why) if why else first

    @classmethod
    def _of(cls, config: PlanConfig) -> "_Setup":
        target, choice = config.check()
        length: int | None = config.seq_len
        data = config.mesh or config.data_sizes(target.num_devices)
        mesh = make_mesh(data, tensor=config.tensor, context=config.context, replica=config.replica,
                         devices=target_devices(target))
        choice = with_attention(choice, mesh, config.attention)
        optimizer = optimizer_of(config, mesh, learning_rate=1e-3, weight_decay=0.1)
        return cls(config, target, choice, length, mesh, {
            "precision": config.precision, "mesh": data, "optimizer": optimizer,
            "accumulate": config.accumulate, "tensor": config.tensor, "context": config.context,
            "replica": config.replica,
            "loss": loss_of(config, choice, mesh, choice.loss), **residual_options(config, choice)})

    def batch(self, per_device: int | None = None) -> Any:
        """The global batch, abstract."""
        return abstract_batch(self.choice, (per_device or self.config.sequences) * self.config.groups,
                              self.length)

    def step(self, offload: OffloadArgument) -> ZeroTrainStep:
        """The step with another placement."""
        axes = ("mesh", "tensor", "context", "replica")  # which `mesh` has
        options: dict[str, Any] = {name: value for name, value in self.options.items() if name not in axes}
        return make_zero_train_step(_model(self.choice, self.config), self.config.stage, **options | {
            "mesh": self.mesh, "offload": offload})

    def plan_of(self, offload: OffloadArgument) -> Plan:
        """The plan of that step."""
        transformer = _transformer(self.choice.config, self.config, self.config.sequences, self.length)
        return examine(self.step(offload), self.batch(), self.target, transformer)

    def plan(self) -> Plan:
        """The plan of the step as it is configured."""
        return self.plan_of(self.options["offload"])


def inspect_command(config: TrainConfig, *, console: Console | None = None) -> bool:
    """The report of `plan` for the step that `train` would run with the same options; returns whether it fits.

    On the live devices, or those of the `target` of a dry run, which also prints all options. Raises ValueError as
    `train` does.
    """
    console = console or make_console()
    objective = objective_of(config)
    choice = objective.choice
    if config.dry_run:
        console.print("Dry run, nothing is trained or written; nor are the data read, so whether there are enough only "
                      f"a run says. All options:\n{config_text(config)}", soft_wrap=True)
    check_start(config)
    target = None if config.target is None else target_of(config.target)
    devices = devices_of(config) if target is None else target_devices(target)
    live = None if target is not None else topology_of(devices, config.chip)
    groups = len(devices) // (config.tensor * config.context)
    transformer = _transformer(choice.config, config, config.batch_size // groups, objective.length)
    config, placement = with_chosen_offload(config, objective, devices, target=target, transformer=transformer)
    config, microbatches = with_chosen_microbatches(config, lambda: step_of(
        config, choice, devices, loss=objective.loss).layout(objective.batch_shapes()), choice, target or live,
        batch=config.batch_size, length=objective.length)
    step = step_of(config, choice, devices, loss=objective.loss)
    if microbatches:
        console.print(microbatches, soft_wrap=True)
    if placement:
        console.print(str(placement), soft_wrap=True)
    fits, lines = True, []
    if slices := slices_of(config, step):
        chosen, lines, fits = examine_slices(slices, objective.batch_shapes(), target, steps=config.steps,
                                             transformer=transformer, timed_on=live)
    else:
        chosen = placement.plan if placement else examine(step, objective.batch_shapes(), target, transformer,
                                                          timed_on=live)
    console.print(state_table(chosen.layout))
    console.print(plan_report.plan_tables(chosen))
    for line in lines:
        console.print(line, soft_wrap=True)
    console.print(attention_text(with_attention(choice, step.mesh, config.attention), batch=config.batch_size
                                 // config.accumulate, length=objective.length, precision=config.precision))
    if config.dry_run and chosen.timing is None and not chosen.refused:
        console.print("Time: not predicted for the devices that are here; --target h100:8, say, predicts it, or --chip "
                      "with a chip file of these.")
    return chosen.fits and fits


def _transformer(sizes: Any, config: PlanConfig | TrainConfig, batch: int, length: int | None) -> Transformer | None:
    """The fields of a model's config that the activation formula needs; None if it is not such a transformer's.

    batch: sequences of one group of devices that share them. The paper's formula is of a feed-forward of 4 x width; a
    config with a field `hidden` has another.
    """
    if length is None or hasattr(sizes, "hidden") or not all(
            hasattr(sizes, name) for name in ("num_layers", "width", "num_heads")):
        return None
    return Transformer(sizes.num_layers, sizes.width, sizes.num_heads, batch // config.accumulate,
                       length // config.context,
                       remat=getattr(sizes, "remat", False) or config.remat not in ("model", "yes", "no"),
                       split=config.tensor if config.partition_activations in ("yes", "cpu") else 1,
                       host=config.partition_activations == "cpu")


def _model(choice: ModelChoice, config: PlanConfig, **changes: Any) -> Any:
    return config.adapted(choice.build(dataclasses.replace(choice.config, **changes) if changes else choice.config))


def _models(choice: ModelChoice, config: PlanConfig) -> dict[str, Any]:
    """Without and with remat of the model's own, where its config has the field and the user left the choice open."""
    if config.remat != "model" or not hasattr(choice.config, "remat"):
        return {config.model: _model(choice, config)}
    return {f"{config.model}, {name}": _model(choice, config, remat=remat)
            for name, remat in (("nothing recomputed", False), ("blocks recomputed", True))}
