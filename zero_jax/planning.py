"""The commands `plan` and `inspect`: a report on a step, for described devices or for live ones."""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console

from zero_jax.config import InspectConfig
from zero_jax.memory import Transformer
from zero_jax.model_choice import ModelChoice
from zero_jax.optimizers import OPTIMIZERS
from zero_jax.plan_config import PlanConfig
from zero_jax.plan_report import draw_stages, finite, found_table, plan_json, plan_tables, verdict
from zero_jax.planner import Plan, examine, plan
from zero_jax.report import make_console, state_table
from zero_jax.search import Found, deepest, search
from zero_jax.stages import STAGES
from zero_jax.targets import Target
from zero_jax.train import devices_of, residual_options, step_of


def plan_command(config: PlanConfig, *, console: Console | None = None) -> bool:
    """Plans as `config` says and shows it; returns whether the step fits.

    Raises ValueError for a target, mesh, model or batch that cannot be.
    """
    console = console or make_console()
    target, choice = config.check()
    progress = Console(stderr=True, highlight=False)
    length = config.length or choice.config.max_length
    optimizer = OPTIMIZERS[config.optimizer](learning_rate=1e-3, weight_decay=0.1)
    options = {"precision": config.precision, "mesh": config.mesh or -1, "optimizer": optimizer,
               "accumulate": config.accumulate, "reduce": config.reduce, "tensor": config.tensor,
               "context": config.context, "replica": config.replica, **residual_options(config, choice)}

    def batch(per_device: int) -> Any:
        shape = (per_device * config.groups, length)
        return {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name in ("inputs", "targets")}

    def told(name: str, made: Plan) -> None:
        progress.print(f"{name}: {verdict(made).splitlines()[0]} ({made.compile_seconds:.0f} s)", soft_wrap=True)

    found: Found | None = None
    if config.search == "layers":
        found = deepest(lambda layers: _model(choice, config, num_layers=layers), config.stage, target,
                        batch(config.batch_per_device), on_plan=told, **options)
    elif config.search == "fit":
        found = search(_models(choice, config), target, batch, on_plan=told, **options)
    made = found.plan if found else None
    if found is None:
        with progress.status(f"Compiling {config.model} for {config.target} ..."):
            made = plan(
                _model(choice, config), config.stage, target, batch(config.batch_per_device), **options,
                transformer=_transformer(
                    choice.config, config.remat if config.recompute == "model" else True, config.batch_per_device,
                    length, config))
    if config.json:
        print(json.dumps(finite({
            "model": config.model, "plan": made and plan_json(made),
            "search": found and {"model": found.model, "size": found.size, "tried": [
                {"stage": each.stage, "batch_size": each.batch_size, "needed_bytes": each.needed_bytes,
                 "fits": each.fits} for each in found.tried]}})))
    else:
        if found:
            console.print(found_table(found))
        if made:
            console.print(plan_tables(made))
    if config.png is not None:
        _draw(config, choice, target, batch(config.batch_per_device), options, None if found else made)
    return made is not None and made.fits


def inspect_command(config: InspectConfig, *, console: Console | None = None) -> None:
    """The reports of `plan` for the step that `train` would run with the same options, on the devices that are there.

    Raises ValueError as `train` does.
    """
    console = console or make_console()
    choice = config.check()
    devices = devices_of(config)
    step = step_of(config, choice, devices)
    shape = (config.batch_size, config.length)
    made = examine(
        step, {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name in ("inputs", "targets")},
        transformer=_transformer(choice.config, None, config.batch_size // len(devices), config.length))
    console.print(state_table(made.layout))
    console.print(plan_tables(made))


def _transformer(sizes: Any, remat: bool | None, batch: int, length: int, config: PlanConfig | None = None
                 ) -> Transformer | None:
    """A model's config as the formula of activations takes it, if it is one of a transformer."""
    if not all(hasattr(sizes, name) for name in ("num_layers", "width", "num_heads")):
        return None
    recomputed = getattr(sizes, "remat", False) if remat is None else remat
    return Transformer(sizes.num_layers, sizes.width, sizes.num_heads, batch, length, remat=recomputed,
                       split=config.tensor if config and config.partition_activations != "no" else 1,
                       host=config is not None and config.partition_activations == "cpu")


def _model(choice: ModelChoice, config: PlanConfig, **changes: Any) -> Any:
    if config.remat is not None:
        changes = {"remat": config.remat, **changes}
    return choice.build(dataclasses.replace(choice.config, **changes))


def _models(choice: ModelChoice, config: PlanConfig) -> dict[str, Any]:
    """From the least to the most rematerialisation, where the model's config has a choice and the user made none."""
    if config.remat is not None or not hasattr(choice.config, "remat"):
        return {config.model: _model(choice, config)}
    return {f"{config.model}, {name}": _model(choice, config, remat=remat)
            for name, remat in (("nothing recomputed", False), ("blocks recomputed", True))}


def _draw(config: PlanConfig, choice: ModelChoice, target: Target, batch: Any, options: Any, made: Plan | None) -> None:
    plans = [made if made is not None and made.stage == stage else
             plan(_model(choice, config), stage, target, batch, **options) for stage in range(len(STAGES))]
    assert config.png is not None
    config.png.parent.mkdir(parents=True, exist_ok=True)
    draw_stages(config.png, plans, f"{config.model} on {config.target}, {config.batch_per_device} per device")
