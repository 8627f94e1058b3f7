"""Next-token cross entropy without logits: a few tokens at a time, on each device's part of the batch and vocabulary.

Logits are the largest activation of a language model, and their gradient is as large: in chunks neither exists whole
(the paper's C_B, section 6.2). The gradient of the output layer is summed over chunks where it lies and reduced once,
which a loop that the partitioner divides cannot do: so it stands in a `jax.shard_map`.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from zero_jax.losses import Loss
from zero_jax.mesh import TENSOR, batch_spec, on_torus, zero_axes


def chunked_next_token_loss(mesh: Mesh, chunks: int, *, axis: Any = None) -> Loss:
    """`next_token_loss` that computes logits in `chunks` parts, forward and again backward, on the step's `mesh`.

    It calls `model(inputs, logits=False)`, which gives the features (batch, length, width) and the output layer's table
    (vocabulary, width), split over `tensor` where the mesh has that axis. axis: ZeRO's, as the step takes it. Raises
    ValueError where a device's tokens do not divide into so many chunks.
    """
    axes = zero_axes(mesh, axis)
    if isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1:
        raise ValueError(f"chunks={chunks!r}: give the number of parts, at least 1.")

    def loss(model: Any, batch: Any) -> Any:
        features, table = model(batch["inputs"], logits=False)
        targets, parts = batch["targets"], _Parts(mesh, batch_spec(mesh, axes), chunks)
        ways = math.prod(mesh.shape[name] for name in parts.axes)
        if targets.size % (ways * chunks):
            raise ValueError(f"chunks={chunks}: {targets.size // ways} tokens on each device do not divide by it.")
        weights = jnp.ones(targets.shape, jnp.float32) if "weights" not in batch else batch["weights"]
        summed = _summed(features, table.astype(features.dtype), targets, weights.astype(jnp.float32), parts)
        if "weights" not in batch:
            return summed / targets.size
        total = weights.astype(jnp.float32).sum()
        return summed / jnp.where(total == 0, 1.0, total), {}, total

    return loss


@dataclasses.dataclass(frozen=True)
class _Parts:
    """How tokens lie over a mesh, and in how many chunks each device takes its own."""

    mesh: Mesh
    tokens: P
    chunks: int

    @property
    def axes(self) -> tuple[str, ...]:
        """Over which the tokens are split."""
        return tuple(name for entry in self.tokens for name in ((entry,) if isinstance(entry, str) else entry))

    @property
    def table(self) -> P:
        """How the table lies."""
        return P(TENSOR if TENSOR in self.mesh.axis_names else None, None)

    def run(self, fun: Any, out_specs: Any) -> Any:
        """`fun(features, table, targets, weights)` on each device's part."""
        specs = (self.tokens, self.table, self.tokens, self.tokens)
        return jax.shard_map(fun, mesh=self.mesh, in_specs=specs, out_specs=out_specs, check_vma=False)

    def split(self, *values: jax.Array) -> tuple[jax.Array, ...]:
        """A device's (batch, length, ...) as (chunks, tokens, ...)."""
        return tuple(value.reshape(self.chunks, -1, *value.shape[2:]) for value in values)

    def over_tensor(self, reduce: Any, value: jax.Array) -> jax.Array:
        """`value` reduced over the parts of the vocabulary."""
        return reduce(value, TENSOR) if TENSOR in self.mesh.axis_names else value

    def scores(self, features: jax.Array, table: jax.Array, targets: jax.Array) -> tuple[jax.Array, ...]:
        """Of some tokens: float32 logits of this part, their log of the sum of all, and where the target is."""
        logits = jnp.matmul(features, table.T, preferred_element_type=jnp.float32)
        first = jax.lax.axis_index(TENSOR) * table.shape[0] if TENSOR in self.mesh.axis_names else 0
        hit = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1) + first == targets[:, None]
        highest = self.over_tensor(jax.lax.pmax, logits.max(-1))
        total = self.over_tensor(jax.lax.psum, jnp.exp(logits - highest[:, None]).sum(-1))
        return logits, highest + jnp.log(total), hit


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _summed(features: jax.Array, table: jax.Array, targets: jax.Array, weights: jax.Array, parts: _Parts) -> jax.Array:
    """The weighted sum of all tokens' cross entropies."""

    def on_device(features: jax.Array, table: jax.Array, targets: jax.Array, weights: jax.Array) -> jax.Array:
        def chunk(total: jax.Array, part: Any) -> Any:
            features, targets, weights = part
            logits, logsum, hit = parts.scores(features, table, targets)
            picked = parts.over_tensor(jax.lax.psum, jnp.where(hit, logits, 0).sum(-1))
            return total + ((logsum - picked) * weights).sum(), None

        total, _ = jax.lax.scan(chunk, jnp.zeros(()), parts.split(features, targets, weights))
        return jax.lax.psum(total, parts.axes)

    return parts.run(on_device, P())(features, table, targets, weights)


def _forward(features: jax.Array, table: jax.Array, targets: jax.Array, weights: jax.Array, parts: _Parts) -> Any:
    return _summed(features, table, targets, weights, parts), (features, table, targets, weights)


def _backward(parts: _Parts, kept: Any, cotangent: jax.Array) -> Any:
    def on_device(features: jax.Array, table: jax.Array, targets: jax.Array, weights: jax.Array) -> Any:
        def chunk(total: jax.Array, part: Any) -> Any:
            features, targets, weights = part
            logits, logsum, hit = parts.scores(features, table, targets)
            wrong = (jnp.exp(logits - logsum[:, None]) - hit) * (weights * cotangent)[:, None]
            wrong = wrong.astype(features.dtype)
            total += jnp.matmul(wrong.T, features, preferred_element_type=jnp.float32)
            return total, jnp.matmul(wrong, table)

        total, back = jax.lax.scan(chunk, jnp.zeros(table.shape, jnp.float32),
                                   parts.split(features, targets, weights))
        back = parts.over_tensor(jax.lax.psum, back.reshape(features.shape))
        total = total.astype(table.dtype)
        return back, total[None] if outside else jax.lax.psum(total, parts.axes)

    # On a torus `partial.scatter_parts` sums and scatters it; elsewhere XLA makes a reduce-scatter of a sum in here.
    outside = on_torus(parts.mesh) and set(parts.axes) == set(parts.mesh.axis_names)
    table = P(parts.axes, *parts.table) if outside else parts.table
    features, total = parts.run(on_device, (parts.tokens, table))(*kept)
    return features, total.sum(0) if outside else total, None, jnp.zeros_like(kept[3])


_summed.defvjp(_forward, _backward)
