"""Arguments of a traced function that are opened where it uses them, in its loops and checkpoints, and not on entry."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from zero_jax.jaxpr.equations import ClosedJaxpr, JaxprEqn, bind_in_scope, primitive_of, run_jaxpr, scope_of
from zero_jax.jaxpr.primitives import JIT, REMAT, SCAN, Scan, call_jaxpr


@dataclasses.dataclass(frozen=True)
class AtUse:
    """An argument that is opened at each use, as `read(use, value)`.

    value: a pytree of arrays, which loops over the argument slice along their first dims. use: what `read` takes, with
    a method `drop_dim(index)` for the argument in a loop over that dim.
    """

    use: Any
    value: Any
    read: Callable[[Any, Any], jax.Array]


def open_at_use(closed: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
    """The results of `closed` on `args`, arrays and `AtUse`s; traceable.

    An argument that a scan runs over, or that it, a checkpoint or a call takes, is opened within; one that a branch, a
    `while` or a function with a derivative of its own takes, or that a scan carries, before it.
    """
    return list(map(_opened, run_jaxpr(closed, args, _open_within)))


def _open_within(eqn: JaxprEqn, taken: list[Any]) -> Sequence[Any]:
    if not any(isinstance(each, AtUse) for each in taken):
        return bind_in_scope(eqn, taken)
    with jax.named_scope(scope_of(eqn)):
        return _WITHIN.get(primitive_of(eqn), _bound)(eqn, taken)


def _opened(value: Any) -> Any:
    return value.read(value.use, value.value) if isinstance(value, AtUse) else value


def _closed(value: Any) -> Any:
    """What of an argument passes into a loop or a checkpoint."""
    return value.value if isinstance(value, AtUse) else value


def _with_values(args: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """`args` around what of them passed into a loop or a checkpoint."""
    return [dataclasses.replace(each, value=value) if isinstance(each, AtUse) else value
            for each, value in zip(args, values, strict=True)]


def _bound(eqn: JaxprEqn, taken: list[Any]) -> Sequence[Any]:
    return bind_in_scope(eqn, list(map(_opened, taken)))


def _called(eqn: JaxprEqn, taken: list[Any]) -> list[Any]:
    return open_at_use(call_jaxpr(eqn), taken)


def _checkpointed(eqn: JaxprEqn, taken: list[Any]) -> Sequence[Any]:
    def fun(*values: Any) -> list[Any]:
        return open_at_use(call_jaxpr(eqn), _with_values(taken, values))

    return jax.checkpoint(fun, prevent_cse=eqn.params["prevent_cse"], policy=eqn.params["policy"])(
        *map(_closed, taken))


def _scanned(eqn: JaxprEqn, taken: list[Any]) -> Sequence[Any]:
    scan = Scan.of(eqn)
    consts, carry, scanned = scan.parts(taken)
    inside = [dataclasses.replace(each, use=each.use.drop_dim(0)) if isinstance(each, AtUse) else each
              for each in scanned]

    def body(*values: Any) -> list[Any]:
        first = len(consts) + len(carry)
        return open_at_use(call_jaxpr(eqn), [*values[:first], *_with_values(inside, values[first:])])

    return scan.run(body, [*consts, *map(_opened, carry), *map(_closed, scanned)])


_WITHIN: dict[str, Callable[..., Sequence[Any]]] = {
    SCAN: _scanned, REMAT: _checkpointed, JIT: _called, "closed_call": _called}
"""By primitive, the equations that open their arguments within."""
