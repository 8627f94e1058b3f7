"""Activations that a traced step saves from forward to backward: exact bytes, for any model and any remat policy.

Read from the jaxpr, before any compiler: the operands of the backward pass that are not inputs of the step.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax

from zero_jax.jaxpr.equations import (
    Jaxpr,
    JaxprEqn,
    inner_jaxprs,
    is_literal,
    primitive_of,
    shape_of,
    trace,
    variables,
)
from zero_jax.jaxpr.primitives import JIT, SCAN, SHARD_MAP, call_jaxpr, num_iterations
from zero_jax.layout.layout import Layout
from zero_jax.transforms.gather_again import is_backward_barrier
from zero_jax.tree import leaf_bytes, named_leaves

_SAME = ("name", "reduce_precision", "sharding_constraint", "copy")
"""Primitives whose result is their operand."""


@dataclasses.dataclass(frozen=True)
class SavedActivations:
    """Bytes per device between forward and backward.

    stacked: saved by loops over blocks, in all iterations. other: the rest, as of the loss. largest: the largest array
    in `other`; of_block: that of a block. rounds: iterations of the loop that saves most: blocks, or groups of blocks
    that are one checkpoint.
    """

    stacked: float
    other: float
    largest: float
    of_block: float
    iterations: int

    @property
    def total(self) -> float:
        """Both together."""
        return self.stacked + self.other


def saved_activations(step: Any, batch: Any) -> SavedActivations:
    """Activations that a step at stage 3 saves for `batch`, of arrays or `jax.ShapeDtypeStruct`s.

    Arrays with a dim of the global batch's size count as sharded over the devices that shard the batch, others as
    replicated. An array that depends on no input (a mask) is a constant and counts 0: compilers recompute it.

    Raises ValueError for a step of another stage or of microbatches, whose backward has no single start.
    """
    if not step.stage.shards_params or step.accumulation.microbatches > 1:
        raise ValueError(f"saved_activations: the step is at stage {step.stage.number} and of "
                         f"{step.accumulation.microbatches} microbatches: give one at stage 3 and of one batch.")
    size = jax.tree.leaves(batch)[0].shape[0]
    axes = step.batch_sharding.spec[0]
    num_shards = math.prod(step.mesh.shape[axis] for axis in ((axes,) if isinstance(axes, str) else axes))
    traced = trace(jax.jit(step), step.abstract_state(batch), step.abstract_batch(batch)).jaxpr
    barrier, iterations_of, in_parts = _barrier(traced, traced.invars[-len(jax.tree.leaves(batch)):])
    if barrier is None:
        raise ValueError("saved_activations: nothing is gathered again in the backward pass, so that it has no single "
                         "start: the mesh has one device, or no parameter is sharded.")
    stacked = other = largest = of_block = 0.0
    loops: dict[int, float] = {}
    for var in dict.fromkeys(variables(barrier.invars)):
        divided = size in var.aval.shape and not in_parts
        saved = leaf_bytes(var.aval.shape, var.aval.dtype) / (num_shards if divided else 1)
        if iterations := iterations_of.get(var, 0):
            stacked, loops[iterations] = stacked + saved, loops.get(iterations, 0) + saved
            of_block = max(of_block, saved / iterations)
        elif var in iterations_of:
            other, largest = other + saved, max(largest, saved)
    return SavedActivations(stacked, other, largest, of_block, max(loops, key=lambda each: loops[each], default=0))


def _barrier(jaxpr: Jaxpr, inputs: Iterable[Any]) -> tuple[JaxprEqn | None, dict[Any, int], bool]:
    """The barrier between forward and backward, in a call at any depth, and `_computed` of the program it is in.

    And whether that is the program of one device.
    """
    iterations_of = _computed(jaxpr, inputs)
    for eqn in jaxpr.eqns:
        if is_backward_barrier(eqn):
            return eqn, iterations_of, False
        if primitive_of(eqn) in (JIT, SHARD_MAP):
            inner = call_jaxpr(eqn).jaxpr
            found, within, in_parts = _barrier(inner, [own for own, atom in zip(inner.invars, eqn.invars, strict=True)
                                             if not is_literal(atom) and atom in iterations_of])
            if found is not None:
                return found, within, in_parts or primitive_of(eqn) == SHARD_MAP
    return None, {}, False


def _computed(jaxpr: Jaxpr, inputs: Iterable[Any]) -> dict[Any, int]:
    """Variables that `jaxpr` computes from `inputs` -> iterations of the loop that stacks them, or 0."""
    iterations_of = dict.fromkeys(inputs, 0)
    for eqn in jaxpr.eqns:
        operands = [atom for atom in variables(eqn.invars) if atom in iterations_of]
        inner: Any = next(iter(inner_jaxprs(eqn)), None)
        if not operands:
            continue
        if primitive_of(eqn) == SCAN:
            iterations_of |= {out: num_iterations(eqn) if shape_of(out).ndim > shape_of(own).ndim else 0
                          for out, own in zip(eqn.outvars, inner.outvars, strict=True)}
        elif inner is not None and len(inner.invars) == len(eqn.invars) and len(inner.outvars) == len(eqn.outvars):
            within = _computed(inner, [own for own, atom in zip(inner.invars, eqn.invars, strict=True)
                                       if not is_literal(atom) and atom in iterations_of])
            iterations_of |= {out: within[own] for out, own in zip(eqn.outvars, inner.outvars, strict=True)
                          if not is_literal(own) and own in within}
        else:
            same = primitive_of(eqn) in _SAME
            iterations_of |= {out: iterations_of[operands[0]] if same else 0 for out in eqn.outvars}
    return iterations_of


def weight_bytes(layout: Layout) -> tuple[float, float]:
    """Bytes per device: the weights of one block in compute dtype, and the largest gradient outside the blocks.

    A block's weights are the slices of the parameters that a loop scans. The largest other parameter is an embedding:
    lookups add to its unsharded gradient, and where it is also the output layer, one half waits for the other.
    """
    block = largest = 0.0
    for (name, leaf), (_, use) in zip(named_leaves(layout.state.params), named_leaves(layout.uses), strict=True):
        stacked = layout.reads[name].stacked
        if stacked:
            block += leaf.size // math.prod(leaf.shape[dim] for dim in stacked) * use.dtype.itemsize
        else:
            largest = max(largest, leaf.size * use.reduce.itemsize)
    return block, largest


def backward_peak_bytes(
    *, state: float, gradients: float, stacked: float, other: float, largest: float, block: float,
    of_block: float = 0, every: int = 1, weights: float = 0, waiting: float = 0
) -> dict[str, float]:
    """Bytes per device at the two moments of a step at stage 3 with the most memory: after the loss, and in a block.

    state: model states. gradients: a device's shards in the optimizer's dtype, all of them from the start of backward.
    stacked: saved by the policy in all blocks. other: saved outside of blocks, `largest` of that in one array, the
    logits, whose gradient is as large. block: all activations of one block, needed once for the block in backward, and
    again for each of `every` blocks that are one checkpoint and recomputed together; of_block: the largest of them, an
    attention's scores, whose gradient is as large. weights: one block's, gathered; waiting: gradients that stay
    unsharded until the end (a tied embedding).

    Where every block is a checkpoint of `hidden` elements, `stacked` is `checkpoint_elements`: this is section 6.1's
    accounting with recomputed, gathered and reduced arrays.
    """
    base = state + gradients + stacked
    together = every * block if every > 1 else 0
    return {"loss": base + other + largest, "block": base + together + block + of_block + every * weights + waiting}
