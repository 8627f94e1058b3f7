"""A batch: a pytree of arrays whose leading dim is the global batch, split over all of a mesh's devices."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from zero_jax.tree import named_leaves


def check_batch(batch: Any, mesh: Mesh) -> None:
    """Raises ValueError unless every leaf's leading dim is the same and divides over the devices of `mesh`."""
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
    if size % mesh.size or not size:
        raise ValueError(
            f"A batch of {size} does not divide over the {mesh.size} devices of the mesh {dict(mesh.shape)}: give a "
            f"multiple of {mesh.size}, or a smaller mesh.")


def abstract_batch(batch: Any) -> Any:
    """`batch` as `jax.ShapeDtypeStruct`s, with the dtypes that JAX will give its arrays."""
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(batch)):
        return batch
    return jax.eval_shape(lambda: jax.tree.map(jnp.asarray, batch))
