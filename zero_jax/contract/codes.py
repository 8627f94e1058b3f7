"""Whether what a layout quantises is sent as codes, and what it gathers in tiles as tiles: else a violation."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from zero_jax.contract.report import CODES, Contract, ParamTraffic, TrafficResult
from zero_jax.contract.violations import SMALL_LEAF, TOLERANCE, explain
from zero_jax.xla.collective import Collective, total_bytes
from zero_jax.xla.shapes import shape_bytes

LEAST = 0.9
"""Share of the bytes of a reduction that must be sent as codes. Of gathers the same share of one of two: XLA gathers
once what forward and backward use one after the other."""


def code_violations(results: Mapping[str, TrafficResult], contract: Contract) -> Iterator[str]:
    """A line if fewer codes are sent than promised, or more that are none. results: by the key of the budget.

    What is not quantised (vectors, small leaves) has a budget of its own, since a twenty-fifth of the whole one, which
    a program may exceed, would be any matrix of a deep model.
    """
    for key, what in (("gather", "parameters"), ("reduce", "gradients")):
        result = results[key]
        budget = result.budget
        if not budget.code_bytes:
            continue
        codes, others = _by_width(result)
        passes = 2 if key == "gather" and contract.stage == 3 else 1
        sent, least = total_bytes(codes), LEAST * budget.code_bytes / passes
        if sent < least:
            yield (f"{sent:,.0f} bytes of {what} are sent as codes, of {budget.code_bytes:,.0f}: "
                   + (_explain(others, contract) if others else "nothing is sent in their place."))
        # Vectors are all-reduced whole where that is cheaper than to scatter them: half of that counts, as on a CPU.
        wide = total_bytes(others) - (key == "reduce") * total_bytes(c for c in others if c.kind == "all-reduce") / 2
        allowed = budget.communication_bytes - budget.code_bytes
        slack = TOLERANCE * allowed + SMALL_LEAF * contract.tiles * len(contract.params)
        if wide > allowed + slack and sent >= least:
            yield (f"{wide:,.0f} bytes of {what} are sent as they are, {allowed:,.0f} are promised: "
                   + _explain(others, contract))


def _by_width(result: TrafficResult) -> tuple[list[Collective], list[Collective]]:
    """The traffic that is codes, and the rest; of a collective that combines both, each part."""
    codes, others = [], []
    for collective in result.collectives:
        for part, is_codes in ((codes, True), (others, False)):
            shapes = tuple(shape for shape in collective.shapes if (shape[0] in CODES) == is_codes)
            if shapes:
                part.append(replace(collective, shapes=shapes, payload_bytes=sum(shape_bytes(*s) for s in shapes)))
    return codes, others


def _explain(collectives: list[Collective], contract: Contract) -> str:
    return explain(collectives, contract, (
        "It is to be quantised, and travels in its own dtype: its gradient is no sum over examples that the step "
        "finds, or the parameter is read past Flax's accessor. Name it in Communication(exclude=...) to send it so."))


MARGIN = 1.5
"""How many tiles one buffer may be: a TPU pads it, and two tiles are not one."""


def largest_tile(collective: Collective, contract: Contract) -> float:
    """Elements of the largest buffer that `collective` may send; infinite where it serves no tiled parameter."""
    served = contract.served(collective)
    if not any(each.tiles > 1 for each in served):
        return math.inf
    return MARGIN * max(each.size / each.slices for each in served)


def tile_violations(results: Mapping[str, TrafficResult], contract: Contract) -> Iterator[str]:
    """A line for each tiled parameter that is gathered, or its gradient reduced, in larger parts than its tiles."""
    tiled: dict[str, ParamTraffic] = {each.name: each for each in contract.params if each.tiles > 1}
    for key, what in (("gather", "gathered"), ("reduce", "reduced")):
        for c in results[key].collectives if tiled else ():
            elements = max((math.prod(dims) for _, dims in c.shapes), default=0)
            # With hpZ the copy of a layer is gathered at once, and its tiles from that.
            copy = max((each.kept * each.tiles / each.slices for each in contract.served(c) if key == "gather"),
                       default=0.0)
            if elements > max(largest_tile(c, contract), copy):
                name = next(name for name in c.serves if name in tiled)
                yield (f"{name} is to be {what} in {tiled[name].tiles} tiles of "
                       f"{tiled[name].size / tiled[name].slices:,.0f} elements, and {elements:,} are at once: "
                       + explain([c], contract, "Look for a transform of the model's around the product "
                                                "(step.layout(batch).describe() names what is in tiles)."))
