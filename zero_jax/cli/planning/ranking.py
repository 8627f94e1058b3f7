"""The divisions of a step that fit by formula, the fastest first: what a search lists, and what "auto" stands for."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from zero_jax.cli.model_lookup import ModelChoice
from zero_jax.cli.planning.plan_config import PlanConfig
from zero_jax.cli.step_from_config import attention_text, with_attention
from zero_jax.cli.train_config import TrainConfig
from zero_jax.errors import UsageError
from zero_jax.layout.layout import Layout
from zero_jax.planning.division import Collective, Decoder, Division, Estimate, divisions, estimate
from zero_jax.sharding.mesh import make_mesh
from zero_jax.xla.devices import coords
from zero_jax.xla.process_memory import process_bytes
from zero_jax.xla.targets import Target
from zero_jax.xla.timing import collective_seconds

SEARCHED = ("stage", "tensor", "context", "replica", "hpz", "accumulate", "gather", "reduce", "loss_chunks", "offload",
            "sequence_parallel", "quantize_weights", "quantize_gradients")
"""The options of a step by which divisions differ; and remat."""


def remat_of(config: PlanConfig | TrainConfig, choice: ModelChoice) -> str:
    """What blocks keep, as a `Division` names it."""
    own = "full" if getattr(choice.config, "remat", False) else "no"
    return {"model": own, "yes": "full", "sqrt": "full"}.get(config.remat, config.remat)


def decoder_of_step(config: PlanConfig | TrainConfig, choice: ModelChoice, layout: Layout, *, batch: int, length: int
                    ) -> Decoder:
    """What the formula knows of a step's model and optimizer; raises UsageError for what is no such transformer."""
    moments = sum(row.bytes for row in layout.placements() if row.name.startswith("opt_state")) / layout.num_params
    kernel = attention_text(with_attention(choice, layout.mesh, config.attention), batch=batch, length=length,
                            precision=config.precision)
    return decoder_of(choice.config, layout.num_params, moments,
                      scored_length=length if kernel.startswith("Attention: xla") else 0)


def decoder_of(sizes: Any, num_params: int, moments: float = 8.0, *, scored_length: int = 0) -> Decoder:
    """What the formula knows of a model, by its config. Raises UsageError for what is no such transformer.

    scored_length: tokens whose scores a token has in memory; 0 with a kernel of attention that keeps none.
    """
    if missing := [name for name in ("num_layers", "width", "num_heads", "vocab_size") if not hasattr(sizes, name)]:
        raise UsageError(f"the model's config has no {missing[0]}, by which its time is estimated: give another "
                         "search, or options by hand.")
    hidden = getattr(sizes, "hidden", None)  # gate, up, and their product; without a gate: before and after
    tied = getattr(sizes, "tied", True)
    products = num_params - (0 if tied else sizes.vocab_size * sizes.width)
    return Decoder(
        num_params, sizes.num_layers, sizes.width, sizes.num_heads, getattr(sizes, "num_kv_heads", sizes.num_heads),
        getattr(sizes, "head_dim", None) or sizes.width // sizes.num_heads, 3 * hidden if hidden else 8 * sizes.width,
        sizes.vocab_size, 6.0 * products, moments, 3 * sizes.num_heads * scored_length)


def left_open(config: PlanConfig, choice: ModelChoice, target: Target) -> dict[str, Any]:
    """What of a division is fixed in a search: options that are not at their defaults, and what cannot be."""
    defaults = {field.name: field.default for field in dataclasses.fields(PlanConfig)}
    fixed = {name: getattr(config, name) for name in SEARCHED if getattr(config, name) != defaults[name]}
    if config.remat != "model":
        fixed["remat"] = remat_of(config, choice)
    if choice.rules is None:
        fixed["tensor"] = 1
    if not target.chip.gpu:  # axes along the torus, and no node with links of its own
        fixed.setdefault("hpz", 1)
    return fixed


def ranked(fixed: Mapping[str, Any], model: Decoder, target: Target, devices: Sequence[Any], *, batch: int, length: int,
           precision: str, share: float = 1.0) -> tuple[list[tuple[Division, Estimate]], int]:
    """(The divisions that fit by formula, the fastest first, and how many there are).

    fixed: what divisions have in common. devices: of the mesh. share: of the memory that a process has.
    """
    links = dict[tuple[int, ...], Collective]()
    found, counted, room = list[tuple[Division, Estimate]](), 0, share * process_bytes(target.chip)
    host = target.num_devices // target.num_hosts if target.chip.gpu else 16
    for division in divisions(model, len(devices), batch=batch, length=length, largest_tensor=host, fixed=fixed):
        counted += 1
        sizes = division.replica, division.tensor, division.context, division.hpz
        if sizes not in links:
            links[sizes] = _links(target, devices, division)
        if each := estimate(model, division, batch=batch, length=length, chip=target.chip, collective=links[sizes],
                            compute_bytes=4 if precision == "fp32" else 2, room=room):
            if each.host_bytes <= (target.chip.host_memory_bytes or 0):
                found.append((division, each))
    return sorted(found, key=lambda item: item[0].preferred * item[1].seconds), counted


def _links(target: Target, devices: Sequence[Any], division: Division) -> Collective:
    data = division.data if division.hpz == 1 else (division.data // division.hpz, division.hpz)
    mesh = make_mesh(data, replica=division.replica, context=division.context, tensor=division.tensor,
                     devices=devices)

    @functools.cache
    def link(kind: str, axis: str) -> tuple[float, float]:
        wanted = {"data": ("data", "data_0", "data_1", "context"), "hpz": ("data_1",)}.get(axis, (axis,))
        group = mesh.devices[tuple(slice(None) if name in wanted else 0 for name in mesh.axis_names)]
        return collective_seconds(target, [coords(device) for device in group.flat], kind)

    return link
