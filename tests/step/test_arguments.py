"""Arguments of the wrong type or with impossible values: one UsageError each, never an error from inside of JAX."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from support.flat import flat_step

import zero_jax
from zero_jax import Guard, LossScale, Metric, Names, Precision, Remat, TensorRule, make_mesh
from zero_jax.errors import MAX_MESSAGE, UsageError


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8)(x)


def nnx_net(rngs):
    return nnx.Linear(8, 8, rngs=rngs)


def squared(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def batch_of(**more):
    return {"x": np.zeros((16, 8), np.float32), "y": np.zeros((16, 8), np.float32), **more}


def step_of(loss=squared, model=None, **options):
    return flat_step(model or Net(), 3, loss=loss, optimizer=optax.sgd(0.1), **options)


def layout_of(batch=None, **options):
    return step_of(**options).layout(batch_of() if batch is None else batch)


@pytest.fixture(scope="module")
def started():
    step = step_of()
    return step, step.init(jax.random.key(0), batch_of())


NAN = float("nan")
OPTIONS = {
    "frozen=5: give a text or a tuple": {"frozen": 5},
    r"frozen: '\[' is no regular expression .*re.escape": {"frozen": ("[",)},
    "frozen=.'a', 'a'.: one of these is given twice": {"frozen": ("a", "a")},
    "ema='0.9': give a decay": {"ema": "0.9"},
    "ema=nan: give a decay": {"ema": NAN},
    "ema=True: give a decay": {"ema": True},
    r"guard=3 is a int: give zero_jax.Guard": {"guard": 3},
    "axis=.'data', 'data'.: one of these is given twice": {"axis": ("data", "data")},
    "axis=5: give a text": {"axis": 5},
    "hpz_axes=5: give a text": {"hpz_axes": 5},
    "rng_streams=5: give a text": {"rng_streams": 5},
    "tensor_rules=5: give a list of rules": {"tensor_rules": 5},
    "tensor_rules: 5 is no rule": {"tensor_rules": (5,)},
    r"tensor_rules: pattern: '\[' is no regular": {"tensor_rules": [("[", P(None, "tensor"))]},
    "sequence_parallel='yes': give True or False": {"sequence_parallel": "yes"},
    "partition_activations=.*: give True": {"partition_activations": []},
    "remat=5: give one of": {"remat": 5},
    "precision=5 is a int|precision=5": {"precision": 5},
    "accumulate=0: give at least 1": {"accumulate": 0},
    "accumulate=True: give a whole number": {"accumulate": True},
    "reduce='twice': give": {"accumulate": 2, "reduce": "twice"},
    "gather='auto': give": {"accumulate": 2, "gather": "auto"},
    "gather=1: give": {"accumulate": 2, "gather": 1},
    "offload='disk': give \"optimizer\"": {"offload": "disk"},
    "offload=True: give \"optimizer\"": {"offload": True},
}
VALUES = {
    "spike=nan: give a finite number above 1": lambda: Guard(spike=NAN),
    "spike='2': give a finite number": lambda: Guard(spike="2"),
    "skip=1.5: give a whole number": lambda: Guard(skip=1.5),
    "decay=nan: give a number": lambda: Guard(decay=NAN),
    "warmup=nan: give a whole number": lambda: Guard(warmup=NAN),
    "make_mesh.data=2.5, .*whole numbers": lambda: make_mesh(data=2.5),
    "make_mesh.*replica='2'.*whole numbers": lambda: make_mesh(replica="2"),
    "devices is empty": lambda: make_mesh(devices=[]),
    "devices has .* twice": lambda: make_mesh(devices=[jax.devices()[0]] * 2),
    "0 in devices is a int and no device": lambda: make_mesh(devices=[0, 1]),
    "num_devices='8': give a whole number": lambda: zero_jax.simulate_devices("8"),
    "keep: .* is no regular expression": lambda: Precision(compute=jnp.bfloat16, keep=("(",)),
    "LossScale.*finite": lambda: LossScale(initial=NAN),
    r"Metric.reduce=\[\].: give one of": lambda: Metric(1, reduce=[]),
    "Remat.every=True": lambda: Remat(every=True),
    "rules=5: give a list": lambda: Names(5),
    "units=0: give at least 1": lambda: TensorRule("a", P("tensor"), 0),
    "target=5: give a text": lambda: zero_jax.plan(Net(), 3, 5, batch_of()),
    "path=None: give the path": lambda: zero_jax.Checkpoints(None),
    "path is an empty text": lambda: zero_jax.Checkpoints(""),
    "character of code 0": lambda: zero_jax.Checkpoints("a\0b"),
}
BATCHES = {
    "objects": np.array([object()] * 16), "texts": np.array(["a"] * 16), "bytes": np.zeros(16, "S3"),
    "dates": np.zeros(16, "M8[s]"), "records": np.zeros(16, [("a", "i4")]), "a list of texts": ["a"] * 16, "a set": {1},
}
LOSSES = {
    r"The loss is a NoneType \(is there a return\?\)": lambda model, batch: None,
    "The loss is a list": lambda model, batch: [squared(model, batch)],
    "The loss is a dict": lambda model, batch: {"loss": squared(model, batch)},
    "The loss is a str": lambda model, batch: "low",
    "a tuple of 0": lambda model, batch: (),
    "a tuple of 4": lambda model, batch: (squared(model, batch), {}, 1.0, 1.0),
    "returned NoneType as its second item": lambda model, batch: (squared(model, batch), None),
    "a NoneType as its metric 'a'": lambda model, batch: (squared(model, batch), {"a": None}),
    "a str as its metric 'a'": lambda model, batch: (squared(model, batch), {"a": "high"}),
    "a str as its metric 'b'": lambda model, batch: (squared(model, batch), {"b": Metric("high")}),
    "The loss's weight is a NoneType": lambda model, batch: (squared(model, batch), {}, None),
    r"The loss's weight has shape \(16,\)": lambda model, batch: (squared(model, batch), {}, jnp.ones(16)),
    r"The loss has shape \(8,\)": lambda model, batch: (model(batch["x"]) ** 2).mean(0),
}
CALLS = {  # each of a step and its state
    "state is a dict: give the ZeroState": lambda step, state: step(batch_of(), state),
    "The batch is empty": lambda step, state: step.init(jax.random.key(0), None),
    "rng=0 is a int, not a key": lambda step, state: step.init(0, batch_of()),
    "rng has shape .2,., which is 2 keys": lambda step, state: step.init(
        jax.random.split(jax.random.key(0)), batch_of()),
    "rng is an array of dtype float32": lambda step, state: step.init(jnp.ones(3), batch_of()),
    "rng={.* is a dict, not a key": lambda step, state: step.init(batch_of(), jax.random.key(0)),
    "state is a dict": lambda step, state: step.multi(batch_of(), state),
    "state is a dict.*init": lambda step, state: step.gradients(batch_of(), state),
    "state is a NoneType": lambda step, state: step.params(None),
    "state is a dict.*returned": lambda step, state: step.forgive({}),
    "state is a list": lambda step, state: step.check([]),
    "state is a tuple": lambda step, state: step.evaluator()((), state),
    "loss='mse' is a str": lambda step, state: step.evaluator("mse"),
    "train_state is a NoneType": lambda step, state: step.to_train_state(state, None),
    "step is a NoneType": lambda step, state: zero_jax.Checkpoints("never").save(None, state),
    "step is a ZeroState: .* comes before": lambda step, state: zero_jax.Checkpoints("never").save(state, step),
    "state is a NoneType: give": lambda step, state: zero_jax.Checkpoints("never").save(step, None),
    "step is a dict": lambda step, state: zero_jax.Checkpoints("never").restore(batch_of(), step),
    "step is a list": lambda step, state: zero_jax.Checkpoints("never").load_params([], step),
    "step is a ZeroState": lambda step, state: zero_jax.import_params("a", state, step, batch_of()),
    "import_params: path=None": lambda step, state: zero_jax.import_params(None, step, state, batch_of()),
    "state is a str": lambda step, state: zero_jax.export_params("a", "b", step.layout()),
    "layout is a ZeroTrainStep": lambda step, state: zero_jax.export_params("a", state, step),
    "dtype='x' is no dtype": lambda step, state: zero_jax.export_params("a", state, step.layout(), dtype="x"),
    "is not a ZeRO stage": lambda step, state: zero_jax.make_zero_train_step(3, Net()),
}


def refused(message, call, *args, **options):
    with pytest.raises(UsageError, match=message) as caught:
        call(*args, **options)
    assert len(str(caught.value)) <= MAX_MESSAGE and "\n" not in str(caught.value)


@pytest.mark.parametrize("message", OPTIONS)
def test_options(message):
    refused(message, step_of, **OPTIONS[message])


@pytest.mark.parametrize("message", VALUES)
def test_values(message):
    refused(message, VALUES[message])


@pytest.mark.parametrize("name", BATCHES)
def test_batches_of_what_is_no_number(name, started):
    step, state = started
    wrong = batch_of(z=BATCHES[name])
    refused("batch.'z.*a step takes numbers and booleans alone", step_of().layout, wrong)
    refused("batch.'z.*numbers and booleans alone", step.gradients, state, wrong)
    refused("batch.'z.*numbers and booleans alone", step.multi, state, wrong)


@pytest.mark.parametrize("model", [Net(), nnx_net], ids=["linen", "nnx"])
@pytest.mark.parametrize("message", LOSSES)
def test_losses(message, model):
    refused(message, layout_of, loss=LOSSES[message], model=model)


@pytest.mark.parametrize("message", CALLS)
def test_calls(message, started):
    refused(message, CALLS[message], *started)


def test_a_state_of_another_step_is_not_saved(started):
    step, state = started
    other = zero_jax.make_zero_train_step(Net(), 0, loss=squared, optimizer=optax.sgd(0.1))
    other.layout(batch_of())
    refused("not of this step", zero_jax.Checkpoints("never").save, other, state)


def test_what_is_right_stays_so(started):
    """Negative control: other types that mean the same."""
    step, state = started
    layout_of(frozen="bias", ema=0, guard=Guard(spike=2, skip=np.int64(1)), mesh=make_mesh((np.int64(2), 4)),
              axis=["data_0", "data_1"], rng_streams="dropout", tensor_rules=[])
    layout_of(loss=lambda model, batch: (squared(model, batch), {"vector": model(batch["x"])[0], "nested": {"n": 3}}))
    layout_of(batch=batch_of(z=np.zeros(16, jnp.bfloat16), flag=np.zeros(16, bool), id=np.zeros(16, np.int64)))
    assert step.init(jax.random.PRNGKey(0), batch_of()).step == 0  # of the old kind
    assert step.forgive(state) is state


def test_messages_are_short_and_printable():
    message = str(UsageError("begins \x1b[31m" + "x" * 10**6 + "\r\x00 ends"))
    assert len(message) == MAX_MESSAGE and message.startswith("begins \\x1b[31m") and message.endswith("\\r\\x00 ends")
    assert str(UsageError("\N{GREEK SMALL LETTER PSI}\nnext")) == "\N{GREEK SMALL LETTER PSI}\nnext"  # stays


class Listed(nn.Module):
    @nn.compact
    def __call__(self, x):
        first, last = self.param("pair", lambda key: [jnp.ones((8, 8)), jnp.ones((8, 8))])
        return x @ first @ last


class NnxTree(nnx.Module):
    def __init__(self, rngs):
        self.pair = nnx.Param({"first": jnp.ones((8, 8)), "last": jnp.ones((8, 8))})

    def __call__(self, x):
        return x @ self.pair["first"] @ self.pair["last"]


class NnxSown(nnx.Module):
    """What Flax's own modules hold: no value yet, and a tuple of what was sown."""

    def __init__(self, rngs):
        self.linear, self.cache = nnx.Linear(8, 8, rngs=rngs), nnx.Cache(None)
        self.sown = nnx.Intermediate((jnp.ones(2),))

    def __call__(self, x):
        return self.linear(x) * self.sown.get_value()[0][0]


def test_parameters_that_are_no_arrays():
    with pytest.raises(UsageError, match="parameter pair is a list.*an array, or a dict of arrays"):
        layout_of(model=Listed())
    with pytest.raises(UsageError, match="pair is an nnx.Param of a dict: give each array a variable of its own"):
        step_of(model=NnxTree)
    step = step_of(model=NnxSown)  # negative control
    assert np.isfinite(step(step.init(jax.random.key(0), batch_of()), batch_of())[1]["loss"])


def test_keys_of_another_implementation(started):
    with pytest.raises(UsageError, match="rng is of key<rbg>, and the keys of a step are of jax_default_prng_impl"):
        started[0].init(jax.random.key(0, impl="rbg"), batch_of())
    with jax.default_prng_impl("rbg"):  # negative control: the same key where it is the default
        step_of().init(jax.random.key(0), batch_of())


def test_a_step_without_jit(started):
    step, state = started
    with jax.disable_jit(), pytest.raises(UsageError, match="JAX_DISABLE_JIT is set, and a step is a compiled program"):
        step(state, batch_of())


def test_a_number_that_is_put_into_the_state():
    """As `optax.inject_hyperparams` is used: a rate that the loop itself sets."""
    step = zero_jax.make_zero_train_step(Net(), 3, loss=squared,
                                         optimizer=optax.inject_hyperparams(optax.sgd)(learning_rate=0.1))
    state, metrics = step(step.init(jax.random.key(0), batch_of()), batch_of())
    assert float(metrics["learning_rate"]) == pytest.approx(0.1)
    state.opt_state.hyperparams["learning_rate"] = 0.01
    step.params(state)
    state, metrics = step(state, batch_of())
    assert float(metrics["learning_rate"]) == pytest.approx(0.01)
