"""A model's values before the first step, leaf by leaf, and of stacks layer by layer: all of them are in no memory."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import with_sharding_constraint as constrain

from zero_jax.errors import UsageError
from zero_jax.jaxpr.equations import ClosedJaxpr, needed_eqns, run_eqns, shape_of, trace, trace_flat, value_of
from zero_jax.jaxpr.one_layer import NotByLayer, one_layer
from zero_jax.jaxpr.passes import without_calls
from zero_jax.sharding.layout import Layout
from zero_jax.sharding.stored_shape import StoredShape
from zero_jax.step.disk.leaf import layer_of
from zero_jax.step.disk.part_programs import PartProgram
from zero_jax.step.init import strong
from zero_jax.tree import named_leaves

FIELDS = ("params", "frozen", "variables", "rng")
"""The fields of a state that a model's `init` makes; the others follow from them, or are zeros."""


class InitialValues:
    """The leaves of `FIELDS` by name, as they are stored, each made from the keys alone.

    The values are those of the whole `init`: the same equations, without those that are for others.
    """

    def __init__(self, layout: Layout, init: Callable[..., Mapping[str, Any]], operands: Any, shardings: Any):
        """init: a function of `operands`, a tuple, to a tree for each of `FIELDS` that is not None, in true shapes.

        operands: arrays, or abstract ones. shardings: of each leaf of them, or None.
        """
        leaves, treedef = jax.tree.flatten(operands)
        self._operands, self._shardings = leaves, jax.tree.leaves(shardings, is_leaf=lambda leaf: leaf is None)
        abstract = [jax.eval_shape(lambda leaf=leaf: leaf) if not isinstance(leaf, jax.ShapeDtypeStruct) else leaf
                    for leaf in leaves]
        closed, out_treedef = trace_flat(init, [
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in abstract], treedef)
        self._closed: ClosedJaxpr = without_calls(closed)
        self._outs = dict(named_leaves(jax.tree.unflatten(out_treedef, self._closed.jaxpr.outvars)))
        self._likes, self._shapes = ({name: leaf for name, leaf in named_leaves(tree) if name in self._outs}
                                     for tree in (layout.state, layout.stored_shapes))
        self._compiled: dict[Hashable, Any] = {}
        self._layers: dict[str, PartProgram | str] = {}
        self.names = list(self._outs)

    def __call__(self, names: Sequence[str]) -> dict[str, jax.Array]:
        """The leaves `names`, computed together."""
        return dict(zip(names, self.program(names)(self._operands.__getitem__), strict=True))

    def layer(self, name: str, index: int) -> jax.Array | str:
        """Layer `index` of a stack as it is stored, or why it is not made so."""
        program = self.layer_program(name)
        if isinstance(program, str):
            return program
        (layer,) = program(lambda number: jnp.int32(index) if number == 0 else self._operands[number - 1])
        return layer

    def why_whole(self, name: str) -> str:
        """Why `layer` does not make the layers of a stack; empty where it does."""
        program = self.layer_program(name)
        return program if isinstance(program, str) else ""

    def program(self, names: Sequence[str]) -> PartProgram:
        """What makes the leaves `names`."""
        outs = [self._outs[name] for name in names]

        def make(*operands: Any) -> list[Any]:
            env: dict[Any, Any] = self._known(operands)
            run_eqns(needed_eqns(self._closed, outs), env)
            return [_stored(value_of(out, env), self._shapes[name], self._likes[name])
                    for name, out in zip(names, outs, strict=True)]

        closed = without_calls(trace(make, *map(shape_of, self._closed.jaxpr.invars)))
        return PartProgram(closed, closed.jaxpr.outvars, [self._likes[name].sharding for name in names],
                           self._shardings, self._compiled)

    def layer_program(self, name: str) -> PartProgram | str:
        """What makes a layer of the stack `name`; its first operand is the number of that. Or why there is none."""
        if name not in self._layers:
            self._layers[name] = self._make_layer_program(name)
        return self._layers[name]

    def lower(self, names: Sequence[str]) -> jax.stages.Lowered:
        """The program that makes the leaves `names`, lowered."""
        return self.program(names).lower(self._operands.__getitem__)

    def lower_layer(self, name: str) -> jax.stages.Lowered:
        """The program that makes a layer of the stack `name`, lowered; raises ValueError where there is none."""
        program = self.layer_program(name)
        if isinstance(program, str):
            raise UsageError(f"{name}: it {program}.")
        index = jax.ShapeDtypeStruct((), jnp.int32)
        return program.lower(lambda number: index if number == 0 else self._operands[number - 1])

    def _make_layer_program(self, name: str) -> PartProgram | str:
        if self._shapes[name].identity_dim((0,)) != 0 or self._likes[name].sharding.spec[:1] not in ((), (None,)):
            return "is stored across layers"
        like, shape = layer_of(self._likes[name]), self._shapes[name].drop_dim(0)

        def make(index: Any, *operands: Any) -> Any:
            row = one_layer(self._closed, self._outs[name], index, self._known(operands), {})
            return _stored(row, shape, like)

        try:
            closed = trace(make, jax.ShapeDtypeStruct((), jnp.int32), *map(shape_of, self._closed.jaxpr.invars))
        except NotByLayer as reason:
            return str(reason)
        closed = without_calls(closed)
        return PartProgram(closed, closed.jaxpr.outvars, [like.sharding], [None, *self._shardings], self._compiled)

    def _known(self, operands: Sequence[Any]) -> dict[Any, Any]:
        jaxpr = self._closed.jaxpr
        return dict(zip((*jaxpr.constvars, *jaxpr.invars), (*self._closed.consts, *operands), strict=True))


def _stored(value: Any, shape: StoredShape, like: jax.ShapeDtypeStruct) -> jax.Array:
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        return value
    return strong(constrain(shape.store(jnp.asarray(value).astype(like.dtype)), like.sharding))
