"""The step of this library at stage 3 that computes what an audited step computes."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zero_jax.auditing.program import Program
from zero_jax.auditing.roles import BATCH, OPTIMIZER, PARAMS
from zero_jax.errors import UsageError
from zero_jax.sharding.mesh import make_mesh
from zero_jax.stages import stage_of
from zero_jax.step.make import make_zero_train_step
from zero_jax.step.step import ZeroTrainStep
from zero_jax.xla.events import totals

_OPTIMIZERS = (optax.sgd(1e-3), optax.sgd(1e-3, momentum=0.9), optax.adamw(1e-3))
"""By how many arrays a parameter has in the optimizer's state."""


def same_at_stage_3(jitted: Any, shapes: Sequence[Any], program: Program, loss: Callable[..., Any] | None
                    ) -> tuple[ZeroTrainStep, Any] | None:
    """(The step, its batch) of the same loss over the same devices; None where there is no loss, or it is at stage 3.

    The optimizer is one with as much state, and the precision "bf16" where that is what products compute in.

    Args:
        jitted: the audited step; if it is a `ZeroTrainStep`, its own loss is known.
        shapes: its arguments.
        program: the audited step, compiled.
        loss: `loss(params, batch)`, in which nothing is said of shardings; `loss(params, *batch)` of several arguments.
    """
    if isinstance(jitted, ZeroTrainStep):
        if jitted.stage.number == 3:
            return None
        return ZeroTrainStep(jitted.functions.changed(stage=stage_of(3))), shapes[0]
    if loss is None:
        return None
    params, batch = _subtrees(shapes, program, PARAMS), _subtrees(shapes, program, BATCH)
    if len(params) != 1:
        raise UsageError(f"loss: the parameters are {len(params)} arguments, and loss(params, batch) has one: name "
                         "them, as params=\"state.params\", or leave loss out.")
    sizes = [sum(leaf.size for _, leaf in program.of(role)) for role in (OPTIMIZER, PARAMS)]
    flops = totals(program.schedule).flops
    narrow = flops.get("bf16", 0) > 0.5 * sum(flops.values())
    is_wide = any(leaf.dtype == jnp.float32 for _, leaf in program.of(PARAMS))
    step = make_zero_train_step(
        params=params[0], loss=lambda params, batch: loss(params, *batch), stage=3,
        mesh=make_mesh(devices=program.devices), precision="bf16" if narrow and is_wide else None,
        optimizer=_OPTIMIZERS[min(2, round(sizes[0] / sizes[1]))])
    return step, tuple(batch)


def _subtrees(shapes: Sequence[Any], program: Program, role: str) -> list[Any]:
    """The largest subtrees of the arguments that have only leaves of `role`, as shapes without shardings."""
    leaves, structure = jax.tree.flatten(tuple(shapes))
    wanted = {number for number, _ in program.of(role)}

    def is_of_role(node: Any) -> bool:
        return bool(inside := jax.tree.leaves(node)) and wanted.issuperset(inside)

    found = jax.tree.leaves(jax.tree.unflatten(structure, range(len(leaves))), is_leaf=is_of_role)
    return [jax.tree.map(lambda number: jax.ShapeDtypeStruct(leaves[number].shape, leaves[number].dtype), each)
            for each in found if is_of_role(each)]
