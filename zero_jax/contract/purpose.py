"""What a collective of a compiled step is for: gathers, reductions, matrices, activations, or the rest."""

import dataclasses
import math
from collections.abc import Iterable, Sequence

from zero_jax.contract.report import CODES, Contract
from zero_jax.gather.gather import GATHER_SCOPE, SCATTER
from zero_jax.layout.slices import OUTER_SCOPE
from zero_jax.optim.whole_matrices import MATRICES_SCOPE
from zero_jax.xla.collective import Collective
from zero_jax.xla.shapes import shape_bytes


def purpose_of(collective: Collective, contract: Contract) -> str:
    """The key of the budget that `collective` counts against."""
    axes = collective.axes(contract.mesh)
    if contract.slices in axes:
        return "slices"
    if contract.slices and OUTER_SCOPE in collective.op_name and GATHER_SCOPE not in collective.op_name:
        return "outer"
    if MATRICES_SCOPE in collective.op_name and contract.budget("matrices"):
        return "matrices"
    activations = contract.budget("activations")
    if activations and GATHER_SCOPE not in collective.op_name and (
            len(axes) == 1 and axes[0] in activations.axes and (
                axes[0] != contract.context or not _is_gradient(collective))):
        return "activations"
    if GATHER_SCOPE in collective.op_name:
        return "gather"
    if SCATTER in collective.op_name and collective.kind in ("all-to-all", "all-gather"):
        return "reduce"  # of quantised gradients: sums across replicas are gathered again
    unmarked = collective.kind == "all-gather" and (contract.stage < 3 or not collective.op_name)
    if unmarked and _is_buffer(collective, contract):
        return "gather"
    if collective.kind in ("reduce-scatter", "all-reduce", "collective-permute") and (
            collective.serves or _is_buffer(collective, contract) or SCATTER in collective.op_name):
        return "reduce"
    return "activations" if activations and axes and set(axes) <= set(activations.axes) else "rest"


def split_by_purpose(collective: Collective, contract: Contract) -> Iterable[Collective]:
    """A collective of many buffers as one for each purpose: compilers combine what they can."""
    if collective.kind == "all-reduce":
        return _sums_by_purpose(collective, contract)
    budget = contract.budget("matrices")
    matrices = set(budget.buffers) if budget and MATRICES_SCOPE in collective.op_name else set()
    names = collective.op_name.split(":")
    # Keys and values may have the size of a parameter: where each buffer has a name, that says what it is.
    scope = SCATTER if collective.kind == "reduce-scatter" else GATHER_SCOPE
    named = len(names) == len(collective.shapes) and scope in collective.op_name
    mixed = named and not all(scope in name for name in names)
    if len(collective.shapes) == 1 or not mixed and (
            collective.kind != "all-gather" or not matrices and _is_buffer(collective, contract)):
        return (collective,)
    parts: dict[str, list[tuple[str, tuple[int, ...]]]] = {MATRICES_SCOPE: [], scope: [], "": []}
    for i, shape in enumerate(collective.shapes):
        is_param = scope in names[i] if named else math.prod(shape[1]) in contract.budgets[0].buffers
        parts[MATRICES_SCOPE if sorted_dims(shape[1]) in matrices else scope if is_param else ""].append(shape)
    return [_part(collective, shapes, scope) for scope, shapes in parts.items() if shapes]


def _sums_by_purpose(collective: Collective, contract: Contract) -> Iterable[Collective]:
    """An all-reduce of gradients, of which nothing else tells what it is for, apart from the sums that go with it.

    With the norm of a small model these are more than a thousandth: those of an embedding's gradient, of 6144 elements,
    and eight scalars were taken for the rest together.
    """
    if len(collective.shapes) == 1 or collective.serves or SCATTER in collective.op_name or (
            MATRICES_SCOPE in collective.op_name or _is_buffer(collective, contract)):
        return (collective,)
    is_buffer = [math.prod(shape[1]) in contract.budgets[0].buffers for shape in collective.shapes]
    parts = [[shape for shape, own in zip(collective.shapes, is_buffer, strict=True) if own == wanted]
             for wanted in (True, False)]
    return [_part(collective, shapes, "") for shapes in parts if shapes]


def sorted_dims(dims: Sequence[int]) -> tuple[int, ...]:
    """A shape as a key: the compiler permutes dims, and drops those of size 1."""
    return tuple(sorted(size for size in dims if size > 1))


def total_elements(collectives: Iterable[Collective]) -> float:
    """Elements that each device sends for them per step; of messages of codes, bytes."""
    return sum(c.step_bytes / c.payload_bytes
               * sum(math.prod(dims) * CODES.get(dtype, 1) for dtype, dims in c.shapes)
               for c in collectives if c.payload_bytes)


def _part(collective: Collective, shapes: Sequence[tuple[str, tuple[int, ...]]], scope: str) -> Collective:
    """What of it carries `shapes`, with the names of all but the other scopes."""
    others = {MATRICES_SCOPE, GATHER_SCOPE, SCATTER} - {scope}
    names = [name for name in collective.op_name.split(":") if not any(other in name for other in others)]
    return dataclasses.replace(
        collective, shapes=tuple(shapes), payload_bytes=sum(shape_bytes(*shape) for shape in shapes),
        op_name=":".join(names), serves=collective.serves if scope else ())


def _is_gradient(collective: Collective) -> bool:
    """Whether it scatters gradients, by its name, or by its result where a product that it runs within named it."""
    return SCATTER in collective.op_name or collective.kind == "reduce-scatter" and bool(collective.serves)


def _is_buffer(collective: Collective, contract: Contract) -> bool:
    """Whether all but a thousandth of its elements are buffers of the size of some parameter."""
    sizes = [math.prod(dims) for _, dims in collective.shapes]
    return sum(size for size in sizes if size not in contract.budgets[0].buffers) <= 1e-3 * sum(sizes)
