"""What a program must send: a stage that did not do its work sends too little, or as much in another way."""

import math
from collections.abc import Iterable, Iterator, Mapping

from zero_jax.contract.purpose import total_elements
from zero_jax.contract.report import CODES, Contract, ParamTraffic, TrafficResult
from zero_jax.contract.violations import SMALL_LEAF, explain, reduced_bytes
from zero_jax.gather.gather import SCATTER
from zero_jax.xla.collective import Collective, total_bytes
from zero_jax.xla.shapes import shape_bytes

LEAST = 0.9
"""Share of the elements of all parameters above a small size that must be gathered, and of gradients reduced."""

WHOLE_LEAF = 2**14
"""Bytes of a gradient that may be all-reduced whole; as `partition.SMALL_LEAF`, which may be stored so.

On a TPU that is for each part: its compiler all-reduces the parts of a gradient of 64 KiB on a v5e of 2x4.
"""

WHOLE_SHARE = 0.04
"""Share of the gradients' budget that all-reduces of larger ones may take together: XLA scatters no sum over rows.

Measured: position embeddings take 0.014 of GPT-2 of 2 layers and width 256 on eight H100s.
"""

BEFORE_THE_LOOP = ("Read it before the loop (jax.lax.scan over arrays that the model has read already), so that it is "
                   "sent once.")

NARROW_SHARE = 0.01
"""Share of the gradients' budget that may be sent in fewer bits than declared."""


def detours(results: Mapping[str, TrafficResult], contract: Contract) -> Iterator[str]:
    """A line for each way in which a program sends what it need not, though no more bytes. results: by budget."""
    gather, reduce = results["gather"], results["reduce"]
    if gather.communication_bytes <= gather.budget.communication_bytes + contract.slack:  # else it is reported already
        yield from _repeated_in_loops(gather, contract.num_gathers, "gathered", contract)
    if reduced_bytes(reduce.collectives, contract) <= reduce.budget.communication_bytes + contract.slack:
        yield from _whole_reductions(reduce, contract)
        yield from _repeated_in_loops(reduce, contract.num_reductions, "reduced", contract)


def shortfalls(results: Mapping[str, TrafficResult], contract: Contract) -> Iterator[str]:
    """A line for each way in which a program does less than its stage says. results: by the key of the budget."""
    yield from _narrow_reductions(results["reduce"], contract)
    yield from _missing(results["gather"], results["reduce"], contract)


def _whole_reductions(reduce: TrafficResult, contract: Contract) -> Iterator[str]:
    """Gradients that are all-reduced over the axes over which the stage scatters them.

    Those that are sums and no products may be, as far as the budget of bytes goes.
    """
    if contract.platform == "cpu":  # has no reduce-scatter under jit
        return
    small = WHOLE_LEAF * contract.tiles
    whole = []
    for c in reduce.collectives:
        num_large = sum(shape_bytes(*shape) > small for shape in c.shapes)
        is_sum = num_large == 1 and c.op_name.endswith("/reduce_sum")  # as of position embeddings: XLA scatters none
        if c.kind == "all-reduce" and set(c.axes(contract.mesh)) & set(contract.zero_axes) and num_large and not is_sum:
            whole.append(c)
    if total_bytes(whole) > WHOLE_SHARE * reduce.budget.communication_bytes:
        yield (f"{total_bytes(whole):,.0f} bytes are sent to all-reduce whole gradients, which stage {contract.stage} "
               f"scatters: {explain(whole, contract, _why_whole(whole, contract))}")


def _why_whole(whole: Iterable[Collective], contract: Contract) -> str | None:
    """What to do about it, where the dtype tells why a gradient was not scattered."""
    for c in whole:
        dtype, _ = max(c.shapes, key=lambda shape: shape_bytes(*shape))
        if any(shape_bytes(dtype, ()) != each.reduce_itemsize for each in contract.served(c)):
            return ("A cast stands between the product that makes this gradient and its reduction: give the module "
                    "the dtype in which the step reduces (Precision.reduce), or the step the module's.")
    return None


def _narrow_reductions(reduce: TrafficResult, contract: Contract) -> Iterator[str]:
    """Gradients that are summed in fewer bits than declared."""
    least = min((each.reduce_itemsize for each in contract.params if each.reduced and not each.reduces_codes),
                default=0)
    narrow = []
    for c in reduce.collectives:
        if reduce.budget.code_bytes and set(c.dtypes) <= set(CODES):
            continue
        declared = [each.reduce_itemsize for each in contract.served(c) if each.reduced]
        if (declared or SCATTER in c.op_name) and any(
                shape_bytes(dtype, ()) < min(declared, default=least) for dtype, _ in c.shapes):
            narrow.append(c)
    if total_bytes(narrow) > max(SMALL_LEAF, NARROW_SHARE * reduce.budget.communication_bytes):
        bits = sorted({8 * shape_bytes(dtype, ()) for c in narrow for dtype, _ in c.shapes})
        declared = sorted({8 * each.reduce_itemsize for c in narrow for each in contract.served(c)}) or [8 * least]
        yield (f"{total_bytes(narrow):,.0f} bytes of gradients are summed in {bits[0]} bits, {declared[0]} are "
               "declared: " + explain(narrow, contract, (
                   "The modules compute in this dtype, and XLA sums before it casts: give them the dtype in which the "
                   "step reduces, or declare theirs as Precision(reduce=...).")))


def _repeated_in_loops(result: TrafficResult, passes: int, verb: str, contract: Contract) -> Iterator[str]:
    """Parameters that no loop slices, and that are gathered, or their gradients reduced, in the iterations of a loop.

    passes: how often a step may send a parameter. Where several are reduced as one, all must be such.
    """
    for c in result.collectives:
        # XLA:TPU reduces leaves whose parts fill no tile where they are made, as far as the budget of bytes goes.
        iterations = 1 if contract.platform == "tpu" else c.count
        is_small = c.payload_bytes * iterations <= SMALL_LEAF * contract.tiles
        if not c.in_loop or c.kind == "collective-permute" or is_small:
            continue
        served = contract.served(c)
        repeated = [each for each in served if (
            c.count > passes * each.slices or not c.count_known and each.slices == 1) and _holds(c, each)]
        if repeated and (verb == "gathered" or len(repeated) == len(served)):
            times = f"{c.count} times" if c.count_known else "as often as the data decides"
            yield (f"{', '.join(each.name for each in repeated[:3])} is {verb} in a loop, {times} a step, and no loop "
                   f"takes slices of it: {explain([c], contract, BEFORE_THE_LOOP)}")


def _holds(collective: Collective, param: ParamTraffic) -> bool:
    """Whether a buffer of `collective` may be `param`, or that as far as some of the mesh axes gather it."""
    return any(param.size % size == 0 and size * collective.group_size >= param.size / param.slices
               for _, dims in collective.shapes if (size := math.prod(dims)))


def _missing(gather: TrafficResult, reduce: TrafficResult, contract: Contract) -> Iterator[str]:
    """Sharded parameters that are not gathered, and gradients that are not reduced.

    Elements count, since a TPU may round what it multiplies before the gather. Of branches only one is listed, and
    loops without a known count are counted once: where there are such, nothing is said.
    """
    collectives = (*gather.collectives, *reduce.collectives)
    if any("/branch_" in c.op_name or not c.count_known for c in collectives):
        return
    params = [each for each in contract.params if each.is_read and each.bytes > SMALL_LEAF * contract.tiles]
    gathered_names, reduced_names = ({name for c in result.collectives for name in c.serves}
                                     for result in (gather, reduce))
    if contract.stage == 3:  # of what only reaches an output that the loss does not use, XLA leaves nothing
        alive = [each for each in params if each.name in gathered_names | reduced_names]
        params = alive if sum(each.size for each in alive) > sum(each.size for each in params) / 2 else params
    gathers = params if contract.stage == 3 else [each for each in params if each.reduced]
    expected = sum(each.gathered for each in gathers)
    if total_elements(gather.collectives) < LEAST * expected:
        what = ("they are stored sharded, and read without a gather" if contract.stage == 3 else
                "the update of each device's shard does not reach the others")
        yield (f"{total_elements(gather.collectives):,.0f} elements of parameters are gathered, of {expected:,.0f}: "
               + _absent(gathers, gathered_names) + f"{what}. If the loss does not depend on them, list them in "
               "frozen= or leave them out of the model; else look for a read that no hook sees "
               "(step.layout(batch).describe()).")
    reduced = _reduced_elements(reduce.collectives, contract)
    expected = contract.num_reductions * sum(each.reduced for each in params)
    if reduced < LEAST * expected:
        yield (f"{reduced:,.0f} elements of gradients are reduced, of {expected:,.0f}: "
               + _absent([each for each in params if each.reduced], reduced_names)
               + "no gradient reaches them (if the loss stops it, list them in frozen=, which saves their moments), "
               "or every device computes that of the whole batch (after a sort or shuffle of all examples, say: sort "
               "those of each device), or each device would update with that of its own examples.")


def _absent(params: Iterable[ParamTraffic], names: Iterable[str]) -> str:
    absent = sorted((each for each in params if each.name not in names), key=lambda each: -each.size)
    return f"nothing is sent for {', '.join(each.name for each in absent[:3])}; " if absent else ""


def _reduced_elements(collectives: Iterable[Collective], contract: Contract) -> float:
    """Elements that each device sends to reduce gradients; where they are scattered, a whole all-reduce counts half."""
    collectives = list(collectives)
    whole = [c for c in collectives if c.kind == "all-reduce" and set(c.axes(contract.mesh)) & set(contract.zero_axes)]
    return total_elements(collectives) - total_elements(whole) / 2
