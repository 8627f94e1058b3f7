"""A pass on the backward program: gradients of stacked layers that go down to host memory as they are made."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.lax import with_sharding_constraint as constrain
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zero_jax.errors import UsageError
from zero_jax.gather.gather import is_scatter
from zero_jax.jaxpr.equations import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    eqn_of,
    is_literal,
    is_on_host_atom,
    jaxpr_to_fun,
    needed_eqns,
    primitive_of,
    producers,
    shape_of,
    variable_like,
    variable_on_host,
    variables,
)
from zero_jax.jaxpr.primitives import (
    CALLS,
    CONVERT,
    JIT,
    NAME,
    SCAN,
    Scan,
    call_jaxpr,
    inlined,
    inlined_eqns,
    out_shardings,
    with_call_jaxpr,
)
from zero_jax.offload.tpu_tiles import minor_order
from zero_jax.sharding.batch import add_weighted
from zero_jax.sharding.host_arrays import fetch, is_on_host, put_on_host
from zero_jax.tree import named_leaves

GRADIENT_SCOPE = "zero_host_gradient"
"""In the op_name of what moves a layer's gradient to host memory."""


def stack_on_host(closed: ClosedJaxpr, outputs: Collection[int]) -> ClosedJaxpr:
    """Moves each iteration's part of the results `outputs` to host memory, where a loop stacks them; others stay.

    Why: a stack in device memory has the gradients of all layers before the update reads the first of them. The loop
    writes a layer's shard into a stack in host memory instead, as it writes checkpoints that are offloaded.
    Order: last, on the outermost program alone, since what it moves is a result of the whole.
    """
    jaxpr = _flat(closed.jaxpr, outputs)
    numbers = _stacked(jaxpr, outputs)
    if not numbers:
        return closed
    renamed: dict[Any, Any] = {}
    eqns = [_moved(eqn, list(numbers[eqn.outvars[0]]), renamed) if eqn.outvars and eqn.outvars[0] in numbers else eqn
            for eqn in jaxpr.eqns]
    return closed.replace(jaxpr=jaxpr.replace(eqns=eqns, outvars=_renamed(jaxpr.outvars, renamed)))


def add_on_host(closed: ClosedJaxpr, outputs: Sequence[int], *, weight: int, shardings: Sequence[NamedSharding]
                ) -> ClosedJaxpr:
    """As `stack_on_host`, but that each iteration adds its part, times a weight, to what a stack in host memory has.

    The first inputs of the program are these stacks, one for each of `outputs`, in the dtype of their sums and sharded
    as `shardings`, and behind them whether they have nothing yet: then what they have is not read as a number, since
    XLA leaves memory of the host that a loop writes as it was. weight: the number of the result that multiplies what is
    added. The sum of an iteration is what a loop over microbatches adds on the device, so that its bits are the same.

    Why not new stacks, as results: the old and the new ones would be in host memory together.
    """
    closed = closed.replace(jaxpr=_flat(closed.jaxpr, outputs))
    jaxpr = closed.jaxpr
    numbers = _stacked(jaxpr, outputs)
    by_output = {output: (var, sharding) for output, var, sharding in zip(
        outputs, jaxpr.invars[:len(outputs)], shardings, strict=True)}
    first, factor = jaxpr.invars[len(outputs)], jaxpr.outvars[weight]
    before = needed_eqns(closed, [factor])  # forward computes it, and backward's loop reads it
    others = {id(eqn) for eqn in before}
    renamed: dict[Any, Any] = {}
    eqns = []
    for eqn in [*before, *(eqn for eqn in jaxpr.eqns if id(eqn) not in others)]:
        if eqn.outvars and eqn.outvars[0] in numbers:
            stacks = {number: by_output[output] for number, output in numbers[eqn.outvars[0]].items()}
            eqn = _added(eqn, stacks, first, factor, renamed)
        eqns.append(eqn)
    return closed.replace(jaxpr=jaxpr.replace(eqns=eqns, outvars=_renamed(jaxpr.outvars, renamed)))


def _flat(jaxpr: Jaxpr, outputs: Collection[int]) -> Jaxpr:
    """`jaxpr` with the calls inlined that make the results `outputs`, as those in which a loop stands by itself."""
    while True:
        makers = producers(jaxpr)
        makers_of = [makers.get(jaxpr.outvars[output]) for output in outputs if not is_literal(jaxpr.outvars[output])]
        calls = {id(eqn) for eqn in makers_of if eqn is not None and primitive_of(eqn) == JIT and not is_scatter(eqn)}
        if not calls:
            return jaxpr
        jaxpr = jaxpr.replace(eqns=[inner for eqn in jaxpr.eqns for inner in (
            inlined_eqns(eqn) if id(eqn) in calls else [eqn])])


def _stacked(jaxpr: Any, outputs: Collection[int]) -> dict[Any, dict[int, int]]:
    """For each loop that stacks some of the results `outputs`, by its first result: which of its own each is."""
    makers = producers(jaxpr)
    numbers: dict[Any, dict[int, int]] = {}
    for output in outputs:
        var: Any = jaxpr.outvars[output]
        loop = None if is_literal(var) else makers.get(var)
        if loop is not None and primitive_of(loop) == SCAN and loop.outvars.index(var) >= Scan.of(loop).num_carry and (
                not any(var in eqn.invars for eqn in jaxpr.eqns)):
            numbers.setdefault(loop.outvars[0], {})[loop.outvars.index(var)] = output
    return numbers


def _renamed(atoms: Sequence[Any], renamed: Mapping[Any, Any]) -> list[Any]:
    return [atom if is_literal(atom) else renamed.get(atom, atom) for atom in atoms]


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


def _added(loop: JaxprEqn, stacks: Mapping[int, tuple[Any, NamedSharding]], first: Any, weight: Any,
           renamed: dict[Any, Any]) -> JaxprEqn:
    """`loop`, which carries these stacks and adds to them.

    stacks: the variable and the sharding of each, by the number of the result that is added to it. renamed: takes the
    new variable for each old one.
    """
    scan, body, numbers = Scan.of(loop), jaxpr_to_fun(call_jaxpr(loop)), list(stacks)

    def run(first: Any, weight: Any, sums: Any, *operands: Any) -> list[Any]:
        consts, carry, xs = scan.parts(operands)

        def step(carried: Any, xs: Any) -> Any:
            carry, sums, done = carried
            results = body(*consts, *carry, *xs)
            layer = scan.length - 1 - done if scan.reverse else done
            sums = [_with_addend(total, results[number], layer, first, weight, stacks[number][1])
                    for total, number in zip(sums, numbers, strict=True)]
            stacked = [result for number, result in enumerate(results) if number >= scan.num_carry
                       and number not in stacks]
            return (results[:scan.num_carry], sums, done + 1), stacked

        (carry, sums, _), stacked = jax.lax.scan(
            step, (list(carry), list(sums), jnp.int32(0)), xs, length=scan.length, reverse=scan.reverse,
            unroll=scan.unroll)
        rest, replaced = iter([*carry, *stacked]), dict(zip(numbers, sums, strict=True))
        return [replaced[number] if number in replaced else next(rest) for number in range(len(loop.outvars))]

    outvars = list(loop.outvars)
    for number, (stack, _) in stacks.items():
        outvars[number] = renamed[loop.outvars[number]] = variable_on_host(
            variable_like(loop.outvars[number], stack.aval.dtype))
    operands = [first, weight, *(stack for stack, _ in stacks.values()), *loop.invars]
    call = eqn_of(jax.jit(lambda first, weight, *others: run(
        first, weight, others[:len(numbers)], *others[len(numbers):])), operands, outvars)
    return inlined(call, call_jaxpr(call).jaxpr)


def _with_addend(stack: Any, grad: Any, layer: Any, first: Any, weight: Any, sharding: NamedSharding) -> Any:
    """`stack`, in host memory, with `weight * grad` added to its part `layer`."""
    start = (layer, *[jnp.int32(0)] * grad.ndim)
    of_layer = NamedSharding(sharding.mesh, P(*sharding.spec[1:]))
    with jax.named_scope(GRADIENT_SCOPE):
        part = jax.lax.dynamic_slice(stack, start, (1, *grad.shape), allow_negative_indices=False)
        before = constrain(jnp.where(first, 0, fetch(part)[0]), of_layer)
        total = constrain(add_weighted(before, grad.astype(stack.dtype), weight), of_layer)
        return jax.lax.dynamic_update_slice(stack, put_on_host(total[None]), start, allow_negative_indices=False)


def check_on_host(gradients: Any, names: Collection[str]) -> None:
    """Raises ValueError for gradients that are not in host memory and should be: of parameters that no one loop reads.

    names: of those that should be there.
    """
    left = [name for name, leaf in named_leaves(gradients) if name in names and not is_on_host(leaf)]
    if left:
        raise UsageError(f"Offload(gradients=\"host\"): the gradient of {', '.join(left)} is no stack that one loop "
                         "over layers makes, but a sum of several or what is computed from it: read each stacked "
                         "parameter in one loop, or leave gradients out.")


def wait_for_reads(closed: ClosedJaxpr, gradients: Mapping[int, int], num_gradients: int) -> ClosedJaxpr:
    """Makes the gradients of arrays in host memory wait for the next one that follows from their last read.

    gradients: by the number of such an array among the inputs in host memory that of its gradient among the results,
    of which the first `num_gradients` are gradients.

    Why: backward reads a weight once more for the gradients of what is before it, and not for its own. Nothing keeps
    its update, which writes it in place, behind that read, and XLA:GPU copies it within host memory to be able to.
    Not for all of backward: 72.1 instead of 53.1 GiB of temporaries (a block of width 65,536 on 8 H100).
    Cost without: 512 MiB of temporaries in host memory, and 1036 instead of 531 MiB on the device (one product of
    16k x 16k on an H100).
    Order: last, on the outermost program alone, whose results the update gets.
    """
    jaxpr = closed.jaxpr
    on_host = [var for var in jaxpr.invars if is_on_host_atom(var)]
    last = _last_reads(jaxpr)
    eqns, outvars = list(jaxpr.eqns), list(jaxpr.outvars)
    for number, result in gradients.items():
        after = _following(jaxpr, last[on_host[number]], num_gradients) if on_host[number] in last else []
        if after and result not in after:
            pair = [outvars[result], outvars[after[0]]]
            outvars[result], outvars[after[0]] = map(variable_like, pair)
            eqns.append(eqn_of(lambda *both: jax.lax.optimization_barrier(both), pair,
                               [outvars[result], outvars[after[0]]]))
    return closed.replace(jaxpr=jaxpr.replace(eqns=eqns, outvars=outvars))


def _following(jaxpr: Jaxpr, eqn: JaxprEqn, num_gradients: int) -> list[int]:
    """The numbers of the gradients that follow from the results of `eqn`, in the order in which they are computed."""
    found, made = set(eqn.outvars), dict[Any, int]()
    for place, each in enumerate(jaxpr.eqns):
        made |= dict.fromkeys(each.outvars, place)
        if not found.isdisjoint(variables(each.invars)):
            found |= set(each.outvars)
    numbers = [number for number, var in enumerate(jaxpr.outvars[:num_gradients])
               if not is_literal(var) and var in found and not is_on_host_atom(var)]
    return sorted(numbers, key=lambda number: made[jaxpr.outvars[number]])


def _last_reads(jaxpr: Jaxpr) -> dict[Any, JaxprEqn]:
    """For each variable in host memory the last equation that takes it, itself or behind barriers and the like."""
    last, names = dict[Any, JaxprEqn](), {var: var for var in jaxpr.invars}
    for eqn in jaxpr.eqns:
        if len(eqn.invars) == len(eqn.outvars) and any(map(is_on_host_atom, eqn.outvars)):
            names |= {out: names[atom] for atom, out in zip(eqn.invars, eqn.outvars, strict=True)
                      if is_on_host_atom(out) and atom in variables(eqn.invars) and atom in names}
        else:
            last |= {names[atom]: eqn for atom in variables(eqn.invars) if atom in names}
    return last


def order_stacked_gradients(jaxpr: Jaxpr, *, tiled: bool = False) -> Jaxpr:
    """Gives the gradient of each layer, where a loop stacks it, the order of dims in memory of the state's arrays.

    Why: XLA:GPU scatters with the scattered dim as the major one, so that it stacks transposed gradients. The streamed
    update reads blocks of the stack beside blocks of the state, and XLA transposes all of it before the update's loop.
    Here each layer is transposed as it is put into the stack.
    tiled: of a TPU, whose order is that which pads its tiles least.

    Cost without: 117 MiB more of device memory in the update (GPT-2 1.5B on `h100:8`, offload="optimizer"). Of sums in
    host memory on four v5p, which XLA:TPU transposes whole, 50.3 MB of copies there beside 25.2.
    Order: on the program that is differentiated already, whose reductions it looks for.
    """
    return jaxpr.replace(eqns=[_ordered(eqn, tiled) if primitive_of(eqn) == SCAN else eqn for eqn in jaxpr.eqns])


def _ordered(loop: JaxprEqn, tiled: bool) -> JaxprEqn:
    body, first = call_jaxpr(loop).jaxpr, Scan.of(loop).num_carry
    shardings = [_scattered(body, number) if number >= first else None for number in range(len(body.outvars))]
    found = {number: sharding for number, sharding in enumerate(shardings)
             if sharding is not None and shape_of(body.outvars[number]).ndim > 1}
    if not found:
        return loop
    outvars = [variable_like(atom) if number in found else atom for number, atom in enumerate(body.outvars)]
    eqns = [eqn_of(_in_order(sharding, tiled), [body.outvars[number]], [outvars[number]])
            for number, sharding in found.items()]
    return with_call_jaxpr(loop, body.replace(eqns=[*body.eqns, *eqns], outvars=outvars))


def _scattered(jaxpr: Jaxpr, number: int) -> NamedSharding | None:
    """The sharding of a result that is a reduced and scattered gradient; None of any other."""
    atom, makers = jaxpr.outvars[number], producers(jaxpr)
    while not is_literal(atom) and (eqn := makers.get(atom)) is not None:
        if is_scatter(eqn):
            return out_shardings(eqn)[0]
        if primitive_of(eqn) in CALLS:
            return _scattered(call_jaxpr(eqn).jaxpr, next(i for i, out in enumerate(eqn.outvars) if out is atom))
        if primitive_of(eqn) not in (CONVERT, NAME, "copy"):
            return None
        atom = eqn.invars[0]
    return None


def _in_order(sharding: NamedSharding, tiled: bool) -> Callable[[jax.Array], Any]:
    """The identity on arrays of this sharding. On each device's shard: the partitioner gathers what is constrained."""
    def on_shard(shard: jax.Array) -> jax.Array:
        return with_layout_constraint(shard, Layout(minor_order(shard.shape) if tiled else tuple(range(shard.ndim))))

    return jax.shard_map(on_shard, mesh=sharding.mesh, in_specs=sharding.spec, out_specs=sharding.spec,
                         check_vma=False)
