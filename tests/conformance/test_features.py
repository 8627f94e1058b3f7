"""What a model may do with its parameters, module feature by module feature, beside a plain flax and optax loop.

The loop knows nothing of the library: it starts from the values that the step made, and both go on alone. Odd sizes are
padded on eight devices, even ones are not.
"""

import math
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support.oracle import slow

import zero_jax
from zero_jax.frontends import nnx as nnx_frontend
from zero_jax.step import gradients
from zero_jax.transforms import explicit_scatter
from zero_jax.tree import named_leaves
from zero_jax.xla import devices as xla_devices

OPTIMIZER = optax.sgd(0.02, momentum=0.9)
RNG = np.random.default_rng(0)
NUM_STEPS = 3
SIZES = {"even": (64, 64), "uneven": (67, 71)}
STAGES = pytest.mark.parametrize("stage, sizes", [
    slow(0, "uneven"), slow(1, "uneven"), (2, "uneven"), slow(3, "even"), (3, "uneven")])


def vectors(width, rows=16):
    return [{"x": RNG.normal(size=(rows, width)).astype(np.float32), "y": RNG.normal(size=(rows, 1)).astype(np.float32)}
            for _ in range(NUM_STEPS)]


def squares(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def plain_linen(model, params, variables, batches, loss, dtype=None):
    """Losses, parameters and variables of Flax's own loop, on one device; `dtype`: in which floats are read."""
    opt_state = OPTIMIZER.init(params)

    def cast(tree):
        return jax.tree.map(lambda x: x.astype(dtype) if dtype and jnp.issubdtype(x.dtype, jnp.floating) else x, tree)

    @jax.jit
    def step(params, variables, opt_state, batch):
        scales = {name: tree for name, tree in variables.items() if name == "_overwrite_with_gradient"}

        def loss_of(params, scales):
            everything = {"params": cast(params), **variables, **scales}
            return nn.apply(loss, model, mutable=list(variables))(everything, cast(batch))

        (value, new), (grads, scales) = jax.value_and_grad(loss_of, argnums=(0, 1), has_aux=True)(params, scales)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        return value, optax.apply_updates(params, updates), {**new, **scales}, opt_state

    losses = []
    for batch in batches:
        value, params, variables, opt_state = step(params, variables, opt_state, jax.tree.map(jnp.asarray, batch))
        losses.append(float(value))
    return losses, params, variables


def plain_nnx(factory, params, variables, batches, loss):
    """The same of Flax's own loop over a module, which it changes, on one device."""
    module = factory(nnx.Rngs(0))
    values = dict(named_leaves(params) + named_leaves(variables))
    for path, variable in nnx.to_flat_state(nnx.state(module)):
        if isinstance(variable, nnx.Variable):
            variable.set_value(jnp.asarray(values["/".join(map(str, path))]))
    optimizer = nnx.Optimizer(module, OPTIMIZER, wrt=nnx.Param)

    @nnx.jit
    def step(module, optimizer, batch):
        value, grads = nnx.value_and_grad(loss)(module, batch)
        optimizer.update(module, grads)
        return value

    losses = [float(step(module, optimizer, batch)) for batch in batches]
    _, params, variables = nnx.split(module, nnx.Param, ...)
    return losses, nnx.to_pure_dict(params), nnx.to_pure_dict(variables)


def compare(model, stage, batches, loss=squares, *, plain=None, dtype=None, tolerance=2e-5, **options):
    """Trains both ways and compares losses, parameters and what else the model owns; returns (step, state).

    plain: the model of the plain loop, where it is not the same.
    """
    step = zero_jax.make_zero_train_step(model, stage, optimizer=OPTIMIZER, loss=loss, **options)
    state = step.init(jax.random.key(0), batches[0])
    start = jax.device_get((step.params(state), state.variables))
    flavour = {"dtype": dtype} if isinstance(model, nn.Module) else {}
    loop = plain_linen if isinstance(model, nn.Module) else plain_nnx
    expected, *plain_trees = loop(plain or model, *start, batches, loss, **flavour)
    losses = []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert np.isfinite(losses).all()
    np.testing.assert_allclose(losses, expected, rtol=tolerance)
    for tree, like in zip((step.params(state), state.variables), plain_trees, strict=True):
        likes = dict(named_leaves(like))
        for name, leaf in named_leaves(tree):
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                continue
            a, b = np.asarray(leaf), np.asarray(likes[name])
            np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * (1 + np.abs(b).max()), err_msg=name)
    return step, state


def up_front(step):
    """The names that `describe` lists as gathered before the model runs."""
    (line,) = [line for line in step.layout().describe().splitlines() if line.startswith("gathered up front")]
    names = line.split(": ")[1]
    return [] if names == "none" else names.split(", ")


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


def factory(module, sizes):
    return lambda rngs: module(*sizes, rngs=rngs)


@STAGES
@pytest.mark.parametrize("module", [Clipped, Spectral, Bypassing])
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


class WeightNormed(nnx.Module):
    def __init__(self, width, hidden, rngs):
        self.normed = nnx.WeightNorm(nnx.Linear(width, hidden, rngs=rngs), rngs=rngs)
        self.out = nnx.Linear(hidden, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.normed(x)))


@STAGES
@pytest.mark.parametrize("module", [Buffers, WeightNormed])
def test_factories_of_modules_with_plain_arrays(module, stage, sizes):
    compare(factory(module, SIZES[sizes]), stage, vectors(SIZES[sizes][0]))


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


@STAGES
def test_scales_of_fp8_products_move_as_in_flax(stage, sizes):
    width, hidden = SIZES[sizes]
    _, state = compare(Eight(hidden), stage, vectors(width))
    scales = dict(named_leaves(state.variables))
    assert all(float(np.max(np.abs(leaf - 1))) > 0.1 for name, leaf in scales.items() if name.endswith("scale"))


def test_fp8_statistics_of_each_device_alone_are_refused():
    step = zero_jax.make_zero_train_step(Eight(16), 2, loss=squares, accumulate=2, reduce="once")
    state = step.init(jax.random.key(0), vectors(16)[0])
    with pytest.raises(ValueError, match="_overwrite_with_gradient.*reduce=\"every\""):
        step(state, vectors(16)[0])


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


class Recurrent(nn.Module):
    hidden: int

    @nn.compact
    def __call__(self, x):
        steps = nn.RNN(nn.OptimizedLSTMCell(self.hidden))(x.reshape(x.shape[0], 4, -1))
        return nn.Dense(1)(steps.mean(1))


class NnxRecurrent(nnx.Module):
    def __init__(self, width, hidden, rngs):
        self.rnn = nnx.RNN(nnx.GRUCell(width // 4, hidden, rngs=rngs))
        self.out = nnx.Linear(hidden, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(self.rnn(x.reshape(x.shape[0], 4, -1)).mean(1))


class Shared(nn.Module):
    """One block of layers over and over, in a loop of JAX's own: its weights, biases and a table are read in each."""

    hidden: int

    @nn.compact
    def __call__(self, x):
        first, second = nn.Dense(self.hidden, name="first"), nn.Dense(self.hidden, name="second")
        table = self.param("table", nn.initializers.normal(0.1), (9, self.hidden))
        x = first(x)
        second(x)

        def body(x, position):
            return nn.tanh(second(x) + table[position][None]), None

        return nn.Dense(1)(jax.lax.scan(body, x, jnp.arange(5))[0])


RECURRENT = {
    "linen": lambda width, hidden: Recurrent(hidden), "nnx": lambda *sizes: factory(NnxRecurrent, sizes),
    "shared": lambda width, hidden: Shared(hidden)}


@pytest.mark.parametrize("flavour", RECURRENT)
@STAGES
def test_recurrent_loops(flavour, stage, sizes):
    width, hidden = {"even": (64, 64), "uneven": (68, 71)}[sizes]
    compare(RECURRENT[flavour](width, hidden), stage, vectors(width))


@pytest.mark.parametrize("target", ["h100:8", slow("v5e:2x4")])
@pytest.mark.parametrize("flavour, stage, sizes", [
    ("linen", 3, "even"), slow("linen", 3, "uneven"), slow("linen", 2, "even"), slow("nnx", 3, "even"),
    slow("shared", 3, "even")])
def test_recurrent_loops_send_their_parameters_once(flavour, stage, sizes, target):
    """`verify` raises where a step sends more than its contract: 26 times as much, once."""
    if extra := xla_devices.missing_compiler(target):
        pytest.skip(f"needs {extra}")
    on_tpu = target.startswith("v5e")
    mesh = zero_jax.make_mesh(data=(2, 4) if on_tpu else 8, devices=xla_devices.target_devices(target))
    width = {"even": 256, "uneven": 1004 if on_tpu else 268}[sizes]  # parts of small leaves do not fill TPU tiles
    batch = {"x": jax.ShapeDtypeStruct((64, width), jnp.float32), "y": jax.ShapeDtypeStruct((64, 1), jnp.float32)}
    step = zero_jax.make_zero_train_step(RECURRENT[flavour](width, width), stage, mesh=mesh, loss=squares)
    report = step.verify(batch)
    assert on_tpu or report.communication_bytes < 1.01 * report.contract.communication_bytes


class Typed(nn.Module):
    """Modules that compute in a dtype of their own, whatever they are given."""

    hidden: int
    dtype: type

    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = nn.gelu(nn.Dense(self.hidden, dtype=self.dtype)(x))
        return nn.Dense(1, dtype=self.dtype)(x)


OWN_DTYPES = {"bf16 of fp32": (jnp.bfloat16, None), "fp32 of bf16": (jnp.float32, "bf16")}


@pytest.mark.parametrize("case", OWN_DTYPES)
@pytest.mark.parametrize("stage, sizes", [
    (3, "even"), slow(3, "uneven"), slow(2, "even"), slow(2, "uneven"), slow(1, "even")])
def test_a_modules_own_dtype_keeps_the_reduce_scatter(case, stage, sizes):
    """Reduced in the dtype in which the step gives the parameter, and nothing large is all-reduced."""
    if extra := xla_devices.missing_compiler("h100:8"):
        pytest.skip(f"needs {extra}")
    dtype, precision = OWN_DTYPES[case]
    mesh = zero_jax.make_mesh(devices=xla_devices.target_devices("h100:8"))
    width = {"even": 512, "uneven": 515}[sizes]
    batch = {"x": jax.ShapeDtypeStruct((64, width), jnp.float32), "y": jax.ShapeDtypeStruct((64, 1), jnp.float32)}
    step = zero_jax.make_zero_train_step(Typed(width, dtype), stage, mesh=mesh, loss=squares, precision=precision)
    report = step.verify(batch)
    assert report.communication_bytes < 1.01 * report.contract.communication_bytes
    text = step.compile(batch).as_text()
    reduced = [math.prod(map(int, dims.split(","))) for dims in re.findall(r"\w+\[([\d,]+)\]\S* all-reduce", text)]
    assert max(reduced, default=0) < 4 * width, "only biases are all-reduced"
    assert f"{'f32' if precision is None else 'bf16'}[" in next(
        line for line in text.splitlines() if " reduce-scatter" in line and "= " in line)


@pytest.mark.parametrize("case", OWN_DTYPES)
@pytest.mark.parametrize("stage", [slow(0), slow(1), slow(2), 3])
def test_a_modules_own_dtype_has_the_numbers_of_one_device(case, stage):
    dtype, precision = OWN_DTYPES[case]
    plain = {"dtype": jnp.bfloat16} if precision else {}
    compare(Typed(71, dtype), stage, vectors(67), precision=precision, tolerance=2e-2, **plain)


@pytest.mark.parametrize("left_out", ["_is_cast", "communicate_once_per_loop"])
def test_without_these_passes_the_contract_is_broken(left_out, monkeypatch):
    """Negative control: both are what keeps it."""
    if extra := xla_devices.missing_compiler("h100:8"):
        pytest.skip(f"needs {extra}")
    if left_out == "_is_cast":
        monkeypatch.setattr(explicit_scatter, left_out, lambda atom, makers: False)
        model, precision = Typed(512, jnp.float32), "bf16"
    else:
        monkeypatch.setattr(gradients, left_out, lambda jaxpr, **_: jaxpr)
        model, precision = Recurrent(256), None
    mesh = zero_jax.make_mesh(devices=xla_devices.target_devices("h100:8"))
    batch = {"x": jax.ShapeDtypeStruct((64, 256), jnp.float32), "y": jax.ShapeDtypeStruct((64, 1), jnp.float32)}
    step = zero_jax.make_zero_train_step(model, 3, mesh=mesh, loss=squares, precision=precision)
    with pytest.raises(ValueError, match="breaks its contract"):
        step.verify(batch)


@pytest.mark.parametrize("model, plain", [
    (Pmapped(16), Rescaled(16)), (factory(Clipped, (16, 16)), factory(ClippedAside, (16, 16)))],
    ids=["statistics of some rows", "clipped but not written"])
def test_a_loop_over_something_else_is_told_apart(model, plain):
    """Negative control: the comparison fails where the plain loop trains another model."""
    with pytest.raises(AssertionError):
        compare(model, 3, vectors(16), plain=plain)
