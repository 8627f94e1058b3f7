"""A batch: a pytree of arrays whose leading dim is the global batch, split over devices and into microbatches."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from zero_jax.mesh import CONTEXT, batch_axes
from zero_jax.tree import named_leaves


@dataclasses.dataclass(frozen=True)
class Accumulation:
    """How many microbatches make a step, and whether "every" one of them or all at "once" are reduced."""

    microbatches: int = 1
    reduce: str = "every"

    def __post_init__(self) -> None:
        if isinstance(self.microbatches, bool) or not isinstance(self.microbatches, int) or self.microbatches < 1:
            raise ValueError(f"accumulate={self.microbatches!r}: give the number of microbatches, at least 1.")
        if self.reduce not in ("every", "once"):
            raise ValueError(f"reduce={self.reduce!r}: give \"every\" (each microbatch's gradient is reduced and "
                             "scattered) or \"once\" (the sum of them is).")
        if self.once and self.microbatches == 1:
            raise ValueError("reduce=\"once\" without accumulate: the gradient of one batch is reduced once anyhow.")

    @property
    def once(self) -> bool:
        """Whether the devices' sums are reduced after the last microbatch only."""
        return self.reduce == "once"


def check_batch(batch: Any, mesh: Mesh, axes: tuple[str, ...], microbatches: int = 1) -> None:
    """Raises ValueError unless every leaf's leading dim is the same and divides over devices and microbatches.

    axes: ZeRO's. With an axis `context` every second dim is the sequence, and must divide over it.
    """
    split = batch_axes(mesh, axes)
    ways, shards = math.prod(mesh.shape[axis] for axis in split), mesh.shape[CONTEXT] if CONTEXT in axes else 1
    leaves = named_leaves(batch)
    if not leaves:
        raise ValueError("The batch is empty: give a pytree of arrays whose leading dim is the global batch.")
    sizes = {name: np.shape(leaf)[:1] for name, leaf in leaves}
    flat = [name for name, size in sizes.items() if not size]
    if flat:
        raise ValueError(f"batch[{flat[0]!r}] is a scalar: every leaf needs a leading dim, the global batch.")
    if len(set(sizes.values())) > 1:
        raise ValueError(
            "The leaves of the batch differ in their leading dim, the global batch: "
            + ", ".join(f"{name} {size[0]}" for name, size in sizes.items()) + ".")
    (size,) = next(iter(sizes.values()))
    on = f"the {ways} devices of the axes {', '.join(split)} of the mesh {dict(mesh.shape)}"
    if size and not size % ways and size % (ways * microbatches):
        raise ValueError(
            f"A batch of {size} does not divide into {microbatches} microbatches over {on}: give a multiple of "
            f"{ways * microbatches}, or another accumulate.")
    if size % ways or not size:
        raise ValueError(
            f"A batch of {size} does not divide over {on}: give a multiple of {ways}, or a smaller mesh.")
    for name, leaf in leaves:
        if shards > 1 and np.ndim(leaf) > 1 and np.shape(leaf)[1] % shards:
            raise ValueError(
                f"batch[{name!r}] of shape {np.shape(leaf)}: its second dim, the sequence, must divide over the "
                f"{shards} devices of the axis {CONTEXT!r} of the mesh {dict(mesh.shape)}: give another length, or "
                "context=1.")


def abstract_batch(batch: Any) -> Any:
    """`batch` as `jax.ShapeDtypeStruct`s, with the dtypes that JAX will give its arrays."""
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(batch)):
        return batch
    return jax.eval_shape(lambda: jax.tree.map(jnp.asarray, batch))
