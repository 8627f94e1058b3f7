"""Whether what a layout quantises is sent as codes: a format that travels as bfloat16 is a violation."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from zero_jax.contract.purpose import total_bytes
from zero_jax.contract.report import CODES, Contract, TrafficResult
from zero_jax.contract.violations import SMALL_LEAF, TOLERANCE, explain
from zero_jax.xla.collective import Collective
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
        tiles = max(contract.mesh.values()) if contract.platform == "tpu" else 1
        slack = TOLERANCE * allowed + SMALL_LEAF * tiles * len(contract.params)
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
