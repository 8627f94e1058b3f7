"""How a program breaks its contract, in words: the operation, its bytes, its source, and what to do."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from zero_jax.contract.purpose import purpose_of
from zero_jax.contract.report import CODES, Contract, TrafficResult
from zero_jax.layout.stored_optimizer import UPDATE_SCOPE
from zero_jax.optim.whole_matrices import MATRICES_SCOPE
from zero_jax.typing import AxisNames
from zero_jax.xla.collective import Collective, total_bytes
from zero_jax.xla.host_copies import ANNOTATOR
from zero_jax.xla.host_slices import HostSlice
from zero_jax.xla.replica_groups import group_order, mesh_axes

OUTSIDE = 0.5
"""Share of what is to be sent between slices in the iterations of loops that may be outside: XLA peels some off."""

TOLERANCE = 0.04
"""Share of a budget by which a program may exceed it."""

SMALL_LEAF = 4096
"""Bytes that a leaf may add: the padding of a TPU's tile, for each device of an axis; elsewhere its all-reduce."""


def excess(results: Mapping[str, TrafficResult], contract: Contract) -> Iterator[str]:
    """A line for each budget that is exceeded, by its key."""
    rest_bytes = results["rest"].budget.communication_bytes
    for key, what, share, slack in (
            ("gather", "of parameters are gathered", 0.0, contract.slack),
            ("reduce", "of gradients are reduced", 0.0, contract.slack),
            ("rest", "gather no parameter where it is read and sum no gradient", 0.0, 0.0),
            ("activations", "of activations travel", TOLERANCE, rest_bytes),
            ("matrices", "of whole matrices travel", TOLERANCE, SMALL_LEAF),
            ("slices", f"cross the axis {contract.slices!r} between slices", TOLERANCE, 0.0),
            ("outer", "of outer parameters are gathered in each slice", TOLERANCE, contract.slack)):
        result = results.get(key)
        if result is None or counted_bytes(result, contract) <= (1 + share) * _promised(result) + slack:
            continue
        whole = [c for c in result.collectives if c.kind == "all-reduce" and key == "reduce"]
        yield (f"{counted_bytes(result, contract):,.0f} bytes {what}, {_promised(result):,.0f} are promised"
               f"{' for such' * (key == 'rest')}: "
               + explain(whole if total_bytes(whole) > contract.slack else result.collectives, contract))


def violations(results: Mapping[str, TrafficResult], contract: Contract) -> Iterator[str]:
    """A line for gathers over other axes than promised, and for too little or nothing hidden between slices."""
    gather, slices = results["gather"], results.get("slices")
    wrong = [c for c in gather.collectives if set(c.axes(contract.mesh)) - set(gather.budget.axes)]
    if total_bytes(wrong) > _promised(results["rest"]):
        yield (f"parameters are gathered over {' x '.join(wrong[0].axes(contract.mesh))}, not only over "
               f"{' x '.join(gather.budget.axes) or 'no axis'}: {explain(wrong, contract)}")
    if slices is None:
        return
    sent, between = slices.communication_bytes, f"bytes cross the axis {contract.slices!r} between slices"
    if sent < (1 - TOLERANCE) * _promised(slices):
        yield (f"{sent:,.0f} {between}, and {_promised(slices):,.0f} must, of the outer gradients in their dtype.")
    outside = [c for c in slices.collectives if contract.slices_in_loops and not c.in_loop]
    if total_bytes(outside) > OUTSIDE * sent:
        yield (f"{total_bytes(outside):,.0f} of {sent:,.0f} {between} outside of the loops over layers, with no "
               f"product beside them: {explain(outside, contract)}")


def row_violations(results: Mapping[str, TrafficResult], contract: Contract) -> Iterator[str]:
    """A line for the scatters, and one for the gathers, that put other rows on a device than its specs say.

    Where several axes split a dim, the rows are right where it is scattered over the major axis first, and gathered
    over the minor one first; within one collective the order of the devices in a group decides. Those that serve
    several parameters are wrong where they are wrong for all. Nothing is said of what is moved on.
    """
    splits = {each.name: each.splits for each in contract.params}
    for key, kinds, done, first in (("reduce", ("reduce-scatter", "all-reduce"), "scattered", "major"),
                                    ("gather", ("all-gather",), "gathered", "minor")):
        wrong = [c for c in results[key].collectives if c.kind in kinds and c.serves and not set(c.dtypes) & set(CODES)
                 and all(_misplaces(c, splits.get(name, ()), contract) for name in c.serves)]
        if wrong:
            name = wrong[0].serves[0]
            order = " and ".join(" x ".join(axes) for axes in splits[name] if axes)
            yield (f"rows are on other devices than the layout says: {name} is split over {order}, and each dim must "
                   f"be {done} over its {first} axis first: " + explain(
                       wrong, contract, "This is a fault of zero_jax or of XLA, and not of the model: report it."))


def _misplaces(collective: Collective, splits: Sequence[AxisNames], contract: Contract) -> bool:
    """Whether it leaves other rows of a parameter on the devices than `splits`, the axes of each dim, says."""
    if () in collective.then:
        return False
    across, order = collective.axes(contract.mesh), group_order(collective.group, contract.mesh)
    is_whole = collective.group_size == math.prod(contract.mesh[axis] for axis in across)
    has_order, scatters = is_whole and collective.kind != "all-reduce", collective.kind != "all-gather"
    for axes in splits:
        own = [axis for axis in axes if axis in across]
        if has_order and own != [axis for axis in order if axis in axes]:
            return True
        for group in collective.then:
            later = [axis for axis in mesh_axes(group, contract.mesh) if axis in axes and axis not in own]
            if any((axes.index(axis) < axes.index(other)) != scatters for axis in own for other in later):
                return True
    return False


def slice_violations(slices: Iterable[HostSlice]) -> Iterator[str]:
    """A line for each slice of host memory that a GPU would take from other rows than its index says."""
    for each in slices:
        if not each.is_right:
            yield (f"{each}. The GPU copies by the walk, so that these would be other rows: XLA's pass {ANNOTATOR} has "
                   "such faults (openxla/xla pull requests 46231 and 46308). Turn it off, as the step does for its own "
                   f"offload: XLA_FLAGS=--xla_disable_hlo_passes={ANNOTATOR}.")


def reduced_bytes(collectives: Iterable[Collective], contract: Contract) -> float:
    """What counts as sent for the reduction of gradients.

    XLA:CPU has no reduce-scatter under jit: of its all-reduce and slice, half counts.
    """
    collectives = list(collectives)
    sent = total_bytes(collectives)
    if contract.platform == "cpu" and contract.stage:
        sent -= total_bytes(c for c in collectives if c.kind == "all-reduce") / 2
    return sent


def counted_bytes(result: TrafficResult, contract: Contract) -> float:
    """What counts as sent against the budget of `result`."""
    return reduced_bytes(result.collectives, contract) if result.budget.key == "reduce" else result.communication_bytes


def gather_notes(collectives: Iterable[Collective], contract: Contract) -> tuple[str, ...]:
    """Where the backend gathers in another way."""
    whole = [c for c in collectives if c.kind == "all-reduce"]
    return (f"{total_bytes(whole):,.0f} bytes of it by all-reduces: this compiler has no all-gather over "
            f"{' x '.join(whole[0].axes(contract.mesh))} for them",) if whole else ()


def reduce_notes(collectives: Iterable[Collective], contract: Contract) -> tuple[str, ...]:
    """Where the backend reduces in another way."""
    whole = [c for c in collectives if c.kind == "all-reduce"]
    if contract.stage == 0 or not whole:
        return ()
    if contract.platform == "cpu":
        return (f"{total_bytes(whole):,.0f} bytes of it by all-reduces and slices: XLA:CPU has no reduce-scatter under "
                "jit, so that half of them counts",)
    return (f"{total_bytes(whole):,.0f} bytes of it by all-reduces, for leaves too small or uneven to be scattered",)


def slices_notes(collectives: Sequence[Collective]) -> tuple[str, ...]:
    """What of it has a product beside it."""
    beside = [c for c in collectives if c.asynchronous and c.overlapped_flops]
    return (f"{total_bytes(beside):,.0f} bytes of it beside a matrix product",) if collectives else ()


def _promised(result: TrafficResult) -> float:
    return result.budget.communication_bytes


def explain(collectives: Sequence[Collective], contract: Contract, advice: str | None = None) -> str:
    """The collective that sends most, in words, and what to do about it: `advice`, or what its purpose suggests."""
    c = max(collectives, key=lambda c: c.step_bytes)
    dtype, dims = max(c.shapes, key=lambda shape: math.prod(shape[1]))
    serves = f" for {', '.join(c.serves[:3])}" if c.serves else ""
    return (f"{c.kind} of {dtype}{list(dims)} over {' x '.join(c.axes(contract.mesh)) or 'no axis'}, {c.count} times, "
            f"{c.step_bytes:,.0f} bytes per step{serves}, from {c.op_name[-160:] or 'the compiler'}"
            + (f" ({c.source})" if c.source else "") + f". {advice or _advice(c, contract)}")


def _advice(collective: Collective, contract: Contract) -> str:
    if MATRICES_SCOPE in collective.op_name:
        return ("Matrices of which no dim divides over the ZeRO devices are gathered before they go to their owners: "
                "choose dims that divide.")
    if UPDATE_SCOPE in collective.op_name:
        return ("The optimizer needs whole matrices, and the partitioner splits its products: give them to "
                "zero_jax.whole_matrices.")
    purpose = purpose_of(collective, contract)
    if purpose == "slices":
        return ("Slices train by themselves: look for a value of the model's that is not of one slice, a sharding "
                "constraint over this axis, or outer gradients in a wider dtype.")
    if purpose == "activations":
        return ("Look at tensor_rules: a column-parallel kernel, whose outputs are split, goes before a row-parallel "
                "one, and what lies between (heads) must be whole on each device.")
    if purpose == "rest":
        return ("Values of the batch are sent, or a parameter that is not gathered where it is read: look for a "
                "sharding constraint in the model, a loss that mixes examples, and a parameter that the layout does "
                "not see read (step.layout(batch).describe()).")
    if collective.kind == "all-reduce" and contract.platform == "tpu" and len(contract.mesh) == 1:
        return ("This slice has no reduce-scatter over one flat axis: let zero_jax.make_mesh() factor it along the "
                "torus.")
    if collective.in_loop:
        return ("In a loop: over layers that is as it should be, but a parameter that is read in a loop over time or "
                "microbatches is gathered, and its gradient summed, in each of its iterations. Read it before the "
                "loop.")
    return "See whether the parameter is read more than once, or through something that no hook sees."
