"""How activations are stored: checkpoints split over `tensor` (P_a) or in host memory, and sequence parallelism.

Sources: ZeRO, arXiv 1910.02054, section 6.1; Megatron-LM's sequence parallelism, arXiv 2205.05198.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from zero_jax.errors import UsageError
from zero_jax.gather.gather import split_dim
from zero_jax.jaxpr.equations import (
    Jaxpr,
    JaxprEqn,
    eqn_of,
    inner_jaxprs,
    is_literal,
    primitive_of,
    shape_of,
    variable_like,
)
from zero_jax.jaxpr.primitives import (
    CONVERT,
    CUSTOM_VJP,
    DOT,
    GATHER_ROWS,
    JIT,
    NAME,
    REMAT,
    SHARD_MAP,
    call_jaxpr,
    dot_dims,
    in_specs,
    num_iterations,
    permutation,
)
from zero_jax.sharding.mesh import constrain
from zero_jax.sharding.mesh_axes import MeshAxes
from zero_jax.sharding.partition import names_of
from zero_jax.transforms.fp8_products import rounded_product
from zero_jax.transforms.tiled_products import tiled_product
from zero_jax.tree import leaf_bytes

STASH_SCOPE = "zero_checkpoint"
"""In the op_name of what moves a checkpoint to where it is stored and back."""


@dataclasses.dataclass(frozen=True)
class Activations:
    """The layout of activations: arrays whose leading dim is the batch, and whose second is the sequence.

    batch_size: of the global batch. partition: checkpoints are split over `tensor` (P_a); host: they are offloaded to
    host memory (P_a+cpu). sequence: between the products that `tensor` splits, activations (norms, dropout, the
    residual stream) are split along the sequence.
    """

    axes: MeshAxes
    batch_size: int
    partition: bool = False
    host: bool = False
    sequence: bool = False

    @property
    def stashes(self) -> bool:
        """Whether checkpoints are stored in another layout or memory than the activations they save."""
        return self.partition or self.host

    def check(self, jaxpr: Jaxpr, *, checkpoints: bool) -> None:
        """Raises ValueError for what could not take effect on a traced loss. checkpoints: whether it has any."""
        if self.stashes and not checkpoints:
            raise UsageError("partition_activations: nothing is checkpointed, so there are no checkpoints to move: "
                             "give remat=\"full\", or a model that rematerialises its blocks.")
        if self.sequence and not _streams(jaxpr, self):
            raise UsageError(
                "sequence_parallel: no product with a weight that `tensor` splits takes or gives an array of (batch, "
                f"sequence, width) whose sequence divides over its {self.axes.tensor_size} devices: give another "
                "length, or leave it out.")

    @property
    def _degrees(self) -> tuple[int, int]:
        return self.axes.tensor_size, self.axes.size(self.axes.context)

    def _spec(self, leaf: Any, dim: int | None) -> P:
        """Split over the batch, along the sequence where that is split, and over `tensor` in `dim`."""
        entries: list[Any] = [self.axes.batch, *[None] * (leaf.ndim - 1)]
        if self.axes.context in self.axes.mesh.axis_names:
            entries[1] = self.axes.context
        if dim is not None:
            entries[dim] = (entries[dim], self.axes.tensor) if entries[dim] else self.axes.tensor
        return P(*entries)

    def _dim(self, leaf: Any) -> int | None:
        """The dim in which a checkpoint is split over `tensor`: the sequence if it divides, else the last that does."""
        tensor_degree, context_degree = self._degrees
        dims = [dim for dim in (1, *range(leaf.ndim - 1, 1, -1))
                if leaf.shape[dim] % (tensor_degree * (context_degree if dim == 1 else 1)) == 0]
        return dims[0] if dims and tensor_degree > 1 else None

    def _stored_dim(self, leaf: Any) -> int | None:
        dim = self._dim(leaf) if self.partition else None
        if self.partition and dim is None:
            raise UsageError(f"partition_activations: a checkpoint of shape {leaf.shape} has no dim behind the batch "
                             f"that divides over the {self.axes.tensor_size} devices of the axis {self.axes.tensor!r} "
                             f"of the mesh {self.axes.sizes}: give another length or width.")
        return dim

    def is_activation(self, leaf: Any) -> bool:
        """Whether `leaf` is of the batch, and not a parameter or a scalar of each example."""
        return (leaf.ndim >= 2 and leaf.shape[0] == self.batch_size and jnp.issubdtype(leaf.dtype, jnp.floating))

    def stash(self, leaf: Any) -> Any:
        """A residual of backward in the layout and memory in which it is saved; others than activations unchanged."""
        if not self.is_activation(leaf):
            return leaf
        spec = self._spec(leaf, self._stored_dim(leaf))
        with jax.named_scope(STASH_SCOPE):
            if not self.sequence:  # else the split propagates into what computes the value
                leaf = constrain(leaf, self.axes.mesh, self._spec(leaf, None))
            leaf = constrain(leaf, self.axes.mesh, spec)
            return jax.device_put(leaf, jax.memory.Space.Host) if self.host else leaf

    def fetch(self, leaf: Any) -> Any:
        """What `stash` stored, in the layout and memory in which backward uses it."""
        if not self.is_activation(leaf):
            return leaf
        dim = self._stored_dim(leaf)
        with jax.named_scope(STASH_SCOPE):
            if self.host:
                leaf = jax.device_put(leaf, jax.memory.Space.Device)
            leaf = constrain(leaf, self.axes.mesh, self._spec(leaf, dim))
            return leaf if self.sequence or dim is None else constrain(leaf, self.axes.mesh, self._spec(leaf, None))

    def split_sequence(self, jaxpr: Jaxpr) -> Jaxpr:
        """Splits the activations between tensor-parallel products along the sequence.

        Why: norms, dropout and the residual stream are otherwise replicated over `tensor`. The operand of a
        column-parallel product is gathered along the sequence and the result of a row-parallel one scattered along it,
        where each would be all-reduced: the same bytes are sent.
        Cost without: 1808 instead of 1664 MiB of temporaries (6 layers of the 124M program, tensor=2, remat="full").
        Order: before the passes that make calls of the transposes and casts through which the split dim of a weight is
        followed.
        """
        eqns: list[JaxprEqn] = []
        enter, leave = (functools.partial(_moved, at=self, enters=enters) for enters in (True, False))
        for eqn, role, side in _roles(jaxpr):
            out: Any = eqn.outvars[0] if eqn.outvars else None
            if role in ("row", "lookup") and self._is_stream(out.aval):
                unsplit = variable_like(out)
                eqns += [eqn.replace(outvars=[unsplit]), eqn_of(leave, [unsplit], [out])]
            elif role == "column" and self._is_stream(eqn.invars[side].aval):
                operand = eqn.invars[side]
                unsplit = variable_like(operand)
                invars = [unsplit if i == side else atom for i, atom in enumerate(eqn.invars)]
                eqns += [eqn_of(enter, [operand], [unsplit]), eqn.replace(invars=invars)]
            else:
                eqns.append(eqn)
        return jaxpr.replace(eqns=eqns)

    def communication_bytes(self, jaxpr: Jaxpr) -> float:
        """Bytes that each device may send over `tensor` and `context` for the activations of one step of a traced loss.

        Over `tensor` the paper's count (section 8): the result of each row-parallel product is summed forward and where
        it is recomputed, and the gradient of each column-parallel product's operand is summed backward; a sum sends
        each element twice. With P_a, the input of a checkpoint is gathered once more. Over `context`, of each product
        of two activations (attention's two) the smaller, a key or value, is gathered forward, where recomputed and
        backward, and its gradient scattered in float32 (or all-reduced in half of that). Where a kernel has sequences
        whole and heads split, what enters and leaves it is exchanged as often (`step.attention`).
        """
        tensor, context = (1 - 1 / degree for degree in self._degrees)
        share = 1.0 / self.axes.batch_shards
        return share * ((tensor and tensor * _elements(jaxpr, self)) + (context and context * _keys(jaxpr, self.axes)))

    def _is_stream(self, aval: Any) -> bool:
        return aval.ndim >= 3 and aval.shape[0] == self.batch_size and self._dim(aval) == 1

    def moved(self, value: Any, *, enters: bool) -> Any:
        """`value` split along the sequence, then whole, where a product is entered; else the other way round."""
        for dim in (1, None) if enters else (None, 1):
            value = constrain(value, self.axes.mesh, self._spec(value, dim))
        return value


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _moved(value: jax.Array, at: Activations, enters: bool) -> jax.Array:
    return at.moved(value, enters=enters)


_moved.defvjp(lambda value, at, enters: (_moved(value, at, enters), None),
              lambda at, enters, _, cotangent: (at.moved(cotangent, enters=not enters),))


def _streams(jaxpr: Jaxpr, at: Activations) -> bool:
    """Whether `split_sequence` changes anything in `jaxpr`, at any depth."""
    return len(at.split_sequence(jaxpr).eqns) > len(jaxpr.eqns) or any(
        _streams(inner, at) for eqn in jaxpr.eqns for inner in inner_jaxprs(eqn))


def _roles(jaxpr: Jaxpr) -> Iterator[tuple[JaxprEqn, str, int]]:
    """Each equation with what it does with a weight that `tensor` splits, and the index of its other operand.

    "row": a product that sums over the split dim; "column": one that keeps it; "lookup": of rows; else "".
    """
    split_dims: dict[Any, int] = {}
    for eqn in jaxpr.eqns:
        operand_dims = [None if is_literal(atom) else split_dims.get(atom) for atom in eqn.invars]
        weight = next((i for i, dim in enumerate(operand_dims) if dim is not None), 0)
        dim, role = split_dim(eqn), ""
        if dim is not None:
            split_dims[eqn.outvars[0]] = dim
        elif operand_dims and operand_dims[weight] is not None and (dot := _product(eqn)) is not None:
            role = "row" if operand_dims[weight] in dot_dims(dot).contracted[weight] else "column"
            role = "" if is_literal(eqn.invars[1 - weight]) else role
        elif operand_dims and operand_dims[0] is not None:
            role, result_dim = "lookup" if _looks_up(eqn) else "", _result_dim(eqn, operand_dims[0])
            if result_dim is not None:
                split_dims[eqn.outvars[0]] = result_dim
        yield eqn, role, 1 - weight


def _product(eqn: JaxprEqn) -> JaxprEqn | None:
    """The product that `eqn` is, or that it makes of operands which it rounds."""
    return eqn if primitive_of(eqn) == DOT else rounded_product(eqn)


def _elements(jaxpr: Jaxpr, at: Activations) -> float:
    """Of `Activations.communication_bytes`: bytes over `tensor`, with all iterations of loops, of the global batch."""
    total = 0.0
    for eqn, role, side in _roles(jaxpr):
        if role:
            total += 2 * _bytes(eqn.invars[side]) if role == "column" else 4 * _bytes(eqn.outvars[0])
        elif product := tiled_product(eqn):
            sums = product.sums_split_dim
            total += 0 if sums is None else 4 * _bytes(eqn.outvars[0]) if sums else 2 * _bytes(eqn.invars[-1])
        elif primitive_of(eqn) != CUSTOM_VJP:
            if primitive_of(eqn) == REMAT and at.partition:
                total += sum(_bytes(atom) for atom in eqn.invars if at.is_activation(atom.aval))
            total += num_iterations(eqn) * sum(_elements(inner, at) for inner in inner_jaxprs(eqn))
    return total


def _keys(jaxpr: Jaxpr, axes: MeshAxes) -> float:
    """Of `Activations.communication_bytes`: bytes over `context`, with all iterations of loops, of the global batch."""
    total = 0.0
    for eqn in jaxpr.eqns:
        if primitive_of(eqn) == DOT and dot_dims(eqn).batched[0]:
            smaller = min(map(shape_of, eqn.invars), key=lambda leaf: leaf.size)
            total += smaller.size * (3 * smaller.dtype.itemsize + 4)
        if primitive_of(eqn) == SHARD_MAP and any(axes.context in names_of(P(*spec[2:])) for spec in in_specs(eqn)):
            total += 3 * sum(_bytes(atom) for atom in (*eqn.invars, *eqn.outvars)) / axes.size(axes.context)
            continue
        total += num_iterations(eqn) * sum(_keys(inner, axes) for inner in inner_jaxprs(eqn))
    return total


def _bytes(atom: Any) -> int:
    return leaf_bytes(atom.aval.shape, atom.aval.dtype)


def _looks_up(eqn: JaxprEqn) -> bool:
    """Whether `eqn` takes rows of its first operand."""
    eqns = call_jaxpr(eqn).jaxpr.eqns if primitive_of(eqn) == JIT else [eqn]
    return any(primitive_of(each) == GATHER_ROWS for each in eqns)


def _result_dim(eqn: JaxprEqn, dim: int | None) -> int | None:
    """The dim of the result of `eqn` that is the dim `dim` of its first operand; None where that is not so simple."""
    primitive = primitive_of(eqn)
    if dim is None:
        return None
    if primitive in (CONVERT, "copy", NAME):
        return dim
    if primitive == "transpose":
        return permutation(eqn).index(dim)
    if primitive == JIT:
        inner = call_jaxpr(eqn).jaxpr
        dims: dict[Any, int] = {inner.invars[0]: dim}
        for each in inner.eqns:
            if each.invars and not is_literal(each.invars[0]) and each.invars[0] in dims:
                result_dim = _result_dim(each, dims[each.invars[0]])
                if result_dim is not None:
                    dims[each.outvars[0]] = result_dim
        out = inner.outvars[0]
        return dims.get(out) if not is_literal(out) else None
    return None
