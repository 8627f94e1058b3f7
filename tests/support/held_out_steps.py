"""Train steps for the audit that its thresholds were not chosen by: a 2-D mesh by hand, and ZeRO-1 of a conv net."""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from support.audited_steps import Step, mesh_of_8, shape

LAYERS, WIDTH, HIDDEN, ROWS = 6, 3072, 12288, 4 * 8192
DATA = P("data")


def two_axes(*, scatter=True, donate=(0, 1, 2)):
    """FSDP over 4 and Megatron's tensor parallelism over 2 in one shard_map; Lion, and an average of the weights.

    scatter=False: gradients are summed whole, of which each device takes its rows.
    """
    mesh, optimizer = mesh_of_8(("data", 4), ("model", 2)), optax.lion(1e-4)
    specs = {"wi": P(None, "data", "model"), "wo": P(None, "model", "data")}
    params = {"wi": shape(mesh, (LAYERS, WIDTH, HIDDEN), specs["wi"]),
              "wo": shape(mesh, (LAYERS, HIDDEN, WIDTH), specs["wo"])}
    state = jax.tree_util.tree_map_with_path(
        lambda path, leaf: shape(mesh, leaf.shape, specs[path[-1].key] if leaf.ndim else P(), leaf.dtype),
        jax.eval_shape(optimizer.init, params))

    @jax.custom_vjp
    def whole_rows(w):
        return jax.lax.all_gather(w, "data", axis=0, tiled=True)

    def summed(_, grad):
        total, rows = jax.lax.psum(grad, "data"), grad.shape[0] // 4
        return jax.lax.dynamic_slice_in_dim(total, jax.lax.axis_index("data") * rows, rows, 0),

    whole_rows.defvjp(lambda w: (whole_rows(w), None), summed)

    def gathered(w, dim):
        w = w.astype(jnp.bfloat16)
        if scatter:
            return jax.lax.all_gather(w, "data", axis=dim, tiled=True)
        return whole_rows(w) if dim == 0 else whole_rows(w.T).T

    def layer(x, w):
        h = jax.nn.gelu(x @ gathered(w["wi"], 0))
        return x + jax.lax.psum(h @ gathered(w["wo"], 1), "model"), None

    def local(params, ema, opt_state, batch):
        def loss(params):
            x, _ = jax.lax.scan(jax.checkpoint(layer), batch, params)
            return (x.astype(jnp.float32) ** 2).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        ema = jax.tree.map(lambda old, new: 0.999 * old + 0.001 * new, ema, params)
        return params, ema, opt_state, jax.lax.pmean(value, ("data", "model"))

    at = jax.tree.map(lambda leaf: leaf.sharding.spec, (params, params, state))
    step = jax.shard_map(local, mesh=mesh, in_specs=(*at, P("data")), out_specs=(*at, P()), check_vma=False)
    batch = shape(mesh, (ROWS, WIDTH), P("data"), jnp.bfloat16)
    return Step(jax.jit(step, donate_argnums=donate), (params, params, state, batch), {"target": "h100:8"})


def conv_net(*, moments=DATA, batch=DATA):
    """ZeRO-1 by annotation of a conv net with batch norm: whole weights, momentum in shards.

    moments: where the momentum is; P() is a flag that does nothing.
    """
    mesh, optimizer = mesh_of_8(), optax.sgd(0.1, momentum=0.9, nesterov=True)
    channels = [64, 256, 512, 1024, 2048]
    params = [{"kernel": shape(mesh, (3, 3, one, other)), "scale": shape(mesh, (other,)), "bias": shape(mesh, (other,))}
              for one, other in zip(channels, channels[1:], strict=False)]
    stats = [{"mean": leaf["scale"], "var": leaf["scale"]} for leaf in params]

    def kept(leaf):
        return NamedSharding(mesh, P(None, None, *moments) if leaf.ndim == 4 else P())

    opt_state = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=kept(leaf)),
                             jax.eval_shape(optimizer.init, params))

    def forward(params, stats, x):
        new = []
        for layer, old in zip(params, stats, strict=True):
            x = jax.lax.conv_general_dilated(x, layer["kernel"].astype(jnp.bfloat16), (1, 1), "SAME",
                                             dimension_numbers=("NHWC", "HWIO", "NHWC"))
            mean, var = jnp.mean(x.astype(jnp.float32), (0, 1, 2)), jnp.var(x.astype(jnp.float32), (0, 1, 2))
            new.append({"mean": 0.9 * old["mean"] + 0.1 * mean, "var": 0.9 * old["var"] + 0.1 * var})
            x = (x - mean) * jax.lax.rsqrt(var + 1e-5) * layer["scale"] + layer["bias"]
            x = jax.nn.relu(x).astype(jnp.bfloat16)
        return (x.astype(jnp.float32).mean((1, 2)) ** 2).mean(), new

    def train_step(params, batch_stats, opt_state, images):
        (value, stats), grads = jax.value_and_grad(forward, has_aux=True)(params, batch_stats, images)
        grads = jax.tree.map(lambda leaf: jax.lax.with_sharding_constraint(leaf, kept(leaf)), grads)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        opt_state = jax.tree.map(lambda leaf: jax.lax.with_sharding_constraint(leaf, kept(leaf)), opt_state)
        params = jax.tree.map(lambda leaf: jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, P())),
                              optax.apply_updates(params, updates))
        return params, stats, opt_state, value

    images = shape(mesh, (8 * 32, 28, 28, 64), batch, jnp.bfloat16)
    return Step(jax.jit(train_step, donate_argnums=(0, 1, 2)), (params, stats, opt_state, images),
                {"target": "h100:8"})
