"""What is computed in parts, as it is whole in no memory: the first state in files, and an update of it."""

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import optax
from jax.lax import with_sharding_constraint as constrain
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zero_jax.jaxpr.equations import (
    JaxprEqn,
    bind_in_scope,
    needed_eqns,
    run_eqns,
    structure_of,
    value_of,
    variables,
)
from zero_jax.layout.layout import Layout
from zero_jax.layout.stored_optimizer import init_stored
from zero_jax.offload.disk_leaves import OnDisk
from zero_jax.offload.file_update import BlockPrograms, group_units
from zero_jax.offload.split import traced_update
from zero_jax.step.start import average_of, strong
from zero_jax.step.update import Updated
from zero_jax.tree import named_leaves
from zero_jax.typing import Params


@dataclasses.dataclass(frozen=True)
class Before:
    """What is computed before the blocks: values of `UpdatePlan.values`, and results of the update by number."""

    values: list[Any]
    results: dict[int, Any]


jax.tree_util.register_dataclass(Before, ["values", "results"], [])


class UpdatePlan:
    """One traced update."""

    def __init__(self, update: Any, layout: Layout, given: Any, buffer_bytes: int):
        """update: as `update_function` returns it; given: its second argument, abstract."""
        self.layout = layout
        like, shardings = layout.state, layout.shardings
        old = Updated(like.params, like.opt_state, like.ema, like.weights if layout.stage.shards_params else None)
        specs = Updated(layout.gradients, shardings.opt_state, shardings.ema,
                        None if old.weights is None else shardings.weights)
        self.names, self.carried = [name for name, _ in named_leaves(old)], jax.tree.leaves(old)
        self.on_disk = [name in layout.disk for name in self.names]
        leaves, treedef = jax.tree.flatten((old, given))
        self.closed, self.out_treedef = traced_update(update, leaves, treedef)
        results = len(self.closed.jaxpr.outvars) - len(self.names)
        copies = [sharding.spec for sharding in jax.tree.leaves(layout.gradients)] if results else []
        self.specs: list[P] = [leaf.spec for leaf in jax.tree.leaves(specs)] + copies
        self.groups = group_units(self.closed, self.specs, self.on_disk, self.names, self.carried, layout.mesh,
                                  buffer_bytes)
        self.units = [unit for group in self.groups for unit in group.units]
        self.programs = BlockPrograms(self.closed, self.specs, self.on_disk, layout.mesh)
        self._find_values()

    @property
    def copied(self) -> list[int]:
        """Numbers of the arrays in memory that units replace, and of which files have a copy."""
        return [number for unit in self.units for number in self.programs.buffers_of(unit)
                if number < len(self.names) and not self.names[number].startswith("weights/")]

    def _find_values(self) -> None:
        """`values`: variables that units read, and that are computed before; `results`: numbers of such results."""
        jaxpr, known = self.closed.jaxpr, set(self.closed.jaxpr.invars[:len(self.names)])
        used: dict[Any, P | None] = {}
        for unit in self.units:
            used.update(dict.fromkeys(unit.scalars))
            used.update(dict.fromkeys(unit.arrays, unit.spec if unit.in_blocks else None))
        self.values = {var: spec for var, spec in used.items() if var not in known}
        by_units = {number for unit in self.units for number in unit.results}
        self.results = [number for number in range(len(jaxpr.outvars)) if number not in by_units]

    def before(self, old: Updated, given: Any) -> Before:
        """Computes what no file is needed for; `old` with abstract arrays for what is in files. Traceable."""
        jaxpr, mesh = self.closed.jaxpr, self.layout.mesh
        leaves = jax.tree.leaves((old, given))
        env: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*self.closed.consts, *leaves), strict=True))
        wanted = [*self.values, *(jaxpr.outvars[number] for number in self.results)]
        run_eqns(needed_eqns(self.closed, wanted), env, bind_in_scope)
        values = [env[var] if spec is None else constrain(env[var], NamedSharding(mesh, spec))
                  for var, spec in self.values.items()]
        results = {number: value_of(jaxpr.outvars[number], env) for number in self.results}
        return Before(values, {number: constrain(value, NamedSharding(mesh, self.specs[number]))
                               for number, value in results.items()})

    def tree(self, results: Mapping[int, Any]) -> Any:
        """(`Updated`, the copy to gather) of results by number; `OnDisk` for those in files."""
        leaves = [OnDisk(like.shape, str(like.dtype)) if disk else results.get(number)
                  for number, (like, disk) in enumerate(zip(self.carried, self.on_disk, strict=True))]
        leaves += [results.get(number) for number in range(len(self.names), len(self.specs))]
        return jax.tree.unflatten(self.out_treedef, leaves)


class InitialOptimizerState:
    """`make(names)`: those leaves of `opt_state/` and `ema/`, as they are stored, by name, before the first step.

    They are made some at a time: the whole of them is in no memory.
    """

    def __init__(self, layout: Layout, optimizer: optax.GradientTransformationExtraArgs,
                 param: Callable[[str], jax.Array]):
        """param: a parameter by its name, as it is stored."""
        def derive(params: Params) -> Any:
            return {"opt_state": strong(init_stored(layout, optimizer, params)), "ema": average_of(params, layout)}

        leaves, treedef = jax.tree.flatten((layout.state.params,))
        self._params, self._param = [name for name, _ in named_leaves(layout.state.params)], param
        self._closed, out_treedef = traced_update(derive, leaves, treedef)
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
