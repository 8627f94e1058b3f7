"""Names for the types that Python or JAX leave open, so that a signature says what `Any` cannot.

Most are pytrees, whose structure no type can state: the name is for the reader. Real types are used where they exist
(`Mesh`, `PartitionSpec`, `NamedSharding`, `optax.GradientTransformation`).
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
from jax.sharding import PartitionSpec

Pytree: TypeAlias = Any
"""Any tree of leaves that JAX knows."""

Params: TypeAlias = dict[str, Any]
"""Parameters by module: nested dicts with arrays, or `jax.ShapeDtypeStruct`s, as leaves."""

Variables: TypeAlias = Any
"""What a model owns beside its parameters: batch statistics, RNG streams, caches."""

Gradients: TypeAlias = Any
"""A tree like that of the parameters that are trained."""

OptState: TypeAlias = Any
"""The state of an optax transform."""

Batch: TypeAlias = Any
"""Arrays whose leading dim is the global batch."""

Metrics: TypeAlias = dict[str, Any]
"""Scalars by name."""

PRNGKey: TypeAlias = jax.Array
"""A typed JAX key, or an array of them."""

Scalar: TypeAlias = Any
"""An array of no dims, or a Python number."""

DType: TypeAlias = Any
"""What `jnp.dtype` takes."""

Shape: TypeAlias = tuple[int, ...]

Spec: TypeAlias = PartitionSpec
"""For each dim None, the mesh axis that shards it, or a tuple of such, major first."""

AxisNames: TypeAlias = tuple[str, ...]
"""Mesh axes, major first."""

Loss: TypeAlias = Callable[[Any, Batch], Any]
"""`loss(model, batch)`, or `loss(model, batch, rng)`: a scalar, `(scalar, metrics)` or `(scalar, metrics, weight)`."""

Pattern: TypeAlias = str
"""A regular expression that `re.search` applies to a parameter's name, such as `blocks/attention/kernel`."""
