"""Work that a step does not wait for, a part of it in each iteration of the step's loops over layers."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from zero_jax.jaxpr.equations import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    bind_in_scope,
    inner_jaxprs,
    is_literal,
    primitive_of,
    run_jaxpr,
    scope_of,
    shape_of,
    value_of,
)
from zero_jax.jaxpr.primitives import (
    CONV,
    DOT,
    JIT,
    REMAT,
    SCAN,
    SHARD_MAP,
    Checkpoint,
    Scan,
    call_jaxpr,
    conv_dims,
    dot_dims,
    mapped_beside,
    mapped_mesh,
    newly_manual,
    num_iterations,
    out_shardings,
)


def iterations_with_products(jaxpr: Jaxpr) -> int:
    """How many iterations the loops of `jaxpr` have in which matrix products are, 0 if there are none.

    Of loops in a loop (layers in a microbatch, blocks of attention in a layer) those that hold most of the products
    themselves count. Loops in branches, in checkpoints and in other loops than `jax.lax.scan` do not.
    """
    return sum(map(_iterations, jaxpr.eqns))


def run_in_iterations(closed: ClosedJaxpr, args: Sequence[Any], parts: jax.Array, work: Callable[[jax.Array], jax.Array]
                  ) -> tuple[list[Any], jax.Array]:
    """What `closed` gives for the values `args`, and `work(part)` of each part, stacked.

    Why: XLA starts a collective no sooner than its cost model finds worth it before what takes the result, and nothing
    in a step does: one all-reduce beside a step has no product between its start and its end (GPT-2 of 4 layers and
    width 512 on `h100:2x8`). In an iteration there are products on both sides.

    Args:
      closed: of a step, differentiated already: calls that hold such loops are replaced by their equations.
      args: as many as it has operands.
      parts: (`iterations_with_products(closed.jaxpr)`, devices, ...): part i is worked on in iteration i, counted in
        program order. In a `jax.shard_map` a part has the rows of its device (all along axes that are not mapped).
      work: of one part; it is to depend on nothing else in the step.
    """
    taken, results = 0, []

    def bind(eqn: JaxprEqn, args: list[Any]) -> Sequence[Any]:
        nonlocal taken
        iterations = _iterations(eqn)
        if not iterations:
            return bind_in_scope(eqn, args)
        with jax.named_scope(scope_of(eqn)):
            if primitive_of(eqn) == JIT:
                return run_jaxpr(call_jaxpr(eqn), args, bind)
            run_eqn = _run_mapped if primitive_of(eqn) == SHARD_MAP else _run_loop
            outs, result = run_eqn(eqn, args, parts[taken:taken + iterations], work)
        taken += iterations
        results.append(result)
        return outs

    outs = run_jaxpr(closed, args, bind)
    return outs, jnp.concatenate(results)


def call_operands(eqn: JaxprEqn, values: list[Any]) -> list[Any]:
    """The operands of a call; of what is recomputed behind the barrier that JAX lowers a checkpoint with."""
    if primitive_of(eqn) != REMAT or not (checkpoint := Checkpoint.of(eqn)).differentiated:
        return values
    behind = checkpoint.prevent_cse
    kept = [behind] * len(values) if isinstance(behind, bool) else list(behind)
    chosen = iter(jax.lax.optimization_barrier([value for value, keep in zip(values, kept, strict=True) if keep]))
    return [next(chosen) if keep else value for value, keep in zip(values, kept, strict=True)]


def _run_mapped(eqn: JaxprEqn, args: list[Any], parts: jax.Array, work: Callable[[jax.Array], jax.Array]
                ) -> tuple[list[Any], jax.Array]:
    mesh, manual = mapped_mesh(eqn), newly_manual(eqn)
    by_axis = parts.reshape(parts.shape[0], *mesh.axis_sizes, *parts.shape[2:])
    spec = P(None, *[name if name in manual else None for name in mesh.axis_names])

    def on_device(own: jax.Array, *args: Any) -> tuple[list[Any], jax.Array]:
        rows = own.reshape(own.shape[0], -1, *parts.shape[2:])
        outs, results = run_in_iterations(call_jaxpr(eqn), args, rows, work)
        return outs, results.reshape(*own.shape[:-1], *results.shape[2:])

    outs, results = mapped_beside(eqn, on_device, spec)(by_axis, *args)
    return outs, results.reshape(parts.shape[0], -1, *results.shape[1 + len(mesh.axis_sizes):])


def _run_loop(eqn: JaxprEqn, args: list[Any], parts: jax.Array, work: Callable[[jax.Array], jax.Array]
              ) -> tuple[list[Any], jax.Array]:
    scan, body = Scan.of(eqn), call_jaxpr(eqn)
    consts, carry, scanned = scan.parts(args)
    nested = _holds_loops(body.jaxpr)

    def one_iteration(carry: Any, xs: Any) -> Any:
        own, part = xs
        values = [*consts, *carry, *own]
        if nested:
            outs, result = run_in_iterations(body, values, part, work)
        else:
            outs, result = _Iteration(body.jaxpr, part[0], work).run(body, values)
            result = result[None]
        return outs[:scan.num_carry], (outs[scan.num_carry:], result)

    each = parts.reshape(scan.length, -1, *parts.shape[1:])
    carry, (ys, results) = jax.lax.scan(
        one_iteration, list(carry), (list(scanned), each), scan.length, scan.reverse, scan.unroll)
    return [*carry, *ys], results.reshape(parts.shape[0], *results.shape[2:])


class _Iteration:
    """One iteration of a loop, and the work on one part beside it.

    The work begins behind the first product of the iteration. Else XLA:TPU queues a collective with the gathers that
    this product waits for, and waits for it with them. It begins where a product takes what another one gave, since an
    operand of a product is in memory anyway: nothing that XLA would fuse is kept apart.
    """

    def __init__(self, body: Jaxpr, part: jax.Array, work: Callable[[jax.Array], jax.Array]):
        self.part, self.work, self.total = part, work, sum(_products(body))
        self.result: jax.Array | None = None

    def run(self, closed: ClosedJaxpr, args: Sequence[Any]) -> tuple[list[Any], jax.Array]:
        """(The results of the body `closed`, that of the work)."""
        outs, _ = self._run(closed, args, [False] * len(args))
        return outs, self.work(self.part) if self.result is None else self.result

    def _run(self, closed: ClosedJaxpr, args: Sequence[Any], late: Sequence[bool]) -> tuple[list[Any], list[bool]]:
        """(Results, which of them follow from a product). late: the same of the operands."""
        jaxpr = closed.jaxpr
        env: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *args), strict=True))
        behind = {var for var, is_late in zip(jaxpr.invars, late, strict=True) if is_late}
        for eqn in jaxpr.eqns:
            values = [value_of(atom, env) for atom in eqn.invars]
            is_late = [not is_literal(atom) and atom in behind for atom in eqn.invars]
            products = sum(_of(eqn))
            if _is_open(eqn) and 2 * products > self.total:
                with jax.named_scope(scope_of(eqn)):
                    outs, late_out = self._run(call_jaxpr(eqn), call_operands(eqn, values), is_late)
            else:
                if self.result is None and products and any(is_late):
                    number = is_late.index(True)
                    part, values[number] = jax.lax.optimization_barrier((self.part, values[number]))
                    self.result = self.work(part)
                outs, late_out = bind_in_scope(eqn, values), [bool(products) or any(is_late)] * len(eqn.outvars)
            env.update(zip(eqn.outvars, outs, strict=True))
            behind.update(var for var, of_product in zip(eqn.outvars, late_out, strict=True) if of_product)
        ends = [not is_literal(atom) and atom in behind for atom in jaxpr.outvars]
        return [value_of(atom, env) for atom in jaxpr.outvars], ends


def _is_open(eqn: JaxprEqn) -> bool:
    """Whether the equations of a call may take its place: no sharding is asked of its results."""
    if primitive_of(eqn) == JIT:
        return not any(isinstance(each, jax.sharding.Sharding) for each in out_shardings(eqn))
    return primitive_of(eqn) == REMAT


def _iterations(eqn: JaxprEqn) -> int:
    if primitive_of(eqn) in (JIT, SHARD_MAP):
        return iterations_with_products(call_jaxpr(eqn).jaxpr)
    if primitive_of(eqn) != SCAN or num_iterations(eqn) < 2:  # XLA removes a loop of one iteration
        return 0
    body = call_jaxpr(eqn).jaxpr
    each = iterations_with_products(body) if _holds_loops(body) else bool(sum(_products(body)))
    return num_iterations(eqn) * each


def _holds_loops(body: Jaxpr) -> bool:
    """Whether most of what a body multiplies is in loops within it."""
    own, in_loops = _products(body)
    return in_loops > own and iterations_with_products(body) > 0


def _products(jaxpr: Jaxpr) -> tuple[float, float]:
    """Multiplications of the products in `jaxpr`: (outside of scans, in scans)."""
    each = [_of(eqn) for eqn in jaxpr.eqns]
    return sum(own for own, _ in each), sum(in_loops for _, in_loops in each)


def _of(eqn: JaxprEqn) -> tuple[float, float]:
    primitive = primitive_of(eqn)
    if primitive == DOT:
        shape = shape_of(eqn.invars[0]).shape
        return math.prod((*shape_of(eqn.outvars[0]).shape, *(shape[dim] for dim in dot_dims(eqn).contracted[0]))), 0.0
    if primitive == CONV:
        kernel = shape_of(eqn.invars[1]).shape
        return math.prod((*shape_of(eqn.outvars[0]).shape, *(kernel[dim] for dim in conv_dims(eqn).kernel[1:]))), 0.0
    inside = [_products(each) for each in inner_jaxprs(eqn)]
    own, in_loops = sum(each for each, _ in inside), sum(each for _, each in inside)
    return (0.0, num_iterations(eqn) * (own + in_loops)) if primitive == SCAN else (own, in_loops)
