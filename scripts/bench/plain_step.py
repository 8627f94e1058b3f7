"""The train step that benchmarks compare with: Flax and Optax alone, as `jax.jit` takes it."""

import jax
import jax.numpy as jnp
import optax


def plain_step(model, optimizer, dtype=None):
    """(state, batch) -> (state, metrics); state: (parameters, optimizer state) of a Linen language model.

    dtype: of the parameters that the model computes with; None: theirs.
    """
    def step(state, batch):
        params, opt_state = state

        def loss_of(params):
            computed = jax.tree.map(lambda leaf: leaf.astype(dtype), params) if dtype else params
            logits = model.apply({"params": computed}, batch["inputs"]).astype(jnp.float32)
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss, "grad_norm": optax.tree.norm(grads)}

    return step
