"""Whether what is to be computed in tiles is sent in tiles: never whole, neither a weight nor its gradient."""

import math
from collections.abc import Iterator, Mapping

from zero_jax.contract.report import Contract, ParamTraffic, TrafficResult
from zero_jax.contract.violations import explain
from zero_jax.xla.collective import Collective

MARGIN = 1.5
"""How many tiles one buffer may be: a TPU pads it, and two tiles are not one."""


def largest_tile(collective: Collective, contract: Contract) -> float:
    """Elements of the largest buffer that `collective` may send; infinite where it serves no tiled parameter."""
    served = [each for each in contract.params if each.name in collective.serves]
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
            copy = max((each.kept * each.tiles / each.slices for each in contract.params if each.name in c.serves),
                       default=0.0) if key == "gather" else 0.0
            if elements > max(largest_tile(c, contract), copy):
                name = next(name for name in c.serves if name in tiled)
                yield (f"{name} is to be {what} in {tiled[name].tiles} tiles of "
                       f"{tiled[name].size / tiled[name].slices:,.0f} elements, and {elements:,} are at once: "
                       + explain([c], contract, "Look for a transform of the model's around the product "
                                                "(step.layout(batch).describe() names what is in tiles)."))
