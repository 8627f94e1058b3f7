"""The optimizer's state and the average before the first step, leaf by leaf: the whole of them is in no memory."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import optax

from zero_jax.jaxpr.equations import (
    JaxprEqn,
    bind_in_scope,
    needed_eqns,
    run_eqns,
    structure_of,
    trace_flat,
    value_of,
    variables,
)
from zero_jax.jaxpr.passes import without_calls
from zero_jax.sharding.layout import Layout
from zero_jax.sharding.stored_update import init_stored
from zero_jax.step.init import average_of, strong
from zero_jax.tree import named_leaves
from zero_jax.typing import Params


class InitialOptimizerState:
    """`make(names)`: those leaves of `opt_state/` and `ema/`, as they are stored, by name."""

    def __init__(self, layout: Layout, optimizer: optax.GradientTransformationExtraArgs,
                 param: Callable[[str], jax.Array]):
        """param: a parameter by its name, as it is stored."""
        def derive(params: Params) -> Any:
            return {"opt_state": strong(init_stored(layout, optimizer, params)), "ema": average_of(params, layout)}

        leaves, treedef = jax.tree.flatten((layout.state.params,))
        self._params, self._param = [name for name, _ in named_leaves(layout.state.params)], param
        abstract = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
        closed, out_treedef = trace_flat(derive, abstract, treedef)
        self._closed = without_calls(closed)
        self._outs = dict(named_leaves(jax.tree.unflatten(out_treedef, self._closed.jaxpr.outvars)))
        self._stored = dict(named_leaves({"opt_state": layout.state.opt_state, "ema": layout.state.ema}))
        self._compiled: dict[Hashable, Any] = {}
        self.names = list(self._outs)

    def __call__(self, names: Sequence[str]) -> dict[str, Any]:
        """The leaves `names`, computed together of the parameters that they read; alike ones share a program."""
        jaxpr, outs = self._closed.jaxpr, [self._outs[name] for name in names]
        eqns = needed_eqns(self._closed, outs)
        read = {*variables(outs), *(var for eqn in eqns for var in variables(eqn.invars))}
        values = {var: value for var, value in zip(jaxpr.constvars, self._closed.consts, strict=True) if var in read}
        values |= {var: self._param(name) for var, name in zip(jaxpr.invars, self._params, strict=True) if var in read}
        shardings = [self._stored[name].sharding for name in names]
        key = structure_of(eqns, list(values), outs), tuple(shardings)
        if key not in self._compiled:
            self._compiled[key] = _jitted(eqns, list(values), outs, shardings)
        return dict(zip(names, self._compiled[key](list(values.values())), strict=True))


def _jitted(eqns: Sequence[JaxprEqn], inputs: Sequence[Any], outs: Sequence[Any], shardings: Sequence[Any]) -> Any:
    def run(values: list[Any]) -> list[Any]:
        env: dict[Any, Any] = dict(zip(inputs, values, strict=True))
        run_eqns(eqns, env, bind_in_scope)
        return [value_of(out, env) for out in outs]

    return jax.jit(run, out_shardings=list(shardings))
