"""One layer of a stack that a traced program makes, without the others: what a round of its loop, or a row, is made of.

A stack of layers is made by a scan over keys (`nn.scan`), by a `vmap` over keys (`nnx.vmap`), or of a scalar.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from zero_jax.jaxpr.equations import (
    ClosedJaxpr,
    JaxprEqn,
    all_eqns,
    bind_eqn,
    inner_jaxprs,
    is_literal,
    needed_eqns,
    primitive_of,
    producers,
    run_eqns,
    shape_of,
    value_of,
    variables,
)
from zero_jax.jaxpr.passes import without_calls
from zero_jax.jaxpr.primitives import (
    BROADCAST,
    ELEMENTWISE,
    RANDOM_BITS,
    RESHAPE,
    SCAN,
    SQUEEZE,
    TRANSPOSE,
    Scan,
    bind_unsharded,
    broadcast_dims,
    call_jaxpr,
    draws_by_key,
    permutation,
    squeezed_dims,
)


class NotByLayer(Exception):
    """A stack cannot be made layer by layer; the message says why, as what follows "it": "is drawn from one key"."""


def one_layer(closed: ClosedJaxpr, out: Any, index: Any, known: Mapping[Any, Any], rows: Mapping[Any, Any]) -> Any:
    """Layer `index` of the result `out` of a program without calls, whose first dim counts layers; traceable.

    known: values of its operands; rows: of those that are only known so, their layer `index`. Nothing larger than a
    layer of `out` is computed. Raises NotByLayer where that cannot be.
    """
    return _OneLayer(closed, out, index, known, rows).row(out)


class _OneLayer:
    def __init__(self, closed: ClosedJaxpr, out: Any, index: Any, known: Mapping[Any, Any], rows: Mapping[Any, Any]):
        self._closed, self._index = closed, index
        self._env: dict[Any, Any] = {**dict(zip(closed.jaxpr.constvars, closed.consts, strict=True)), **known}
        self._rows: dict[tuple[Any, bool], Any] = {(var, False): row for var, row in rows.items()}
        self._makers, self._length = producers(closed.jaxpr), out.aval.shape[0]
        self._limit = _bytes(out) // self._length
        self._small = set(self._env)
        for eqn in closed.jaxpr.eqns:
            if all(var in self._small for var in variables(eqn.invars)) and self._is_small(eqn):
                self._small.update(eqn.outvars)

    def _is_small(self, eqn: JaxprEqn) -> bool:
        made = [*eqn.outvars, *(var for inner in inner_jaxprs(eqn) for each in all_eqns(inner) for var in each.outvars)]
        return all(_bytes(var) <= self._limit for var in made)

    def row(self, atom: Any, *, only: bool = False) -> Any:
        """The layer of an operand or result whose first dim counts layers; only: whose first dim has one element."""
        if is_literal(atom):
            raise NotByLayer("has a dim of layers that is written into the program")
        if (atom, only) not in self._rows:
            self._rows[atom, only] = self._made(atom, only)
        return self._rows[atom, only]

    def whole(self, atom: Any) -> Any:
        """A value that is small, or an operand."""
        if is_literal(atom):
            return atom.val
        if atom not in self._small:
            raise NotByLayer(f"reads an array of {atom.aval.shape} whole")
        if atom not in self._env:
            run_eqns([eqn for eqn in needed_eqns(self._closed, [atom]) if eqn.outvars[0] not in self._env], self._env)
        return self._env[atom]

    def _made(self, atom: Any, only: bool) -> Any:
        if atom in self._small:
            return jax.lax.dynamic_index_in_dim(self.whole(atom), 0 if only else self._index, 0, keepdims=False)
        if (eqn := self._makers.get(atom)) is None:
            raise NotByLayer(f"reads an array of {atom.aval.shape} whole")
        name = primitive_of(eqn)
        rule = _OneLayer._elementwise if name in ELEMENTWISE else _RULES.get(name)
        if rule is None:
            raise NotByLayer(f"is made by an operation on all layers at once ({name})")
        return rule(self, eqn, atom, only)

    def _elementwise(self, eqn: JaxprEqn, out: Any, only: bool) -> Any:
        def operand(atom: Any) -> Any:
            if not atom.aval.shape:
                return self.whole(atom)
            return self.row(atom, only=only or atom.aval.shape[0] == 1 != self._length)

        (result,) = bind_unsharded(eqn, [operand(atom) for atom in eqn.invars])
        return result

    def _broadcast(self, eqn: JaxprEqn, out: Any, only: bool) -> Any:
        dims = broadcast_dims(eqn)
        operand: Any = eqn.invars[0]
        if len(eqn.invars) > 1:
            raise NotByLayer("has a shape that is computed")
        if 0 in dims:  # as the first: dims grow
            value = self.row(operand, only=only or operand.aval.shape[0] == 1 != self._length)
            return jax.lax.broadcast_in_dim(value, out.aval.shape[1:], [dim - 1 for dim in dims[1:]])
        return jax.lax.broadcast_in_dim(self.whole(operand), out.aval.shape[1:], [dim - 1 for dim in dims])

    def _reshaped(self, eqn: JaxprEqn, out: Any, only: bool) -> Any:
        shape = shape_of(eqn.invars[0]).shape
        if len(eqn.invars) > 1 or shape[:1] != out.aval.shape[:1]:
            raise NotByLayer("is reshaped across layers")
        return jax.lax.reshape(self.row(eqn.invars[0], only=only), out.aval.shape[1:])

    def _squeezed(self, eqn: JaxprEqn, out: Any, only: bool) -> Any:
        dims = squeezed_dims(eqn)
        if 0 in dims:
            raise NotByLayer("is reshaped across layers")
        return jax.lax.squeeze(self.row(eqn.invars[0], only=only), [dim - 1 for dim in dims])

    def _transposed(self, eqn: JaxprEqn, out: Any, only: bool) -> Any:
        first, *others = permutation(eqn)
        if first != 0:
            raise NotByLayer("is made with its layers along another dim than the first")
        return jax.lax.transpose(self.row(eqn.invars[0], only=only), [dim - 1 for dim in others])

    def _drawn(self, eqn: JaxprEqn, out: Any, only: bool) -> Any:
        key: Any = eqn.invars[0]
        if not key.aval.shape:
            raise NotByLayer("is drawn from one key for all layers")
        if not draws_by_key(key):
            raise NotByLayer(f"is drawn from keys of {key.aval.dtype} together, whose bits are not those of each alone")
        (bits,) = bind_eqn(eqn, [self.row(key, only=only)])
        return bits

    def _scanned(self, eqn: JaxprEqn, out: Any, only: bool) -> Any:
        scan, body = Scan.of(eqn), without_calls(call_jaxpr(eqn))
        number = eqn.outvars.index(out)
        if number < scan.num_carry:
            raise NotByLayer("is carried through a loop")
        part, inner = body.jaxpr.outvars[number], body.jaxpr.invars
        first, end = scan.num_consts, scan.num_consts + scan.num_carry
        wanted, carried = [part], dict[int, None]()
        for atom in wanted:  # which grows
            read = _read(body, [atom])
            for at in range(first, end):
                if inner[at] in read and at not in carried:
                    carried[at] = None
                    wanted.append(body.jaxpr.outvars[at - first])
        if any(_bytes(inner[at]) * scan.length > self._limit for at in carried):
            raise NotByLayer("follows from the layers before it")

        def operand(at: int) -> Any:
            return self.whole(eqn.invars[at]) if at < first else self.row(eqn.invars[at], only=only)

        values = {inner[at]: operand(at) for at in range(len(inner))
                  if not first <= at < end and inner[at] in _read(body, [part])}
        if carried:
            values |= self._carried(eqn, body, list(carried), only)
        env: dict[Any, Any] = {**dict(zip(body.jaxpr.constvars, body.consts, strict=True)), **values}
        run_eqns(needed_eqns(body, [part]), env)
        return value_of(part, env)

    def _carried(self, eqn: JaxprEqn, body: ClosedJaxpr, carried: list[int], only: bool) -> dict[Any, Any]:
        """What the round begins with of what is carried, all of which is small: a counter or a key."""
        scan, jaxpr = Scan.of(eqn), body.jaxpr
        first, end = scan.num_consts, scan.num_consts + scan.num_carry
        outs = [jaxpr.outvars[at - first] for at in carried]
        read = _read(body, outs)
        fixed = {jaxpr.invars[at]: self.whole(eqn.invars[at]) for at in range(first) if jaxpr.invars[at] in read}
        scanned = [at for at in range(end, len(jaxpr.invars)) if jaxpr.invars[at] in read]

        def round_of(carry: Any, parts: Any) -> Any:
            env: dict[Any, Any] = {**dict(zip(jaxpr.constvars, body.consts, strict=True)), **fixed}
            env.update(zip((jaxpr.invars[at] for at in carried), carry, strict=True))
            env.update(zip((jaxpr.invars[at] for at in scanned), parts, strict=True))
            run_eqns(needed_eqns(body, outs), env)
            return [value_of(out, env) for out in outs], carry

        _, begun = jax.lax.scan(round_of, [self.whole(eqn.invars[at]) for at in carried],
                                [self.whole(eqn.invars[at]) for at in scanned], length=scan.length,
                                reverse=scan.reverse)
        index = 0 if only else self._index
        return {jaxpr.invars[at]: jax.lax.dynamic_index_in_dim(stack, index, 0, keepdims=False)
                for at, stack in zip(carried, begun, strict=True)}


_RULES: dict[str, Callable[[Any, JaxprEqn, Any, bool], Any]] = {
    BROADCAST: _OneLayer._broadcast, RESHAPE: _OneLayer._reshaped, SQUEEZE: _OneLayer._squeezed,
    TRANSPOSE: _OneLayer._transposed, RANDOM_BITS: _OneLayer._drawn, SCAN: _OneLayer._scanned}


def _read(closed: ClosedJaxpr, outs: Iterable[Any]) -> set[Any]:
    """The variables that `outs` follow from, and themselves."""
    outs = list(outs)
    return {*variables(outs), *(var for eqn in needed_eqns(closed, outs) for var in variables(eqn.invars))}


def _bytes(atom: Any) -> int:
    return atom.aval.size * atom.aval.dtype.itemsize
