"""What a traced step keeps of its activations from forward to backward: exact bytes, for any model and any policy.

Read from the traced program, before any compiler: what goes into its backward pass and is no input of the step.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax
from jax.extend import core
from jax.extend.core import primitives

from zero_jax.layout import Layout
from zero_jax.rewrite import shape_of
from zero_jax.tree import leaf_bytes, named_leaves

_SAME = ("name", "reduce_precision", "sharding_constraint", "copy")
"""Equations that give the array that they take."""


@dataclasses.dataclass(frozen=True)
class Kept:
    """Bytes of a device between forward and backward.

    stacked: what loops over blocks keep, of all their rounds. other: the rest, as of the loss. largest: the largest
    array in that. rounds: of the loop that keeps most: blocks, or groups of blocks that are one checkpoint.
    """

    stacked: float
    other: float
    largest: float
    rounds: int

    @property
    def total(self) -> float:
        """All of it."""
        return self.stacked + self.other


def kept(step: Any, batch: Any) -> Kept:
    """What a step of `make_zero_train_step` at stage 3 keeps of `batch` (arrays or `jax.ShapeDtypeStruct`s).

    Arrays with a dim of the global batch's size count as split over the devices that split the batch, others whole.
    What is made of no input (a mask) is a constant and counts nothing: a compiler makes it where it is used.

    Raises ValueError for a step of another stage or of microbatches, whose backward has no one beginning.
    """
    if not step.stage.shards_params or step.accumulation.microbatches > 1:
        raise ValueError(f"kept: the step is at stage {step.stage.number} and of {step.accumulation.microbatches} "
                         "microbatches: give one at stage 3 and of one batch.")
    size = jax.tree.leaves(batch)[0].shape[0]
    axes = step.batch_sharding.spec[0]
    ways = math.prod(step.mesh.shape[axis] for axis in ((axes,) if isinstance(axes, str) else axes))
    (call,) = jax.make_jaxpr(step)(step.abstract_state(batch), step.abstract_batch(batch)).jaxpr.eqns
    jaxpr = call.params["jaxpr"].jaxpr
    backward = next((eqn for eqn in jaxpr.eqns if eqn.primitive is primitives.remat_p
                     and eqn.params["differentiated"]), None)
    if backward is None:
        raise ValueError("kept: nothing is gathered again in the backward pass, so that it has no one beginning: the "
                         "mesh has one device, or no parameter divides.")
    rounds_of = _computed(jaxpr, jaxpr.invars[-len(jax.tree.leaves(batch)):])
    stacked = other = largest = 0.0
    loops: dict[int, float] = {}
    for var in dict.fromkeys(atom for atom in backward.invars if not isinstance(atom, core.Literal)):
        held = leaf_bytes(var.aval.shape, var.aval.dtype) / (ways if size in var.aval.shape else 1)
        if rounds := rounds_of.get(var, 0):
            stacked, loops[rounds] = stacked + held, loops.get(rounds, 0) + held
        elif var in rounds_of:
            other, largest = other + held, max(largest, held)
    return Kept(stacked, other, largest, max(loops, key=lambda length: loops[length], default=0))


def _computed(jaxpr: core.Jaxpr, inputs: Iterable[Any]) -> dict[Any, int]:
    """What `jaxpr` computes from `inputs`, and the rounds of the loop that stacks it up; 0 where none does."""
    found = dict.fromkeys(inputs, 0)
    for eqn in jaxpr.eqns:
        atoms = [atom for atom in eqn.invars if not isinstance(atom, core.Literal) and atom in found]
        inner: Any = next(iter(core.jaxprs_in_params(eqn.params)), None)
        if not atoms:
            continue
        if eqn.primitive is primitives.scan_p:
            found |= {out: eqn.params["length"] if shape_of(out).ndim > shape_of(own).ndim else 0
                      for out, own in zip(eqn.outvars, inner.outvars, strict=True)}
        elif inner is not None and len(inner.invars) == len(eqn.invars) and len(inner.outvars) == len(eqn.outvars):
            within = _computed(inner, [own for own, atom in zip(inner.invars, eqn.invars, strict=True)
                                       if not isinstance(atom, core.Literal) and atom in found])
            found |= {out: within[own] for out, own in zip(eqn.outvars, inner.outvars, strict=True)
                      if not isinstance(own, core.Literal) and own in within}
        else:
            found |= {out: found[atoms[0]] if eqn.primitive.name in _SAME else 0 for out in eqn.outvars}
    return found


def weight_bytes(layout: Layout) -> tuple[float, float]:
    """Bytes of a device: the weights of one block as the model reads them, and the largest gradient of what is in none.

    A block's are the slices of what a loop runs over. The largest other is an embedding: lookups add to its whole
    gradient, and where it is the output layer, too, that half waits whole for the other.
    """
    block = largest = 0.0
    for (name, leaf), (_, use) in zip(named_leaves(layout.state.params), named_leaves(layout.uses), strict=True):
        stacked = layout.reads[name].stacked
        if stacked:
            block += leaf.size // math.prod(leaf.shape[dim] for dim in stacked) * use.dtype.itemsize
        else:
            largest = max(largest, leaf.size * use.reduce.itemsize)
    return block, largest
