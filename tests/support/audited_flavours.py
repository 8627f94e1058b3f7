"""Clean train steps as other libraries' documentation writes them, for the audit: each in plain JAX, Flax, or ours."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import zero_jax
from models import gpt2
from support.audited_steps import HIDDEN, LAYERS, TOKENS, WIDTH, Step, mesh_of_8, scanned, shape
from support.targets import mesh_of

BF16 = jnp.bfloat16


def _mlp(x, up, down):
    return x + jax.nn.relu(x @ up) @ down


def one_device():
    """A plain step on one device, with SGD."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))

    def step(params, batch):
        value, grads = jax.value_and_grad(lambda p: (_mlp(batch, p["up"], p["down"]) ** 2).mean())(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    params = {"up": shape(mesh, (256, 1024)), "down": shape(mesh, (1024, 256))}
    return Step(jax.jit(step, donate_argnums=0), (params, shape(mesh, (512, 256))), {"target": None})


def _shard_mapped(stage):
    """ZeRO by hand in shard_map: each device has a row of every layer's weights, and of their moments."""
    mesh = mesh_of_8()
    flat = {"up": shape(mesh, (LAYERS, WIDTH, HIDDEN), P(None, "data")),
            "down": shape(mesh, (LAYERS, HIDDEN, WIDTH), P(None, "data"))}
    whole = {name: shape(mesh, leaf.shape) for name, leaf in flat.items()}
    optimizer = optax.adam(1e-3)
    moments = jax.tree.map(lambda leaf: shape(mesh, leaf.shape, P(None, "data") if leaf.ndim else P(), leaf.dtype),
                           jax.eval_shape(optimizer.init, flat))

    def gather(w):
        return jax.lax.all_gather(w.astype(BF16), "data", axis=0, tiled=True)

    def layer(x, w):
        w = jax.tree.map(gather, w) if stage == 3 else jax.tree.map(lambda each: each.astype(BF16), w)
        return _mlp(x, w["up"], w["down"]), None

    def local(params, opt_state, batch):
        def loss(params):
            x, _ = jax.lax.scan(jax.checkpoint(layer), batch, params)
            return (x.astype(jnp.float32) ** 2).mean()

        value, grads = jax.value_and_grad(loss)(params)
        shard = params
        if stage < 3:
            size, at = jax.lax.axis_size("data"), jax.lax.axis_index("data")
            grads = jax.tree.map(lambda g: jax.lax.psum_scatter(g, "data", scatter_dimension=1, tiled=True), grads)
            shard = jax.tree.map(lambda p: jax.lax.dynamic_slice_in_dim(p, at * (p.shape[1] // size),
                                                                        p.shape[1] // size, 1), params)
        updates, opt_state = optimizer.update(grads, opt_state, shard)
        shard = optax.apply_updates(shard, updates)
        if stage < 3:
            shard = jax.tree.map(lambda p: jax.lax.all_gather(p, "data", axis=1, tiled=True), shard)
        return shard, opt_state, jax.lax.pmean(value, "data")

    def spec(tree):
        return jax.tree.map(lambda leaf: leaf.sharding.spec, tree)

    params = flat if stage == 3 else whole
    step = jax.shard_map(local, mesh=mesh, in_specs=(spec(params), spec(moments), P("data")),
                         out_specs=(spec(params), spec(moments), P()), check_vma=False)
    return Step(jax.jit(step, donate_argnums=(0, 1)), (params, moments, shape(mesh, (TOKENS, WIDTH), P("data"), BF16)),
                {"target": "h100:8"})


def zero1_shard_map():
    """ZeRO-1 by hand."""
    return _shard_mapped(1)


def fsdp_shard_map():
    """FSDP by hand."""
    return _shard_mapped(3)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Mlp:
    """A module as Equinox has it: a pytree of its arrays, called as a function."""

    up: jax.Array
    down: jax.Array

    def __call__(self, x):
        return _mlp(x, self.up, self.down)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class TrainState:
    """As Flax's: step, params, opt_state."""

    step: jax.Array
    params: dict
    opt_state: tuple


def _unrolled(params, apply, names, *, state=False, optimizer=None):
    """FSDP by annotation of unrolled layers: cast in shards, gathered by a constraint, again in backward."""
    mesh = mesh_of_8()
    optimizer = optimizer or optax.adamw(1e-3)

    def cut(leaf):
        dims = [dim for dim in range(leaf.ndim) if leaf.ndim > 1 and leaf.shape[dim] % 8 == 0]
        return shape(mesh, leaf.shape, P(*["data" if dim == dims[0] else None for dim in range(leaf.ndim)])
                     if dims else P(), leaf.dtype)

    params = jax.tree.map(cut, params)
    opt_state = jax.tree.map(cut, jax.eval_shape(optimizer.init, params))

    def gather(w):
        own = jax.lax.with_sharding_constraint(w.astype(BF16), cut(w).sharding)
        return jax.lax.with_sharding_constraint(own, NamedSharding(mesh, P()))

    def layer(function):
        def gathered(w, x):
            x = function(jax.tree.map(gather, w), x)
            return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("data")))
        return jax.checkpoint(gathered, prevent_cse=True)

    def update(params, opt_state, x):
        value, grads = jax.value_and_grad(lambda p: (apply(p, x, layer).astype(jnp.float32) ** 2).mean())(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    data = shape(mesh, (TOKENS, WIDTH), P("data"), BF16)
    if state:
        def step(state, batch):
            params, opt_state, value = update(state.params, state.opt_state, batch)
            return TrainState(state.step + 1, params, opt_state), {"loss": value}

        whole = TrainState(shape(mesh, (), P(), jnp.int32), params, opt_state)
        return Step(jax.jit(step, donate_argnums=0), (whole, data), {"target": "h100:8"})
    scope = {"update": update}
    exec(f"def step({', '.join(names)}): return update({', '.join(names)})", scope)
    return Step(jax.jit(scope["step"], donate_argnums=(0, 1)), (params, opt_state, data), {"target": "h100:8"})


def _float(*dims):
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def equinox_style():
    """A list of modules that are pytrees, `make_step(model, opt_state, x)`."""
    layers = [Mlp(_float(WIDTH, HIDDEN), _float(HIDDEN, WIDTH)) for _ in range(LAYERS)]

    def apply(model, x, layer):
        for each in model:
            x = layer(lambda w, x: w(x))(each, x)
        return x

    return _unrolled(layers, apply, ("model", "opt_state", "x"))


def _haiku(**options):
    params = {f"mlp/~/linear_{n}": {"w": _float(*dims), "b": _float(dims[1])}
              for n, dims in enumerate([(WIDTH, HIDDEN), (HIDDEN, WIDTH)] * LAYERS)}

    def apply(params, x, layer):
        for name in sorted(params, key=lambda each: int(each.rpartition("_")[2])):
            x = layer(lambda w, x: jax.nn.relu(x @ w["w"] + w["b"][None]))(params[name], x)
        return x

    return _unrolled(params, apply, ("params", "opt_state", "batch"), **options)


def haiku_style():
    """Parameters as two levels of dicts, with biases that are whole."""
    return _haiku()


def train_state():
    """One argument for all state, as Flax's TrainState."""
    return _haiku(state=True)


def momentum():
    """SGD with momentum, in a TrainState."""
    return _haiku(state=True, optimizer=optax.sgd(0.1, momentum=0.9))


def nnx_recipe():
    """Flax's NNX modules, split and merged within the step."""
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(WIDTH, HIDDEN, use_bias=False, rngs=rngs)
            self.down = nnx.Linear(HIDDEN, WIDTH, use_bias=False, rngs=rngs)

        def __call__(self, x):
            return x + self.down(jax.nn.relu(self.up(x)))

    graph, one = nnx.split(nnx.eval_shape(lambda: Block(nnx.Rngs(0))), nnx.Param)[:2]
    params = [one] * LAYERS

    def apply(params, x, layer):
        for each in params:
            x = layer(lambda w, x: nnx.merge(graph, w)(x))(each, x)
        return x

    return _unrolled(params, apply, ("params", "opt_state", "batch"))


def _ours(stage):
    config = gpt2.Config(num_layers=2, width=2048, num_heads=16, vocab_size=8192, max_length=1024,
                         remat=True)
    step = zero_jax.make_zero_train_step(
        gpt2.build(config), stage, optimizer=optax.adam(1e-3), precision="bf16", mesh=mesh_of("h100:8"))
    return Step(step, ({"inputs": jax.ShapeDtypeStruct((128, 1024), jnp.int32),
                        "targets": jax.ShapeDtypeStruct((128, 1024), jnp.int32)},), {})


CLEAN = {
    "scan": scanned, "scan_unnamed": lambda: scanned(names=("a", "b")), "tensor": lambda: scanned(tensor=2),
    "a100": lambda: scanned(target="a100:8"), "cpu": lambda: scanned(target=None),
    "one_device": one_device, "zero1_shard_map": zero1_shard_map, "fsdp_shard_map": fsdp_shard_map,
    "equinox": equinox_style, "haiku": haiku_style, "train_state": train_state, "momentum": momentum,
    "nnx": nnx_recipe, "ours_1": lambda: _ours(1), "ours_2": lambda: _ours(2), "ours_3": lambda: _ours(3),
}
"""Name -> a function that makes a step in which nothing is to be found."""
