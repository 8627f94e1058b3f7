"""LLaMA, BERT, T5 and ViT: sizes as published, one device's numbers at every stage and on tensor axes, packed texts."""

import dataclasses
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, traverse_util
from support.flat import flat_step, nested
from support.oracle import loss_difference, next_token, oracle, param_difference, slow, train
from support.program_controls import partitioned

import zero_jax
from models import bert, gpt2, llama, llama_nnx, t5, vit
from models.layers import attention as kernels
from zero_jax.sharding.mesh_axes import MeshAxes
from zero_jax.sharding.tensor_rules import tensor_specs

NAMES = ("llama", "llama_nnx", "bert", "t5", "vit", "vit_nnx")
TINY = {"llama": llama.Config(2, 32, 4, 2, 48, head_dim=8, vocab_size=64, max_length=16, qk_norm=True, remat=True),
        "bert": bert.Config(2, 32, 4, 48, vocab_size=64, max_length=16, remat=True),
        "t5": t5.Config(2, 32, 4, 48, head_dim=8, vocab_size=64, gated=True, buckets=8, max_distance=9, remat=True),
        "vit": vit.Config(2, 32, 4, 48, image_size=8, patch_size=4, num_classes=8, remat=True)}


def config_of(name):
    return TINY[name.removesuffix("_nnx")]


def module_of(name):
    return importlib.import_module(f"models.{name}")


def loss_of(name):
    return getattr(module_of(name), "loss", next_token)


@functools.cache
def batches(name, num=3):
    rng, rows = np.random.default_rng(0), []
    for _ in range(num):
        if name.startswith("vit"):
            targets = rng.integers(0, 8, 8)
            images = rng.normal(size=(8, 8, 8, 3)) + targets[:, None, None, None] / 4
            rows.append({"inputs": images.astype(np.float32), "targets": targets})
            continue
        tokens = rng.integers(0, 64, (8, 17)).astype(np.int32)
        rows.append({"inputs": tokens[:, :-1], "targets": tokens[:, 1:]})
        if name == "bert":
            rows[-1]["weights"] = (rng.random((8, 16)) < 0.3).astype(np.float32)
        if name == "t5":
            rows[-1]["decoder_inputs"] = tokens[:, ::-1][:, 1:]
    return rows


@functools.cache
def alone(name):
    return oracle(module_of(name).build(config_of(name)), batches=batches(name), loss=loss_of(name))


def without_key_bias(name):
    """Softmax does not see the bias of keys: what Adam makes of its rounding is not compared."""
    return [("/k/bias", lambda bias: bias[..., :0].sum(keepdims=True))] if name in ("bert", "vit", "vit_nnx") else []


def check(run, name):
    assert loss_difference(run, alone(name)) < 2e-6
    # T5 begins with logits of 30, whose smallest gradients are rounding; a wrong one moves a parameter by 3e-4 a step.
    assert param_difference(run, alone(name), without_key_bias(name)) < (3e-5 if name == "t5" else 1e-5)


@pytest.mark.grid
@pytest.mark.parametrize(("name", "stage"), [
    ("llama", 3), *(slow(name, stage) for name in NAMES for stage in range(4) if (name, stage) != ("llama", 3))])
def test_numbers_of_one_device(name, stage):
    check(train(module_of(name).build(config_of(name)), stage, 8, batches=batches(name), loss=loss_of(name)), name)


@pytest.mark.slow
def test_another_model_is_caught():
    """Negative control: one field that changes no shape."""
    wrong = dataclasses.replace(config_of("llama"), rope_theta=1e4)
    run = train(llama.build(wrong), 3, 8, batches=batches("llama"), loss=next_token)
    assert loss_difference(run, alone("llama")) > 1e-5


def run_on(mesh, name, rules=True):
    options = {"tensor_rules": module_of(name).tensor_rules(config_of(name))} if rules else {}
    step = flat_step(module_of(name).build(config_of(name)), 3, mesh=mesh, loss=loss_of(name),
                                         **options)
    return step, step.init(jax.random.key(0), batches(name)[0])


@pytest.mark.grid
@pytest.mark.parametrize(("name", "tensor"), [slow(name, tensor) for name, tensor in (
    ("llama", 2), ("llama_nnx", 2), ("bert", 4), ("t5", 4), ("t5", 2), ("vit", 4), ("vit_nnx", 2))])
def test_tensor_parallelism(name, tensor):
    step, state = run_on(zero_jax.make_mesh(tensor=tensor), name)
    _, metrics = step(state, batches(name)[0])
    assert float(metrics["loss"]) == pytest.approx(alone(name).losses[0], rel=2e-6)
    assert float(metrics["grad_norm"]) == pytest.approx(alone(name).norms[0], rel=2e-5)


@pytest.mark.grid
@pytest.mark.parametrize("name", [slow(name) for name in ("llama", "llama_nnx", "bert", "t5")])
def test_context_parallelism(name):
    step, state = run_on(zero_jax.make_mesh(context=2), name, rules=False)
    _, metrics = step(state, batches(name)[0])
    assert float(metrics["loss"]) == pytest.approx(alone(name).losses[0], rel=2e-6)
    assert float(metrics["grad_norm"]) == pytest.approx(alone(name).norms[0], rel=2e-5)


@pytest.mark.parametrize("name", ["llama", "bert", "t5", "vit"])
def test_tensor_rules_split_all_matrices(name):
    """And heads that do not divide are refused."""
    shapes = jax.eval_shape(lambda: module_of(name).build(config_of(name)).init(jax.random.key(0), *(
        batches(name)[0][key] for key in ("inputs", "decoder_inputs") if key in batches(name)[0])))["params"]
    mesh = zero_jax.make_mesh(tensor=2)
    axes = MeshAxes.of(mesh)
    specs = tensor_specs(shapes, axes, module_of(name).tensor_rules(config_of(name)))
    whole = {path for path, leaf in traverse_util.flatten_dict(shapes, sep="/").items()
             if path not in specs and leaf.ndim > 1 + path.split("/")[-3:][0].startswith("blocks")
             and path.endswith(("kernel", "embedding"))}
    assert whole <= {"wpe/embedding", "types/embedding", "head/kernel", "patches/kernel",
                     "encoder/relative_bias/embedding", "decoder/relative_bias/embedding"}, whole
    with pytest.raises(ValueError, match="do not divide"):
        wide = MeshAxes.of(zero_jax.make_mesh(tensor=8))
        tensor_specs(shapes, wide, module_of(name).tensor_rules(config_of(name)))


@pytest.mark.grid
@pytest.mark.parametrize("name", ["llama", slow("llama_nnx"), slow("gpt2"), slow("gpt2_nnx"), slow("bert")])
def test_packed_documents_do_not_see_each_other(name):
    """Two in a row are what each is alone; without segment ids, or with positions that run on, they are not."""
    module = module_of(name)
    config = gpt2.Config(2, 32, 4, vocab_size=64, max_length=16) if name.startswith("gpt2") else config_of(name)
    config = dataclasses.replace(config, remat=False)
    tokens = np.random.default_rng(3).integers(0, 64, (1, 14)).astype(np.int32)
    segments = np.array([[1] * 5 + [2] * 6 + [0] * 3], np.int32)
    positions = np.array([[*range(5), *range(6), *range(3)]], np.int32)
    if name.endswith("_nnx"):
        model = module.build(config)(nnx.Rngs(0))
    else:
        init = jax.jit(module.build(config).init)
        variables = jax.tree.map(lambda leaf: leaf * 4, init(jax.random.key(0), tokens))
        model = jax.jit(functools.partial(module.build(config).apply, variables))
    both = model(tokens, segment_ids=segments, positions=positions)
    for part in (slice(0, 5), slice(5, 11)):
        np.testing.assert_allclose(both[:, part], model(tokens[:, part]), 1e-4, 1e-4)
    unlike = model(tokens, positions=positions)[:, 5:11]
    assert not np.allclose(unlike, both[:, 5:11], 1e-3, 1e-3)
    if not name.startswith("llama"):  # rotary positions are relative: within a document they may run on
        assert not np.allclose(model(tokens, segment_ids=segments)[:, 5:11], both[:, 5:11], 1e-3, 1e-3)


def published(config, module, *arrays):
    shapes = jax.eval_shape(lambda: module.build(config).init(jax.random.key(0), *arrays)["params"])
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


TOKENS = jnp.zeros((1, 8), jnp.int32)
# Of the published checkpoints: what transformers counts, without poolers, heads for next sentences and tied copies
SIZES = [
    (llama, "3-8b", 8_030_261_248), (llama, "3.1-405b", 405_853_388_800), (llama, "3.2-1b", 1_235_814_400),
    (llama, "qwen3-0.6b", 596_049_920), (llama, "qwen3-8b", 8_190_735_360), (bert, "large", 335_174_458),
    (t5, "small", 60_506_624), (t5, "11b", 11_307_321_344), (t5, "1.1-xxl", 11_135_332_352), (vit, "b-16", 86_567_656)]


@pytest.mark.parametrize(("module", "preset", "size"), SIZES, ids=lambda value: value if isinstance(value, str) else "")
def test_presets_have_the_published_number_of_parameters(module, preset, size):
    config = module.PRESETS[preset]
    given = (jnp.zeros((1, config.image_size, config.image_size, 3)),) if module is vit else (
        (TOKENS, TOKENS) if module is t5 else (TOKENS,))
    assert published(config, module, *given) == config.num_params == size


def test_bert_starts_from_its_range():
    config = bert.Config(1, 32, 2, 64, vocab_size=512, max_length=32, init_range=0.1, scan_layers=False)  # and not 0.02
    params = jax.jit(bert.build(config).init)(jax.random.key(0), TOKENS)["params"]
    for name, leaf in traverse_util.flatten_dict(params, sep="/").items():
        if leaf.size >= 1024:
            assert leaf.std() == pytest.approx(0.1, rel=0.1), name
    assert bert.huggingface_config(config)["initializer_range"] == 0.1


def test_nnx_has_linens_parameters():
    for linen, other in ((llama, llama_nnx), (vit, module_of("vit_nnx"))):
        config = config_of(linen.__name__.split(".")[-1])
        batch = batches(linen.__name__.split(".")[-1])[0]["inputs"]
        tree = jax.eval_shape(lambda batch=batch, linen=linen, config=config: linen.build(config).init(
            jax.random.key(0), batch)["params"])
        state = nnx.state(nnx.eval_shape(lambda other=other, config=config: other.build(config)(nnx.Rngs(0))))
        assert {"/".join(map(str, path)): leaf.shape for path, leaf in traverse_util.flatten_dict(
            nnx.to_pure_dict(state)).items()} == {
                name: leaf.shape for name, leaf in traverse_util.flatten_dict(tree, sep="/").items()}


@pytest.mark.parametrize(("make", "message"), [
    (lambda: llama.Config(2, 32, 4, 3, 48), "num_heads=4 is not a multiple of num_kv_heads=3"),
    (lambda: llama.Config(2, 32, 4, 2, 48, head_dim=7), "head_dim=7 is odd"),
    (lambda: bert.Config(2, 30, 4, 48), "width=30 is not a multiple"),
    (lambda: t5.Config(2, 32, 4, 48, buckets=6), "buckets=6 must be a multiple of 4"),
    (lambda: bert.Config(2, 32, 4, 48, init_range=1.5), "init_range=1.5 must be in"),
    (lambda: vit.Config(2, 32, 4, 48, image_size=10, patch_size=4), "image_size=10 is not a multiple"),
    (lambda: vit.build(config_of("vit")).init(jax.random.key(0), jnp.zeros((1, 8, 9, 3))), "Images of shape"),
    (lambda: llama.build(config_of("llama")).init(jax.random.key(0), jnp.zeros((1, 17), int)), "17 tokens are more"),
    (lambda: t5.build(config_of("t5")).init(jax.random.key(0), TOKENS, TOKENS, segment_ids=TOKENS), "belong together"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_bad_input(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_the_kernel_is_the_asked_one():
    """A function gets what the model gives it; cuDNN on a CPU is JAX's error, and no other kernel in silence."""
    q = jnp.zeros((1, 8, 2, 16), jnp.bfloat16)
    given = {}

    def mine(*qkv, **options):
        given.update(options)
        return qkv[0] + 1

    assert kernels.attention(q, q, q, causal=True, scale=2.0, implementation=mine).sum() == q.size
    assert given == {"causal": True, "segment_ids": None, "bias": None, "scale": 2.0}
    with pytest.raises(RuntimeError, match="cuDNN"):
        kernels.attention(q, q, q, causal=True, implementation="cudnn")


def plan_of(name, stage, length=32, **options):
    """Of the smallest preset on eight H100s in bf16."""
    module, config = module_of(name), module_of(name).PRESETS["tiny"]
    batch = module.batch_shapes(config, 16, length) if hasattr(module, "batch_shapes") else {
        key: jax.ShapeDtypeStruct((16, length), jnp.int32) for key in ("inputs", "targets")}
    return zero_jax.plan(module.build(config), stage, "h100:8", batch, loss=getattr(module, "loss", None),
                         precision="bf16", **nested(options))


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize(("name", "stage"), [("llama", 3), ("t5", 3), ("bert", 2), ("vit", 3)])
def test_the_contract_is_kept_on_h100s(name, stage):
    planned = plan_of(name, stage)
    assert not planned.communication.violations and planned.fits
    assert planned.layout.num_params == module_of(name).PRESETS["tiny"].num_params


@pytest.mark.slow
def test_the_gradient_of_a_bias_that_all_examples_share_is_scattered():
    """Negative control: XLA's partitioner sums it over devices as scores, (H, S, S), before buckets."""
    assert not plan_of("t5", 3, 64).communication.violations
    with partitioned():
        assert "all-reduce of f32[1, 4, 64, 64]" in plan_of("t5", 3, 64).communication.violations[0]
