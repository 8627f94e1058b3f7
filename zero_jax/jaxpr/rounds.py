"""The pieces of a program that is cut at some of its loops: straight ones, and loops that run round by round."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from zero_jax.jaxpr.equations import ClosedJaxpr, JaxprEqn, variables
from zero_jax.jaxpr.primitives import Scan


@dataclasses.dataclass(frozen=True)
class Straight:
    """Equations that run as one program. inputs: what they read; outputs: what of theirs is read later."""

    eqns: tuple[JaxprEqn, ...]
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Rounds:
    """A scan whose rounds run one by one.

    Attributes:
        eqn: the scan.
        saved: numbers of its stacked results of which no stack is made: each round's part is saved.
        fetched: numbers of its scanned operands of which a round's part is fetched: stacks that earlier scans saved, or
            that are in no memory from the start.
        before: what each round computes of its operands first, rather than be given it.
    """

    eqn: JaxprEqn
    saved: tuple[int, ...]
    fetched: tuple[int, ...]
    before: tuple[JaxprEqn, ...] = ()

    @property
    def scan(self) -> Scan:
        """Its parameters."""
        return Scan.of(self.eqn)

    @property
    def order(self) -> range:
        """The numbers of the rounds, as they run."""
        scan = self.scan
        return range(scan.length - 1, -1, -1) if scan.reverse else range(scan.length)

    @property
    def consts(self) -> list[Any]:
        """Operands that each round reads."""
        return list(self.eqn.invars[:self.scan.num_consts])

    @property
    def carry(self) -> list[Any]:
        """Operands that the first round carries on."""
        return list(self.eqn.invars[self.scan.num_consts:][:self.scan.num_carry])

    @property
    def stacks(self) -> list[Any]:
        """Operands of which each round reads a part, and its number; without what is fetched."""
        return [atom for number, atom in enumerate(self._scanned) if number not in self.fetched]

    @property
    def fetches(self) -> list[Any]:
        """The saved stacks of which each round reads a part."""
        return [self._scanned[number] for number in self.fetched]

    @property
    def results(self) -> list[Any]:
        """What is carried out of the last round."""
        return list(self.eqn.outvars[:self.scan.num_carry])

    @property
    def stacked(self) -> list[Any]:
        """Stacks of what each round makes; without what is saved."""
        return self.without_saved(self._made)

    @property
    def saves(self) -> list[Any]:
        """The stacks that are saved in parts."""
        return [self._made[number] for number in self.saved]

    def in_order(self, parts: Iterable[Any], fetched: Iterable[Any]) -> list[Any]:
        """The scanned operands of a round: parts of `stacks`, and what was fetched."""
        from_stacks, from_saved = iter(parts), iter(fetched)
        return [next(from_saved if number in self.fetched else from_stacks) for number in range(len(self._scanned))]

    def without_saved(self, made: Sequence[Any]) -> list[Any]:
        """Of what a round makes for all stacks, what is for `stacked`."""
        return [part for number, part in enumerate(made) if number not in self.saved]

    @property
    def _scanned(self) -> Sequence[Any]:
        return self.eqn.invars[self.scan.num_consts + self.scan.num_carry:]

    @property
    def _made(self) -> Sequence[Any]:
        return self.eqn.outvars[self.scan.num_carry:]

    @property
    def reads(self) -> tuple[Any, ...]:
        """The variables that each round reads, but for what is carried and fetched."""
        return _read_from_outside(self.before, [*self.consts, *self.stacks])

    @property
    def inputs(self) -> tuple[Any, ...]:
        """The variables that must be in memory before the first round."""
        return tuple(dict.fromkeys((*self.reads, *variables(self.carry))))

    @property
    def outputs(self) -> tuple[Any, ...]:
        """The variables that are in memory after the last round."""
        return *self.results, *self.stacked


Piece = Straight | Rounds


@dataclasses.dataclass(frozen=True)
class CutProgram:
    """A program in pieces, which run in order.

    Attributes:
        closed: the program. Its operands and constants are those of the pieces, too.
        pieces: what runs; none where no loop makes what is saved.
        outvars: the results, as the pieces call them, or literals.
    """

    closed: ClosedJaxpr
    pieces: tuple[Piece, ...]
    outvars: tuple[Any, ...]

    @property
    def in_memory(self) -> set[Any]:
        """The variables that pieces read or make whole."""
        return {var for piece in self.pieces for var in (*piece.inputs, *piece.outputs)}

    def last_reads(self) -> list[set[Any]]:
        """For each piece, the variables among its inputs and outputs that nothing behind it reads."""
        later, last = set(variables(self.outvars)), []
        for piece in reversed(self.pieces):
            last.append({*piece.inputs, *piece.outputs} - later)
            later |= set(piece.inputs)
        return last[::-1]


def _read_from_outside(eqns: Iterable[JaxprEqn], atoms: Iterable[Any]) -> tuple[Any, ...]:
    """The variables that `eqns`, and then `atoms`, read, and that no one of `eqns` makes."""
    made, read = set[Any](), dict[Any, None]()
    for eqn in eqns:
        read |= dict.fromkeys(var for var in variables(eqn.invars) if var not in made)
        made |= set(eqn.outvars)
    return tuple(read | dict.fromkeys(var for var in variables(atoms) if var not in made))


def straight(eqns: Sequence[JaxprEqn], later: Iterable[Any]) -> Straight:
    """`eqns` with what they read, and what of theirs is among the variables `later`."""
    later = set(later)
    made = dict.fromkeys(var for eqn in eqns for var in eqn.outvars)
    return Straight(tuple(eqns), _read_from_outside(eqns, ()), tuple(var for var in made if var in later))
