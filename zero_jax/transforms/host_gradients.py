"""A pass on the backward program: gradients of stacked layers that go down to host memory as they are made."""

from collections.abc import Collection
from typing import Any

import jax

from zero_jax.errors import UsageError
from zero_jax.jaxpr.equations import (
    ClosedJaxpr,
    JaxprEqn,
    eqn_of,
    is_literal,
    primitive_of,
    producers,
    variable_on_host,
)
from zero_jax.jaxpr.primitives import SCAN, Scan, call_jaxpr, with_call_jaxpr
from zero_jax.sharding.memory.host_arrays import is_on_host, put_on_host
from zero_jax.tree import named_leaves

GRADIENT_SCOPE = "zero_host_gradient"
"""In the op_name of what moves a layer's gradient to host memory."""


def stack_on_host(closed: ClosedJaxpr, outputs: Collection[int]) -> ClosedJaxpr:
    """Moves each round's part of the results `outputs` to host memory, where a loop stacks them; others stay.

    Why: a stack in device memory has the gradients of all layers before the update reads the first of them. The loop
    writes a layer's shard into a stack in host memory instead, as it writes checkpoints that are offloaded.
    Order: last, on the outermost program alone, since what it moves is a result of the whole.
    """
    jaxpr = closed.jaxpr
    makers = producers(jaxpr)
    numbers: dict[Any, list[Any]] = {}
    for number in outputs:
        var: Any = jaxpr.outvars[number]
        loop = None if is_literal(var) else makers.get(var)
        if loop is not None and primitive_of(loop) == SCAN and loop.outvars.index(var) >= Scan.of(loop).num_carry and (
                not any(var in eqn.invars for eqn in jaxpr.eqns)):
            numbers.setdefault(loop.outvars[0], []).append(loop.outvars.index(var))
    if not numbers:
        return closed
    renamed: dict[Any, Any] = {}
    eqns = [_moved(eqn, numbers[eqn.outvars[0]], renamed) if eqn.outvars and eqn.outvars[0] in numbers else eqn
            for eqn in jaxpr.eqns]
    outvars = [atom if is_literal(atom) else renamed.get(atom, atom) for atom in jaxpr.outvars]
    return closed.replace(jaxpr=jaxpr.replace(eqns=eqns, outvars=outvars))


def _moved(loop: JaxprEqn, numbers: Collection[int], renamed: dict[Any, Any]) -> JaxprEqn:
    """`loop` with these results in host memory; renamed: takes the new variable for each old one."""
    body = call_jaxpr(loop).jaxpr
    outvars, eqns, outer = list(body.outvars), list(body.eqns), list(loop.outvars)
    for number in numbers:
        outvars[number] = variable_on_host(body.outvars[number])
        with jax.named_scope(GRADIENT_SCOPE):
            eqns.append(eqn_of(put_on_host, [body.outvars[number]], [outvars[number]]))
        outer[number] = renamed[loop.outvars[number]] = variable_on_host(loop.outvars[number])
    return with_call_jaxpr(loop, body.replace(eqns=eqns, outvars=outvars)).replace(outvars=outer)


def check_on_host(gradients: Any, names: Collection[str]) -> None:
    """Raises ValueError for gradients that are not in host memory and should be: of parameters that no one loop reads.

    names: of those that should be there.
    """
    left = [name for name, leaf in named_leaves(gradients) if name in names and not is_on_host(leaf)]
    if left:
        raise UsageError(f"Offload(gradients=\"host\"): the gradient of {', '.join(left)} is no stack that one loop "
                         "over layers makes, but a sum of several or what is computed from it: read each stacked "
                         "parameter in one loop, or leave gradients out.")
