"""The optimizer's state and the average before the first step, leaf by leaf: the whole of them is in no memory."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zero_jax.errors import few
from zero_jax.jaxpr.equations import shape_of, trace, trace_flat
from zero_jax.jaxpr.one_layer import NotByLayer, one_layer
from zero_jax.jaxpr.passes import without_calls
from zero_jax.sharding.layout import Layout
from zero_jax.sharding.stored_update import init_stored
from zero_jax.step.disk.leaf import layer_of
from zero_jax.step.disk.part_programs import PartProgram
from zero_jax.step.init import average_of, strong
from zero_jax.tree import ending, named_leaves
from zero_jax.typing import Params


class InitialOptimizerState:
    """`make(names)`: those leaves of `opt_state/` and `ema/`, as they are stored, by name."""

    def __init__(self, layout: Layout, optimizer: optax.GradientTransformationExtraArgs,
                 param: Callable[[str], jax.Array]):
        """param: a parameter by its name, as it is stored."""
        def derive(params: Params) -> Any:
            return {"opt_state": strong(init_stored(layout, optimizer, params)), "ema": average_of(params, layout)}

        leaves, treedef = jax.tree.flatten((layout.state.params,))
        self._params = [name for name, _ in named_leaves(layout.state.params)]
        self._likes = dict(zip(self._params, leaves, strict=True))
        abstract = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
        closed, out_treedef = trace_flat(derive, abstract, treedef)
        self._closed = without_calls(closed)
        outs = jax.tree.unflatten(out_treedef, self._closed.jaxpr.outvars)
        self._outs, self._param = dict(named_leaves(outs)), param
        self._stored = dict(named_leaves({"opt_state": layout.state.opt_state, "ema": layout.state.ema}))
        self._compiled: dict[Hashable, Any] = {}
        self._layers: dict[str, PartProgram | str] = {}
        self.names = list(self._outs)

    def __call__(self, names: Sequence[str]) -> dict[str, Any]:
        """The leaves `names`, computed together."""
        program = PartProgram(self._closed, [self._outs[name] for name in names],
                              [self._stored[name].sharding for name in names], None, self._compiled)
        return dict(zip(names, program(lambda number: self._param(self._params[number])), strict=True))

    def layer(self, name: str, index: int, param: Callable[[str], jax.Array]) -> jax.Array | str:
        """Layer `index` of the stack `name`, or why it is not made so; param: that layer of a stacked parameter."""
        program = self.layer_program(name)
        if isinstance(program, str):
            return program
        (layer,) = program(lambda number: jnp.int32(index) if number == 0 else param(self._params[number - 1]))
        return layer

    def layer_program(self, name: str) -> PartProgram | str:
        """What makes a layer of the stack `name`, of its number and the parameter's layer. Or why there is none."""
        if name not in self._layers:
            self._layers[name] = self._make_layer_program(name)
        return self._layers[name]

    def _make_layer_program(self, name: str) -> PartProgram | str:
        length, invars = self._outs[name].aval.shape[0], self._closed.jaxpr.invars
        stacks = {var: number for number, var in enumerate(invars) if shape_of(var).shape[:1] == (length,)}
        layers = [jax.ShapeDtypeStruct(shape_of(var).shape[var in stacks:], shape_of(var).dtype) for var in invars]

        def make(index: Any, *layers: Any) -> Any:
            rows: Mapping[Any, Any] = {var: layers[number] for var, number in stacks.items()}
            return one_layer(self._closed, self._outs[name], index, {}, rows)

        try:
            closed = without_calls(trace(make, jax.ShapeDtypeStruct((), jnp.int32), *layers))
        except NotByLayer as reason:
            return str(reason)
        program = PartProgram(closed, closed.jaxpr.outvars, [layer_of(self._stored[name]).sharding], None,
                              self._compiled)
        read = {self._params[number - 1] for number in program.reads if number}
        return program if read <= {ending(name, self._likes)} else f"reads {few(sorted(read), 2)}"
