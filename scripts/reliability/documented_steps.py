"""Train steps in Flax as MaxText's and EasyLM's documentation writes them, in our own words: neither is installed.

MaxText needs very many packages, and EasyLM has no release that the package index has. What is here is what their steps
have in common with them: where parameters are stored, what is constrained, cast, checkpointed and scanned. Each
argument but the sizes is a fault where it is not the default (tests/auditing/test_held_out.py).
"""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

VOCAB, WIDTH, HIDDEN, HEADS, LAYERS = 16384, 2048, 8192, 16, 4
BATCH, LENGTH = 64, 2048
DATA = P(("dp", "fsdp"))
"""EasyLM's spec of the batch."""


def mesh_of(sizes):
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(jax.sharding.AxisType.Auto,) * len(sizes))


def attention(q, k, v):
    rows, length, width = q.shape
    q, k, v = (each.reshape(rows, length, HEADS, width // HEADS) for each in (q, k, v))
    return jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(rows, length, width)


def cross_entropy(logits, targets):
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets).mean()


def tokens(mesh, spec):
    one = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32, sharding=NamedSharding(mesh, spec))
    return {"inputs": one, "targets": one}


# MaxText: parameters have logical axes, which rules give mesh axes; activations are constrained by theirs; the layers
# are one nn.scan of nn.remat; kernels are cast to bf16 where they are used.

MAXTEXT_RULES = (
    ("activation_batch", ("data", "fsdp")), ("activation_length", None), ("activation_embed", None),
    ("activation_mlp", "tensor"), ("activation_vocab", "tensor"),
    ("vocab", "tensor"), ("embed", "fsdp"), ("mlp", "tensor"), ("heads", "tensor"), ("layers", None))


def _maxtext_dense(features, axes, name):
    return nn.Dense(features, use_bias=False, dtype=jnp.bfloat16, name=name, kernel_init=nn.with_logical_partitioning(
        nn.initializers.lecun_normal(), axes))


class _MaxTextLayer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        def constrained(x, last="activation_embed"):
            return nn.with_logical_constraint(x, ("activation_batch", "activation_length", last))

        def norm(x, name):
            return nn.RMSNorm(dtype=jnp.bfloat16, name=name, scale_init=nn.with_logical_partitioning(
                nn.initializers.ones, ("embed",)))(x)

        x = constrained(x)
        h = constrained(norm(x, "pre_attention_norm"))
        q, k, v = (_maxtext_dense(WIDTH, ("embed", "heads"), name)(h) for name in ("query", "key", "value"))
        x = x + constrained(_maxtext_dense(WIDTH, ("heads", "embed"), "out")(attention(q, k, v)))
        h = constrained(norm(x, "pre_mlp_norm"))
        gate, up = (_maxtext_dense(HIDDEN, ("embed", "mlp"), name)(h) for name in ("wi_0", "wi_1"))
        h = constrained(nn.silu(gate) * up, "activation_mlp")
        return constrained(x + constrained(_maxtext_dense(WIDTH, ("mlp", "embed"), "wo")(h))), None


class _MaxText(nn.Module):
    remat: bool

    @nn.compact
    def __call__(self, inputs):
        table = self.param("token_embedder", nn.with_logical_partitioning(
            nn.initializers.normal(0.02), ("vocab", "embed")), (VOCAB, WIDTH), jnp.float32)
        x = nn.with_logical_constraint(table.astype(jnp.bfloat16)[inputs], (
            "activation_batch", "activation_length", "activation_embed"))
        layer = nn.remat(_MaxTextLayer, prevent_cse=False) if self.remat else _MaxTextLayer
        x, _ = nn.scan(layer, length=LAYERS, variable_axes={"params": 0}, split_rngs={"params": True},
                       metadata_params={nn.PARTITION_NAME: "layers"})(name="layers")(x, None)
        logits = _maxtext_dense(VOCAB, ("embed", "vocab"), "logits_dense")(x)
        return nn.with_logical_constraint(logits, ("activation_batch", "activation_length", "activation_vocab"))


def maxtext(rules=MAXTEXT_RULES, remat=True, microbatches=1, donate=(0,)):
    """MaxText's train step of a decoder over `fsdp`, with gradient accumulation where microbatches > 1."""
    mesh, model = mesh_of({"data": 1, "fsdp": 8, "tensor": 1}), _MaxText(remat)
    with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
        def create():
            return TrainState.create(apply_fn=model.apply, tx=optax.adamw(1e-3), params=model.init(
                jax.random.key(0), jnp.zeros((8, 128), jnp.int32))["params"])

        abstract = jax.eval_shape(create)
        shardings = nn.logical_to_mesh_sharding(nn.get_partition_spec(abstract), mesh, rules)
    state = jax.tree.map(lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at),
                         nn.unbox(abstract), shardings)

    def train_step(state, batch):
        with nn.logical_axis_rules(rules):
            def loss(params, batch):
                return cross_entropy(model.apply({"params": params}, batch["inputs"]), batch["targets"])

            if microbatches == 1:
                value, grads = jax.value_and_grad(loss)(state.params, batch)
            else:
                def add(total, one):
                    value, grads = jax.value_and_grad(loss)(state.params, one)
                    return jax.tree.map(jnp.add, total, grads), value

                parts = jax.tree.map(lambda leaf: nn.with_logical_constraint(
                    leaf.reshape(-1, microbatches, LENGTH).swapaxes(0, 1), (None, "activation_batch", None)), batch)
                grads, values = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, state.params), parts)
                value, grads = values.mean(), jax.tree.map(lambda leaf: leaf / microbatches, grads)
            return state.apply_gradients(grads=grads), {"learning/loss": value}

    jitted = jax.jit(train_step, donate_argnums=donate, out_shardings=(shardings, None))
    return jitted, (state, tokens(mesh, P(("data", "fsdp")))), {"mesh": mesh}


# EasyLM: modules know nothing of shardings; rules by regular expressions give each parameter its spec, the state is
# constrained by them in the step, the batch over (dp, fsdp); blocks are unrolled, each in nn.remat.

EASYLM_RULES = (
    ("wte/embedding", P("mp", "fsdp")),
    ("attention/(wq|wk|wv)/kernel", P("fsdp", "mp")), ("attention/wo/kernel", P("mp", "fsdp")),
    ("feed_forward/(w1|w3)/kernel", P("fsdp", "mp")), ("feed_forward/w2/kernel", P("mp", "fsdp")),
    ("lm_head/kernel", P("fsdp", "mp")), (".*", P()))


class _Attention(nn.Module):
    @nn.compact
    def __call__(self, x):
        q, k, v = (nn.Dense(WIDTH, use_bias=False, dtype=jnp.bfloat16, name=name)(x) for name in ("wq", "wk", "wv"))
        q, k, v = (jax.lax.with_sharding_constraint(each, P(("dp", "fsdp"), None, "mp")) for each in (q, k, v))
        return nn.Dense(WIDTH, use_bias=False, dtype=jnp.bfloat16, name="wo")(attention(q, k, v))


class _FeedForward(nn.Module):
    @nn.compact
    def __call__(self, x):
        gate, up = (nn.Dense(HIDDEN, use_bias=False, dtype=jnp.bfloat16, name=name)(x) for name in ("w1", "w3"))
        return nn.Dense(WIDTH, use_bias=False, dtype=jnp.bfloat16, name="w2")(nn.silu(gate) * up)


class _Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = x + _Attention(name="attention")(nn.RMSNorm(dtype=jnp.bfloat16, name="attention_norm")(x))
        return x + _FeedForward(name="feed_forward")(nn.RMSNorm(dtype=jnp.bfloat16, name="ffn_norm")(x))


class _EasyLM(nn.Module):
    remat: bool

    @nn.compact
    def __call__(self, inputs):
        x = nn.Embed(VOCAB, WIDTH, dtype=jnp.bfloat16, name="wte")(inputs)
        for number in range(LAYERS):
            x = (nn.remat(_Block) if self.remat else _Block)(name=f"h_{number}")(x)
        return nn.Dense(VOCAB, use_bias=False, dtype=jnp.bfloat16, name="lm_head")(nn.RMSNorm(name="ln_f")(x))


def easylm(rules=EASYLM_RULES, remat=True, batch=DATA, donate=(0, 1)):
    """EasyLM's train step of its LLaMA over `fsdp`."""
    mesh, model = mesh_of({"dp": 1, "fsdp": 8, "mp": 1}), _EasyLM(remat)

    def spec(path, leaf):
        name = "/".join(str(getattr(key, "key", getattr(key, "name", key))) for key in path)
        return next(spec for rule, spec in rules if re.search(rule, name)) if leaf.ndim else P()

    def create(rng):
        return TrainState.create(apply_fn=model.apply, tx=optax.adamw(1e-3, b2=0.95), params=model.init(
            rng, jnp.zeros((8, 128), jnp.int32))["params"])

    with jax.set_mesh(mesh):
        abstract = jax.eval_shape(create, jax.random.key(0))
    specs = jax.tree_util.tree_map_with_path(spec, abstract)
    state = jax.tree.map(lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(
        mesh, at)), abstract, specs)
    rng = jax.ShapeDtypeStruct((2,), jnp.uint32, sharding=NamedSharding(mesh, P()))

    def train_step(train_state, rng, batch_):
        rng, _ = jax.random.split(jax.random.wrap_key_data(rng))
        batch_ = jax.lax.with_sharding_constraint(batch_, batch)

        def loss_and_accuracy(params):
            logits = train_state.apply_fn({"params": params}, batch_["inputs"])
            return cross_entropy(logits, batch_["targets"]), (logits.argmax(-1) == batch_["targets"]).mean()

        (loss, accuracy), grads = jax.value_and_grad(loss_and_accuracy, has_aux=True)(train_state.params)
        train_state = train_state.apply_gradients(grads=grads)
        return train_state, jax.random.key_data(rng), {"loss": loss, "accuracy": accuracy,
                                                       "gradient_norm": optax.tree.norm(grads)}

    out = jax.tree.map(lambda leaf: leaf.sharding, (state, rng))
    jitted = jax.jit(train_step, donate_argnums=donate, out_shardings=(*out, None))
    return jitted, (state, rng, tokens(mesh, batch)), {"mesh": mesh}
