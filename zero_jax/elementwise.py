"""An optimizer on leaves as they are stored: traced on true shapes, by which it decides, and run on stored arrays.

What it does elementwise is done on the stored array, and a reduction of a whole leaf skips the padding. Anything else
gets the leaf in its true shape: of merged dims that takes all of it, so that the layout asks `needs_shape` beforehand.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.extend.core import primitives
from jax.sharding import NamedSharding

from zero_jax.rewrite import bound
from zero_jax.view import View

_ELEMENTWISE = frozenset(
    "abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp conj convert_element_type copy cos "
    "cosh div digamma eq erf erf_inv erfc exp exp2 expm1 floor ge gt imag integer_pow is_finite le lgamma log log1p "
    "logistic lt max min mul name ne neg nextafter not or population_count pow real reduce_precision rem round rsqrt "
    "select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square sub tan "
    "tanh xor".split())
_CALLS = ("jit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "checkpoint")


@dataclasses.dataclass(frozen=True)
class Home:
    """Where an array of a stored tree lies: its view, and its sharding where there is one."""

    view: View
    sharding: NamedSharding | None = None


@dataclasses.dataclass(frozen=True)
class _Held:
    """A stored array where the traced function has a true one."""

    value: Any
    home: Home

    def load(self) -> Any:
        """The array in its true shape. With padded dims it stays where it lies: inside a jit, layouts may be uneven."""
        value, sharding = self.home.view.load(self.value), self.home.sharding
        if sharding is None or self.home.view.merges:
            return value
        return jax.lax.with_sharding_constraint(value, sharding)


def on_stored(fun: Callable[..., Any], homes: Any, out_homes: Any, spoilt: set[View] | None = None
              ) -> Callable[..., Any]:
    """`fun`, a function of pytrees of true arrays, as one of trees of stored arrays.

    homes: a `Home` for each leaf of the tuple of arguments; out_homes: the same for what `fun` returns. The padding of
    what is returned is zeros. `spoilt` collects the views that some equation could not keep.
    """

    def stored(*args: Any) -> Any:
        leaves, treedef = jax.tree.flatten(args)
        places = jax.tree.leaves(homes)
        true = [jax.ShapeDtypeStruct(home.view.shape, leaf.dtype, weak_type=getattr(leaf, "weak_type", False))
                for leaf, home in zip(leaves, places, strict=True)]
        closed, out_shape = jax.make_jaxpr(
            lambda *flat: fun(*jax.tree.unflatten(treedef, flat)), return_shape=True)(*true)
        values = [leaf if home.view.natural else _Held(leaf, home) for leaf, home in zip(leaves, places, strict=True)]
        outs = _Run(spoilt).run(closed, values)
        outs = [_at_home(out, home) for out, home in zip(outs, jax.tree.leaves(out_homes), strict=True)]
        return jax.tree.unflatten(jax.tree.structure(out_shape), outs)

    return stored


def needs_shape(fun: Callable[..., Any], homes: Any, out_homes: Any, *args: Any) -> set[View]:
    """The views of which `fun` needs the true shape, being more than elementwise; `args` are abstract, as stored."""
    spoilt: set[View] = set()
    jax.eval_shape(on_stored(fun, homes, out_homes, spoilt), *args)
    return spoilt


def _at_home(value: Any, home: Home) -> Any:
    if isinstance(value, _Held):
        if value.home.view == home.view:
            return home.view.filled(value.value, 0)
        value = value.load()
    return home.view.store(value)


def _beside(value: Any, home: Home) -> Any:
    """`value`, a scalar or of a shape that broadcasts to the leaf's, as an operand beside a stored array."""
    if isinstance(value, _Held):
        if value.home.view == home.view:
            return value.value
        value = value.load()
    return value if jnp.ndim(value) == 0 else home.view.store(jnp.broadcast_to(value, home.view.shape))


class _Run:
    """An interpreter of jaxprs of true arrays, some of which are held stored."""

    def __init__(self, spoilt: set[View] | None):
        self.spoilt = spoilt

    def run(self, closed: Any, args: Sequence[Any]) -> list[Any]:
        jaxpr = closed.jaxpr
        env: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *args), strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, core.Literal) else env[atom]

        for eqn in jaxpr.eqns:
            with jax.named_scope(str(eqn.source_info.name_stack)):
                env.update(zip(eqn.outvars, self._equation(eqn, [read(atom) for atom in eqn.invars]), strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _equation(self, eqn: core.JaxprEqn, args: list[Any]) -> Sequence[Any]:
        held = [arg for arg in args if isinstance(arg, _Held)]
        name = eqn.primitive.name
        if name in _CALLS:
            inner: Any = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
            return self.run(inner if isinstance(inner, core.ClosedJaxpr) else core.ClosedJaxpr(inner, ()), args)
        if not held:
            return bound(eqn, args)
        if eqn.primitive is primitives.cond_p and not isinstance(args[0], _Held):
            return self._cond(eqn, args)
        shape = getattr(eqn.outvars[0].aval, "shape", ())
        home = next((arg.home for arg in held if arg.home.view.shape == shape), held[0].home)
        if name in _ELEMENTWISE and home.view.shape == shape:
            return [_Held(value, home) for value in bound(eqn, [_beside(arg, home) for arg in args])]
        if name in _NEUTRAL and len(eqn.params["axes"]) == len(home.view.shape):
            value = home.view.filled(held[0].value, _NEUTRAL[name](held[0].value.dtype))
            return bound(eqn, [value], axes=tuple(range(value.ndim)))
        if self.spoilt is not None:
            self.spoilt.update(arg.home.view for arg in held)
        return bound(eqn, [arg.load() if isinstance(arg, _Held) else arg for arg in args])

    def _cond(self, eqn: core.JaxprEqn, args: list[Any]) -> Sequence[Any]:
        """Branches on stored arrays: a result is stored if any branch has it so."""
        homes: list[Home | None] = [None] * len(eqn.outvars)
        arrays = [arg.value if isinstance(arg, _Held) else arg for arg in args[1:]]

        def branch(closed: Any, *, settle: bool) -> Callable[..., list[Any]]:
            def call(*values: Any) -> list[Any]:
                given = [dataclasses.replace(arg, value=value) if isinstance(arg, _Held) else value
                         for arg, value in zip(args[1:], values, strict=True)]
                outs = self.run(closed, given)
                if settle:
                    return [out if home is None else _at_home(out, home)
                            for out, home in zip(outs, homes, strict=True)]
                homes[:] = [out.home if isinstance(out, _Held) else home
                            for out, home in zip(outs, homes, strict=True)]
                return [out.value if isinstance(out, _Held) else out for out in outs]

            return call

        for closed in eqn.params["branches"]:
            jax.eval_shape(branch(closed, settle=False), *arrays)
        outs = jax.lax.switch(args[0], [branch(closed, settle=True) for closed in eqn.params["branches"]], *arrays)
        return [out if home is None else _Held(out, home) for out, home in zip(outs, homes, strict=True)]


def _lowest(dtype: Any) -> Any:
    return -jnp.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min


def _highest(dtype: Any) -> Any:
    return jnp.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).max


_NEUTRAL: dict[str, Callable[[Any], Any]] = {
    "reduce_sum": lambda dtype: 0, "reduce_prod": lambda dtype: 1, "reduce_and": lambda dtype: True,
    "reduce_or": lambda dtype: False, "reduce_max": _lowest, "reduce_min": _highest}
"""What padding holds while a whole leaf is reduced."""
