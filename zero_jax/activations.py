"""Where activations lie: checkpoints partitioned over `tensor` (P_a) or in host memory, and sequence parallelism.

Sources: ZeRO, arXiv 1910.02054, section 6.1; Megatron-LM's sequence parallelism, arXiv 2205.05198.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.extend.core import primitives
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from zero_jax.gather import constrain, split_dim
from zero_jax.mesh import CONTEXT, TENSOR
from zero_jax.rewrite import shape_of
from zero_jax.tree import leaf_bytes

HOSTS = ("cpu", "gpu", "cuda", "rocm", "tpu")
"""Platforms on which XLA moves arrays to the host's memory and back. On a CPU it is the same memory: nothing moves."""

STASH_SCOPE = "zero_checkpoint"
"""In the op_name of what moves a checkpoint between where it is kept and where it is used."""


@dataclasses.dataclass(frozen=True)
class Activations:
    """How activations lie on a mesh: arrays whose leading dim is the batch, and whose second is the sequence.

    batch: the axes over which the batch is split; batch_size: of the global batch. partition: checkpoints are split
    over `tensor`; host: they are kept in the host's memory. sequence: what lies between the regions that are split over
    `tensor` (norms, dropout, the residual stream) is split along the sequence.
    """

    mesh: Mesh
    batch: tuple[str, ...]
    batch_size: int
    partition: bool = False
    host: bool = False
    sequence: bool = False

    @property
    def stashes(self) -> bool:
        """Whether checkpoints lie elsewhere than what they are made of."""
        return self.partition or self.host

    def __post_init__(self) -> None:
        ways = self.mesh.shape.get(TENSOR, 1)
        if ways == 1 and (self.sequence or self.partition):
            what = "sequence_parallel" if self.sequence else "partition_activations"
            raise ValueError(f"{what}: the mesh {dict(self.mesh.shape)} has no axis {TENSOR!r} to split over: build it "
                             f"with zero_jax.make_mesh(tensor=...), or leave {what} out.")
        device = self.mesh.devices.flat[0]
        if self.host and device.platform not in HOSTS:
            raise ValueError(f"partition_activations=\"cpu\": {device.device_kind} of platform {device.platform!r} "
                             "has no pinned host memory that XLA moves arrays to: give True, which splits them over "
                             "`tensor`.")

    def check(self, jaxpr: core.Jaxpr, *, checkpoints: bool) -> None:
        """Raises ValueError for what could not take effect on a traced loss. checkpoints: whether it has any."""
        if self.stashes and not checkpoints:
            raise ValueError("partition_activations: nothing is checkpointed, so there are no checkpoints to move: "
                             "give remat=\"full\", or a model that rematerialises its blocks.")
        if self.sequence and not _streams(jaxpr, self):
            raise ValueError(
                "sequence_parallel: no product with a weight that `tensor` splits takes or gives an array of (batch, "
                f"sequence, width) whose sequence divides over its {self.mesh.shape[TENSOR]} devices: give another "
                "length, or leave it out.")

    def _spec(self, leaf: Any, dim: int | None) -> P:
        """Split over the batch, along the sequence where that is split, and over `tensor` in `dim`."""
        entries: list[Any] = [self.batch, *[None] * (leaf.ndim - 1)]
        if CONTEXT in self.mesh.axis_names:
            entries[1] = CONTEXT
        if dim is not None:
            entries[dim] = (entries[dim], TENSOR) if entries[dim] else TENSOR
        return P(*entries)

    def _dim(self, leaf: Any) -> int | None:
        """The dim in which a checkpoint is split over `tensor`: the sequence if it divides, else the last that does."""
        ways = self.mesh.shape.get(TENSOR, 1)
        taken = self.mesh.shape.get(CONTEXT, 1)
        dims = [dim for dim in (1, *range(leaf.ndim - 1, 1, -1))
                if leaf.shape[dim] % (ways * (taken if dim == 1 else 1)) == 0]
        return dims[0] if dims and ways > 1 else None

    def _kept_dim(self, leaf: Any) -> int | None:
        dim = self._dim(leaf) if self.partition else None
        if self.partition and dim is None:
            raise ValueError(f"partition_activations: a checkpoint of shape {leaf.shape} has no dim behind the batch "
                             f"that divides over the {self.mesh.shape[TENSOR]} devices of the axis {TENSOR!r} of the "
                             f"mesh {dict(self.mesh.shape)}: give another length or width.")
        return dim

    def is_activation(self, leaf: Any) -> bool:
        """Whether `leaf` is of the batch, and not a parameter or a scalar of each example."""
        return (leaf.ndim >= 2 and leaf.shape[0] == self.batch_size and jnp.issubdtype(leaf.dtype, jnp.floating))

    def stash(self, leaf: Any) -> Any:
        """A value that backward will need, where it is kept until then; what is no activation stays where it is."""
        if not self.is_activation(leaf):
            return leaf
        spec = self._spec(leaf, self._kept_dim(leaf))
        with jax.named_scope(STASH_SCOPE):
            if not self.sequence:  # else the split propagates into what makes the value
                leaf = constrain(leaf, self.mesh, self._spec(leaf, None))
            leaf = constrain(leaf, self.mesh, spec)
            return jax.device_put(leaf, jax.memory.Space.Host) if self.host else leaf

    def fetch(self, leaf: Any) -> Any:
        """What `stash` kept, where it is used."""
        if not self.is_activation(leaf):
            return leaf
        dim = self._kept_dim(leaf)
        with jax.named_scope(STASH_SCOPE):
            if self.host:
                leaf = jax.device_put(leaf, jax.memory.Space.Device)
            leaf = constrain(leaf, self.mesh, self._spec(leaf, dim))
            return leaf if self.sequence or dim is None else constrain(leaf, self.mesh, self._spec(leaf, None))

    def split_sequence(self, jaxpr: core.Jaxpr) -> core.Jaxpr:
        """An edit: products with weights that `tensor` splits take the whole sequence, and give their part of it.

        What a column-parallel product takes is gathered along the sequence, and what a row-parallel one gives is
        scattered along it, where each would else be whole and summed: the same bytes, and all between is split.
        """
        eqns: list[core.JaxprEqn] = []
        for eqn, role, side in _roles(jaxpr):
            given: Any = eqn.outvars[0] if eqn.outvars else None
            if role in ("row", "lookup") and self._is_stream(given.aval):
                part = core.Var(given.aval)
                eqns += [eqn.replace(outvars=[part]), _call(functools.partial(_leave, at=self), part, given)]
            elif role == "column" and self._is_stream(eqn.invars[side].aval):
                whole = core.Var(eqn.invars[side].aval)
                invars = [whole if i == side else atom for i, atom in enumerate(eqn.invars)]
                eqns += [_call(functools.partial(_enter, at=self), eqn.invars[side], whole), eqn.replace(invars=invars)]
            else:
                eqns.append(eqn)
        return jaxpr.replace(eqns=eqns)

    def wire_bytes(self, jaxpr: core.Jaxpr) -> float:
        """Bytes that each device may send over `tensor` and `context` for the activations of one step of a traced loss.

        Over `tensor` the paper's count (section 8): of each product with a split weight, what a row-parallel one gives
        is summed forward and where it is recomputed, and the gradient of what a column-parallel one takes is summed
        backward; a sum sends each element twice. With P_a, what enters a checkpoint is gathered once more. Over
        `context`, of each product of two activations (attention's two) the smaller, a key or value, is gathered
        forward, where recomputed and backward, and its gradient scattered in float32 (or all-reduced in half of that).
        """
        tensor, context = (1 - 1 / self.mesh.shape.get(axis, 1) for axis in (TENSOR, CONTEXT))
        share = 1.0 / math.prod(self.mesh.shape[axis] for axis in self.batch)
        return share * ((tensor and tensor * _elements(jaxpr, self)) + (context and context * _keys(jaxpr)))

    def _is_stream(self, aval: Any) -> bool:
        return aval.ndim >= 3 and aval.shape[0] == self.batch_size and self._dim(aval) == 1

    def whole(self, value: Any) -> Any:
        """`value` with its whole sequence."""
        return constrain(value, self.mesh, self._spec(value, None))

    def part(self, value: Any) -> Any:
        """`value` split along the sequence."""
        return constrain(value, self.mesh, self._spec(value, 1))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _enter(value: jax.Array, at: Activations) -> jax.Array:
    return at.whole(at.part(value))


_enter.defvjp(lambda value, at: (_enter(value, at), None), lambda at, _, cotangent: (at.part(at.whole(cotangent)),))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _leave(value: jax.Array, at: Activations) -> jax.Array:
    return at.part(at.whole(value))


_leave.defvjp(lambda value, at: (_leave(value, at), None), lambda at, _, cotangent: (at.whole(at.part(cotangent)),))


def _streams(jaxpr: core.Jaxpr, at: Activations) -> bool:
    """Whether `split_sequence` changes anything in `jaxpr`, at any depth."""
    return len(at.split_sequence(jaxpr).eqns) > len(jaxpr.eqns) or any(
        _streams(inner, at) for eqn in jaxpr.eqns for inner in core.jaxprs_in_params(eqn.params))


def _roles(jaxpr: core.Jaxpr) -> Iterator[tuple[core.JaxprEqn, str, int]]:
    """Each equation with what it does with a weight that `tensor` splits, and its operand beside that weight.

    "row": a product that sums over the split dim; "column": one that keeps it; "lookup": of rows; else "".
    """
    split: dict[Any, int] = {}
    for eqn in jaxpr.eqns:
        found = [None if isinstance(atom, core.Literal) else split.get(atom) for atom in eqn.invars]
        dim, role, weight = split_dim(eqn), "", next((i for i, each in enumerate(found) if each is not None), 0)
        if dim is not None:
            split[eqn.outvars[0]] = dim
        elif eqn.primitive.name == "dot_general" and found[weight] is not None:
            role = "row" if found[weight] in eqn.params["dimension_numbers"][0][weight] else "column"
            role = "" if isinstance(eqn.invars[1 - weight], core.Literal) else role
        elif found and found[0] is not None:
            role, moved = "lookup" if _looks_up(eqn) else "", _moved(eqn, found[0])
            if moved is not None:
                split[eqn.outvars[0]] = moved
        yield eqn, role, 1 - weight


def _elements(jaxpr: core.Jaxpr, at: Activations) -> float:
    """Of `Activations.wire_bytes`: bytes, with all rounds of loops, before they are shared."""
    total = 0.0
    for eqn, role, side in _roles(jaxpr):
        if role:
            total += 2 * _bytes(eqn.invars[side]) if role == "column" else 4 * _bytes(eqn.outvars[0])
        elif eqn.primitive is not primitives.custom_vjp_call_p:
            if eqn.primitive is primitives.remat_p and at.partition:
                total += sum(_bytes(atom) for atom in eqn.invars if at.is_activation(atom.aval))
            rounds = eqn.params["length"] if eqn.primitive is primitives.scan_p else 1
            total += rounds * sum(_elements(inner, at) for inner in core.jaxprs_in_params(eqn.params))
    return total


def _keys(jaxpr: core.Jaxpr) -> float:
    """Of `Activations.wire_bytes`, over `context`: bytes, with all rounds of loops, before they are shared."""
    total = 0.0
    for eqn in jaxpr.eqns:
        if eqn.primitive is primitives.dot_general_p and eqn.params["dimension_numbers"][1][0]:
            least = min(map(shape_of, eqn.invars), key=lambda leaf: leaf.size)
            total += least.size * (3 * least.dtype.itemsize + 4)
        rounds = eqn.params["length"] if eqn.primitive is primitives.scan_p else 1
        total += rounds * sum(map(_keys, core.jaxprs_in_params(eqn.params)))
    return total


def _bytes(atom: Any) -> int:
    return leaf_bytes(atom.aval.shape, atom.aval.dtype)


def _call(fun: Any, taken: Any, given: Any) -> core.JaxprEqn:
    """An equation that makes `given` of `taken` by `fun`."""
    (eqn,) = jax.make_jaxpr(fun)(shape_of(taken)).jaxpr.eqns
    return eqn.replace(invars=[taken], outvars=[given])


def _looks_up(eqn: core.JaxprEqn) -> bool:
    """Whether `eqn` takes rows of its first operand."""
    inner = eqn.params["jaxpr"].jaxpr.eqns if eqn.primitive is primitives.jit_p else [eqn]
    return any(each.primitive is primitives.gather_p for each in inner)


def _moved(eqn: core.JaxprEqn, dim: int | None) -> int | None:
    """Where the dim `dim` of what `eqn` takes lies in what it gives; None where that is not so simple."""
    name = eqn.primitive.name
    if dim is None:
        return None
    if name in ("convert_element_type", "copy", "name"):
        return dim
    if name == "transpose":
        return tuple(eqn.params["permutation"]).index(dim)
    if name == "jit":
        inner = eqn.params["jaxpr"].jaxpr
        places = {inner.invars[0]: dim}
        for each in inner.eqns:
            if each.invars and not isinstance(each.invars[0], core.Literal) and each.invars[0] in places:
                moved = _moved(each, places[each.invars[0]])
                if moved is not None:
                    places[each.outvars[0]] = moved
        out = inner.outvars[0]
        return places.get(out) if not isinstance(out, core.Literal) else None
    return None


