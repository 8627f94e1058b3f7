"""What each stage lets cross the wire, and whether a compiled program keeps to it.

A stage promises which collectives a step runs, over which mesh axes and with how many bytes (arXiv 1910.02054,
section 7). XLA decides what is emitted, and a model can make it emit more; only the compiled text tells.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from zero_jax.batch import Accumulation
from zero_jax.contract_report import Contract, Kept, Promise, Report
from zero_jax.gather import GATHER_SCOPE, SCATTER, used
from zero_jax.hlo import Collective, collectives
from zero_jax.hlo_text import shape_bytes
from zero_jax.layout import UPDATE_SCOPE, Layout
from zero_jax.matrices import MATRICES_SCOPE, moved
from zero_jax.mesh import CONTEXT, TENSOR
from zero_jax.tree import named_leaves

TOLERANCE = 0.04
"""Share of what is promised by which a program may exceed it."""

SMALL_LEAF = 4096
"""Bytes that a leaf may add: the padding of a TPU's tile, for each device of an axis; elsewhere its all-reduce."""


class ContractError(ValueError):
    """A compiled program sends what its stage does not promise."""


def contract_of(layout: Layout, accumulation: Accumulation | None = None, optimizer: Any = None,
                activation_bytes: float = 0.0) -> Contract:
    """What a step of this layout may send; exact for every leaf, padding included.

    With microbatches, stage 3 gathers in each of them, and gradients are summed in each or once. Of `optimizer` only
    what `matrices.whole_matrices` moves may travel. activation_bytes: what a step's activations may send over `tensor`
    and `context` (`activations.Activations.wire_bytes`).

    Simulated devices get it as XLA:CPU can: bfloat16 travels as float32 there. There and at stage 0 a tied embedding,
    as a rule the largest leaf, is summed for each of its readings.
    """
    mesh, stage, platform = dict(layout.mesh.shape), layout.stage, layout.mesh.devices.flat[0].platform
    narrowest = 4 if platform == "cpu" else 1
    params = dict(named_leaves(layout.state.params))
    grads = dict(named_leaves(layout.gradients))
    weights = dict(named_leaves(layout.state.weights)) if layout.state.weights is not None else params
    views = dict(named_leaves(layout.views.params))  # padding travels, too
    uses = dict(named_leaves(layout.uses))  # no entry where the parameter is used as it is stored
    gathered, sums, pieces = 0.0, {}, {}
    for name, leaf in params.items():
        use, parts = uses.get(name), _parts(leaf.shape, grads[name])
        split = _split_ways(grads[name])
        size, shards = leaf.size / split, parts // split
        read, summed = (weights[name].dtype,) * 2 if use is None else (use.dtype, use.reduce)
        itemsize, sum_size = (max(np.dtype(dtype).itemsize, narrowest) for dtype in (read, summed))
        for shape in (leaf.shape, views[name].shape):
            pieces |= {size: name for size in _sizes(shape, layout.reads[name].stacked, parts, mesh)}
        if stage.shards_params:
            within = shards if use is None or not use.secondary else math.prod(mesh[axis] for axis in use.secondary)
            gathered += size * itemsize * (1 - 1 / shards + 1 - 1 / within)
        else:
            gathered += size * itemsize * (1 - 1 / shards)
        others, size = math.prod(mesh.values()) // parts, size * sum_size
        sums[name] = size * (1 - 1 / shards) + 2 * size / shards * (1 - 1 / others)
    for (name, leaf), view in zip(named_leaves(layout.state.frozen), jax.tree.leaves(layout.views.frozen), strict=True):
        parts, split = _parts(leaf.shape, leaf.sharding), _split_ways(leaf.sharding)
        gathered += 2 * leaf.size / split * max(leaf.dtype.itemsize, narrowest) * (1 - split / parts)
        for shape in (leaf.shape, view.shape):
            pieces |= {size: name for size in _sizes(shape, layout.reads[name].stacked, parts, mesh)}
    reduced = sum(sums.values())
    if platform == "cpu" or not stage.shards_optimizer:
        reduced += max(sums.values(), default=0.0)
    many = 1 if accumulation is None else accumulation.microbatches
    gathered *= many if stage.shards_params else 1
    reduced *= 1 if accumulation is None or accumulation.once else many
    how = "the forward and once more for the backward pass" if stage.shards_params else "all devices after the update"
    axes = layout.axes if stage.shards_optimizer else ()
    # A batch norm sums two statistics forward, again where it is recomputed, and two backward.
    statistics = 3 * sum(leaf.size * 4 for leaf in jax.tree.leaves(layout.state.variables))
    small = max(0.01 * (gathered + reduced), 2.0 * many * statistics, 4096.0 * many)
    tiles = max(mesh.values()) if platform == "tpu" else 1
    slack = TOLERANCE * (gathered + reduced) + len(params) * SMALL_LEAF * tiles
    matrices = moved(layout, optimizer) if optimizer is not None and axes else []
    promises = [
        Promise(f"parameters gathered for {how}" if axes else "no parameter gathered", ("all-gather",), axes,
                gathered, pieces, "gather"),
        Promise("gradients summed" + (" and scattered" if axes else ""),
                ("reduce-scatter", "all-reduce") if axes else ("all-reduce",), tuple(mesh), reduced, pieces, "reduce"),
        Promise("metrics, statistics of the batch and other small sums", ("all-reduce", "all-gather", "reduce-scatter",
                "collective-permute"), tuple(mesh), small, key="rest")]
    if matrices:
        promises.append(Promise(
            "matrices made whole for the optimizer, and their updates returned", ("all-to-all", "all-gather"), axes,
            sum(value.size * max(value.dtype.itemsize, narrowest) * share for value, share in matrices),
            {_any_order(value.shape): str(value) for value, _ in matrices}, "matrices"))
    if within_model := tuple(axis for axis in (TENSOR, CONTEXT) if mesh.get(axis, 1) > 1):
        promises.append(Promise(
            "activations summed, gathered and scattered", ("all-reduce", "all-gather", "reduce-scatter"), within_model,
            activation_bytes * many * (2 if platform == "cpu" else 1),
            key="activations"))
    return Contract(stage.number, mesh, platform, slack, tuple(promises))


def check(text: str, contract: Contract) -> Report:
    """How the compiled program `text` keeps `contract`; it does if the report has no violations."""
    found: dict[str, list[Collective]] = {promise.key: [] for promise in contract.promises}
    for combined in collectives(text):
        for collective in _split(combined, contract):
            if collective.wire_bytes:
                found[_purpose(collective, contract)].append(collective)
    lowered = [c for c in found["gather"] if c.kind == "all-reduce"]
    notes = {"reduce": _reduce_notes(found["reduce"], contract)}
    if lowered:
        notes["gather"] = (f"{_total(lowered):,.0f} bytes of it by all-reduces: this compiler has no all-gather over "
                           f"{' x '.join(lowered[0].axes(contract.mesh))} for them",)
    kept = {promise.key: Kept(promise, tuple(found[promise.key]), notes.get(promise.key, ()))
            for promise in contract.promises}
    return Report(contract, tuple(kept.values()), tuple(_violations(kept, contract)))


def verify(text: str, contract: Contract) -> Report:
    """As `check`, but raises ContractError with each offending operation, its bytes, its source and what to do."""
    report = check(text, contract)
    if report.violations:
        raise ContractError(f"The compiled step breaks its contract.\n{report}")
    return report


def _parts(shape: Sequence[int], sharding: jax.sharding.NamedSharding) -> int:
    """Into how many parts a leaf is split."""
    return math.prod(shape) // max(1, math.prod(sharding.shard_shape(tuple(shape)))) or 1


def _split_ways(sharding: jax.sharding.NamedSharding) -> int:
    """Into how many parts `tensor` splits a leaf."""
    return sharding.mesh.shape[TENSOR] if any(entry is not None for entry in used(sharding.spec)) else 1


def _sizes(shape: Sequence[int], stacked: Sequence[int], parts: int, mesh: Mapping[str, int]) -> set[int]:
    """Elements of what may travel of a leaf: all of it, or a slice of a loop; whole, or what some axes leave of it."""
    whole = math.prod(shape)
    slices = whole // max(1, math.prod(shape[dim] for dim in stacked))
    ways = {math.prod(axes) for many in range(len(mesh) + 1) for axes in itertools.combinations(mesh.values(), many)}
    return {size // way for size in (whole, slices) for way in ways if parts % way == 0 and size // way > 1}


def _purpose(collective: Collective, contract: Contract) -> str:
    if MATRICES_SCOPE in collective.op_name and contract.promise("matrices"):
        return "matrices"
    within_model = contract.promise("activations")
    over = collective.axes(contract.mesh)
    if within_model and GATHER_SCOPE not in collective.op_name and (
            over == (TENSOR,) or over == (CONTEXT,) and SCATTER not in collective.op_name):
        return "activations"
    unmarked = collective.kind == "all-gather" and (contract.stage < 3 or not collective.op_name)
    if GATHER_SCOPE in collective.op_name or unmarked and _is_piece(collective, contract):
        return "gather"
    if collective.kind in ("reduce-scatter", "all-reduce", "collective-permute") and (
            collective.serves or _is_piece(collective, contract) or SCATTER in collective.op_name):
        return "reduce"
    return "activations" if within_model and over and set(over) <= set(within_model.axes) else "rest"


def _split(collective: Collective, contract: Contract) -> Iterable[Collective]:
    """A gather of many buffers, as one for each purpose: a GPU's compiler combines what it can."""
    promise = contract.promise("matrices")
    matrices = set(promise.pieces) if promise and MATRICES_SCOPE in collective.op_name else set()
    if collective.kind != "all-gather" or len(collective.shapes) == 1 or (
            not matrices and _is_piece(collective, contract)):
        return (collective,)
    parts: dict[str, list[tuple[str, tuple[int, ...]]]] = {MATRICES_SCOPE: [], GATHER_SCOPE: [], "": []}
    for shape in collective.shapes:
        size = math.prod(shape[1])
        parts[MATRICES_SCOPE if _any_order(shape[1]) in matrices else
              GATHER_SCOPE if size in contract.promises[0].pieces else ""].append(shape)
    return [_part(collective, shapes, scope) for scope, shapes in parts.items() if shapes]


def _any_order(dims: Sequence[int]) -> tuple[int, ...]:
    """As a key: the compiler permutes dims, and drops those of 1."""
    return tuple(sorted(size for size in dims if size > 1))


def _part(collective: Collective, shapes: Sequence[tuple[str, tuple[int, ...]]], scope: str) -> Collective:
    """What of it carries `shapes`, with the names of all but the other scopes."""
    others = {MATRICES_SCOPE, GATHER_SCOPE} - {scope}
    names = [name for name in collective.op_name.split(":") if not any(other in name for other in others)]
    return dataclasses.replace(
        collective, shapes=tuple(shapes), payload_bytes=sum(shape_bytes(*shape) for shape in shapes),
        op_name=":".join(names), serves=collective.serves if scope else ())


def _is_piece(collective: Collective, contract: Contract) -> bool:
    """Whether all but a thousandth of its elements are buffers of the size of some parameter."""
    sizes = [math.prod(dims) for _, dims in collective.shapes]
    return sum(size for size in sizes if size not in contract.promises[0].pieces) <= 1e-3 * sum(sizes)


def _reduce_notes(found: Iterable[Collective], contract: Contract) -> tuple[str, ...]:
    whole = [c for c in found if c.kind == "all-reduce"]
    if contract.stage == 0 or not whole:
        return ()
    if contract.platform == "cpu":
        return (f"{_total(whole):,.0f} bytes of it by all-reduces and slices: XLA:CPU has no reduce-scatter under jit, "
                "so that half of them counts",)
    return (f"{_total(whole):,.0f} bytes of it by all-reduces, for leaves too small or uneven to be scattered",)


def _violations(kept: Mapping[str, Kept], contract: Contract) -> Iterable[str]:
    gather, reduce, rest = kept["gather"], kept["reduce"], kept["rest"]
    allowed = contract.slack
    sent = reduce.wire_bytes
    if contract.platform == "cpu" and contract.stage:
        sent -= _total([c for c in reduce.collectives if c.kind == "all-reduce"]) / 2
    if gather.wire_bytes > gather.promise.wire_bytes + allowed:
        yield (f"{gather.wire_bytes:,.0f} bytes of parameters are gathered, {gather.promise.wire_bytes:,.0f} are "
               f"promised: {_tell(gather.collectives, contract)}")
    if sent > reduce.promise.wire_bytes + allowed:
        whole = [c for c in reduce.collectives if c.kind == "all-reduce"]
        yield (f"{sent:,.0f} bytes of gradients are reduced, {reduce.promise.wire_bytes:,.0f} are promised: "
               f"{_tell(whole if _total(whole) > allowed else reduce.collectives, contract)}")
    if rest.wire_bytes > rest.promise.wire_bytes:
        yield (f"{rest.wire_bytes:,.0f} bytes gather no parameter where it is read and sum no gradient, "
               f"{rest.promise.wire_bytes:,.0f} are promised for such: {_tell(rest.collectives, contract)}")
    if activations := kept.get("activations"):
        if activations.wire_bytes > (1 + TOLERANCE) * activations.promise.wire_bytes + rest.promise.wire_bytes:
            yield (f"{activations.wire_bytes:,.0f} bytes of activations travel, {activations.promise.wire_bytes:,.0f} "
                   f"are promised: {_tell(activations.collectives, contract)}")
    if matrices := kept.get("matrices"):
        if matrices.wire_bytes > (1 + TOLERANCE) * matrices.promise.wire_bytes + SMALL_LEAF:
            yield (f"{matrices.wire_bytes:,.0f} bytes of whole matrices travel, {matrices.promise.wire_bytes:,.0f} are "
                   f"promised: {_tell(matrices.collectives, contract)}")
    wrong = [c for c in gather.collectives if set(c.axes(contract.mesh)) - set(gather.promise.axes)]
    if _total(wrong) > rest.promise.wire_bytes:
        yield (f"parameters are gathered over {' x '.join(wrong[0].axes(contract.mesh))}, not only over "
               f"{' x '.join(gather.promise.axes) or 'no axis'}: {_tell(wrong, contract)}")


def _total(found: Iterable[Collective]) -> float:
    return sum(c.wire_bytes * c.count for c in found)


def _tell(found: Sequence[Collective], contract: Contract) -> str:
    """The collective of `found` that sends most, in words, and what to do about it."""
    c = max(found, key=lambda c: c.wire_bytes * c.count)
    dtype, dims = max(c.shapes, key=lambda shape: math.prod(shape[1]))
    serves = f" for {', '.join(c.serves[:3])}" if c.serves else ""
    return (f"{c.kind} of {dtype}{list(dims)} over {' x '.join(c.axes(contract.mesh)) or 'no axis'}, {c.count} times, "
            f"{c.wire_bytes * c.count:,.0f} bytes per step{serves}, from {c.op_name[-160:] or 'the compiler'}"
            + (f" ({c.source})" if c.source else "") + f". {_advice(c, contract)}")


def _advice(collective: Collective, contract: Contract) -> str:
    if MATRICES_SCOPE in collective.op_name:
        return ("Matrices of which no dim divides over the ZeRO devices are gathered before they go to their owners: "
                "choose dims that divide.")
    if UPDATE_SCOPE in collective.op_name:
        return ("The optimizer needs whole matrices, and the partitioner splits its products: give them to "
                "zero_jax.whole_matrices.")
    if _purpose(collective, contract) == "activations":
        return ("Look at tensor_rules: a column-parallel kernel, whose outputs are split, goes before a row-parallel "
                "one, and what lies between (heads) must be whole on each device.")
    if _purpose(collective, contract) == "rest":
        return ("Values of the batch cross the wire, or a parameter that is not gathered where it is read: look for a "
                "sharding constraint in the model, a loss that mixes examples, and a parameter that the layout does "
                "not see read (step.layout(batch).describe()).")
    if collective.kind == "all-reduce" and contract.platform == "tpu" and len(contract.mesh) == 1:
        return ("This slice has no reduce-scatter over one flat axis: let zero_jax.make_mesh() factor it along the "
                "torus.")
    if collective.in_loop:
        return ("In a loop: over layers that is as it should be, but a parameter that is read in a loop over time or "
                "microbatches is gathered, and its gradient summed, in each of its rounds. Read it before the loop.")
    return "See whether the parameter is read more than once, or through something that no hook sees."
