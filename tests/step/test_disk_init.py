"""`init` with parameters in files: the bits of an ordinary one, made layer by layer, or else named."""

import logging

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from step.test_disk import differing
from step.test_disk_activations import TwoLoops
from step.test_disk_params import ADAM, made
from step.test_offload import BATCH, Stacked
from support.stacked_nnx import NnxStacked
from support.targets import mesh_of

import zero_jax
from models import gpt2, gpt2_nnx, llama, llama_nnx
from zero_jax.errors import CheckpointError
from zero_jax.sharding.shard_reader import UnreadLeaf
from zero_jax.step.disk.given_leaves import GivenLeaves
from zero_jax.step.disk.initial_values import InitialValues
from zero_jax.tree import named_leaves
from zero_jax.xla import live_chip

GPT2 = gpt2.Config(num_layers=3, width=64, num_heads=2, vocab_size=96, max_length=16, remat=True)
LLAMA = llama.Config(num_layers=3, width=64, num_heads=4, num_kv_heads=2, hidden=256, vocab_size=96, max_length=16)


class Pair(nnx.Module):
    """Stacks of which one is drawn from one key, so that no layer of it can be drawn alone."""

    def __init__(self, rngs):
        self.up = nnx.Param(0.1 * jax.random.normal(rngs.params(), (3, 128, 128)))
        self.down = nnx.Param(0.1 * jax.vmap(lambda key: jax.random.normal(key, (128, 128)))(
            jax.random.split(rngs.params(), 3)))

    def __call__(self, x):
        return x + jnp.tanh(x @ self.up[...]) @ self.down[...]


class Drawn(nnx.Module):
    def __init__(self, *, rngs):
        self.embed, self.blocks, self.out = nnx.Embed(96, 128, rngs=rngs), Pair(rngs), nnx.Linear(128, 96, rngs=rngs)

    def __call__(self, x):
        x = nnx.scan(lambda block, x: block(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.blocks, self.embed(x))
        return self.out(x)


def recorded(monkeypatch):
    """Lists of what is made whole, and of what layer by layer."""
    whole, layers = [], []
    make, layer = InitialValues.__call__, InitialValues.layer
    monkeypatch.setattr(InitialValues, "__call__", lambda self, names: (whole.extend(names), make(self, names))[1])

    def of_layer(self, name, index):
        made = layer(self, name, index)
        layers.extend([] if isinstance(made, str) else [(name, index)])
        return made

    monkeypatch.setattr(InitialValues, "layer", of_layer)
    return whole, layers


def ordinary(model, **options):
    model = model() if model in (Stacked, TwoLoops) else model
    step = zero_jax.make_zero_train_step(model, 3, optimizer=ADAM, **options)
    return step.init(jax.random.key(0), BATCH)


GRID = [pytest.mark.slow, pytest.mark.grid]
MODELS = {
    "linen": (Stacked, {"precision": "bf16"}), "nnx": (NnxStacked, {"ema": 0.9}),
    "frozen": (Stacked, {"frozen": "blocks/Dense_0", "ema": 0.9}), "two loops": (TwoLoops, {}),
    "constructed": (NnxStacked(rngs=nnx.Rngs(3)), {}), "gpt2": (gpt2.build(GPT2), {"precision": "bf16"}),
    "gpt2_nnx": (gpt2_nnx.build(GPT2), {"precision": "bf16"}), "llama": (llama.build(LLAMA), {"precision": "bf16"}),
    "llama_nnx": (llama_nnx.build(LLAMA), {"precision": "bf16"})}


@pytest.mark.parametrize("name", ["linen", "nnx", *(pytest.param(name, marks=GRID) for name in [*MODELS][2:])])
def test_init_has_the_bits_of_an_ordinary_one_and_makes_layers_one_by_one(tmp_path, monkeypatch, caplog, name):
    model, options = MODELS[name]
    whole, layers = recorded(monkeypatch)
    step = made(tmp_path / "run", model=model, **options)
    state = step.init(jax.random.key(0), BATCH)
    lengths = {name.replace("weights/", "params/"): leaf.shape[0]
               for name, leaf in named_leaves(step.layout().state) if name in step.layout().disk_layers}
    assert lengths.keys().isdisjoint(whole) and not caplog.records
    assert sorted(layers) == sorted((name, at) for name, length in lengths.items() for at in range(length))
    assert differing(ordinary(model, **options), step.in_memory(state)[0]) == []


def test_another_key_or_another_order_of_layers_is_other_bits(tmp_path, monkeypatch):
    """The controls of the test above."""
    wanted, layer = ordinary(Stacked), InitialValues.layer
    step = made(tmp_path / "key")
    found = differing(wanted, step.in_memory(step.init(jax.random.key(1), BATCH))[0])
    assert {"params/blocks/Dense_0/kernel", "params/Dense_0/kernel", "rng"} <= set(found)
    monkeypatch.setattr(InitialValues, "layer", lambda self, name, index: layer(self, name, index ^ 1))
    step = made(tmp_path / "order")
    found = differing(wanted, step.in_memory(step.init(jax.random.key(0), BATCH))[0])
    assert found == ["params/blocks/Dense_0/kernel", "params/blocks/Dense_1/kernel"]


def test_a_stack_that_can_only_be_made_whole_is_named(tmp_path, monkeypatch, caplog):
    whole, layers = recorded(monkeypatch)
    step = made(tmp_path / "run", model=Drawn)
    with caplog.at_level(logging.WARNING, "zero_jax"):
        state = step.init(jax.random.key(0), BATCH)
    (record,) = caplog.records
    assert record.getMessage() == (
        "init makes all layers of params/blocks/up at once, of up to 24,576 bytes on each device (params/blocks/up), "
        "since it is drawn from one key for all layers.")
    assert "params/blocks/up" in whole and {name for name, _ in layers} == {"params/blocks/down"}
    assert differing(ordinary(Drawn), step.in_memory(state)[0]) == []

    # Refused where it takes more than a device has.
    monkeypatch.setattr(live_chip, "memory_limit", lambda devices: 24_575)
    with pytest.raises(ValueError, match="all layers of params/blocks/up would be made at once, 24,576 bytes on each "
                                         "device, which has 24,575, since .* a key of its own"):
        made(tmp_path / "small", model=Drawn).init(jax.random.key(0), BATCH)
    assert not list((tmp_path / "small").rglob("commit-*"))


def test_given_parameters_are_written_layer_by_layer(tmp_path, monkeypatch):
    """Of an ordinary state, of other values in a file that is read part by part, and of those of the state itself."""
    options, read, make = {"precision": "bf16", "frozen": "blocks/Dense_0", "ema": 0.9}, [], GivenLeaves.layer
    step = zero_jax.make_zero_train_step(Stacked(), 3, optimizer=ADAM, **options)
    wanted = step.init(jax.random.key(5), BATCH)
    given = jax.tree.map(np.asarray, step.params(wanted))
    monkeypatch.setattr(GivenLeaves, "layer", lambda self, name, index: (
        read.append((name, index)), make(self, name, index))[1])
    files = made(tmp_path / "run", **options)
    state = files.init(jax.random.key(5), BATCH, params=given)
    stacks = ["frozen/blocks/Dense_0/kernel", "params/blocks/Dense_1/kernel"]
    assert sorted(set(read)) == [(name, at) for name in stacks for at in range(4)]
    assert differing(wanted, files.in_memory(state)[0]) == []

    def unread(value):
        return UnreadLeaf("a file", value.shape, value.dtype, lambda: lambda index: 2 * value[index])

    state, _ = files(state, BATCH)
    wanted, _ = step(wanted, BATCH)
    state = files.with_params(state, jax.tree.map(unread, given))
    wanted = step.with_params(wanted, jax.tree.map(lambda value: 2 * value, given))
    assert int(state.step) == int(wanted.step) == 1 and differing(wanted, files.in_memory(state)[0]) == []
    # The control: in another order the bits are others.
    monkeypatch.setattr(GivenLeaves, "layer", lambda self, name, index: make(self, name, index ^ 1))
    state = files.with_params(state, jax.tree.map(lambda value: 2 * value, given))
    assert set(stacks) <= set(differing(wanted, files.in_memory(state)[0]))
    with pytest.raises(ValueError, match="params lacks 1 .embed|lacks 1 "):
        files.with_params(state, {name: value for name, value in given.items() if name != "Embed_0"})


def test_after_an_error_between_two_layers_the_folder_is_free_and_holds_no_state(tmp_path, monkeypatch):
    layer = InitialValues.layer

    def fails(self, name, index):
        if index == 2:
            raise KeyboardInterrupt
        return layer(self, name, index)

    step = made(tmp_path / "run")
    with monkeypatch.context() as patched:
        patched.setattr(InitialValues, "layer", fails)
        with pytest.raises(KeyboardInterrupt):
            step.init(jax.random.key(1), BATCH)
    step.close()
    step = made(tmp_path / "run")
    with pytest.raises(CheckpointError, match="holds no committed state"):
        step.stored_state(BATCH)
    state = step.init(jax.random.key(0), BATCH)
    assert differing(ordinary(Stacked), step.in_memory(state)[0]) == []


@pytest.mark.slow
def test_h100s_hold_one_layer_at_a_time(tmp_path):
    mesh = mesh_of("h100:8")
    config = gpt2.Config(num_layers=24, width=512, num_heads=8, vocab_size=512, max_length=128)
    tokens = jax.ShapeDtypeStruct((mesh.size, 128), jnp.int32)
    batch, rng = {"inputs": tokens, "targets": tokens}, jax.eval_shape(lambda: jax.random.key(0))
    step = zero_jax.make_zero_train_step(gpt2.build(config), 3, mesh=mesh, precision="bf16", optimizer=ADAM,
                                         offload=zero_jax.Offload(disk=tmp_path, parameters="disk"))
    initial = step.initial_values(rng, batch)

    def device_bytes(lowered):
        memory = lowered.compile().memory_analysis()
        return memory.temp_size_in_bytes + memory.output_size_in_bytes

    name = "params/blocks/up/kernel"
    layer = device_bytes(initial.lower_layer(name))
    stack = 4 * 24 * 4 * 512**2 // 8
    assert device_bytes(initial.lower([name])) > stack > 8 * layer  # the control: the same leaf, whole
