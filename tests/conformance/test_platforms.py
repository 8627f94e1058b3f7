"""What a step does on TPUs and GPUs, computed on simulated devices with their decisions, beside a plain loop.

Each row is a platform, the axes that ZeRO shards over, major first, a stage and options. They take the explicit
scatters of a TPU (tiles, rows, columns, flat, summed and cut), gathers in chunks, ahead and before loops, reductions
beside products, codes in words, a GPU's copy engines and merged shapes.
"""

import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.flat import flat_step
from support.oracle import oracle, param_difference, train
from support.targets import simulated

import zero_jax
from zero_jax.contract.verify import ContractError
from zero_jax.gather import reduce_scatter

SGD = optax.sgd(0.3, momentum=0.9)
PLATFORMS = ("v4:2x2x2", "v5e:2x4", "v5p:2x2x2", "v6e:2x4", "tpu7x:1x2x2", "h100:8")
SIZES = {1: 8, 2: (2, 4), 3: (2, 2, 2)}
OPTIONS = {
    "": {}, "once": {"accumulate": 2, "reduce": "once"}, "step": {"accumulate": 2, "gather": "step"},
    "kept": {"gather": "forward"}, "int8": {"communication": zero_jax.Communication(weights="int8", gradients="int8")},
    "int8 gradients": {"communication": zero_jax.Communication(gradients="int8")},
    "optimizer": {"offload": zero_jax.Offload(buffer_bytes=2**16)}, "parameters": {"offload": "parameters"},
    "gradients": {"offload": zero_jax.Offload(parameters="host", gradients="host", buffer_bytes=2**16)},
    "remat": {"remat": "full"}, "tiles": {"tiling": {"up/kernel": 2}},
    "serial": {"overlap": False}}


class Block(nn.Module):
    """Two products and a norm."""

    hidden: int

    @nn.compact
    def __call__(self, x, _):
        h = nn.tanh(nn.Dense(self.hidden, name="up")(nn.LayerNorm()(x)))
        return x + nn.Dense(x.shape[-1], name="down")(h), None


class Net(nn.Module):
    """A table, a convolution, and a loop over two layers, whose shapes divide or not."""

    width: int
    hidden: int
    vocab_size: int

    @nn.compact
    def __call__(self, tokens):
        table = nn.Embed(self.vocab_size, self.width, embedding_init=nn.initializers.normal(0.5))
        x = table(tokens)
        x = x + nn.Conv(self.width, (3,), name="conv")(x)
        layers = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        x, _ = layers(self.hidden, name="layers")(x, None)
        return table.attend(x) / self.width**0.5


NETS = {"even": Net(64, 256, 128), "odd": Net(60, 100, 131), "wide": Net(256, 2048, 512)}
"""The wide one's weights fill tiles, and are gathered in chunks where weights are."""


def loss(model, batch):
    logits = model(batch["x"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


@functools.cache
def batches(vocab_size, number=2):
    drawn = np.random.default_rng(0).integers(0, vocab_size, (number, 16, 9)).astype(np.int32)
    return [{"x": rows[:, :-1], "y": rows[:, 1:]} for rows in drawn]


@functools.cache
def alone(net):
    return oracle(NETS[net], batches=batches(NETS[net].vocab_size), optimizer=SGD, loss=loss)


def trained(platform, axis, stage, net, option="", hpz=(), replica=1):
    sizes = SIZES[len(axis)] if replica == 1 else 4 if len(axis) == 1 else (2, 2)
    with simulated(platform):
        return train(NETS[net], stage, zero_jax.make_mesh(sizes, replica=replica), axis=axis, optimizer=SGD, loss=loss,
                     batches=batches(NETS[net].vocab_size), **OPTIONS[option], **({"hpz_axes": hpz} if hpz else {}))


def step_of(platform, stage, net, **options):
    with simulated(platform):
        return flat_step(
            NETS[net], stage, mesh=zero_jax.make_mesh(options.pop("data", 8)), optimizer=SGD, loss=loss, **options)


def check(found, net, option=""):
    one, (loss_at, param_at) = alone(net), (2e-2, 5e-2) if "int8" in option else (3e-6, 1e-5)
    np.testing.assert_allclose(found.losses, one.losses, rtol=loss_at)
    np.testing.assert_allclose(found.norms, one.norms, rtol=10 * loss_at)
    assert param_difference(found, one) < param_at
    assert max(abs(leaf - one.start[name]).max() for name, leaf in found.params.items()) > 100 * 1e-5


def rows():
    """Every order of one, two and three axes and every set of hpZ axes on every platform; options go round."""
    options, nets = itertools.cycle(OPTIONS), itertools.cycle(["even", "odd", "odd", "wide"])
    for platform in PLATFORMS:
        for number in SIZES:
            names = ["data"] if number == 1 else [f"data_{at}" for at in range(number)]
            for axis in itertools.permutations(names):
                inside = [some for size in range(number) for some in itertools.combinations(names, size)]
                for stage, hpz in [(1, ()), (2, ()), *((3, some) for some in inside)]:
                    option = next(options)
                    option = "" if refused(platform, stage, option, hpz) else option
                    net = next(nets)
                    yield platform, axis, stage, "even" if option == "gradients" else net, option, hpz


def refused(platform, stage, option, hpz):
    """Whether the library refuses the option there, or it would change nothing."""
    return stage < 3 and option in ("step", "kept", "int8", "parameters", "gradients", "tiles") or hpz and option in (
        "kept", "parameters", "gradients", "step", "tiles") or platform != "h100:8" and option == "gradients"


FAST = {
    ("v5e:2x4", ("data_1", "data_0"), 3, "odd", "", ("data_1",)),
    ("h100:8", ("data",), 3, "odd", "parameters", ())}


@pytest.mark.grid
@pytest.mark.parametrize(("platform", "axis", "stage", "net", "option", "hpz"), [
    *sorted(FAST), *(pytest.param(*row, marks=pytest.mark.slow) for row in rows())])
def test_the_numbers_of_a_plain_loop(platform, axis, stage, net, option, hpz):
    check(trained(platform, axis, stage, net, option, hpz), net, option)


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("axis", [("data",), ("data_1", "data_0")])
def test_beside_replicas(platform, axis, stage):
    check(trained(platform, axis, stage, "odd", replica=2), "odd")


def in_the_order_of_the_mesh(splits, names):
    """As it was: where the minor axis of a dim is the major one of the mesh, rows come to other devices."""
    return sorted((axis for axes in splits for axis in axes), key=names.index)


@pytest.mark.parametrize(("platform", "stage", "hpz"), [
    ("v5e:2x4", 3, ("data_1",)), pytest.param("v5p:2x2x2", 1, (), marks=pytest.mark.slow)])
def test_scatters_in_the_order_of_the_mesh_are_caught(platform, stage, hpz, monkeypatch):
    """Negative control of the local view, of the numbers and of `verify`, which keeps its contract without it."""
    axis, batch = ("data_0", "data_1") if hpz else ("data_1", "data_0"), batches(NETS["even"].vocab_size)[0]
    step_of(platform, stage, "even", data=(2, 4), axis=axis, **({"hpz_axes": hpz} if hpz else {})).verify(batch)
    monkeypatch.setattr(reduce_scatter, "major_first", in_the_order_of_the_mesh)
    found = trained(platform, axis, stage, "even", hpz=hpz)
    with pytest.raises(AssertionError):
        check(found, "even")
    with pytest.raises(ContractError, match="rows are on other devices than the layout says: .*over data_1 x data_0"):
        found.step.verify(batch)


@pytest.mark.slow
@pytest.mark.parametrize(("platform", "stage", "net", "programs"), [
    ("v5e:2x4", 1, "wide", 3), ("v5e:2x4", 3, "wide", 2), ("v5p:2x2x2", 2, "wide", 3), ("v6e:2x4", 3, "wide", 2)])
def test_the_passes_of_a_platform_change_its_program(platform, stage, net, programs):
    """Else the rows above would compute what any device does: chunks, tiles, beside products.

    At stage 3 `overlap` adds nothing to the program: XLA's options do all of it.
    """
    batch = batches(NETS[net].vocab_size)[0]
    texts = {step_of(*row).lower(batch).as_text() for row in ((platform, stage, net), (None, stage, net))}
    assert len(texts) == 2
    assert len({*texts, step_of(platform, stage, net, overlap=False).lower(batch).as_text()}) == programs


def test_a_platform_has_as_many_devices():
    with pytest.raises(zero_jax.errors.UsageError, match="has 4 devices"):
        zero_jax.simulate_devices(8, platform="v5e:2x2")
    assert zero_jax.make_mesh().devices.size == jax.device_count()
    with simulated("v5p:2x2x2"):
        assert dict(zero_jax.make_mesh().shape) == {"data_0": 4, "data_1": 2}
