"""Tensor, sequence and context parallelism, partitioned checkpoints, secondary shards: the numbers of one device."""

import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from support.covering import covering, weekly
from support.flat import flat_step
from support.oracle import slow
from support.trained_losses import BATCH, CONFIG, FLAVOURS, LENGTH, VOCAB, batches, losses

import zero_jax
from models import gpt2
from zero_jax.sharding.mesh_axes import MeshAxes
from zero_jax.sharding.tensor_rules import TensorRule, tensor_specs
from zero_jax.transforms.activation_partitioning import Activations
from zero_jax.transforms.remat import has_checkpoints

RULES = gpt2.tensor_rules(CONFIG)


@functools.cache
def oracle(flavour, scan=True):
    return losses(flavour, 0, zero_jax.make_mesh(1), config_of(scan))


@functools.cache
def config_of(scan=True, remat=True):
    return gpt2.Config(2, 32, 4, vocab_size=VOCAB, max_length=LENGTH, remat=remat, scan_layers=scan)


def difference(found, flavour, scan=True):
    expected = oracle(flavour, scan)
    return float(np.max(np.abs(found - expected) / expected))


FAST = [("nnx", 3, 4, True, True)]
ROWS = covering(FLAVOURS, range(4), (2, 4), (False, True, "cpu"), (False, True))


@pytest.mark.grid
@pytest.mark.parametrize("flavour, stage, tensor, partition, sequence", [
    *FAST, slow("linen", 1, 4, True, False), *(slow(*row) for row in ROWS if row not in FAST)])
def test_numbers_of_one_device(flavour, stage, tensor, partition, sequence):
    found = losses(flavour, stage, zero_jax.make_mesh(tensor=tensor), tensor_rules=RULES, sequence_parallel=sequence,
                   partition_activations=partition)
    assert difference(found, flavour) <= 1e-6


@weekly("broken, options", [
    ("fetch", {"partition_activations": True}), ("moved", {"sequence_parallel": True})])
def test_the_comparison_sees_a_wrong_activation(broken, options, monkeypatch):
    right = getattr(Activations, broken)

    def wrong(self, leaf, **how):
        leaf = right(self, leaf, **how)
        return leaf * 1.01 if self.is_activation(leaf) else leaf

    monkeypatch.setattr(Activations, broken, wrong)
    found = losses("linen", 3, zero_jax.make_mesh(tensor=2), tensor_rules=RULES, **options)
    assert difference(found, "linen") > 1e-6


MESHES = {
    "context": ({"context": 2}, {}),
    "context and tensor": ({"context": 2, "tensor": 2}, {"tensor_rules": RULES, "sequence_parallel": True}),
    "hybrid and tensor": ({"replica": 2, "tensor": 2}, {"tensor_rules": RULES}),
    "secondary": ({"data": (2, 4)}, {"hpz_axes": "data_1"}),
    "secondary and tensor": ({"data": (2, 2), "tensor": 2}, {"tensor_rules": RULES, "hpz_axes": ("data_1",)}),
    "reduced once": ({"tensor": 2}, {"tensor_rules": RULES, "accumulate": 2, "reduce": "once"}),
    "every microbatch": ({"tensor": 2}, {"tensor_rules": RULES, "accumulate": 2, "sequence_parallel": True}),
    "on the host without tensor": ({}, {"partition_activations": "cpu"}),
}


@pytest.mark.grid
@pytest.mark.parametrize("name, flavour", [
    row if row == ("context and tensor", "linen") else slow(*row)
    for row in itertools.product(MESHES, FLAVOURS)])
def test_other_meshes(name, flavour):
    sizes, options = MESHES[name]
    assert difference(losses(flavour, 3, zero_jax.make_mesh(**sizes), **options), flavour) <= 1e-6


class Dropped(nn.Module):
    """It draws in evaluation, too."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dropout(0.1, deterministic=False)(nn.Dense(32, name="up")(x))
        return nn.Dense(8, name="down")(x)


@pytest.mark.slow
@weekly("sizes", [{"tensor": 2}, {"context": 2}])
def test_a_model_with_dropout_is_verified(sizes):
    rules = [("up/kernel", P(None, "tensor")), ("down/kernel", P("tensor", None))] if "tensor" in sizes else []
    batch = {"x": np.ones((8, 16, 8), np.float32)}

    def step_with(streams):
        return flat_step(
            Dropped(), 3, mesh=zero_jax.make_mesh(**sizes), tensor_rules=rules, rng_streams=streams,
            loss=lambda model, batch: jnp.mean(model(batch["x"]) ** 2))

    assert not step_with(("dropout",)).verify(batch).violations
    with pytest.raises(ValueError, match="needs PRNG for \"dropout\""):  # negative control
        step_with(()).verify(batch)


REMAT = {"full": "full", "dots": "dots", "names": ("attention",), "sqrt": zero_jax.Remat(every="sqrt"),
         "both": zero_jax.Remat(every=2), "policy": jax.checkpoint_policies.everything_saveable}
KEEPING = [("linen", 3, True, "full"), ("nnx", 0, True, "sqrt")]


@pytest.mark.grid
@weekly("flavour, stage, scan, remat", [
    *KEEPING, *(slow(*row) for row in covering(FLAVOURS, (0, 3), (True, False), REMAT) if row not in KEEPING)])
def test_what_blocks_keep_changes_no_number(flavour, stage, scan, remat):
    found = losses(flavour, stage, zero_jax.make_mesh(), config_of(scan, remat=False), remat=REMAT[remat])
    assert difference(found, flavour, scan) <= 1e-6


@pytest.mark.grid
@pytest.mark.parametrize("sizes, flavour", [
    ({}, "linen"), slow({}, "nnx"), *(slow(sizes, flavour) for sizes in ({"tensor": 4}, {"context": 2, "tensor": 2})
                                      for flavour in FLAVOURS)])
def test_loss_in_chunks(sizes, flavour):
    mesh = zero_jax.make_mesh(**sizes)
    options = {"tensor_rules": RULES} if "tensor" in sizes else {}
    found = losses(flavour, 3, mesh, loss=zero_jax.chunked_next_token_loss(mesh, 4), **options)
    assert difference(found, flavour) <= 1e-6


@pytest.mark.slow
def test_loss_in_chunks_is_weighted():
    mesh = zero_jax.make_mesh(tensor=2)
    batch = batches(1)[0] | {"weights": np.tile(np.arange(LENGTH) % 3, (BATCH, 1)).astype(np.float32)}
    found = []
    for loss in (None, zero_jax.chunked_next_token_loss(mesh, 2)):
        step = flat_step(gpt2.build(CONFIG), 1, mesh=mesh, tensor_rules=RULES, loss=loss)
        _, metrics = step(step.init(jax.random.key(0), batch), batch)
        found.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    np.testing.assert_allclose(*found, rtol=1e-6)
    assert abs(found[0][0] - oracle("linen")[0]) > 1e-4  # without weights it is another


def test_state_falls_by_both_degrees():
    sizes = {"stage": 3, "mesh": zero_jax.make_mesh(tensor=4), "tensor_rules": RULES}
    layout = flat_step(gpt2.build(CONFIG), **sizes).layout(batches()[0])
    split = [row for row in layout.placements() if "tensor" in str(row.spec)]
    assert all(row.device_bytes * 8 == row.bytes for row in split)
    assert {row.name.split("/", 1)[1] for row in split if row.name.startswith("params")} == {
        "wte/embedding", *(f"blocks/{name}" for name in (
            "qkv/kernel", "qkv/bias", "proj/kernel", "up/kernel", "up/bias", "down/kernel"))}
    others = [row for row in layout.placements() if row not in split and row.bytes > 8]
    assert all(row.device_bytes * 2 == row.bytes for row in others) and not layout.replicated()
    assert layout.num_shards == 2 and layout.tensor_size == 4


class Annotated(nn.Module):
    """A Linen model that says itself how it is split."""

    spec: tuple = (None, "tensor")

    @nn.compact
    def __call__(self, x):
        init = nn.initializers.lecun_normal()
        x = nn.Dense(16, kernel_init=nn.with_partitioning(init, self.spec), name="up")(x)
        return nn.Dense(8, kernel_init=nn.with_partitioning(init, ("tensor", "embed")), name="down")(nn.relu(x))


def annotated_nnx(rngs):
    init, eager = nnx.initializers.lecun_normal(), {"eager_sharding": False}

    class Model(nnx.Module):
        def __init__(self):
            metadata = {"kernel_metadata": {"out_sharding": (None, "tensor"), **eager}}
            self.up = nnx.Linear(8, 16, kernel_init=init, rngs=rngs, **metadata)
            self.down = nnx.Linear(16, 8, rngs=rngs, kernel_metadata={"out_sharding": ("tensor", None), **eager})

        def __call__(self, x):
            return self.down(nnx.relu(self.up(x)))

    return Model()


def squares(model, batch):
    return jnp.mean((model(batch["x"]) - batch["x"]) ** 2)


@weekly("model", [Annotated(), annotated_nnx], ids=["linen", "nnx"])
def test_metadata_are_rules(model):
    batch = {"x": np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)}
    found = []
    for mesh in (zero_jax.make_mesh(1), zero_jax.make_mesh(tensor=4)):
        step = zero_jax.make_zero_train_step(model, 3, mesh=mesh, loss=squares)
        specs = {row.name: row.spec for row in step.layout(batch).placements()}
        _, metrics = step(step.init(jax.random.key(0), batch), batch)
        found.append(float(metrics["loss"]))
    assert specs["params/up/kernel"][1] == "tensor" and specs["params/down/kernel"][0] in ("tensor", ("tensor", "data"))
    np.testing.assert_allclose(*found, rtol=1e-6)


def tree(**shapes):
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}


def test_rules_take_the_last_dims_and_the_first_that_matches():
    axes = MeshAxes.of(zero_jax.make_mesh(tensor=2))
    params = tree(up=(3, 4, 8), down=(3, 8, 4), scale=(4,))
    specs = tensor_specs(params, axes, [("up", P(None, "tensor")), TensorRule("up|down", P("tensor", None), units=4)])
    assert specs == {"up": P(None, None, "tensor"), "down": P(None, "tensor", None)}


@pytest.mark.parametrize("rules, metadata, message", [
    ([("upp", P(None, "tensor"))], {}, "'upp' matches no parameter. There are: down, up"),
    ([("up", P(None, "data"))], {}, "one entry for each of its last dims, None or 'tensor'"),
    ([("up", P("tensor", "tensor"))], {}, "at most once"),
    ([("up", P(None, None, None, "tensor"))], {}, r"of parameter up of shape \(4, 6\)"),
    ([("up", P(None, "tensor"))], {}, r"up of shape \(4, 6\): dim 1 of 6 does not divide over the 4 devices"),
    ([("down", P(None, "tensor"), 6)], {}, "6 units .heads., which do not divide over the 4 devices"),
    ([("down", P("tensor", None))], {"down": (None, "tensor")}, "down of shape .* by the model's own metadata"),
    ([], {"up": ("tensor",)}, "one entry for each dim"),
    ([], {}, "no parameter is split over it: give tensor_rules"),
])
def test_rules_that_are_refused(rules, metadata, message):
    with pytest.raises(ValueError, match=message):
        tensor_specs(tree(down=(8, 8), up=(4, 6)), MeshAxes.of(zero_jax.make_mesh(tensor=4)), rules, metadata)


@pytest.mark.parametrize("sizes, options, message", [
    ({}, {"partition_activations": "disk"}, "partition_activations='disk': give True .* or \"cpu\""),
    ({"tensor": 8}, {"tensor_rules": RULES}, "made of 4 units"),
    ({"tensor": 2}, {}, "no parameter is split over it"),
    ({}, {"hpz_axes": "node"}, "hpz_axes=.'node'.*give some of the axes"),
    ({"data": (1, 8)}, {"hpz_axes": "data_1"}, "all of whose 8 devices they span"),
    ({"data": (8, 1)}, {"hpz_axes": "data_1"}, "span one device, which would keep all"),
    ({}, {"remat": "half"}, "remat='half': give one of 'full', 'dots'"),
    ({}, {"remat": zero_jax.Remat(every="sqrt")}, "the model checkpoints its blocks itself"),
    ({}, {"combine_bytes": 2**20}, "combine_bytes=1048576: XLA has no option on 'cpu'"),
    ({}, {"overlap": True}, "overlap=True changes nothing on 'cpu': its collectives block"),
    ({}, {"overlap": 3}, "overlap=3: give \"auto\", True, False, or a mapping"),
    ({"context": 8}, {"length": 12}, "must divide over the 8 devices of the axis 'context'"),
    ({"tensor": 4}, {"tensor_rules": RULES, "sequence_parallel": True, "length": 14}, "sequence divides over its 4"),
])
def test_settings_that_are_refused(sizes, options, message):
    options = {"stage": 3, "length": LENGTH, **options}
    length, batch = options.pop("length"), batches()[0]
    with pytest.raises(ValueError, match=message):
        step = flat_step(gpt2.build(CONFIG), mesh=zero_jax.make_mesh(**sizes), **options)
        step.lower({name: leaf[:, :length] for name, leaf in batch.items()})


@pytest.mark.parametrize("options, config, message", [
    ({"remat": zero_jax.Remat(every=3)}, config_of(remat=False), "has 2 blocks, which do not divide by it"),
    ({"remat": ("attention", "typo")}, config_of(remat=False), "has the name 'typo'.* there are: 'attention'. Give"),
    ({"remat": ("attention_owt",)}, config_of(scan=False), "in the model's blocks has the name 'attention_owt'"),
    ({"partition_activations": "cpu"}, config_of(remat=False), "nothing is checkpointed"),
])
def test_blocks_that_do_not_fit(options, config, message):
    with pytest.raises(ValueError, match=message):
        flat_step(gpt2.build(config), 3, **options).lower(batches()[0])


def test_a_name_that_a_rule_for_forward_alone_gives_is_found():
    @jax.custom_vjp
    def squash(x):
        return jnp.tanh(x)

    def forward(x):
        out = jax.ad_checkpoint.checkpoint_name(jnp.tanh(x), "squashed")
        return out, out

    squash.defvjp(forward, lambda out, by_out: (by_out * (1 - out**2),))

    class Blocks(nn.Module):
        @nn.compact
        def __call__(self, x):
            for number in range(2):
                x = squash(nn.Dense(8, name=f"blocks_{number}")(x))
            return x

    def lower(name):
        step = zero_jax.make_zero_train_step(Blocks(), 3, loss=lambda model, batch: jnp.mean(model(batch["x"]) ** 2),
                                             remat=(name,))
        step.lower({"x": np.zeros((8, 8), np.float32)})

    lower("squashed")
    with pytest.raises(zero_jax.UsageError, match="Names that there are: 'squashed'"):  # negative control
        lower("squash")


def test_a_model_without_blocks_is_told():
    with pytest.raises(ValueError, match="no blocks were found"):
        zero_jax.make_zero_train_step(Annotated(), 3, loss=squares, remat="full").lower({"x": np.zeros((8, 8))})


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_remat_of_a_block(flavour):
    class Linen(nn.Module):
        @nn.compact
        def __call__(self, x):
            return zero_jax.remat(nn.Dense)(8)(x)

    def made(rngs):
        return zero_jax.remat(nnx.Linear)(8, 8, rngs=rngs)

    step = zero_jax.make_zero_train_step({"linen": Linen(), "nnx": made}[flavour], 0, loss=squares)
    batch = {"x": np.ones((8, 8), np.float32)}
    assert has_checkpoints(step.trace_forward(batch).jaxpr)
    with pytest.raises(ValueError, match="give a Linen class"):
        zero_jax.remat(nn.Dense(8))
