"""The models are what their configurations say, and in both flavours the same; GPT-2's presets are the paper's."""

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, traverse_util
from support.covering import weekly
from support.oracle import slow

from models import gpt2, gpt2_nnx
from models.gpt2 import PRESETS, Config

SMALL = Config(2, 32, 4, vocab_size=48, max_length=16)
TOKENS = np.random.default_rng(7).integers(0, SMALL.vocab_size, (2, 12), np.int32)
# Compile time is most of what these tests take.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
LOOPS = pytest.mark.parametrize("scan_layers", [True, False])
FLAVOURS = pytest.mark.parametrize("flavour", ["linen", "nnx"])
Flat = dict[str, jax.Array]


def initialise(flavour: str, config: Config) -> Flat:
    """Its parameters by name; both flavours name them alike."""
    if flavour == "linen":
        return flat_dict(gpt2.build(config).init(jax.random.key(0), TOKENS)["params"])
    model = gpt2_nnx.build(config)(rngs=nnx.Rngs(0))
    return flat_dict(nnx.to_pure_dict(nnx.state(model, nnx.Param)))


def flat_dict(tree) -> Flat:
    flat = traverse_util.flatten_dict(tree)
    return {"/".join(map(str, path)): value for path, value in flat.items()}


def shapes_of(flavour: str, config: Config) -> Flat:
    return jax.eval_shape(lambda: initialise(flavour, config))


def forward(flavour: str, config: Config):
    """`run(flat parameters, tokens) -> logits`; dropout, if any, draws the same at each call."""
    if flavour == "linen":
        model = gpt2.build(config)
        rngs = {"dropout": jax.random.key(5)} if config.dropout else {}

        def run(flat: Flat, tokens: jax.Array) -> jax.Array:
            params = traverse_util.unflatten_dict(flat, sep="/")
            return model.apply({"params": params}, tokens, rngs=rngs)
    else:
        def run(flat: Flat, tokens: jax.Array) -> jax.Array:
            model = gpt2_nnx.build(config)(rngs=nnx.Rngs(5))
            paths = [path for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))]
            state = [(path, nnx.Param(flat["/".join(map(str, path))])) for path in paths]
            nnx.update(model, nnx.from_flat_state(state))
            return model(tokens)

    return run


def noise(shapes: Flat) -> Flat:
    """Parameters with nothing left at zero or one, so that each of them counts."""
    draw = np.random.default_rng(3).normal
    return {name: jnp.float32(0.2 * draw(size=shapes[name].shape)) for name in sorted(shapes)}


def unstacked(flat: Flat, separator: str, order=range(SMALL.num_layers)) -> Flat:
    """Stacked blocks by layer: blocks_0/... in Linen, blocks/0/... in NNX."""
    out = {name: value for name, value in flat.items() if not name.startswith("blocks/")}
    for name in set(flat) - set(out):
        for i, layer in enumerate(order):
            out[name.replace("blocks/", f"blocks{separator}{i}/")] = flat[name][layer]
    return out


@FLAVOURS
@LOOPS
@pytest.mark.parametrize("config", [SMALL, PRESETS["tiny"]], ids=["small", "tiny"])
def test_num_params_is_exact(flavour, scan_layers, config):
    shapes = shapes_of(flavour, dataclasses.replace(config, scan_layers=scan_layers))
    assert sum(leaf.size for leaf in shapes.values()) == config.num_params


@FLAVOURS
def test_initialisation_is_gpt2s(flavour):
    config = dataclasses.replace(SMALL, width=128, vocab_size=512)
    for name, value in jit(lambda: initialise(flavour, config))().items():
        layers = np.asarray(value if name.startswith("blocks") else value[None])
        if name.endswith(("bias", "scale")):
            assert (layers == name.endswith("scale")).all(), name
            continue
        residual = name.startswith(("blocks/proj", "blocks/down"))
        expected = 0.02 / np.sqrt(2 * config.num_layers) if residual else 0.02
        for layer in layers:
            assert layer.std() == pytest.approx(expected, rel=0.05), name
        assert len(layers) == 1 or not np.allclose(layers[0], layers[1]), f"{name}: layers alike"


@FLAVOURS
def test_scanned_equals_unrolled(flavour):
    flat, separator = noise(shapes_of(flavour, SMALL)), "_" if flavour == "linen" else "/"
    scanned = jit(forward(flavour, SMALL))(flat, TOKENS)
    loop = jit(forward(flavour, dataclasses.replace(SMALL, scan_layers=False)))
    np.testing.assert_allclose(loop(unstacked(flat, separator), TOKENS), scanned, 1e-4, 1e-4)
    swapped = loop(unstacked(flat, separator, order=(1, 0)), TOKENS)
    assert not np.allclose(swapped, scanned, 1e-2, 1e-2), "the order of layers must matter here"


@FLAVOURS
def test_a_scanned_program_does_not_grow_with_depth(flavour):
    def size(num_layers: int, scan_layers: bool) -> int:
        config = dataclasses.replace(SMALL, num_layers=num_layers, scan_layers=scan_layers)
        program = jax.make_jaxpr(forward(flavour, config))(shapes_of(flavour, config), TOKENS)
        return len(str(program).splitlines())

    assert size(4, scan_layers=True) == size(2, scan_layers=True)
    assert size(4, scan_layers=False) > 1.5 * size(2, scan_layers=False)


def test_linen_equals_nnx():
    flat = noise(shapes_of("linen", SMALL))
    assert shapes_of("nnx", SMALL) == shapes_of("linen", SMALL)
    linen, other = jit(forward("linen", SMALL)), jit(forward("nnx", SMALL))
    expected = linen(flat, TOKENS)
    np.testing.assert_allclose(other(flat, TOKENS), expected, 1e-4, 1e-4)
    for name, value in flat.items():  # each parameter counts, or equality would say little
        assert not np.allclose(linen({**flat, name: 2 * value}, TOKENS), expected, 1e-3, 1e-3), name


@FLAVOURS
def test_attention_is_causal(flavour):
    flat, run, at = noise(shapes_of(flavour, SMALL)), jit(forward(flavour, SMALL)), 6
    before = run(flat, TOKENS)
    tokens = TOKENS.copy()
    tokens[:, at] = (tokens[:, at] + 1) % SMALL.vocab_size
    after = run(flat, tokens)
    np.testing.assert_array_equal(after[:, :at], before[:, :at])
    changed = np.abs(after - before).max(axis=(0, 2))
    assert (changed[at:] > 1e-4).all(), "a token must reach every later position"


@pytest.mark.grid
@weekly("flavour, scan_layers", [
    ("linen", True), slow("linen", False), slow("nnx", True), ("nnx", False)])
def test_remat_does_not_change_gradients(flavour, scan_layers):
    config = dataclasses.replace(SMALL, dropout=0.2, scan_layers=scan_layers)
    flat = noise(shapes_of(flavour, config))

    def grads(config: Config) -> tuple[str, Flat]:
        run = forward(flavour, config)
        traced = jit(jax.grad(lambda flat: jnp.square(run(flat, TOKENS)).mean())).trace(flat)
        return str(traced.jaxpr), traced.lower().compile()(flat)

    text, expected = grads(config)
    remat_text, got = grads(dataclasses.replace(config, remat=True))
    assert "remat" not in text and "remat" in remat_text
    for name in expected:
        np.testing.assert_allclose(got[name], expected[name], 1e-4, 1e-5, err_msg=name)


@weekly("scan_layers, remat", itertools.product([True, False], [True, False]))
def test_linen_dropout_follows_its_stream(scan_layers, remat):
    config = dataclasses.replace(SMALL, dropout=0.2, scan_layers=scan_layers, remat=remat)
    flat, model = noise(shapes_of("linen", config)), gpt2.build(config)
    variables = {"params": traverse_util.unflatten_dict(flat, sep="/")}

    @functools.partial(jit, static_argnames="deterministic")
    def run(key: jax.Array, deterministic: bool | None = None) -> jax.Array:
        return model.apply(variables, TOKENS, deterministic=deterministic, rngs={"dropout": key})

    one, two = jax.random.key(1), jax.random.key(2)
    still = jit(model.apply)(variables, TOKENS)
    np.testing.assert_array_equal(run(one), run(one))
    assert not np.allclose(run(one), run(two)) and not np.allclose(run(one), still)
    np.testing.assert_allclose(run(one, deterministic=True), still, 1e-4, 1e-4)


@weekly("scan_layers, remat", itertools.product([True, False], [True, False]))
def test_nnx_dropout_draws_anew_at_each_call(scan_layers, remat):
    config = dataclasses.replace(SMALL, dropout=0.2, scan_layers=scan_layers, remat=remat)
    model = nnx.jit(lambda: gpt2_nnx.build(config)(nnx.Rngs(0)))()
    keys = nnx.to_flat_state(nnx.state(model, nnx.RngKey))
    data = np.concatenate([np.atleast_2d(jax.random.key_data(key[...])) for _, key in keys])
    assert len(np.unique(data, axis=0)) == config.num_layers + 1, "each layer has its own stream"
    call = nnx.jit(lambda model: model(TOKENS))
    assert not np.allclose(call(model), call(model))
    counts = [count[...] for _, count in nnx.to_flat_state(nnx.state(model, nnx.RngCount))]
    assert sorted(set(np.hstack(counts).tolist())) == [2, 4], "blocks draw twice in a call"
    model.eval()
    np.testing.assert_array_equal(call(model), call(model))


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_nnx_has_random_state_only_for_dropout(dropout):
    make = gpt2_nnx.build(dataclasses.replace(SMALL, dropout=dropout))
    _, _, rest = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))), nnx.Param, ...)
    assert bool(nnx.to_flat_state(rest)) == bool(dropout)


@FLAVOURS
@LOOPS
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_bfloat16_parameters_or_dtype_give_bfloat16_activations(flavour, scan_layers, dtype):
    config = dataclasses.replace(SMALL, dropout=0.1, scan_layers=scan_layers, dtype=dtype)
    shapes = shapes_of(flavour, config)
    assert {leaf.dtype for leaf in shapes.values()} == {jnp.dtype("float32")}

    def products(dtype: str) -> set[tuple[str, str]]:
        """(dtype, width) of each product that is (batch, seq, width): all but attention's own."""
        flat = {name: jax.ShapeDtypeStruct(leaf.shape, dtype) for name, leaf in shapes.items()}
        text = str(jax.make_jaxpr(forward(flavour, config))(flat, TOKENS))
        return set(re.findall(r"(\w+)\[2,12,(\d+)\] = dot_general", text))

    widths = ("96", "32", "128", "48")
    assert products("float32" if dtype else "bfloat16") == {("bf16", width) for width in widths}
    if dtype is None:
        assert products("float32") == {("f32", width) for width in widths}


@FLAVOURS
def test_the_trillion_costs_nothing_to_describe(flavour):
    config = PRESETS["1t"]
    assert sum(leaf.size for leaf in shapes_of(flavour, config).values()) == config.num_params
    assert config.num_params == pytest.approx(1.008e12, rel=1e-3)


@pytest.mark.parametrize("bad", [
    {"num_heads": 5}, {"num_layers": 0}, {"width": -32}, {"vocab_size": 0}, {"max_length": 0},
    {"num_heads": 0}, {"dropout": 1.0}, {"dropout": -0.1}], ids=str)
def test_sizes_that_make_no_model_are_refused(bad):
    (name,) = bad
    with pytest.raises(ValueError, match=name):
        dataclasses.replace(SMALL, **bad)


@FLAVOURS
def test_too_many_tokens_are_refused(flavour):
    with pytest.raises(ValueError, match="17 tokens .* max_length=16"):
        forward(flavour, SMALL)(noise(shapes_of(flavour, SMALL)), jnp.zeros((1, 17), jnp.int32))


# Presets: GPT-2's released models and the paper's

def size_of(name: str) -> float | None:
    match = re.match(r"([\d.]+)([mbt])(-\d+x\d+)?$", name)
    return match and float(match[1]) * {"m": 1e6, "b": 1e9, "t": 1e12}[match[2]]


def fits(name: str, config: Config) -> bool:
    num_params = 12 * config.num_layers * config.width**2 + config.vocab_size * config.width
    return abs(num_params / size_of(name) - 1) < 0.10


SIZED = {name: config for name, config in PRESETS.items() if size_of(name)}


def test_both_flavours_have_the_same_presets():
    for module in (gpt2, gpt2_nnx):
        assert module.PRESETS is PRESETS and callable(module.build)


def test_names_are_sizes():
    assert set(PRESETS) - set(SIZED) == {"tiny", "bytes"}
    assert [name for name, config in SIZED.items() if not fits(name, config)] == ["1.38b"]
    for name in SIZED:  # a shape in a name is the shape
        if match := re.search(r"-(\d+)x(\d+)$", name):
            assert (int(match[1]), int(match[2])) == (PRESETS[name].num_layers, PRESETS[name].width)
    assert 1e6 < PRESETS["bytes"].num_params < 3e6
    tiny = PRESETS["tiny"]
    assert not any(size % 8 for size in (tiny.width, tiny.vocab_size, tiny.max_length))
