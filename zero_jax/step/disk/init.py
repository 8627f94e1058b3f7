"""The optimizer's state and the average before the first step, leaf by leaf: the whole of them is in no memory."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import optax

from zero_jax.jaxpr.equations import needed_eqns, run_eqns, structure_of, trace_flat, value_of, variables
from zero_jax.jaxpr.passes import without_calls
from zero_jax.sharding.layout import Layout
from zero_jax.sharding.stored_update import init_stored
from zero_jax.step.init import average_of, strong
from zero_jax.tree import named_leaves
from zero_jax.typing import Params


class InitialOptimizerState:
    """`make(names)`: those leaves of `opt_state/` and `ema/`, as they are stored, by name."""

    def __init__(self, layout: Layout, optimizer: optax.GradientTransformationExtraArgs, params: Params):
        """params: as they are stored."""
        def derive(params: Params) -> Any:
            return {"opt_state": strong(init_stored(layout, optimizer, params)), "ema": average_of(params, layout)}

        self._values, treedef = jax.tree.flatten((params,))
        abstract = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in self._values]
        closed, out_treedef = trace_flat(derive, abstract, treedef)
        self._closed = without_calls(closed)
        outs = jax.tree.unflatten(out_treedef, self._closed.jaxpr.outvars)
        self._outs = dict(named_leaves(outs))
        self._shardings = dict(named_leaves({"opt_state": layout.shardings.opt_state, "ema": layout.shardings.ema}))
        self._compiled: dict[Hashable, Callable[..., Any]] = {}
        self.names = list(self._outs)

    def __call__(self, names: Sequence[str]) -> dict[str, Any]:
        """The leaves `names`, computed together."""
        jaxpr, outs = self._closed.jaxpr, [self._outs[name] for name in names]
        eqns = needed_eqns(self._closed, outs)
        read = {var for eqn in eqns for var in variables(eqn.invars)} | set(variables(outs))
        known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*self._closed.consts, *self._values), strict=True))
        inputs = [var for var in known if var in read]
        shardings = [self._shardings[name] for name in names]
        key = structure_of(eqns, inputs, outs), tuple(shardings)
        if key not in self._compiled:
            def run(values: list[Any]) -> list[Any]:
                env: dict[Any, Any] = dict(zip(inputs, values, strict=True))
                run_eqns(eqns, env)
                return [value_of(out, env) for out in outs]

            self._compiled[key] = jax.jit(run, out_shardings=shardings)
        return dict(zip(names, self._compiled[key]([known[var] for var in inputs]), strict=True))
