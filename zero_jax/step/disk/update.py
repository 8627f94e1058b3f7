"""An update whose arrays are in files: what is computed before the files are read, and what of each block."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from jax.lax import with_sharding_constraint as constrain
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zero_jax.jaxpr.equations import bind_in_scope, needed_eqns, run_eqns, value_of
from zero_jax.optim.file_update import BlockPrograms, group_units
from zero_jax.optim.split import traced_update
from zero_jax.sharding.layout import Layout
from zero_jax.sharding.memory.disk_leaves import OnDisk
from zero_jax.step.update import Updated
from zero_jax.tree import named_leaves


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
        by_units = {number for unit in self.units for _, number in unit.writes}
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
