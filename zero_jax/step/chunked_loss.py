"""Next-token cross entropy without whole logits: in chunks of tokens, on each device's shard of batch and vocabulary.

Logits are the largest activation of a language model, and their gradient is as large: in chunks neither exists whole
(the paper's C_B, section 6.2). The gradient of the output layer is summed over chunks on each device and reduced once.
The partitioner would reduce it in every iteration of the loop, so the loop is inside a `jax.shard_map`.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from zero_jax.arguments import whole
from zero_jax.errors import UsageError
from zero_jax.sharding.mesh_axes import AxisRoles, MeshAxes
from zero_jax.sharding.partition import names_of
from zero_jax.step.losses import call_model
from zero_jax.typing import AxisNames, Batch, Loss


def chunked_next_token_loss(mesh: Mesh, chunks: int, *, axis: Any = None, axis_roles: AxisRoles | None = None) -> Loss:
    """`next_token_loss` that computes logits in `chunks` parts, forward and again backward, on the step's `mesh`.

    It calls `model(inputs, logits=False)`, which returns the features (batch, length, width) and the output layer's
    table (vocabulary, width), split over `tensor` where the mesh has that axis. axis, axis_roles: as in
    `Parallelism`. Raises ValueError where a device's tokens do not divide into so many chunks.
    """
    axes = MeshAxes.of(mesh, axis, axis_roles)
    return _loss_on(axes, whole("chunks", chunks, 1))


def _loss_on(axes: MeshAxes, chunks: int) -> Loss:
    def loss(model: Any, batch: Batch) -> Any:
        features, table = call_model(model, batch, logits=False)
        targets, chunking = batch["targets"], _Chunking(axes, chunks)
        num_shards = axes.size(*chunking.token_axes)
        if targets.size % (num_shards * chunks):
            raise UsageError(
                f"chunks={chunks}: {targets.size // num_shards} tokens on each device do not divide by it.")
        weights = jnp.ones(targets.shape, jnp.float32) if "weights" not in batch else batch["weights"]
        loss_sum: Any = _loss_sum(
            features, table.astype(features.dtype), targets, weights.astype(jnp.float32), chunking)
        if "weights" not in batch:
            return loss_sum / targets.size
        total = weights.astype(jnp.float32).sum()
        return loss_sum / jnp.where(total == 0, 1.0, total), {}, total

    of_step: Any = loss
    of_step.of_slices = lambda: _loss_on(axes.of_slices(), chunks)
    return of_step


@dataclasses.dataclass(frozen=True)
class _Chunking:
    """How tokens and the output layer's table are sharded, and into how many chunks each device splits its tokens."""

    axes: MeshAxes
    chunks: int

    @property
    def token_axes(self) -> AxisNames:
        """The mesh axes over which the tokens are split."""
        return tuple(names_of(self.axes.batch_spec))

    @property
    def table_spec(self) -> P:
        """The spec of the table, (vocabulary, width)."""
        return P(self.axes.tensor if self.splits_vocabulary else None, None)

    @property
    def splits_vocabulary(self) -> bool:
        """Whether each device has a part of the table's rows."""
        return self.axes.tensor in self.axes.mesh.axis_names

    def run(self, fun: Any, out_specs: Any) -> Any:
        """`fun(features, table, targets, weights)` on each device's part."""
        tokens = self.axes.batch_spec
        return jax.shard_map(fun, mesh=self.axes.mesh, in_specs=(tokens, self.table_spec, tokens, tokens),
                             out_specs=out_specs, check_vma=False)

    def split(self, *values: jax.Array) -> tuple[jax.Array, ...]:
        """A device's (batch, length, ...) as (chunks, tokens, ...)."""
        return tuple(value.reshape(self.chunks, -1, *value.shape[2:]) for value in values)

    def over_vocabulary(self, reduce: Any, value: jax.Array) -> jax.Array:
        """`value` reduced over the parts of the vocabulary."""
        return reduce(value, self.axes.tensor) if self.splits_vocabulary else value

    def scores(self, features: jax.Array, table: jax.Array, targets: jax.Array) -> tuple[jax.Array, ...]:
        """Of some tokens: float32 logits of this part, their log-sum-exp over all parts, and where the target is."""
        logits = jnp.matmul(features, table.T, preferred_element_type=jnp.float32)
        first = jax.lax.axis_index(self.axes.tensor) * table.shape[0] if self.splits_vocabulary else 0
        is_target = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1) + first == targets[:, None]
        highest = self.over_vocabulary(jax.lax.pmax, logits.max(-1))
        total = self.over_vocabulary(jax.lax.psum, jnp.exp(logits - highest[:, None]).sum(-1))
        return logits, highest + jnp.log(total), is_target


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _loss_sum(features: jax.Array, table: jax.Array, targets: jax.Array, weights: jax.Array,
              chunking: _Chunking) -> jax.Array:
    """The weighted sum of all tokens' cross entropies."""

    def on_device(features: jax.Array, table: jax.Array, targets: jax.Array, weights: jax.Array) -> jax.Array:
        def chunk(total: jax.Array, part: Any) -> Any:
            features, targets, weights = part
            logits, logsum, is_target = chunking.scores(features, table, targets)
            target_logit = chunking.over_vocabulary(jax.lax.psum, jnp.where(is_target, logits, 0).sum(-1))
            return total + ((logsum - target_logit) * weights).sum(), None

        total, _ = jax.lax.scan(chunk, jnp.zeros(()), chunking.split(features, targets, weights))
        return jax.lax.psum(total, chunking.token_axes)

    return chunking.run(on_device, P())(features, table, targets, weights)


def _forward(features: jax.Array, table: jax.Array, targets: jax.Array, weights: jax.Array, chunking: _Chunking) -> Any:
    return _loss_sum(features, table, targets, weights, chunking), (features, table, targets, weights)


def _backward(chunking: _Chunking, residuals: Any, cotangent: jax.Array) -> Any:
    axes, token_axes = chunking.axes, chunking.token_axes

    def on_device(features: jax.Array, table: jax.Array, targets: jax.Array, weights: jax.Array) -> Any:
        def chunk(table_grad: jax.Array, part: Any) -> Any:
            features, targets, weights = part
            logits, logsum, is_target = chunking.scores(features, table, targets)
            logits_grad = (jnp.exp(logits - logsum[:, None]) - is_target) * (weights * cotangent)[:, None]
            logits_grad = logits_grad.astype(features.dtype)
            table_grad += jnp.matmul(logits_grad.T, features, preferred_element_type=jnp.float32)
            return table_grad, jnp.matmul(logits_grad, table)

        table_grad, features_grad = jax.lax.scan(chunk, jnp.zeros(table.shape, jnp.float32),
                                                 chunking.split(features, targets, weights))
        features_grad = chunking.over_vocabulary(jax.lax.psum, features_grad.reshape(features.shape))
        table_grad = table_grad.astype(table.dtype)
        return features_grad, table_grad[None] if summed_outside else jax.lax.psum(table_grad, token_axes)

    # Where the sum is not in here, the local view scatters it at once. Beside `tensor` on GPUs XLA makes a
    # reduce-scatter of a sum in here.
    summed_outside = set(token_axes) == set(axes.step_names) and (axes.is_tpu or not axes.tensor_enabled)
    table_spec = P(token_axes, *chunking.table_spec) if summed_outside else chunking.table_spec
    features_grad, table_grad = chunking.run(on_device, (axes.batch_spec, table_spec))(*residuals)
    weights = residuals[3]
    return features_grad, table_grad.sum(0) if summed_outside else table_grad, None, jnp.zeros_like(weights)


_loss_sum.defvjp(_forward, _backward)
