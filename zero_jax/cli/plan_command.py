"""The commands `plan` and `inspect`: a report on a compiled step, for a target topology or for live devices."""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console

from zero_jax.cli.config_file import config_text
from zero_jax.cli.model_lookup import ModelChoice
from zero_jax.cli.plan_config import PlanConfig
from zero_jax.cli.plan_report import draw_stages, finite, plan_json, plan_tables, search_table, verdict
from zero_jax.cli.report import make_console, state_table
from zero_jax.cli.step_from_config import attention_text, devices_of, residual_options, step_of, with_attention
from zero_jax.cli.train_config import TrainConfig
from zero_jax.optim.presets import OPTIMIZERS
from zero_jax.planning.memory import Transformer
from zero_jax.planning.plan import Plan, examine, plan
from zero_jax.planning.search import SearchResult, deepest, search
from zero_jax.sharding.mesh import make_mesh
from zero_jax.stages import STAGES
from zero_jax.xla.devices import target_devices
from zero_jax.xla.targets import Target, target_of


def plan_command(config: PlanConfig, *, console: Console | None = None) -> bool:
    """Compiles and prints the plan of `config`; returns whether the step fits.

    Raises ValueError for an invalid target, mesh, model or batch.
    """
    console = console or make_console()
    target, choice = config.check()
    progress = Console(stderr=True, highlight=False)
    length = config.seq_len or getattr(choice.config, "max_length", None)
    optimizer = OPTIMIZERS[config.optimizer](learning_rate=1e-3, weight_decay=0.1)
    options = {"precision": config.precision, "mesh": config.mesh or -1, "optimizer": optimizer,
               "accumulate": config.accumulate, "reduce": config.reduce, "gather": config.gather,
               "tensor": config.tensor, "context": config.context, "replica": config.replica,
               "loss": choice.loss, **residual_options(config, choice)}

    mesh = make_mesh(options["mesh"], tensor=config.tensor, context=config.context, replica=config.replica,
                     devices=target_devices(target))
    choice = with_attention(choice, mesh, config.attention)

    def batch(per_device: int) -> Any:
        rows = per_device * config.groups
        if choice.batch_shapes is not None:
            return choice.batch_shapes(choice.config, rows, length)
        return {name: jax.ShapeDtypeStruct((rows, length), jnp.int32) for name in ("inputs", "targets")}

    def report_trial(name: str, trial: Plan) -> None:
        progress.print(f"{name}: {verdict(trial).splitlines()[0]} ({trial.compile_seconds:.0f} s)", soft_wrap=True)

    result: SearchResult | None = None
    if config.search == "layers":
        result = deepest(lambda layers: _model(choice, num_layers=layers), config.stage, target,
                         batch(config.batch_per_device), on_plan=report_trial, **options)
    elif config.search == "fit":
        result = search(_models(choice, config), target, batch, on_plan=report_trial, **options)
    chosen = result.plan if result else None
    if result is None:
        with progress.status(f"Compiling {config.model} for {config.target} ..."):
            chosen = plan(
                _model(choice), config.stage, target, batch(config.batch_per_device), **options,
                transformer=_transformer(
                    choice.config, None if config.remat in ("model", "yes", "no") else True, config.batch_per_device,
                    length, config))
    if config.json:
        print(json.dumps(finite({
            "model": config.model, "plan": chosen and plan_json(chosen),
            "search": result and {"model": result.model, "size": result.size, "tried": [
                {"stage": each.stage, "batch_size": each.batch_size, "needed_bytes": each.needed_bytes,
                 "fits": each.fits} for each in result.tried]}})))
    else:
        if result:
            console.print(search_table(result))
        if chosen:
            console.print(plan_tables(chosen))
            console.print(attention_text(choice, batch=chosen.batch_size // config.accumulate, length=length,
                                         precision=config.precision))
    if config.png is not None:
        _draw(config, choice, target, batch(config.batch_per_device), options, None if result else chosen)
    return chosen is not None and chosen.fits


def inspect_command(config: TrainConfig, *, console: Console | None = None) -> bool:
    """The report of `plan` for the step that `train` would run with the same options; returns whether it fits.

    On the live devices, or those of the `target` of a dry run, which also prints all options. Raises ValueError as
    `train` does.
    """
    console = console or make_console()
    choice = config.check()
    if config.dry_run:
        console.print(f"Dry run, nothing is trained or written. All options:\n{config_text(config)}", soft_wrap=True)
    target = None if config.target is None else target_of(config.target)
    devices = devices_of(config) if target is None else target_devices(target)
    step = step_of(config, choice, devices)
    shape = (config.batch_size, config.seq_len)
    chosen = examine(
        step, {name: jax.ShapeDtypeStruct(shape, dtype) for name, dtype in config.batch_arrays.items()}, target,
        transformer=_transformer(choice.config, None, config.batch_size // len(devices), config.seq_len))
    console.print(state_table(chosen.layout))
    console.print(plan_tables(chosen))
    console.print(attention_text(with_attention(choice, step.mesh, config.attention), batch=config.batch_size
                                 // config.accumulate, length=config.seq_len, precision=config.precision))
    if config.dry_run and chosen.timing is None and not chosen.refused:
        console.print("Time: not predicted for the devices that are here; --target h100:8, say, predicts it.")
    return chosen.fits


def _transformer(sizes: Any, remat: bool | None, batch: int, length: int | None, config: PlanConfig | None = None
                 ) -> Transformer | None:
    """The fields of a model's config that the activation formula needs; None if it is not such a transformer's.

    The paper's formula is of a feed-forward of 4 x width; a config with a field `hidden` has another.
    """
    if not all(hasattr(sizes, name) for name in ("num_layers", "width", "num_heads")) or hasattr(sizes, "hidden"):
        return None
    assert length is not None
    recomputed = getattr(sizes, "remat", False) if remat is None else remat
    return Transformer(sizes.num_layers, sizes.width, sizes.num_heads, batch, length, remat=recomputed,
                       split=config.tensor if config and config.partition_activations != "no" else 1,
                       host=config is not None and config.partition_activations == "cpu")


def _model(choice: ModelChoice, **changes: Any) -> Any:
    return choice.build(dataclasses.replace(choice.config, **changes))


def _models(choice: ModelChoice, config: PlanConfig) -> dict[str, Any]:
    """Without and with remat of the model's own, where its config has the field and the user left the choice open."""
    if config.remat != "model" or not hasattr(choice.config, "remat"):
        return {config.model: _model(choice)}
    return {f"{config.model}, {name}": _model(choice, remat=remat)
            for name, remat in (("nothing recomputed", False), ("blocks recomputed", True))}


def _draw(config: PlanConfig, choice: ModelChoice, target: Target, batch: Any, options: Any,
          chosen: Plan | None) -> None:
    plans = [chosen if chosen is not None and chosen.stage == stage else
             plan(_model(choice), stage, target, batch, **options) for stage in range(len(STAGES))]
    assert config.png is not None
    config.png.parent.mkdir(parents=True, exist_ok=True)
    draw_stages(config.png, plans, f"{config.model} on {config.target}, {config.batch_per_device} per device")
