"""LoRA written by hand in JAX and Optax on one device: the oracle of fine-tuning. It imports nothing of the library."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from support.oracle import ADAMW, next_token


def merged_by_hand(params, scale):
    """The model's own parameters: each (stack of) kernel W as W + scale * A B."""
    if not isinstance(params, dict):
        return params
    out = {}
    for key, value in params.items():
        if str(key).endswith(("_lora_a", "_lora_b")):
            continue
        if f"{key}_lora_a" in params:
            a, b = params[f"{key}_lora_a"], params[f"{key}_lora_b"]
            value = value + scale * jnp.einsum("...ir,...ro->...io", a, b, precision="highest")
        out[key] = merged_by_hand(value, scale)
    return out


def plain_lora(apply, start, batches, *, scale, trainable=(), optimizer=ADAMW):
    """Losses, gradient norms and parameters of a loop on one device. apply: (the model's params, batch) -> loss.

    scale: of A B; None: `apply` takes adapters and base as they are.
    """
    trained = {name for name in start if name.endswith(("_lora_a", "_lora_b")) or name in trainable}
    opt_state = optimizer.init({name: start[name] for name in trained})
    params, losses, norms = dict(start), [], []

    @jax.jit
    def step(params, opt_state, batch):
        def loss_of(adapters):
            tree = nested({**params, **adapters})
            return apply(tree if scale is None else merged_by_hand(tree, scale), batch)

        adapters = {name: params[name] for name in trained}
        loss, grads = jax.value_and_grad(loss_of)(adapters)
        updates, opt_state = optimizer.update(grads, opt_state, adapters)
        return {**params, **optax.apply_updates(adapters, updates)}, opt_state, loss, optax.tree.norm(grads)

    for batch in batches:
        params, opt_state, loss, norm = step(params, opt_state, batch)
        losses.append(float(loss))
        norms.append(float(norm))
    return np.array(losses), np.array(norms), {name: np.asarray(leaf) for name, leaf in params.items()}


def nested(flat):
    tree = {}
    for name, leaf in flat.items():
        *parents, last = name.split("/")
        functools.reduce(lambda node, key: node.setdefault(key, {}), parents, tree)[last] = leaf
    return tree


def applied(model):
    """(The model's params as a tree of texts, batch) -> loss, by Flax alone."""
    if isinstance(model, nn.Module):
        return lambda params, batch: next_token(model.bind({"params": params}), batch)
    graphdef, state, rest = nnx.split(model(rngs=nnx.Rngs(0)), nnx.Param, ...)

    def apply(params, batch):
        flat = {"/".join(map(str, path)): path for path, _ in nnx.to_flat_state(state)}
        values = dict(nnx.to_flat_state(state))
        for name, leaf in by_path(params):
            values[flat[name]] = values[flat[name]].replace(leaf)
        return next_token(nnx.merge(graphdef, nnx.from_flat_state([*values.items()]), rest), batch)

    return apply


def by_path(tree, prefix=""):
    for key, value in tree.items():
        yield from by_path(value, f"{prefix}{key}/") if isinstance(value, dict) else [(f"{prefix}{key}", value)]
