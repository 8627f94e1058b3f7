"""The axes of a mesh by role: which of them ZeRO shards over, which replicate, and which split model or sequence."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zero_jax.arguments import shown, texts
from zero_jax.errors import UsageError
from zero_jax.sharding.auto_axes import auto_mesh
from zero_jax.sharding.mesh import CONTEXT, DATA, REPLICA, TENSOR
from zero_jax.typing import AxisNames
from zero_jax.xla.platform import Platform, platform_of

AxisRoles: TypeAlias = Mapping[str, str | Sequence[str]]
"""Role -> the name of the mesh axis that has it; `data` may have several, major first."""


@dataclasses.dataclass(frozen=True)
class MeshAxes:
    """A mesh and the role of each of its axes; made by `MeshAxes.of`, and the one place where degrees are computed.

    There is one field for each role, which holds names of mesh axes; a role whose axis the mesh lacks has size 1. A
    further role (pipeline stages, experts) is a further field here, with its `_size` and `_enabled`.

    Attributes:
        mesh: the devices; its axes are Auto, whatever those of the mesh were that `of` got.
        zero: the axes over which ZeRO shards, major first; with sequences split over `context`, it is one of them.
        replica: the axis across which the shards are replicated (hybrid sharding).
        context: the axis over which the sequence is split (context parallelism).
        tensor: the axis over which rules split parameters (tensor parallelism).
        slices: the axis across which slices train by themselves (`diloco`), which no step crosses; empty: none.
        built_for: the platform whose decisions a step takes: that of the devices, or what simulated ones stand for.
    """

    mesh: Mesh
    zero: AxisNames
    replica: str = REPLICA
    context: str = CONTEXT
    tensor: str = TENSOR
    slices: str = ""
    built_for: Platform = dataclasses.field(kw_only=True)

    @classmethod
    def of(cls, mesh: Mesh, axis: str | Sequence[str] | None = None, roles: AxisRoles | None = None) -> "MeshAxes":
        """The roles of the axes of `mesh`.

        axis: those that ZeRO shards over, major first; None takes `data`, or `data_0`, `data_1`, ..., and `context`.
        roles: names of axes by role (`data`, `replica`, `context`, `tensor`), where they are not these.
        Raises ValueError if `mesh` lacks one of them, or has an axis without a role.
        """
        if not isinstance(mesh, Mesh):
            raise UsageError(f"mesh={mesh!r} is not a jax.sharding.Mesh: make one with zero_jax.make_mesh().")
        sizes, roles = dict(mesh.shape), _checked_roles(mesh, axis, roles or {})
        replica, context, tensor = (str(roles.get(role, role)) for role in (REPLICA, CONTEXT, TENSOR))
        if axis is not None:
            zero = texts("axis", axis, "(\"data_0\", \"data_1\")")
        elif DATA in roles:
            zero = (*texts("axis_roles: data", roles[DATA], "\"fsdp\""), *[context] * (context in sizes))
        else:
            zero = tuple(name for name in mesh.axis_names if name in (DATA, context) or name.startswith(DATA + "_"))
        missing = [name for name in zero if name not in sizes]
        if missing or not zero:
            raise UsageError(
                f"The mesh has axes {sizes} and no axis {', '.join(map(repr, missing)) or repr(DATA)} for ZeRO to "
                f"shard over: name it with axis_roles={{\"data\": {mesh.axis_names[0]!r}}}, say, or build the mesh "
                "with zero_jax.make_mesh().")
        known = {*zero, replica, tensor}
        if unknown := [name for name in mesh.axis_names if name not in known and sizes[name] > 1]:
            raise UsageError(
                f"The mesh has axes {sizes}, and {', '.join(map(repr, unknown))} has no role: ZeRO shards over "
                f"{zero}, replicates across {replica!r} and splits by rules over {tensor!r}. Give it a role with "
                f"axis_roles={{\"tensor\": {unknown[0]!r}}}, say (data, replica, context or tensor), or rename it.")
        if tensor in zero:
            raise UsageError(
                f"axis={zero}: rules split parameters over {tensor!r}, and ZeRO cannot shard over it as well.")
        return cls(auto_mesh(mesh), zero, replica, context, tensor, built_for=platform_of(mesh.devices.flat[0]))

    def of_slices(self) -> "MeshAxes":
        """The axes of a step of each slice by itself: what was `replica` is crossed by nothing."""
        return dataclasses.replace(self, replica="", slices=self.replica)

    @property
    def step_names(self) -> AxisNames:
        """The axes that the collectives of a step may cross: all but that of the slices."""
        return tuple(name for name in self.mesh.axis_names if name != self.slices)

    def size(self, *names: str) -> int:
        """Devices along these axes together; an axis that the mesh lacks counts 1."""
        return math.prod(self.mesh.shape.get(name, 1) for name in names)

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each axis of the mesh, in its order."""
        return dict(self.mesh.shape)

    @property
    def zero_sizes(self) -> dict[str, int]:
        """The size of each axis that ZeRO shards over, major first."""
        return {name: self.mesh.shape[name] for name in self.zero}

    @property
    def zero_size(self) -> int:
        """N of the paper: over how many devices ZeRO shards each leaf."""
        return self.size(*self.zero)

    @property
    def replica_size(self) -> int:
        """How many copies of the shards there are."""
        return 1 if self.replica in self.zero else self.size(self.replica)

    @property
    def context_size(self) -> int:
        """Over how many devices the sequence is split."""
        return self.size(self.context) if self.context in self.zero else 1

    @property
    def tensor_size(self) -> int:
        """Over how many devices tensor parallelism splits the model."""
        return self.size(self.tensor)

    @property
    def context_enabled(self) -> bool:
        """Whether the sequence is split."""
        return self.context_size > 1

    @property
    def tensor_enabled(self) -> bool:
        """Whether rules split parameters."""
        return self.tensor_size > 1

    @property
    def batch(self) -> AxisNames:
        """The axes over which the examples of a batch are split: the replicas, then ZeRO's but for `context`."""
        replicas = (self.replica,) if self.replica in self.mesh.axis_names and self.replica not in self.zero else ()
        return replicas + tuple(name for name in self.zero if name != self.context)

    @property
    def batch_shards(self) -> int:
        """Over how many devices the examples of a batch are split."""
        return self.size(*self.batch)

    @property
    def batch_spec(self) -> P:
        """The spec of a leaf of the batch: (examples, sequence, ...)."""
        return P(self.batch, self.context) if self.context in self.zero else P(self.batch)

    @property
    def batch_sharding(self) -> NamedSharding:
        """The sharding of a leaf of the batch that has a sequence."""
        return NamedSharding(self.mesh, self.batch_spec)

    @property
    def platform(self) -> str:
        """That of the devices themselves, as JAX names it: "cpu", "gpu", "cuda", "tpu"."""
        return self.mesh.devices.flat[0].platform

    @property
    def is_tpu(self) -> bool:
        """Whether a step does what it does on TPUs: see `Platform.is_tpu`."""
        return self.built_for.is_tpu


def _checked_roles(mesh: Mesh, axis: str | Sequence[str] | None, roles: AxisRoles) -> AxisRoles:
    """`roles`; raises ValueError for roles that do not exist, or that do not fit the axes of `mesh`."""
    known = (DATA, REPLICA, CONTEXT, TENSOR)
    what = f"axis_roles={shown(roles)}: "
    if not isinstance(roles, Mapping):
        raise UsageError(f"{what}give names of axes by role, as {{\"data\": {mesh.axis_names[0]!r}}}.")
    if unknown := [role for role in roles if role not in known]:
        hint = f" (give {{role: name}}: {{\"data\": {unknown[0]!r}}}, say)" if unknown[0] in mesh.axis_names else ""
        raise UsageError(f"{what}there is no role {unknown[0]!r}: the roles are {', '.join(known)}{hint}.")
    if axis is not None and DATA in roles:
        raise UsageError(f"{what}axis={axis!r} names the axes that ZeRO shards over as well: give one of the two.")
    names = [(role, name) for role, given in roles.items()
             for name in texts(f"axis_roles: {role}", given, "\"fsdp\"")]
    for role, name in names:
        if name not in mesh.axis_names:
            raise UsageError(f"{what}the mesh {dict(mesh.shape)} has no axis {name!r}.")
        if role != DATA and not isinstance(roles[role], str):
            raise UsageError(f"{what}{role} is one axis: give its name.")
        if name in known and name != role or sum(name == other for _, other in names) > 1:
            raise UsageError(f"{what}the axis {name!r} would have two roles: give each axis of the mesh one.")
    return roles
