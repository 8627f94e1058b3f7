"""Memory-centric tiling: the numbers of one device, never a whole weight or gradient, and clear refusals."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from support.flat import flat_step
from support.oracle import ADAMW, loss_difference, oracle, param_difference, train
from support.targets import mesh_of

import zero_jax
from zero_jax.planning.flops import model_flops
from zero_jax.step import gradients
from zero_jax.transforms import tiled_products
from zero_jax.transforms.tiled_products import TiledProduct

TILES = {"up/kernel": 4, "down/kernel": 3, "heads/kernel": 2, "out/kernel": 2}


def batches(steps=2):
    return [{name: jax.random.randint(jax.random.key(10 * number + i), (16, 8), 0, 96)
             for i, name in enumerate(("inputs", "targets"))} for number in range(steps)]


class Block(nn.Module):
    """Of two products, the second of which casts a bfloat16 weight."""

    width: int

    @nn.compact
    def __call__(self, x, _=None):
        up = nn.Dense(2 * self.width, name="up")(x)
        return x + nn.Dense(self.width, name="down", dtype=jnp.float32)(nn.gelu(up)).astype(x.dtype), None


class Net(nn.Module):
    """Products of two, and of three dims, one and two of which are summed over; in a loop over layers or not."""

    width: int = 66  # 66 does not divide by 8 devices
    scanned: bool = True
    remat: bool = False

    @nn.compact
    def __call__(self, x):
        x = nn.Embed(96, self.width)(x)
        heads = nn.DenseGeneral((4, 16), name="heads")(x)
        x = x + nn.DenseGeneral(self.width, axis=(-2, -1), name="out")(heads)
        block = nn.remat(Block) if self.remat else Block
        if self.scanned:
            loop = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
            x, _ = loop(self.width, name="blocks")(x, None)
        else:
            x, _ = block(self.width, name="blocks")(x)
        return nn.Dense(96, name="head")(x)


class NnxBlock(nnx.Module):
    def __init__(self, rngs, width=66):
        self.up, self.down = nnx.Linear(width, 4 * width, rngs=rngs), nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(x)))


class NnxNet(nnx.Module):
    def __init__(self, rngs, width=66):
        self.embed = nnx.Embed(96, width, rngs=rngs)
        self.blocks = nnx.split_rngs(splits=3)(nnx.vmap(NnxBlock, in_axes=(0, None), out_axes=0))(rngs, width)
        self.head = nnx.Linear(width, 96, rngs=rngs)

    def __call__(self, x):
        x = nnx.scan(lambda block, x: block(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(
            self.blocks, self.embed(x))
        return self.head(x)


class Small(nn.Module):
    """Of two products, the first of which is tiled along the dim that it keeps, the second along that it sums over."""

    @nn.compact
    def __call__(self, x):
        x = nn.Embed(96, 18)(x)
        x = nn.gelu(nn.Dense(32, name="up")(x))
        return nn.Dense(97, name="down")(x)


SMALL_TILES = {"up/kernel": 4, "down/kernel": 2}  # 97 columns do not divide by 2, 32 rows do


@pytest.fixture(scope="module")
def small_oracle():
    return oracle(Small(), batches=batches())


def test_numbers_are_those_of_one_device(small_oracle, monkeypatch):
    run = train(Small(), 3, 8, batches=batches(), tiling=SMALL_TILES)
    assert loss_difference(run, small_oracle) < 1e-6 and param_difference(run, small_oracle) < 2e-6
    np.testing.assert_allclose(run.norms, small_oracle.norms, rtol=1e-5)
    lines = run.step.layout().describe()
    assert "computed in tiles: up/kernel, 4 along dim 1: 576 of 2,304 bytes are gathered at a time" in lines
    assert "computed in tiles: down/kernel, 2 along dim 0" in lines

    # Negative control: the first tile in the place of every other one.
    tile = TiledProduct._tile
    monkeypatch.setattr(TiledProduct, "_tile", lambda self, value, dim, index: tile(self, value, dim, 0))
    broken = train(Small(), 3, 8, batches=batches()[:1], tiling=SMALL_TILES)
    assert abs(broken.norms[0] - small_oracle.norms[0]) > 1e-2


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize(("model", "precision", "options"), [
    (Net(), None, {}), (Net(remat=True), "bf16", {}), (Net(width=72, scanned=False), "bf16", {}),
    (Net(), None, {"remat": "dots", "accumulate": 2, "tiling": 6_000}), (NnxNet, None, {}),
    (NnxNet, "bf16", {"offload": "parameters"}), (Net(scanned=False), "bf16", {"offload": "parameters"})])
def test_models_have_the_numbers_of_one_device(model, precision, options):
    made = (lambda rngs: NnxNet(rngs)) if model is NnxNet else model
    tiles = {name: count for name, count in TILES.items() if model is not NnxNet or name[0] in "ud"}
    options = {"tiling": tiles, **options}
    run, plain = train(made, 3, 8, batches=batches(), precision=precision, **options), oracle(
        made, batches=batches(), precision=precision)
    assert loss_difference(run, plain) < (2e-4 if precision else 1e-6)
    assert param_difference(run, plain) < (2e-3 if precision else 3e-6)
    assert run.step.layout().tiles


INT8 = {"communication": zero_jax.Communication(weights="int8")}


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize("model", [Net(width=72), NnxNet])
@pytest.mark.parametrize("options", [{"hpz_axes": "data_1"}, INT8])
def test_tiles_of_copies_and_of_codes_have_the_numbers_of_one_device(model, options):
    """Up to the rounding of codes, whose error is as large without tiles."""
    made = (lambda rngs: NnxNet(rngs, 64)) if model is NnxNet else model
    tiles = {name: count for name, count in {**TILES, "down/kernel": 4}.items()
             if model is not NnxNet or name[0] in "ud"}
    plain, sizes = oracle(made, batches=batches()), (2, 4) if "hpz_axes" in options else 8
    run = train(made, 3, sizes, batches=batches(), tiling=tiles, **options)
    loss, param = (1e-4, 1.5e-3) if "communication" in options else (1e-6, 3e-6)
    assert loss_difference(run, plain) < loss and param_difference(run, plain) < param
    assert len(run.step.layout().tiles) == len(tiles)
    run.step.verify(batches(1)[0])
    if "communication" in options:
        # Codes they are, so that no run is as near as one without: else nothing was sent as codes.
        assert param_difference(run, plain) > 3e-5


def test_what_an_evaluator_reads_is_in_tiles_too():
    step = zero_jax.make_zero_train_step(Small(), 3, tiling=SMALL_TILES)
    batch = batches(1)[0]
    traced = str(step.trace_forward(batch))
    assert traced.count(tiled_products.TILED_PRODUCT) == 2
    other = zero_jax.make_zero_train_step(Small(), 3)
    assert model_flops(step, batch) == model_flops(other, batch) > 0


def test_an_evaluator_takes_a_tiled_weight_for_more_than_a_product():
    """As codes where it is sent so. Control: without codes the numbers are others."""
    class Wide(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(97)(nn.Dense(64, name="up")(nn.Embed(96, 32)(x)))

    def size(model, batch):
        return jnp.sum(model.variables["params"]["up"]["kernel"] ** 2)

    def found(**options):
        step, batch = flat_step(Wide(), 3, **options), batches(1)[0]
        return float(step.evaluator(size)(step.init(jax.random.key(0), batch), batch))

    tiles = {"tiling": {"up/kernel": 4}}
    codes, exact = found(**tiles, **INT8), found(**tiles)
    assert abs(codes / found(**INT8) - 1) < 1e-6 < 1e-5 < abs(codes / exact - 1) < 1e-2


SPLIT = {"tensor_rules": [("up/kernel", P(None, "tensor")), ("down/kernel", P("tensor", None))]}
SPLIT_TILES = {"up/kernel": 3, "down/kernel": 97}  # along the dims that are not split


@pytest.mark.slow
def test_tiles_are_along_what_tensor_parallelism_does_not_split(small_oracle):
    mesh = zero_jax.make_mesh(4, tensor=2)
    run = train(Small(), 3, mesh, batches=batches(), tiling=SPLIT_TILES, **SPLIT)
    assert loss_difference(run, small_oracle) < 2e-6 and param_difference(run, small_oracle) < 2e-6
    lines = run.step.layout().describe()
    assert "up/kernel, 3 along dim 0" in lines and "down/kernel, 97 along dim 1" in lines
    plain = flat_step(Small(), 3, mesh=mesh, optimizer=ADAMW, **SPLIT)
    promised = [each.contract(batches(1)[0]).budget("activations").communication_bytes for each in (run.step, plain)]
    assert promised[0] == promised[1] > 0


@pytest.mark.slow
def test_one_device_takes_tiles_from_host_memory():
    options = {"batches": batches(), "precision": "bf16"}
    run = train(Small(), 3, 1, tiling=SMALL_TILES, offload="parameters", **options)
    assert loss_difference(run, oracle(Small(), **options)) < 2e-4 and len(run.step.layout().tiles) == 2


TARGET_BATCH = {name: jax.ShapeDtypeStruct((32, 64), jnp.int32) for name in ("inputs", "targets")}


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize(("target", "options"), [
    ("h100:8", {}), ("h100:8", {"remat": "full"}), ("h100:8", {"offload": "parameters"}), ("v5e:2x4", {})])
def test_targets_keep_the_contract(target, options, monkeypatch):
    def compiled():
        step = flat_step(lambda rngs: NnxNet(rngs, 256), 3, mesh=mesh_of(target), precision="bf16",
                         tiling={"up/kernel": 8, "down/kernel": 4}, **options)
        return step.compiled_step(TARGET_BATCH)

    report = compiled().verify()
    gathers, reductions = report.results[0], report.results[1]
    sizes = {np.prod(dims) for c in gathers.collectives for _, dims in c.shapes if c.in_loop}
    assert {2**18 // 8, 2**18 // 4} <= sizes and max(sizes) == 2**18 // 4
    assert gathers.budget.communication_bytes / reductions.budget.communication_bytes < (3.1 if options == {
        "remat": "full"} else 2.1)
    if target == "h100:8" and not options:  # negative control: the same products whole
        monkeypatch.setattr(gradients, "tile_products", lambda jaxpr: jaxpr)
        with pytest.raises(zero_jax.ContractError) as broken:
            compiled().verify()
        assert "is to be reduced in" in str(broken.value) and "gathered parameters are in memory" in str(broken.value)


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize(("target", "sizes", "options"), [
    ("h100:2x4", {"data": (2, 4)}, {"hpz_axes": "data_1"}), ("h100:8", {}, INT8)])
def test_targets_send_copies_once_and_codes_in_tiles(target, sizes, options):
    def compiled(**tiling):
        step = flat_step(lambda rngs: NnxNet(rngs, 256), 3, mesh=mesh_of(target, **sizes),
                         precision="bf16", **tiling, **options)
        return step.compiled_step(TARGET_BATCH)

    tiled, plain = compiled(tiling={"up/kernel": 8, "down/kernel": 4}), compiled()
    gathers, whole = (made.verify().results[0] for made in (tiled, plain))
    # As many bytes as of whole weights, but for a scale of each block.
    assert gathers.budget.communication_bytes / whole.budget.communication_bytes == pytest.approx(1, abs=0.02)
    assert gathers.communication_bytes / whole.communication_bytes == pytest.approx(1, abs=0.02)


class Wide(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(16384, use_bias=False, name="wide")(nn.LayerNorm(name="norm")(x))


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize(("target", "options"), [
    ("h100:8", {}), ("h100:1", {"offload": "parameters"}),
    *(("h100:8", {"tensor_rules": [("wide/kernel", spec)]}) for spec in (P(None, "tensor"), P("tensor", None)))])
def test_temporaries_are_those_of_a_tile(target, options):
    """The product of one wide layer: a tile and its gradient, the gradient's shard, and no whole weight."""
    tensor = 2 if "tensor_rules" in options else 1

    def compiled(tiling):
        step = flat_step(
            Wide(), 3, loss=lambda model, batch: jnp.square(model(batch["x"]).astype(jnp.float32)).mean(),
            mesh=mesh_of(target, tensor=tensor), precision="bf16", tiling=tiling, **options)
        return step.compiled_step({"x": jax.ShapeDtypeStruct((64, 16384), jnp.bfloat16)})

    tiled, plain = compiled({"wide/kernel": 16}), compiled(None)
    tiled.verify()
    whole, devices = 2 * 16384**2 / tensor, plain.layout.mesh.size // tensor
    column = tensor > 1 and options["tensor_rules"][0][1][1] is not None  # XLA:GPU transposes shards of these
    update = 2**26 if "offload" in options else 2**24
    bound = (3 if column else 1) * whole / devices + 2 * whole / 16 + update
    assert tiled.memory.temp_size_in_bytes < bound
    assert plain.memory.temp_size_in_bytes > bound  # negative control


def make(model=None, stage=3, **options):
    return flat_step(model or Small(), stage, **{"tiling": {"up/kernel": 4}, **options})


class Tied(nn.Module):
    @nn.compact
    def __call__(self, x):
        embed = nn.Embed(96, 64)
        return embed.attend(nn.Dense(64, name="up")(embed(x)))


class Twice(nn.Module):
    @nn.compact
    def __call__(self, x):
        layer = nn.Dense(32, name="up")
        return nn.Dense(96, name="down")(layer(layer(nn.Embed(96, 32)(x))))


class Batched(nn.Module):
    """Layers under a vmap, whose products have a batch dim."""

    @nn.compact
    def __call__(self, x):
        x = nn.Embed(96, 32)(x)
        each = nn.vmap(nn.Dense, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=None, axis_size=2)
        return nn.Dense(96, name="down")(each(32, name="up")(x).sum(0))


@pytest.mark.parametrize(("model", "options", "message"), [
    (None, {"mesh": (4, 2), **SPLIT, "tiling": {"up/kernel": 4}}, "none of its dims 18 divides"),
    (None, {"tiling": {"up/kernel": 5}}, "up/kernel cannot be computed in 5 tiles: none of its dims 18 x 32 divides"),
    (None, {"tiling": {"kernels": 4}}, "no parameter's name matches 'kernels'. The largest are down/kernel"),
    (None, {"tiling": {"up": 4}}, "up/bias cannot be computed in 4 tiles: something else than a matrix product"),
    (None, {"tiling": {"up/kernel": 1}}, "tiling['up/kernel']=1: give at least 2"),
    (None, {"tiling": "up/kernel"}, "give {pattern of a parameter's name: number of tiles}"),
    (None, {"tiling": 100}, "tiling=100: give at least 1024"),
    (None, {"tiling": 2**20}, "no gathered parameter that is larger than this can be computed in tiles: all are"),
    (Tied(), {"tiling": {"embedding": 4}}, "embedding cannot be computed in 4 tiles: something else than a matrix"),
    (Twice(), {}, "up/kernel cannot be computed in 4 tiles: 2 matrix products use it"),
    (Batched(), {}, "up/kernel cannot be computed in 4 tiles: something else than a matrix product"),
])
def test_what_cannot_be_tiled_is_refused(model, options, message):
    if "mesh" in options:
        data, tensor = options["mesh"]
        options = {**options, "mesh": zero_jax.make_mesh(data, tensor=tensor)}
    with pytest.raises(ValueError, match="tiling") as error:
        make(model, **options).layout(batches(1)[0])
    assert message in str(error.value)


def test_a_number_of_bytes_tiles_what_is_larger():
    lines = make(Tied(), tiling=6_000).layout(batches(1)[0]).describe()
    assert "computed in tiles: up/kernel, 4 along dim 1: 4,096 of 16,384 bytes" in lines  # 3 do not divide 64
    assert "not computed in tiles, and larger than asked for: Embed_0/embedding (something else" in lines


def test_a_use_that_the_layout_does_not_see_is_refused():
    step = make()
    state = step.abstract_state(batches(1)[0])
    with pytest.raises(ValueError, match="up/kernel cannot be computed in tiles: slice uses it"):
        jax.eval_shape(lambda state, batch: step.gradients(state, batch, loss=lambda model, batch: (
            model(batch["inputs"]) + model.variables["params"]["up"]["kernel"][0, 0]).mean()), state, batches(1)[0])
