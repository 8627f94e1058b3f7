"""What a model may do with its parameters, module feature by module feature, beside a plain flax and optax loop."""


import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.beside_plain_loop import OPTIMIZER, SIZES, STAGES, compare, factory, squares, up_front, vectors
from support.covering import weekly
from support.oracle import slow

import zero_jax
from zero_jax.frontends import nnx as nnx_frontend
from zero_jax.transforms import remat
from zero_jax.tree import named_leaves


class Clipped(nnx.Module):
    """A weight that is clipped in place before it is used, as a Wasserstein critic's."""

    def __init__(self, width, hidden, rngs):
        self.linear = nnx.Linear(width, hidden, rngs=rngs)
        self.out = nnx.Linear(hidden, 1, rngs=rngs)

    def __call__(self, x):
        self.linear.kernel.set_value(jnp.clip(self.linear.kernel[...], -0.05, 0.05))
        return self.out(nnx.relu(self.linear(x)))


class Spectral(nnx.Module):
    def __init__(self, width, hidden, rngs):
        self.normed = nnx.SpectralNorm(nnx.Linear(width, hidden, rngs=rngs), rngs=rngs)
        self.out = nnx.Linear(hidden, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.normed(x)))


class Bypassing(nnx.Module):
    """Methods of the array itself (`.T`, a slice, its size), and a mean over all leaves of a state."""

    def __init__(self, width, hidden, rngs):
        self.kernel = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), (hidden, width)))
        self.table = nnx.Param(nnx.initializers.normal(0.1)(rngs.params(), (hidden, width)))
        self.out = nnx.Linear(hidden, 1, rngs=rngs)
        self.wide = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, x):
        penalty = jnp.sum(self.wide.kernel[...] ** 2) / self.wide.kernel.size / self.wide.kernel.ndim
        x = nnx.tanh(self.wide(x))
        penalty += sum(jnp.mean(leaf**2) for leaf in jax.tree.leaves(nnx.state(self.out, nnx.Param)))
        return self.out(nnx.relu(x @ self.kernel.T + x.mean(0) @ self.table[:3].sum(0))) + penalty


@pytest.mark.grid
@STAGES
@weekly("module", [Clipped, Spectral, Bypassing])
def test_parameters_that_are_overwritten_or_used_past_their_reads(module, stage, sizes):
    step, _ = compare(factory(module, SIZES[sizes]), stage, vectors(SIZES[sizes][0]))
    expected = {Clipped: {"linear/kernel"}, Spectral: {"normed/layer_instance/kernel"}, Bypassing: set()}[module]
    assert expected <= set(up_front(step)) and not {"kernel", "table"} & set(up_front(step))
    assert {name for name, read in step.layout().reads.items() if read.written} == expected


def test_without_their_class_methods_and_slices_of_variables_are_gathered_up_front(monkeypatch):
    monkeypatch.setattr(nnx_frontend, "reading_whole", lambda cls: cls)
    step = zero_jax.make_zero_train_step(factory(Bypassing, (16, 16)), 3, loss=squares)
    step.layout(vectors(16)[0])
    assert {"kernel", "table"} <= set(up_front(step))


class LinenInside(nnx.Module):
    """A Linen module, with statistics, between NNX layers; `lazy_init` makes its parameters."""

    def __init__(self, width, hidden, rngs):
        inner = nn.Sequential([nn.Dense(hidden), nn.BatchNorm(use_running_average=False), nn.relu, nn.Dense(1)])
        self.first = nnx.Linear(width, width, rngs=rngs)
        self.inner = nnx.bridge.ToNNX(inner, rngs=rngs).lazy_init(jnp.ones((2, width)))

    def __call__(self, x):
        return self.inner(self.first(x), mutable=["batch_stats"])


@pytest.mark.grid
@STAGES
def test_a_linen_module_inside_of_an_nnx_module(stage, sizes):
    step, _ = compare(factory(LinenInside, SIZES[sizes]), stage, vectors(SIZES[sizes][0]))
    assert not up_front(step)


def test_without_their_own_classes_flax_does_not_know_the_variables_of_a_linen_module(monkeypatch):
    monkeypatch.setattr(nnx_frontend, "restore_bridged_classes", lambda model: None)
    step = zero_jax.make_zero_train_step(factory(LinenInside, (16, 16)), 3, loss=squares)
    with pytest.raises(ValueError, match="not registered"):
        step.layout(vectors(16)[0])


def test_what_is_overwritten_under_a_rounding_precision_is_refused():
    step = zero_jax.make_zero_train_step(factory(Clipped, (16, 16)), 3, loss=squares, precision="bf16")
    with pytest.raises(ValueError, match="overwrites its parameter linear/kernel.*keep="):
        step.init(jax.random.key(0), vectors(16)[0])
    step = zero_jax.make_zero_train_step(factory(Clipped, (16, 16)), 3, loss=squares, accumulate=2)
    with pytest.raises(ValueError, match="accumulate=2 would write it once for each microbatch"):
        step.init(jax.random.key(0), vectors(16)[0])


class Talkative(nnx.Module):
    """Prints itself, and hands modules to transformations of JAX, which name them in their traces."""

    def __init__(self, width, hidden, rngs):
        self.first = nnx.Linear(width, hidden, rngs=rngs)
        self.second = nnx.Linear(hidden, hidden, rngs=rngs)
        self.third = nnx.Linear(hidden, hidden, rngs=rngs)
        self.out = nnx.Linear(hidden, 1, rngs=rngs)

    def __call__(self, x):
        assert "Linear" in str(self) and "Linear" in repr(self.first)
        x = jax.vmap(self.first)(x)
        x = x + jax.checkpoint(self.second)(nnx.relu(x))
        x = x + nnx.remat(lambda layer, x: nnx.relu(layer(x)))(self.third, x)
        return nnx.jit(lambda layer, x: layer(x))(self.out, x)


@pytest.mark.slow
@pytest.mark.grid
@STAGES
def test_a_module_that_is_printed_and_transformed_while_it_is_traced(stage, sizes):
    step, _ = compare(factory(Talkative, SIZES[sizes]), stage, vectors(SIZES[sizes][0]))
    assert not up_front(step)
    assert not any(read.stacked for read in step.layout().reads.values())
    if stage == 3:
        whole = {row.name for row in step.layout().replicated()}
        assert not [name for name in whole if "kernel" in name]


class Buffers(nnx.Module):
    """Plain arrays as attributes, of NumPy and of JAX, and in a list."""

    def __init__(self, width, hidden, rngs):
        self.scale = np.linspace(0.5, 1.5, width).astype(np.float32)
        self.shift = jnp.arange(width, dtype=jnp.float32) / width
        self.tables = nnx.List([jnp.ones(hidden), jnp.zeros(hidden)])
        self.linear = nnx.Linear(width, hidden, rngs=rngs)
        self.out = nnx.Linear(hidden, 1, rngs=rngs)

    def __call__(self, x):
        hidden = self.linear(x * self.scale[None] + self.shift[None])
        return self.out(nnx.relu(hidden * self.tables[0][None] + self.tables[1][None]))


@pytest.mark.grid
@STAGES
def test_factories_of_modules_with_plain_arrays(stage, sizes):
    compare(factory(Buffers, SIZES[sizes]), stage, vectors(SIZES[sizes][0]))


class Pmapped(nn.Module):
    """Batch statistics over an axis that only `jax.pmap` would bind; `axis_name` None: Flax's own over the batch."""

    hidden: int
    axis_name: str | None = "batch"

    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False, axis_name=self.axis_name)(nn.Dense(self.hidden)(x))
        return nn.Dense(1)(nn.relu(x))


class NnxPmapped(nnx.Module):
    def __init__(self, width, hidden, axis_name, rngs):
        self.linear = nnx.Linear(width, hidden, rngs=rngs)
        self.norm = nnx.BatchNorm(hidden, axis_name=axis_name, rngs=rngs)
        self.out = nnx.Linear(hidden, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.norm(self.linear(x))))


def averaged(model, batch):
    """A loss that averages over the devices itself, as a pmapped one does."""
    return jax.lax.pmean(squares(model, batch), "batch")


@pytest.mark.slow
@pytest.mark.grid
@STAGES
def test_axis_names_of_models_written_for_pmap(stage, sizes):
    width, hidden = SIZES[sizes]
    compare(Pmapped(hidden), stage, vectors(width), plain=Pmapped(hidden, None))
    compare(lambda rngs: NnxPmapped(width, hidden, "data", rngs), stage, vectors(width),
            plain=lambda rngs: NnxPmapped(width, hidden, None, rngs))


def test_a_loss_that_averages_over_devices_itself():
    step = zero_jax.make_zero_train_step(Pmapped(16), 3, optimizer=OPTIMIZER, loss=averaged)
    batches = vectors(16)
    state = step.init(jax.random.key(0), batches[0])
    other = zero_jax.make_zero_train_step(Pmapped(16), 3, optimizer=OPTIMIZER, loss=squares)
    expected = other(other.init(jax.random.key(0), batches[0]), batches[0])[1]["loss"]
    np.testing.assert_allclose(step(state, batches[0])[1]["loss"], expected, rtol=1e-6)


class Tied(nn.Module):
    """An embedding that another module reads from `variables`, as in Hugging Face's GPT-2."""

    hidden: int

    @nn.compact
    def __call__(self, x):
        embed = nn.Dense(self.hidden, name="embed", use_bias=False)
        hidden = nn.tanh(embed(x))
        kernel = self.variables["params"]["embed"]["kernel"].T
        again = nn.Dense(x.shape[-1], use_bias=False).apply({"params": {"kernel": kernel}}, hidden)
        return (again + 0.1 * (hidden @ kernel)).mean(-1, keepdims=True)


@pytest.mark.grid
@STAGES
def test_a_tied_embedding_read_from_variables_is_gathered_where_it_is_used(stage, sizes):
    width, hidden = SIZES[sizes]
    step, _ = compare(Tied(hidden), stage, vectors(width))
    assert up_front(step) == []


class Eight(nn.Module):
    """FP8 products: the gradient of their scales is their next value."""

    hidden: int
    op: type = nn.fp8_ops.Fp8DirectDotGeneralOp

    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(nn.relu(nn.Dense(self.hidden, dot_general_cls=self.op)(x)))


@pytest.mark.slow
@pytest.mark.grid
@STAGES
def test_scales_of_fp8_products_move_as_in_flax(stage, sizes):
    width, hidden = SIZES[sizes]
    _, state = compare(Eight(hidden), stage, vectors(width))
    scales = dict(named_leaves(state.variables))
    assert all(float(np.max(np.abs(leaf - 1))) > 0.1 for name, leaf in scales.items() if name.endswith("scale"))


class Looped(nn.Module):
    """A loop that is fed from the batch, and carries what it is fed with."""

    hidden: int

    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (self.hidden, self.hidden))

        def body(carry, x):
            return nn.tanh(carry @ kernel) + x[:, None], None

        carry, _ = jax.lax.scan(body, jnp.zeros((x.shape[0], self.hidden), x.dtype), x[:, :5].T)
        return nn.Dense(1)(carry)


@pytest.mark.slow
@pytest.mark.grid
@STAGES
def test_a_loop_fed_from_a_float_batch_in_bfloat16(stage, sizes):
    width, hidden = SIZES[sizes]
    compare(Looped(hidden), stage, vectors(width), precision="bf16", dtype=jnp.bfloat16, tolerance=2e-2)


class Indexed(nn.Module):
    """A table of indices and a mask among the parameters, neither of which a bfloat16 could hold."""

    @nn.compact
    def __call__(self, x):
        order = self.param("order", lambda key, size: 4095 + jnp.arange(size)[::-1], x.shape[1])
        mask = self.param("mask", lambda key, size: jnp.arange(size) % 2 == 0, x.shape[1])
        self.sow("sums", "order", order.sum())
        return nn.Dense(1)(jnp.where(mask, x[:, order - 4095], 0))


@pytest.mark.grid
@STAGES
def test_integer_and_boolean_parameters_keep_their_values(stage, sizes):
    def loss(model, batch):
        value = squares(model, batch)
        return value, {"order": model.variables["sums"]["order"][0]}

    width = SIZES[sizes][0]
    batches = vectors(width)
    step = zero_jax.make_zero_train_step(Indexed(), stage, optimizer=OPTIMIZER, loss=loss, precision="bf16",
                                         frozen=("^order$", "^mask$"))
    state = step.init(jax.random.key(0), batches[0])
    dense = jax.device_get(step.params(state))["Dense_0"]
    x = np.where(np.arange(width) % 2 == 0, batches[0]["x"][:, ::-1], 0)
    expected = np.mean((x @ dense["kernel"] + dense["bias"] - batches[0]["y"]) ** 2)
    state, metrics = step(state, batches[0])
    np.testing.assert_allclose(metrics["loss"], expected, rtol=2e-2)
    assert float(metrics["order"]) == 4095 * width + width * (width - 1) // 2
    params = step.params(state)
    np.testing.assert_array_equal(params["order"], 4095 + np.arange(width)[::-1])
    assert params["mask"].dtype == bool and params["order"].dtype == np.int32


class Complex(nn.Module):
    hidden: int

    @nn.compact
    def __call__(self, x):
        def init(key, shape):
            return jax.random.normal(key, shape, jnp.complex64) / 10

        kernel = self.param("kernel", init, (x.shape[1], self.hidden))
        return nn.Dense(1)(jnp.abs(x.astype(jnp.complex64) @ kernel))


@pytest.mark.grid
@STAGES
@pytest.mark.parametrize("precision", [slow(None), "bf16"])
def test_complex_parameters_stay_complex(precision, stage, sizes):
    width, hidden = SIZES[sizes]
    bf16 = {"precision": "bf16", "dtype": jnp.bfloat16, "tolerance": 2e-2} if precision else {}
    step, state = compare(Complex(hidden), stage, vectors(width), **bf16)
    assert float(np.abs(np.imag(step.params(state)["kernel"])).max()) > 0.1


def test_a_hugging_face_style_object_is_taken_by_its_module():
    class Wrapper:
        module, params = Pmapped(16, None), {}

    batch = vectors(16)[0]
    step = zero_jax.make_zero_train_step(Wrapper(), 3, optimizer=OPTIMIZER, loss=squares)
    assert np.isfinite(step(step.init(jax.random.key(0), batch), batch)[1]["loss"])


class ClippedAside(Clipped):
    """As `Clipped`, but what is clipped is not written back."""

    def __call__(self, x):
        kernel = jnp.clip(self.linear.kernel[...], -0.05, 0.05)
        return self.out(nnx.relu(x @ kernel + self.linear.bias[...][None]))


class Rescaled(Pmapped):
    """As `Pmapped`, of one device's rows alone."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(self.hidden, name="Dense_0")(x)
        halves = nn.BatchNorm(use_running_average=False, name="BatchNorm_0")(x[: len(x) // 2])
        return nn.Dense(1, name="Dense_1")(nn.relu(jnp.concatenate([halves, halves])))


@pytest.mark.parametrize("model, plain", [
    (Pmapped(16), Rescaled(16)), (factory(Clipped, (16, 16)), factory(ClippedAside, (16, 16)))],
    ids=["statistics of some rows", "clipped but not written"])
def test_a_loop_over_something_else_is_told_apart(model, plain):
    """Negative control: the comparison fails where the plain loop trains another model."""
    with pytest.raises(AssertionError):
        compare(model, 3, vectors(16), plain=plain)


class Chosen(nn.Module):
    """A branch that the data choose, between blocks, with parameters of its own."""

    hidden: int

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(self.hidden)(x)

        def scaled(module, x):
            return x * module.param("scale", nn.initializers.ones, (1, self.hidden))

        def product(module, x):
            return nn.Dense(self.hidden, name="inner")(x)

        if self.is_initializing():
            scaled(self, x)
            product(self, x)
        x = nn.cond(x.sum() > 0, scaled, product, self, x)
        return nn.Dense(1)(x)


@pytest.mark.slow
def test_a_branch_between_blocks_that_are_computed_again():
    compare(Chosen(17), 3, vectors(11), remat="full")


def test_without_their_tangents_removed_integers_of_a_block_choose_no_branch(monkeypatch):
    monkeypatch.setattr(remat, "_without_tangents_of_integers", lambda call: call)
    step = zero_jax.make_zero_train_step(Chosen(17), 3, loss=squares, remat="full")
    state = step.init(jax.random.key(0), vectors(11)[0])
    with pytest.raises(AssertionError):
        step(state, vectors(11)[0])
