"""Audits of train steps of other libraries, as their documentation writes them, for 8 H100: docs/guide/audits.md.

    pip install equinox dm-haiku keras penzai google-tunix levanter # each library is optional, but for Flax
    python scripts/reliability/audited_libraries.py --page docs/guide/audits.md --out .

Each step is compiled in a process of its own. The steps are as large as a layer or four, with 16,384 tokens or rows a
device, so that compute hides what is sent where it can. Of Tunix, whose constraints ask for the platform, and leave out
a CPU, there are two: as it is on simulated devices, and with the constraints that it has on others.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import documented_steps

ROWS, WIDTH, LAYERS = 8 * 16384, 2048, 4
PRINTED = ("haiku", "equinox", "tunix")
"""The audits that the page has as they are printed: a good one, and two sick ones."""


def mesh_of(*names):
    import jax

    return jax.make_mesh((8, *[1] * (len(names) - 1)), names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))


def placed(tree, mesh, *spec, cut=False):
    """`tree` as shapes; cut: each array along its first dim that 8 divides."""
    import jax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    def place(leaf):
        dims = [dim for dim in range(leaf.ndim) if cut and leaf.ndim > 1 and leaf.shape[dim] % 8 == 0]
        own = P(*[None] * dims[0], mesh.axis_names[0]) if dims else P(*spec)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, own))

    return jax.tree.map(place, tree)


def updated(loss, optimizer):
    """The usual step of parameters, optimizer state and batch."""
    import jax
    import optax

    def step(params, opt_state, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return step


def plain(loss, params, *, cut):
    """The step by Adam, of state that is cut or whole, over a batch that is cut."""
    import jax
    import jax.numpy as jnp
    import optax

    mesh, optimizer = mesh_of("data"), optax.adamw(1e-3)
    state = jax.eval_shape(optimizer.init, params)
    shapes = placed(params, mesh, cut=cut), placed(state, mesh, cut=cut), placed(
        jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16), mesh, "data")
    return jax.jit(updated(loss, optimizer), donate_argnums=(0, 1)), shapes, {"loss": loss}


def equinox():
    """Data parallelism as in Equinox's documentation: `filter_jit`, the model on every device, the batch cut."""
    import equinox as eqx
    import jax
    import jax.numpy as jnp
    import optax

    model = eqx.filter_eval_shape(lambda: eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, LAYERS, key=jax.random.key(0)))
    arrays, static = eqx.partition(model, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    mesh, optimizer = mesh_of("data"), optax.adamw(1e-3)

    def loss(model, batch):
        arrays, rest = eqx.partition(model, eqx.is_array)
        low = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), arrays)
        return (jax.vmap(eqx.combine(low, eqx.combine(rest, static)))(batch).astype(jnp.float32) ** 2).mean()

    @eqx.filter_jit(donate="all-except-first")
    def train_step(batch, model, opt_state):
        value, grads = eqx.filter_value_and_grad(loss)(model, batch)
        updates, opt_state = optimizer.update(grads, opt_state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), opt_state, value

    batch = placed(jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16), mesh, "data")
    state = placed(jax.eval_shape(optimizer.init, arrays), mesh)
    return train_step, (batch, eqx.combine(placed(arrays, mesh), static), state), {"loss": loss}


def haiku():
    """A stack of layers by `hk.experimental.layer_stack`, with parameters cut over the devices by jit alone."""
    import haiku as hk
    import jax
    import jax.numpy as jnp

    def forward(x):
        @hk.experimental.layer_stack(LAYERS)
        def layer(x):
            return x + hk.Linear(WIDTH)(jax.nn.relu(hk.Linear(4 * WIDTH)(x)))

        return layer(x)

    transformed = hk.without_apply_rng(hk.transform(forward))
    params = jax.eval_shape(transformed.init, jax.random.key(0), jnp.zeros((1, WIDTH)))

    def loss(params, batch):
        low = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
        return (transformed.apply(low, batch).astype(jnp.float32) ** 2).mean()

    return plain(loss, params, cut=True)


def flax_linen():
    """Flax's guide to `nn.with_partitioning`: TrainState, a mesh of data by model, layers in nn.scan with nn.remat."""
    import flax.linen as nn
    import jax
    import jax.numpy as jnp
    import optax
    from flax.training.train_state import TrainState

    mesh = mesh_of("data", "model")
    init = nn.with_partitioning(nn.initializers.lecun_normal(), ("data", "model"))

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            h = nn.relu(nn.Dense(4 * WIDTH, kernel_init=init, use_bias=False, dtype=jnp.bfloat16)(x))
            h = nn.Dense(WIDTH, kernel_init=init, use_bias=False, dtype=jnp.bfloat16)(h)
            return jax.lax.with_sharding_constraint(x + h, jax.sharding.PartitionSpec("data")), None

    layers = nn.scan(nn.remat(Layer, prevent_cse=False), length=LAYERS, variable_axes={"params": 0},
                     split_rngs={"params": True}, metadata_params={nn.PARTITION_NAME: None})()

    def create(x):
        variables = layers.init(jax.random.key(0), x, None)
        return TrainState.create(apply_fn=layers.apply, params=variables["params"], tx=optax.adamw(1e-3))

    with jax.set_mesh(mesh):
        batch = placed(jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16), mesh, "data")
        abstract = jax.eval_shape(create, batch)
    state = jax.tree.map(lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at),
                         nn.unbox(abstract), nn.get_sharding(abstract, mesh))

    def train_step(state, batch):
        def loss(params):
            return (state.apply_fn({"params": params}, batch, None)[0].astype(jnp.float32) ** 2).mean()

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    return jax.jit(train_step, donate_argnums=0), (state, batch), {"mesh": mesh}


def flax_nnx():
    """Flax's NNX guide: `nnx.jit` of a step of a module and an `nnx.Optimizer`, with partitioning metadata."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import nnx

    mesh = mesh_of("data", "model")

    class Mlp(nnx.Module):
        def __init__(self, rngs):
            init = nnx.initializers.lecun_normal()
            self.up, self.down = (nnx.Linear(
                *sizes, use_bias=False, rngs=rngs, dtype=jnp.bfloat16, kernel_init=nnx.with_partitioning(init, spec))
                for sizes, spec in (((512, 2048), ("data", "model")), ((2048, 512), ("model", "data"))))

        def __call__(self, x):
            return x + self.down(nnx.relu(self.up(x)))

    @nnx.jit
    def train_step(model, optimizer, x):
        value, grads = nnx.value_and_grad(lambda model: (model(x).astype(jnp.float32) ** 2).mean())(model)
        optimizer.update(model, grads)
        return value

    with jax.set_mesh(mesh):
        model = Mlp(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
        batch = jax.device_put(np.zeros((ROWS // 16, 512), np.float32), jax.NamedSharding(mesh, jax.P("data")))
    return train_step, (model, optimizer, batch), {"mesh": mesh}


def keras():
    """Keras's guide to custom training in JAX: `stateless_call`, `stateless_apply`; the batch cut, the rest whole."""
    os.environ["KERAS_BACKEND"] = "jax"
    import jax
    import jax.numpy as jnp
    import keras as k

    mesh = mesh_of("batch")
    model = k.Sequential([k.layers.Input((512,)), *[k.layers.Dense(512, activation="relu") for _ in range(LAYERS)]])
    optimizer = k.optimizers.Adam()
    optimizer.build(model.trainable_variables)

    def train_step(params, others, opt_state, x):
        def loss(params):
            y, new = model.stateless_call(params, others, x, training=True)
            return (y ** 2).mean(), new

        (value, others), grads = jax.value_and_grad(loss, has_aux=True)(params)
        params, opt_state = optimizer.stateless_apply(opt_state, grads, params)
        return params, others, opt_state, value

    shapes = [placed([each.value for each in variables], mesh) for variables in (
        model.trainable_variables, model.non_trainable_variables, optimizer.variables)]
    batch = placed(jax.ShapeDtypeStruct((ROWS, 512), jnp.float32), mesh, "batch")
    return jax.jit(train_step, donate_argnums=(0, 1, 2)), (*shapes, batch), {}


def tunix(constrained=False):
    """A trainer of Tunix: `PeftTrainer` of its Llama 3, sharded by the model's own metadata over `fsdp`."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import nnx
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P
    from tunix.models.llama3 import model as llama
    from tunix.sft import peft_trainer

    mesh = mesh_of("fsdp", "tp")
    if constrained:
        llama.shard = lambda x, spec: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))
    config = llama.ModelConfig(
        num_layers=LAYERS, vocab_size=4096, embed_dim=512, hidden_dim=2048, num_heads=8, head_dim=64, num_kv_heads=8,
        rope_theta=10000, norm_eps=1e-5, remat_config=llama.RematConfig.BLOCK)

    def inputs(batch):
        rows, length = batch.input_tokens.shape
        causal = jnp.tril(jnp.ones((length, length), bool))
        return {"input_tokens": batch.input_tokens, "input_mask": batch.input_mask,
                "positions": jnp.broadcast_to(jnp.arange(length), (rows, length)),
                "attention_mask": jnp.broadcast_to(causal, (rows, length, length))}

    with mesh:
        @nnx.jit
        def create():
            model = llama.Llama3(config, rngs=nnx.Rngs(0))
            state = nnx.state(model)
            nnx.update(model, jax.lax.with_sharding_constraint(state, nnx.get_partition_spec(state)))
            return model

        trainer = peft_trainer.PeftTrainer(
            create(), optax.adamw(1e-3), peft_trainer.TrainingConfig(eval_every_n_steps=10, max_steps=2))
        step, _ = trainer.with_gen_model_input_fn(inputs).jit_train_and_eval_step()
        batch = peft_trainer.TrainingInput(*[jax.device_put(np.ones((64, 512), dtype), NamedSharding(mesh, P("fsdp")))
                                             for dtype in (np.int32, bool)])
    return step.func, (*step.args, batch), {"mesh": mesh}


def levanter():
    """Levanter's `Trainer` of its Llama: named axes, `embed` over the devices, mixed precision, layers checkpointed."""
    import equinox as eqx
    import haliax as hax
    import jax
    import jax.numpy as jnp
    import jmp
    import numpy as np
    import optax
    from levanter.models.llama import LlamaConfig
    from levanter.models.lm_model import LmExample
    from levanter.tracker import NoopConfig
    from levanter.trainer import Trainer, TrainerConfig

    config = LlamaConfig(seq_len=512, hidden_dim=512, intermediate_dim=2048, num_layers=LAYERS, num_heads=8,
                         num_kv_heads=8)
    options = TrainerConfig(id="audit", tracker=NoopConfig(), train_batch_size=64, num_train_steps=2,
                            require_accelerator=False, mp=jmp.get_policy("p=f32,c=bf16"), load_checkpoint=False)
    vocabulary, rows = hax.Axis("vocab", 4096), hax.Axis("batch", 64)

    def loss(model, example, key=None):  # Levanter's own has a mask of floats, which jax 0.10 refuses
        logits = model(example.tokens, example.attn_mask).astype(jnp.float32)
        targets = hax.nn.one_hot(hax.roll(example.tokens, -1, config.Pos), vocabulary, dtype=jnp.float32)
        return hax.mean(hax.nn.cross_entropy_loss(logits, vocabulary, targets))

    trainer = Trainer(options, optax.adamw(1e-3), loss, add_default_hooks=False)
    trainer.__enter__()
    state = trainer.initial_state(jax.random.PRNGKey(0), model_init=lambda: config.build(
        vocabulary, key=jax.random.PRNGKey(0)))
    tokens = hax.named(np.ones((64, 512), np.int32), (rows, config.Pos))
    example = eqx.filter_jit(hax.vmap(LmExample.causal, rows))(tokens)
    example = hax.shard(example, trainer.compute_axis_mapping)
    arrays, static = eqx.partition((state, example), eqx.is_array)

    def train_step(state, batch):
        whole, example = eqx.combine((state, batch), static)
        with hax.axis_mapping(trainer.parameter_axis_mapping):
            result = trainer._train_step(whole, (example,), {}, _no_hooks=True)
            new = hax.shard(result.new_state, trainer.parameter_axis_mapping)
        return eqx.filter(new, eqx.is_array), jnp.asarray(result.loss.array if hasattr(result.loss, "array")
                                                          else result.loss)

    return jax.jit(train_step, donate_argnums=0), arrays, {"params": "state.model"}


def penzai():
    """A trainer of Penzai: `StatefulTrainer` of its LLaMA, by names of axes: neurons, heads and vocabulary are cut."""
    import jax
    import jax.numpy as jnp
    import optax
    from penzai import pz
    from penzai.models.transformer.variants import llamalike_common
    from penzai.toolshed import basic_training, sharding_util

    mesh = mesh_of("data")
    config = llamalike_common.LlamalikeTransformerConfig(
        num_kv_heads=8, query_head_multiplier=1, embedding_dim=512, projection_dim=64, mlp_hidden_dim=2048,
        num_decoder_blocks=LAYERS, vocab_size=4096, mlp_variant="swiglu", tie_embedder_and_logits=False)

    def create():
        return llamalike_common.build_llamalike_transformer(config, jax.random.key(0))

    def loss(model, state, rng, tokens):
        logits = model(tokens, token_positions=pz.nx.arange("seq", 512)).unwrap("batch", "seq", "vocabulary")
        one_hot = optax.softmax_cross_entropy_with_integer_labels(logits, tokens.unwrap("batch", "seq"))
        return one_hot.mean(), state, {}

    axes = {"neurons": "data", "heads": "data", "vocabulary": "data", "batch": "data"}
    trainer = basic_training.StatefulTrainer.build(
        jax.random.key(0), sharding_util.sharded_init(create, mesh=mesh, axis_name_to_mesh_name=axes),
        optax.adamw(1e-3), loss, donate_states=True)
    stateless, variables = pz.unbind_variables(trainer.model)
    params = pz.freeze_variables(tuple(variables))
    tokens = pz.nx.wrap(jnp.ones((64, 512), jnp.int32)).tag("batch", "seq")
    tokens = sharding_util.name_to_name_device_put(tokens, mesh, axes)
    return trainer.step_fn, (trainer.root_rng, trainer.state.value, stateless, params, (), (), loss,
                             trainer.optimizer_def, {"tokens": tokens}), {"params": "trainable_params"}


STEPS = {"equinox": equinox, "haiku": haiku, "flax linen": flax_linen, "flax nnx": flax_nnx, "keras": keras,
         "levanter": levanter, "penzai": penzai, "maxtext, as documented": documented_steps.maxtext,
         "easylm, as documented": documented_steps.easylm, "tunix": tunix,
         "tunix as on a GPU": lambda: tunix(constrained=True)}
PACKAGES = {"haiku": "dm-haiku", "flax linen": "flax", "flax nnx": "flax", "tunix": "google-tunix",
            "tunix as on a GPU": "google-tunix", "maxtext, as documented": "flax", "easylm, as documented": "flax"}
"""Where the package has another name than the row."""


def audited(name, folder):
    """Prints a row of the table, a line of dashes, and the audit, and writes its page."""
    import contextlib
    import importlib.metadata
    import time

    import jax

    import zero_jax

    zero_jax.simulate_devices(8)
    step, shapes, options = STEPS[name]()
    mesh, start = options.pop("mesh", None), time.process_time()
    with contextlib.ExitStack() as stack:
        if mesh is not None:
            stack.enter_context(mesh if name.startswith("tunix") else jax.set_mesh(mesh))
        report = zero_jax.audit(step, *shapes, target="h100:8", **options)
    data, seconds = report.to_json(), time.process_time() - start
    if folder:
        report.to_html(folder / f"{name}.html")
    ideal = data["ideal_bytes"][str(max(1, data["stage"]))]
    found = ", ".join(f"`{each['code']}`" for each in data["findings"]) or "none"
    package = PACKAGES.get(name, name)
    print(f"| {name} ({package} {importlib.metadata.version(package)}) | {data['stage']} "
          f"| {data['sent_bytes'] / 2**20:,.0f} | {ideal / 2**20:,.0f} "
          f"| {1e3 * data['seconds']:.1f} | {1e3 * data['exposed_seconds']:.1f} "
          f"| {seconds:.0f} | {found} |\n---\n{report}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--page", type=Path, help="whose table and audits, after `<!-- audits -->`, are made anew")
    parser.add_argument("--out", type=Path, help="a folder for the page of each audit")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        audited(args.worker, args.out)
        return 0
    rows, printed, failed = [], [], 0
    for name in args.only:
        done = subprocess.run([sys.executable, "-W", "ignore", __file__, "--worker", name,
                               *(["--out", str(args.out)] if args.out else [])], capture_output=True,
                              text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})
        row, _, report = done.stdout.partition("\n---\n")
        if done.returncode:
            failed, row = 1, f"| {name} | failed: {done.stderr.strip().splitlines()[-1][:90]} |"
        rows.append(row)
        print(row, flush=True)
        for folder in sys.path:  # a place is told within its package
            report = report.replace(f"{folder}/", "") if folder else report
        if name in PRINTED:
            printed.append(f"## {name[0].upper()}{name[1:]}\n\n```text\n{report.strip()}\n```\n")
    if args.page:
        table = ("| step | stage | sent, MiB | ideal of that stage | ms | waits, ms | CPU s | found |\n"
                 "| --- | --- | --- | --- | --- | --- | --- | --- |\n" + "\n".join(rows))
        mark = "<!-- audits -->\n"
        before = args.page.read_text().partition(mark)[0]
        args.page.write_text(f"{before}{mark}\n{table}\n\n" + "\n".join(printed))
    return failed


if __name__ == "__main__":
    sys.exit(main())
