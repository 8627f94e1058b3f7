"""What a traced model does with its parameters beside reading them where the library can intercept it.

Reads are marked in the jaxpr (`mark_read`). What reaches a parameter without such a mark (the leaves of a state, say)
works on the array as it is stored, which may be padded; what is written is another array. `GatherCache` makes equal
reads one.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name

from zero_jax.gather.gather import Encoded
from zero_jax.jaxpr.equations import Jaxpr, JaxprEqn, current_trace, inner_jaxprs, is_literal, primitive_of, shape_of
from zero_jax.jaxpr.named_call import watched_identity
from zero_jax.jaxpr.primitives import COND, NAME, SCAN, Scan, checkpoint_names, permutation

_MARK = "zero_access "
_WATCH = watched_identity("access_watch")
_SUMMABLE = ("integer_pow", "square", "mul", "abs", "reduce_sum", "reduce_max")


class _Alias(NamedTuple):
    """The parameter that a variable is.

    stored: whether it is as it is stored (else as it was read). dims: those of the parameter that it has, in order.
    moved: whether that is another order, as where a loop runs over other dims than the first.
    """

    name: str
    stored: bool
    dims: tuple[int, ...]
    moved: bool = False


def mark_read(name: str, value: jax.Array, dims: Sequence[int], on_derivative: Callable[[], None]) -> jax.Array:
    """`value`, which the model reads as `dims` of the parameter `name`.

    on_derivative: called if the model differentiates by it.
    """
    mark = f"{_MARK}{','.join(map(str, dims))} {name}"
    return checkpoint_name(_WATCH.bind(value, on_derivative=on_derivative), mark)


def read_name(eqn: JaxprEqn) -> str | None:
    """The parameter that `mark_read` marks in this equation; None in others."""
    marks = checkpoint_names(eqn) if primitive_of(eqn) == NAME else ()
    return marks[0].removeprefix(_MARK).partition(" ")[2] if marks and marks[0].startswith(_MARK) else None


def _read_dims(eqn: JaxprEqn) -> tuple[int, ...]:
    dims = checkpoint_names(eqn)[0].removeprefix(_MARK).partition(" ")[0]
    return tuple(map(int, dims.split(","))) if dims else ()


@dataclasses.dataclass(frozen=True)
class ParamFlow:
    """Names of parameters.

    bypassed: used past their reads, or read after they were overwritten. summed: used past their reads, but only by
    powers and sums, which need no gather (a penalty of all parameters, say). written: overwritten.
    """

    bypassed: frozenset[str]
    summed: frozenset[str]
    written: frozenset[str]


def param_flow(jaxpr: Jaxpr, names: Sequence[str], final: Sequence[str]) -> ParamFlow:
    """Of a jaxpr whose first inputs are the parameters `names`; its last outputs are those of `final` afterwards."""
    walk = _Walk()
    outs = walk(jaxpr, {var: _Alias(name, True, tuple(range(shape_of(var).ndim)))
                        for var, name in zip(jaxpr.invars, names, strict=False)})
    ends = outs[len(outs) - len(final):]
    written = {name for name, out in zip(final, ends, strict=True)
               if out is None or out.name != name or out.dims != tuple(range(len(out.dims)))}
    bypassed = walk.bypassed | written
    return ParamFlow(frozenset(bypassed), frozenset(walk.summed - bypassed), frozenset(written))


class _Walk:
    """Follows parameters through a jaxpr and those inside it, and collects how they are used."""

    def __init__(self) -> None:
        self.bypassed: set[str] = set()
        self.summed: set[str] = set()

    def __call__(self, jaxpr: Jaxpr, aliases: Mapping[Any, _Alias]) -> list[_Alias | None]:
        """What each output is, from what the inputs are."""
        known = dict(aliases)

        def alias(atom: Any) -> _Alias | None:
            return None if is_literal(atom) else known.get(atom)

        for eqn in jaxpr.eqns:
            taken = [alias(atom) for atom in eqn.invars]
            if name := read_name(eqn):
                of = taken[0]
                if of is None or of.name != name or of.moved and of.dims != _read_dims(eqn):
                    self.bypassed.add(name)
                outs: list[_Alias | None] = [of and of._replace(name=name, stored=False)]
            elif primitive_of(eqn) == _WATCH.name:
                outs = taken
            elif primitive_of(eqn) == "transpose" and taken[0]:
                dims = tuple(taken[0].dims[dim] for dim in permutation(eqn))
                outs = [taken[0]._replace(dims=dims, moved=True)]
            elif inner_jaxprs(eqn):
                outs = self._through(eqn, taken)
            else:
                uses = self.summed if primitive_of(eqn) in _SUMMABLE else self.bypassed
                uses.update(of.name for of in filter(None, taken) if of.stored)
                outs = [None] * len(eqn.outvars)
            known.update((var, out) for var, out in zip(eqn.outvars, outs, strict=True) if out is not None)
        return [alias(atom) for atom in jaxpr.outvars]

    def _through(self, eqn: JaxprEqn, taken: list[_Alias | None]) -> list[_Alias | None]:
        """The outputs of a loop, branch or call."""
        inners = inner_jaxprs(eqn)
        carried, first_scanned = range(0), len(taken)
        if primitive_of(eqn) == COND:
            taken = taken[1:]
        elif primitive_of(eqn) == SCAN:
            scan = Scan.of(eqn)
            first_scanned = scan.num_consts + scan.num_carry
            carried = range(scan.num_consts, first_scanned)
        elif any(len(inner.invars) != len(taken) for inner in inners):  # a `while`, say, with inputs of two jaxprs
            carried = range(len(taken))
        self.bypassed.update(entry.name for i, entry in enumerate(taken) if i in carried and entry and entry.stored)
        taken = [None if i in carried else entry for i, entry in enumerate(taken)]
        over = {entry.name: entry.dims[:1] for entry in taken[first_scanned:] if entry}
        taken = [entry._replace(dims=entry.dims[1:]) if entry and i >= first_scanned else entry
                 for i, entry in enumerate(taken)]
        results = [self(inner, {var: entry for var, entry in zip(inner.invars, taken, strict=False) if entry})
                   for inner in inners]
        fitting = [result for result in results if len(result) == len(eqn.outvars)]
        if not fitting:
            return [None] * len(eqn.outvars)
        return [first and first._replace(dims=(*over.get(first.name, ()), *first.dims))
                if all(first == other for other in others) else None for first, *others in zip(*fitting, strict=True)]


@dataclasses.dataclass(frozen=True)
class ComposedUse:
    """How a model reads a parameter that is computed, by `build`, from a tuple of parts.

    uses: that of each part; None: it is read as it is.
    """

    uses: tuple[Any, ...]
    build: Callable[..., jax.Array]

    def drop_dim(self, index: int) -> "ComposedUse":
        """As `ParamUse.drop_dim`."""
        return dataclasses.replace(self, uses=tuple(use and use.drop_dim(index) for use in self.uses))

    def add_dim(self, index: int) -> "ComposedUse":
        """As `ParamUse.add_dim`."""
        return dataclasses.replace(self, uses=tuple(use and use.add_dim(index) for use in self.uses))


class GatherCache:
    """Reads parameters through their uses, and caches what is read, by trace: no value may leave its trace."""

    def __init__(self) -> None:
        self._read: dict[Any, list[tuple[Any, Any, Any]]] = {}

    def __call__(self, use: Any, value: Any) -> Any:
        """`value` as the model reads it, gathered and read at the first call with these two in this trace.

        Args:
          use: a `gather.ParamUse`, an `AccessRecorder`, or a `ComposedUse` of such.
          value: the stored array, or an `Encoded`, which is made anew wherever a loop hands it on; or a tuple of such.
        """
        if isinstance(use, ComposedUse):
            return use.build(*[part if each is None else self(each, part)
                               for each, part in zip(use.uses, value, strict=True)])
        array = value.stored if isinstance(value, Encoded) else value
        trace = current_trace()
        entries = self._read.setdefault((id(array), use), [])
        for _, known_trace, read in entries:
            if known_trace == trace:
                return read
        entries.append((array, trace, use.read(*use.gather(value))))  # holding `array` keeps its id from another's
        return entries[-1][2]
