"""The walk of an update over the files: a block is read while the one before is computed, and the last one written."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from zero_jax.state import ZeroState
from zero_jax.step.disk.leaf import resharded
from zero_jax.step.disk.plan import Before, UpdatePlan
from zero_jax.step.disk.states import DiskStates
from zero_jax.step.update import Updated
from zero_jax.tree import named_leaves


def walk(states: DiskStates, plan: UpdatePlan, state: ZeroState, before: Before) -> dict[int, Any]:
    """The results of the update that stay in memory, by number; the blocks of the next generation are written.

    What the update replaces of `state` is deleted.
    """
    layout, jaxpr = plan.layout, plan.closed.jaxpr
    values = dict(zip(plan.values, before.values, strict=True))
    fields = named_leaves(Updated(state.params, state.opt_state, state.ema,
                                  state.weights if layout.stage.shards_params else None))
    numbers = {name: number for number, name in enumerate(plan.names)}
    numbered = {number for task in plan.tasks for number in plan.pieces.buffers_of(task)}
    for name, leaf in fields:
        number = numbers[name]
        sharding = NamedSharding(layout.mesh, plan.specs[number])
        if number in numbered and not leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
            leaf, whole = resharded(leaf, sharding), leaf
            jax.block_until_ready(leaf)
            whole.delete()
        values[jaxpr.invars[number]] = leaf
    buffers = {number: values.get(jaxpr.invars[number]) if number < len(plan.names) else _zeros(plan, number)
               for number in sorted(numbered)}
    for number in numbered:
        if number < len(plan.names):
            del values[jaxpr.invars[number]]  # donated with each block
    with states.streaming.abandoned_by_errors(), states.read_pieces() as ahead:
        for piece, stored in zip(states.pieces, ahead, strict=True):
            group = plan.groups[piece.number]
            order = [plan.pieces.buffers_of(task) for task in group.tasks]
            new, whole, blocks = plan.pieces.run(
                group, piece.index, piece.rest, [[stored[plan.names[number]] for number in task.stored]
                                                 for task in group.tasks],
                [[buffers[number] for number in each] for each in order], values)
            del stored
            for each, filled in zip(order, whole, strict=True):
                buffers.update(zip(each, filled, strict=True))
            replaced = [task.replaced(plan.on_disk) for task in group.tasks]
            written = {plan.names[number]: block for numbers, filled in ((replaced, new), (order, blocks))
                       for of_task, each in zip(numbers, filled, strict=True)
                       for number, block in zip(of_task, each, strict=True) if number < len(plan.names)}
            for record in piece.writes:
                states.streaming.write(record, states.filler(written))
            del new, whole, blocks, written
    return {**before.results, **buffers}


def _zeros(plan: UpdatePlan, number: int) -> jax.Array:
    out: Any = plan.closed.jaxpr.outvars[number].aval
    return jnp.zeros(out.shape, out.dtype, device=NamedSharding(plan.layout.mesh, plan.specs[number]))
