"""ZeRO-R and model parallelism as one set of choices: what a step does about activations, buffers and hierarchies.

Source: arXiv 1910.02054, section 6, and what came after it.
"""

import dataclasses
from typing import Any

from jax.sharding import Mesh

from zero_jax.activations import Activations
from zero_jax.batch import Accumulation
from zero_jax.blocks import Remat, remat_of
from zero_jax.hardware import combine_options
from zero_jax.mesh import CONTEXT, TENSOR, batch_axes
from zero_jax.stages import Stage


@dataclasses.dataclass(frozen=True)
class ZeroR:
    """The arguments of `make_zero_train_step` of the same names."""

    tensor_rules: tuple[Any, ...] = ()
    sequence_parallel: bool = False
    remat: Any = None
    partition_activations: bool | str = False
    secondary: tuple[str, ...] = ()
    combine_bytes: int | None = None

    @property
    def blocks(self) -> Remat | None:
        """What each block keeps; None: as the model does."""
        return remat_of(self.remat)

    def activations(self, mesh: Mesh, axes: tuple[str, ...], batch_size: int) -> Activations:
        """How activations of so many examples lie."""
        partition = self.partition_activations is True or (
            self.partition_activations == "cpu" and TENSOR in mesh.axis_names)
        return Activations(mesh, batch_axes(mesh, axes), batch_size, partition=partition,
                           host=self.partition_activations == "cpu", sequence=self.sequence_parallel)

    def options(self, mesh: Mesh) -> dict[str, Any]:
        """XLA's options."""
        return combine_options(mesh.devices.flat[0], self.combine_bytes)

    def check(self, mesh: Mesh, axes: tuple[str, ...], stage: Stage, accumulation: Accumulation) -> None:
        """Raises ValueError for what cannot take effect on this mesh, at this stage."""
        if self.partition_activations not in (False, True, "cpu"):
            raise ValueError(f"partition_activations={self.partition_activations!r}: give True (split over the axis "
                             "`tensor`) or \"cpu\" (and kept in the host's memory).")
        wrong = [name for name in self.secondary if name not in axes]
        if wrong or self.secondary and (stage.number < 3 or set(self.secondary) == set(axes)):
            raise ValueError(f"secondary={self.secondary} at stage {stage.number}: give some of the axes {axes} that "
                             f"ZeRO shards over in the mesh {dict(mesh.shape)}, but not all, and stage 3.")
        if accumulation.once and CONTEXT in axes:
            raise ValueError(f"reduce=\"once\" with an axis {CONTEXT!r}: each of its devices has a part of every "
                             "example, and no batch of its own: give reduce=\"every\".")
        if self.tensor_rules and mesh.shape.get(TENSOR, 1) == 1:
            raise ValueError(f"tensor_rules: the mesh {dict(mesh.shape)} has no axis {TENSOR!r} to split over: build "
                             "it with zero_jax.make_mesh(tensor=...), or leave tensor_rules out.")
        # Each of these raises for what it cannot be made of.
        self.activations(mesh, axes, 1)
        self.options(mesh)
        remat_of(self.remat)
