"""A batch: a pytree of arrays whose leading dim is the global batch, split over devices and into microbatches."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zero_jax.errors import UsageError, printable
from zero_jax.sharding.mesh_axes import MeshAxes
from zero_jax.tree import named_leaves
from zero_jax.typing import Batch


@dataclasses.dataclass(frozen=True)
class Accumulation:
    """Gradient accumulation: microbatches per step, reduced after "every" microbatch or "once" after the last."""

    microbatches: int = 1
    reduce: str = "every"

    def __post_init__(self) -> None:
        if isinstance(self.microbatches, bool) or not isinstance(self.microbatches, int) or self.microbatches < 1:
            raise UsageError(f"accumulate={self.microbatches!r}: give the number of microbatches, at least 1.")
        if self.reduce not in ("every", "once"):
            raise UsageError(f"reduce={self.reduce!r}: give \"every\" (each microbatch's gradient is reduced and "
                             "scattered) or \"once\" (the sum of them is).")
        if self.once and self.microbatches == 1:
            raise UsageError("reduce=\"once\" without accumulate: the gradient of one batch is reduced once already.")

    @property
    def once(self) -> bool:
        """Whether gradients are reduced after the last microbatch only."""
        return self.reduce == "once"


def check_batch(batch: Batch, axes: MeshAxes, num_microbatches: int = 1) -> None:
    """Raises ValueError unless every leaf's leading dim is the same and divides over devices and microbatches.

    With an axis `context` every second dim is the sequence, and must divide over it.
    """
    num_shards = axes.batch_shards
    leaves = named_leaves(batch)
    if not leaves:
        raise UsageError("The batch is empty: give a pytree of arrays whose leading dim is the global batch.")
    for name, leaf in leaves:
        check_dtype(name, leaf)
    sizes = {name: np.shape(leaf)[:1] for name, leaf in leaves}
    scalars = [name for name, size in sizes.items() if not size]
    if scalars:
        raise UsageError(f"batch[{scalars[0]!r}] is a scalar: every leaf needs a leading dim, the global batch.")
    if len(set(sizes.values())) > 1:
        raise UsageError(
            "The leaves of the batch differ in their leading dim, the global batch: "
            + ", ".join(f"{name} {size[0]}" for name, size in sizes.items()) + ".")
    (size,) = next(iter(sizes.values()))
    devices = f"the {num_shards} devices of the axes {', '.join(axes.batch)} of the mesh {axes.sizes}"
    if size and not size % num_shards and size % (num_shards * num_microbatches):
        raise UsageError(
            f"A batch of {size} does not divide into {num_microbatches} microbatches over {devices}: give a multiple "
            f"of {num_shards * num_microbatches}, or another accumulate.")
    if size % num_shards or not size:
        raise UsageError(
            f"A batch of {size} does not divide over {devices}: give a multiple of {num_shards}, or a smaller mesh.")
    for name, leaf in leaves:
        if np.ndim(leaf) > 1 and np.shape(leaf)[1] % axes.context_size:
            raise UsageError(
                f"batch[{name!r}] of shape {np.shape(leaf)}: its second dim, the sequence, must divide over the "
                f"{axes.context_size} devices of the axis {axes.context!r} of the mesh {axes.sizes}: give another "
                "length, or context=1.")


def check_dtype(name: str, leaf: Any) -> None:
    """Raises ValueError for a leaf of the batch, not on devices, of a dtype that JAX lacks: objects, texts, dates."""
    if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)):
        return
    try:
        # result_type alone refuses objects, and alone warns of 64 bits.
        jnp.result_type(jax.dtypes.canonicalize_dtype(leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype))
    except (TypeError, ValueError) as error:
        kind = getattr(leaf, "dtype", type(leaf).__name__)
        raise UsageError(f"batch[{name!r}] is of {printable(str(kind))}, and a step takes numbers and booleans alone: "
                         "encode it as numbers, or leave it out of the batch.") from error


def abstract_batch(batch: Batch) -> Batch:
    """`batch` as `jax.ShapeDtypeStruct`s, with the dtypes that JAX will give its arrays."""
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(batch)):
        return batch
    for name, leaf in named_leaves(batch):
        check_dtype(name, leaf)
    return jax.eval_shape(lambda: jax.tree.map(jnp.asarray, batch))


def ragged(batch: Batch, axes: MeshAxes) -> bool:
    """Whether all leaves have the same leading dim, and it does not divide over the devices: a last batch."""
    sizes = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(batch)}
    size = next(iter(sizes), ()) if len(sizes) == 1 else ()
    return bool(size) and size[0] > 0 and size[0] % axes.batch_shards != 0


def rounded_up(batch: Batch, axes: MeshAxes) -> Batch:
    """A ragged batch as `jax.ShapeDtypeStruct`s of the next size that divides."""
    def round_up(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        size = -(-leaf.shape[0] // axes.batch_shards) * axes.batch_shards
        return jax.ShapeDtypeStruct((size, *leaf.shape[1:]), leaf.dtype)

    return jax.tree.map(round_up, abstract_batch(batch))


def split_steps(batches: Batch) -> Batch:
    """One of several batches in arrays of shape (steps, global batch, ...), abstract.

    Raises ValueError unless every leaf has both dims, and all the same number of steps.
    """
    leaves = named_leaves(abstract_batch(batches))
    flat = [name for name, leaf in leaves if len(leaf.shape) < 2]
    if flat or len({leaf.shape[0] for _, leaf in leaves}) != 1:
        raise UsageError("Several batches at once are arrays of shape (steps, global batch, ...), all with as many "
                         "steps; these are: " + ", ".join(f"{name} {leaf.shape}" for name, leaf in leaves) + ".")
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), abstract_batch(batches))
