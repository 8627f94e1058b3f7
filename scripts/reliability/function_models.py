"""Models of Equinox and Haiku as functions of their parameters, at stage 3, beside a plain loop on one device.

    pip install equinox dm-haiku
    python scripts/reliability/function_models.py

A row: parameters, the largest difference of a loss to the plain loop's, leaves that a loop over layers gathers one by
one, and bytes sent on 8 simulated devices over the paper's ideal (XLA:CPU makes one gather of forward's and backward's
outside of loops: 0.667). Status 1 where numbers differ.
"""

import sys

import zero_jax

zero_jax.simulate_devices(8)

import equinox as eqx  # noqa: E402
import haiku as hk  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

WIDTH, ROWS, STEPS = 64, 32, 3
OPTIMIZER = optax.adamw(1e-2)
KEY = jax.random.key(0)


class Stack(eqx.Module):
    """Layers that `eqx.filter_vmap` makes and a `jax.lax.scan` runs over, as Equinox's documentation stacks them."""

    layers: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    out: eqx.nn.Linear

    def __init__(self, key):
        self.layers = eqx.filter_vmap(lambda key: eqx.nn.Linear(WIDTH, WIDTH, key=key))(jax.random.split(key, 4))
        self.norm, self.out = eqx.nn.LayerNorm(WIDTH), eqx.nn.Linear(WIDTH, 1, key=key)

    def __call__(self, x):
        arrays, static = eqx.partition(self.layers, eqx.is_array)
        x, _ = jax.lax.scan(lambda x, layer: (x + jnp.tanh(eqx.combine(layer, static)(x)), None), x, arrays)
        return self.out(self.norm(x))


class Attention(eqx.Module):
    """Tokens through an embedding and Equinox's attention."""

    embed: eqx.nn.Embedding
    attention: eqx.nn.MultiheadAttention
    out: eqx.nn.Linear

    def __init__(self, key):
        self.embed = eqx.nn.Embedding(64, WIDTH, key=key)
        self.attention = eqx.nn.MultiheadAttention(4, WIDTH, key=key)
        self.out = eqx.nn.Linear(WIDTH, 1, key=key)

    def __call__(self, x):
        tokens = jax.vmap(self.embed)((jnp.abs(x[:16]) * 20).astype(jnp.int32) % 64)
        return self.out(self.attention(tokens, tokens, tokens).mean(0))


def of_equinox(model):
    """(Its parameters, its loss as a function of them)."""
    arrays, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(arrays, batch):
        return jnp.mean((jax.vmap(eqx.combine(arrays, static))(batch["x"]) - batch["y"]) ** 2)

    return arrays, loss


def of_haiku(forward):
    """As `of_equinox`."""
    transformed = hk.without_apply_rng(hk.transform(forward))
    params = transformed.init(KEY, jnp.zeros((1, WIDTH)))

    def loss(params, batch):
        return jnp.mean((transformed.apply(params, batch["x"]) - batch["y"]) ** 2)

    return params, loss


def haiku_stack(x):
    """`hk.experimental.layer_stack` of four layers."""
    @hk.experimental.layer_stack(4)
    def layer(x):
        return x + jnp.tanh(hk.Linear(WIDTH)(x))

    return hk.Linear(1)(layer(x))


MODELS = {
    "equinox MLP": lambda: of_equinox(eqx.nn.MLP(WIDTH, 1, 4 * WIDTH, 2, key=KEY)),
    "equinox stacked layers": lambda: of_equinox(Stack(KEY)),
    "equinox attention": lambda: of_equinox(Attention(KEY)),
    "haiku MLP": lambda: of_haiku(lambda x: hk.nets.MLP([4 * WIDTH, WIDTH, 1])(x)),
    "haiku layer_stack": lambda: of_haiku(haiku_stack),
}


def main() -> int:
    """0 where all models have the numbers of their plain loop."""
    rng, worst = np.random.default_rng(0), 0.0
    batches = [{"x": rng.normal(size=(ROWS, WIDTH)).astype(np.float32), "y": np.ones((ROWS, 1), np.float32)}
               for _ in range(STEPS)]
    print("| model | parameters | loss off by | gathered in loops | sent over ideal |\n| --- | --- | --- | --- | --- |")
    for name, make in MODELS.items():
        params, loss = make()
        plain, opt_state, losses = params, OPTIMIZER.init(params), []
        for batch in batches:
            value, grads = jax.jit(jax.value_and_grad(loss))(plain, batch)
            updates, opt_state = OPTIMIZER.update(grads, opt_state, plain)
            plain, losses = optax.apply_updates(plain, updates), [*losses, float(value)]
        step = zero_jax.make_zero_train_step(params=params, loss=loss, stage=3, optimizer=OPTIMIZER)
        state, found = step.init(KEY, batches[0]), []
        for batch in batches:
            state, metrics = step(state, batch)
            found.append(float(metrics["loss"]))
        off = max(abs(a - b) / abs(b) for a, b in zip(found, losses, strict=True))
        worst, layout = max(worst, off), step.layout()
        report = step.verify(batches[0])
        in_loops = sum(bool(read.stacked) for read in layout.reads.values())
        ideal = 3 * 4 * layout.num_params * 7 / 8
        print(f"| {name} | {layout.num_params:,} | {off:.0e} | {in_loops} of {len(layout.reads)} "
              f"| {report.communication_bytes / ideal:.3f} |")
    return int(worst > 1e-5)


if __name__ == "__main__":
    sys.exit(main())
