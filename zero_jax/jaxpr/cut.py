"""Cuts a traced program at the loops whose rounds leave something for later loops: between two rounds it can go away.

A compiled program cannot wait for a file in its middle. In pieces, one for each round, it can.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from zero_jax.jaxpr.equations import ClosedJaxpr, JaxprEqn, is_literal, primitive_of, variable_like, variables
from zero_jax.jaxpr.primitives import BARRIER, JIT, SCAN, Scan, call_jaxpr
from zero_jax.jaxpr.recipes import in_order, recipe
from zero_jax.jaxpr.rounds import CutProgram, Piece, Rounds, straight
from zero_jax.jaxpr.stack_sums import with_sums_in_rounds


def cut_at_loops(closed: ClosedJaxpr, is_saved: Callable[[Any], bool], *, given: Collection[int] = (),
                 kept: Collection[int] = ()) -> CutProgram:
    """`closed` in pieces.

    Saved are stacks that a scan makes of parts for which `is_saved(aval)` and that only scans read, part by part: what
    forward leaves for backward. Calls around loops are opened. What a barrier hands to later pieces goes past it: they
    are programs of their own, and the barrier would copy it. A piece computes masks and the like again.

    given: numbers of operands that are in no memory, such as stacked parameters: where only scans read one, part by
    part, each round fetches its part. kept: numbers of results of which no stack is wanted, such as gradients: where a
    scan makes one part by part, and all else that is made of it are sums, each round's part is saved. Others are read
    and made as any (`CutProgram.in_memory`).
    """
    names: dict[Any, Any] = {}
    eqns = list(_opened(closed.jaxpr.eqns, names))
    outvars = [_named(atom, names) for atom in closed.jaxpr.outvars]
    if kept:
        stacks, others = ([atom for number, atom in enumerate(outvars) if (number in kept) == wanted]
                          for wanted in (True, False))
        eqns = list(_opened(with_sums_in_rounds(eqns, variables(stacks), set(variables(others))), names := {}))
        outvars = [_named(atom, names) for atom in outvars]
    others = [atom for number, atom in enumerate(outvars) if number not in kept]
    saved = {**_saved_stacks(eqns, others, is_saved), **_given_stacks(eqns, others, [
        closed.jaxpr.invars[number] for number in given])}
    saved |= _kept_stacks(eqns, others, [outvars[number] for number in kept])
    outvars = tuple(outvars)
    if not saved:
        return CutProgram(closed, (), outvars)
    pieces: list[Any] = []
    for eqn in eqns:
        eqn = _without_saved(eqn, saved)
        if primitive_of(eqn) == SCAN and any(var in saved for var in variables([*eqn.invars, *eqn.outvars])):
            scan = Scan.of(eqn)
            made, scanned = eqn.outvars[scan.num_carry:], eqn.invars[scan.num_consts + scan.num_carry:]
            pieces.append(Rounds(eqn, _numbers(made, saved), _numbers(scanned, saved)))
        elif pieces and isinstance(pieces[-1], list):
            pieces[-1].append(eqn)
        else:
            pieces.append([eqn])
    pieces = _with_recipes(list(_past_barriers(pieces, names := {})))
    outvars = tuple(_named(atom, names) for atom in outvars)
    return CutProgram(closed, tuple(_with_borders(pieces, outvars)), outvars)


def _named(atom: Any, names: Mapping[Any, Any]) -> Any:
    return atom if is_literal(atom) else names.get(atom, atom)


def _numbers(atoms: Sequence[Any], wanted: Mapping[Any, Any]) -> tuple[int, ...]:
    return tuple(number for number, atom in enumerate(atoms) if not is_literal(atom) and atom in wanted)


def _opened(eqns: Iterable[JaxprEqn], names: dict[Any, Any]) -> Iterator[JaxprEqn]:
    """`eqns` with the equations of jitted calls around loops in the place of these; names: new ones of variables."""
    for eqn in eqns:
        eqn = _renamed(eqn, names)
        if not _holds_scan(eqn):
            yield eqn.replace(outvars=[names.get(var, var) for var in eqn.outvars])
            continue
        inner = call_jaxpr(eqn).jaxpr
        own: dict[Any, Any] = dict(zip(inner.invars, eqn.invars, strict=True))
        own.update({var: variable_like(var) for each in inner.eqns for var in each.outvars})  # called twice, perhaps
        yield from _opened(inner.eqns, own)
        names.update({var: _named(atom, own) for var, atom in zip(eqn.outvars, inner.outvars, strict=True)})


def _holds_scan(eqn: JaxprEqn) -> bool:
    """Whether `eqn` is a jitted call, without constants of its own, of a scan, directly or in further ones."""
    return primitive_of(eqn) == JIT and not call_jaxpr(eqn).consts and any(
        primitive_of(each) == SCAN or _holds_scan(each) for each in call_jaxpr(eqn).jaxpr.eqns)


def _saved_stacks(eqns: Sequence[JaxprEqn], outvars: Iterable[Any], is_saved: Callable[[Any], bool]) -> dict[Any, Any]:
    """The stacks that are saved, each and what barriers call it -> what the scan that makes it calls it."""
    readers, saved = _Readers(eqns, outvars), dict[Any, Any]()
    for eqn in eqns:
        if primitive_of(eqn) == SCAN:
            carried = Scan.of(eqn).num_carry
            for stack, part in zip(eqn.outvars[carried:], call_jaxpr(eqn).jaxpr.outvars[carried:], strict=True):
                if is_saved(part.aval):
                    saved.update(dict.fromkeys(readers.names_of(stack), stack))
    return saved


def _given_stacks(eqns: Sequence[JaxprEqn], outvars: Iterable[Any], stacks: Iterable[Any]) -> dict[Any, Any]:
    """As `_saved_stacks`, of operands of the program."""
    readers = _Readers(eqns, outvars)
    return {name: stack for stack in stacks for name in readers.names_of(stack)}


def _kept_stacks(eqns: Sequence[JaxprEqn], outvars: Iterable[Any], stacks: Iterable[Any]) -> dict[Any, Any]:
    """Those of `stacks` that a scan makes part by part, and that nothing reads, each -> itself."""
    read = {*variables(outvars), *(var for eqn in eqns for var in variables(eqn.invars))}
    made = {var for eqn in eqns if primitive_of(eqn) == SCAN for var in eqn.outvars[Scan.of(eqn).num_carry:]}
    return {stack: stack for stack in variables(stacks) if stack in made - read}


class _Readers:
    """Which equations read each variable of a program."""

    def __init__(self, eqns: Iterable[JaxprEqn], outvars: Iterable[Any]):
        self._results = set(variables(outvars))
        self._users: dict[Any, list[tuple[JaxprEqn, int]]] = {}
        for eqn in eqns:
            for number, atom in enumerate(eqn.invars):
                if not is_literal(atom):
                    self._users.setdefault(atom, []).append((eqn, number))

    def names_of(self, stack: Any) -> list[Any]:
        """`stack` and what barriers call it; nothing where it is not read, or otherwise than by scans, part by part."""
        names = [stack]
        for name in names:  # which grows
            if name in self._results or not self._users.get(name) and len(names) == 1:
                return []
            for eqn, number in self._users.get(name, ()):
                if primitive_of(eqn) == BARRIER:
                    names.append(eqn.outvars[number])
                elif primitive_of(eqn) != SCAN or number < (scan := Scan.of(eqn)).num_consts + scan.num_carry:
                    return []
        return names


def _without_saved(eqn: JaxprEqn, saved: Mapping[Any, Any]) -> JaxprEqn:
    """`eqn`, with the saved stacks as the scans call them that make them; a barrier without them."""
    if primitive_of(eqn) == BARRIER:
        return _with_operands(eqn, [at for at, atom in enumerate(eqn.invars) if is_literal(atom) or atom not in saved])
    return _renamed(eqn, saved)


def _past_barriers(pieces: Iterable[Any], names: dict[Any, Any]) -> Iterator[Any]:
    """`pieces`, of which some are lists of equations, whose barriers have what is read in their own list alone.

    names: takes the old variable for each new one that goes.
    """
    for piece in pieces:
        if isinstance(piece, Rounds):
            yield dataclasses.replace(piece, eqn=_renamed(piece.eqn, names))
            continue
        read, eqns = {var for eqn in piece for var in variables(eqn.invars)}, list[JaxprEqn]()
        for eqn in (_renamed(each, names) for each in piece):
            if primitive_of(eqn) == BARRIER:
                names.update((new, old) for new, old in zip(eqn.outvars, eqn.invars, strict=True) if new not in read)
                eqn = _with_operands(eqn, [at for at, new in enumerate(eqn.outvars) if new in read])
            eqns.append(eqn)
        yield eqns


def _renamed(eqn: JaxprEqn, names: Mapping[Any, Any]) -> JaxprEqn:
    return eqn.replace(invars=[_named(atom, names) for atom in eqn.invars])


def _with_operands(barrier: JaxprEqn, numbers: Sequence[int]) -> JaxprEqn:
    return barrier.replace(invars=[barrier.invars[at] for at in numbers],
                           outvars=[barrier.outvars[at] for at in numbers])


def _with_recipes(pieces: Sequence[Any]) -> list[Any]:
    """`pieces`, of which some are lists of equations, each with the recipes of what it reads of earlier ones."""
    makers: dict[Any, JaxprEqn] = {}
    earlier: list[JaxprEqn] = []
    done = []
    for piece in pieces:
        reads = piece.reads if isinstance(piece, Rounds) else straight(piece, ()).inputs
        again = in_order(earlier, (eqn for var in reads for eqn in recipe(var, makers)))
        if isinstance(piece, Rounds):
            done.append(dataclasses.replace(piece, before=again))
        else:
            done.append([*again, *piece])
            earlier += piece
            makers |= {var: eqn for eqn in piece for var in eqn.outvars}
    return done


def _with_borders(pieces: Sequence[Any], outvars: Iterable[Any]) -> list[Piece]:
    """`pieces`, of which some are lists of equations, with the inputs and outputs of each list."""
    later, done = set(variables(outvars)), list[Piece]()
    for piece in reversed(pieces):
        piece = straight(piece, later) if isinstance(piece, list) else piece
        later |= set(piece.inputs)
        done.append(piece)
    return done[::-1]
