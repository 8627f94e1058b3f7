"""Meshes and models as users have them: Explicit axes, `jax.set_mesh`, other names, shardings in the model.

Each way has the numbers of one device, by Flax and Optax alone, or is refused with what to do.
"""

import contextlib
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support.covering import covering
from support.flat import flat_step
from support.normed_net import losses_of
from support.oracle import by_name, oracle, slow

import zero_jax
from zero_jax.sharding import auto_axes
from zero_jax.sharding.mesh_axes import MeshAxes
from zero_jax.tree import named_leaves

SGD = optax.sgd(0.1, momentum=0.9)
RNG = np.random.default_rng(0)
BATCHES = [{"x": RNG.normal(size=(16, 12)).astype(np.float32), "y": RNG.normal(size=(16, 1)).astype(np.float32)}
           for _ in range(2)]


def squares(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


class Net(nn.Module):
    """`inside`: what is done with an activation; `names`: metadata of a kernel."""

    inside: object = None
    names: tuple | None = None

    @nn.compact
    def __call__(self, x):
        init = nn.initializers.lecun_normal()
        x = nn.relu(nn.Dense(18, kernel_init=nn.with_partitioning(init, self.names) if self.names else init,
                             name="up")(x))
        return nn.Dense(1, name="down")(self.inside(x) if self.inside else x)


class NnxNet(nnx.Module):
    def __init__(self, rngs, inside=None, names=None):
        init = nnx.initializers.lecun_normal()
        self.up = nnx.Linear(12, 18, kernel_init=nnx.with_partitioning(init, names) if names else init, rngs=rngs)
        self.down, self.inside = nnx.Linear(18, 1, rngs=rngs), inside

    def __call__(self, x):
        x = nnx.relu(self.up(x))
        return self.down(self.inside(x) if self.inside else x)


MODELS = {"linen": Net, "nnx": lambda **options: functools.partial(NnxNet, **options)}


@functools.cache
def alone(flavour):
    return oracle(MODELS[flavour](), batches=BATCHES, optimizer=SGD, loss=squares)


def explicit(names=("data",), sizes=(8,)):
    return jax.make_mesh(sizes, names, (AxisType.Explicit,) * len(names))


def auto(names=("data",), sizes=(8,)):
    return Mesh(np.array(jax.devices()).reshape(sizes), names)


FSDP = {"axis_roles": {"data": "fsdp"}}
TP = {"axis_roles": {"data": "fsdp", "tensor": "tp"}, "tensor_rules": [("up/kernel", (None, "tp"))]}
WAYS = {
    "explicit": (explicit, None, {}),
    "explicit, set": (explicit, explicit, {}),
    "only set": (None, explicit, {}),
    "auto, set": (None, auto, {}),
    "another is set": (auto, lambda: explicit(("x", "y"), (4, 2)), {}),
    "fsdp": (lambda: explicit(("fsdp",)), None, FSDP),
    "dp x fsdp, set": (None, lambda: explicit(("dp", "fsdp"), (2, 4)), {
        "axis_roles": {"data": "fsdp", "replica": "dp"}}),
    "fsdp x fsdp2": (lambda: explicit(("fsdp", "fsdp2"), (4, 2)), None, {"axis_roles": {"data": ("fsdp", "fsdp2")}}),
    "fsdp x tp": (lambda: explicit(("fsdp", "tp"), (4, 2)), None, TP),
}


def train(model, stage, mesh=None, context=None, **options):
    """Losses, and parameters, with arrays that are made where the step runs."""
    with jax.set_mesh(context) if context is not None else contextlib.nullcontext():
        step = flat_step(model, stage, mesh=mesh, optimizer=SGD, loss=squares, **options)
        batches = [BATCHES[0], jax.tree.map(jnp.asarray, BATCHES[1])]
        state = step.init(jax.random.key(0), batches[0])
        losses = []
        for batch in batches:
            state, metrics = step(state, batch)
            losses.append(metrics["loss"] * 1)  # what a step returns can be computed with
        return np.array(losses), by_name(step.params(state)), step, state


def check(run, flavour):
    one = alone(flavour)
    np.testing.assert_allclose(run[0], one.losses, rtol=1e-6)
    for name, leaf in run[1].items():
        np.testing.assert_allclose(leaf, one.params[name], atol=1e-6)


DEFAULT = [(way, list(MODELS)[number % 2], 3 - number % 4) for number, way in enumerate(WAYS)]
"""Each way once, in turn with the flavours and stages; each with every flavour and stage is in the slow run."""


@pytest.mark.grid
@pytest.mark.parametrize("way, flavour, stage", [
    *DEFAULT, *(slow(*row) for row in covering(WAYS, MODELS, range(4)) if row not in DEFAULT)])
def test_meshes_as_users_have_them(way, flavour, stage):
    mesh, context, options = WAYS[way]
    run = train(MODELS[flavour](), stage, mesh and mesh(), context and context(), **options)
    check(run, flavour)
    step = run[2]
    assert set(step.mesh.axis_types) == {AxisType.Auto}
    assert step.mesh.axis_names == (mesh or context)().axis_names


def on_one_device(tree):
    return jax.device_put(tree, jax.devices()[3])


def test_arrays_that_are_on_one_device():
    """As a data loader puts them there, or what a `jit` of the user's own returns."""
    step = zero_jax.make_zero_train_step(Net(), 3, mesh=auto(), optimizer=SGD, loss=squares)
    state = step.init(on_one_device(jax.random.key(0)), on_one_device(BATCHES[0]))
    losses, state = losses_of(step, state, map(on_one_device, BATCHES))
    check((np.array(losses), by_name(step.params(state))), "linen")
    evaluate, batch = step.evaluator(), BATCHES[-1]
    np.testing.assert_array_equal(evaluate(state, on_one_device(batch)), evaluate(state, batch))
    several = on_one_device(jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), batch))
    assert step.multi(state, several)[1]["loss"].shape == (2,)


@pytest.mark.parametrize("key, batch", [(on_one_device, dict), (lambda key: key, on_one_device)])
def test_without_the_move_arrays_on_one_device_are_refused_by_jax(key, batch, monkeypatch):
    monkeypatch.setattr(auto_axes, "_is_on_one_device", lambda leaf, mesh: False)
    step = zero_jax.make_zero_train_step(Net(), 3, mesh=auto(), optimizer=SGD, loss=squares)
    with pytest.raises(ValueError, match="incompatible devices|does not match"):
        step.init(key(jax.random.key(0)), batch(BATCHES[0]))


def test_the_check_tells_other_numbers():
    """Negative control: half of the batch."""
    half = functools.partial(lambda x: x * jnp.where(jnp.arange(16) < 8, 1.0, 0.0)[:, None])
    with pytest.raises(AssertionError):
        check(train(Net(inside=half), 3, explicit()), "linen")


@pytest.mark.slow
def test_all_that_a_step_does_inside_of_set_mesh(tmp_path):
    with jax.set_mesh(explicit()):
        step = zero_jax.make_zero_train_step(NnxNet(nnx.Rngs(0)), 3, optimizer=SGD, loss=squares, ema=0.9)
        batches = [jax.tree.map(jnp.asarray, batch) for batch in BATCHES]
        step.verify(batches[0])
        state = step.init(jax.random.key(0), batches[0])
        params = jax.tree.map(lambda leaf: leaf * 2 / 2, step.params(state))
        state = step.with_params(state, params)
        grads, metrics, _ = step.gradients(state, batches[0])
        state, _ = step.apply_gradients(state, jax.tree.map(lambda leaf: leaf * 1, grads), loss=metrics["loss"])
        run = jax.jit(lambda state, batch: [each := step(state, batch), each[1]["loss"] + 1][0])
        state, more = run(state, batches[1])
        losses = [metrics["loss"], more["loss"]]
        with zero_jax.Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(step, state, wait=True)
            restored = checkpoints.restore(step, batches[0]).state
            loaded, _ = checkpoints.load_params(step, batches[0])
        assert step.evaluator()(restored, batches[0]) + 1 > 1
        state, several = step.multi(restored, jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches))
        assert (several["loss"] * 1).shape == (2,)
        zero_jax.export_params(tmp_path / "x.safetensors", state, step.layout())
        state = zero_jax.import_params(tmp_path / "x.safetensors", step, state, batches[0])
        assert jax.tree.map(lambda leaf: leaf * 1, loaded).keys() == params.keys()
    outside = zero_jax.make_zero_train_step(NnxNet(nnx.Rngs(0)), 3, optimizer=SGD, loss=squares, ema=0.9)
    expected, _ = losses_of(outside, outside.init(jax.random.key(0), BATCHES[0]), BATCHES)
    np.testing.assert_allclose(losses, expected, rtol=1e-6)


@pytest.mark.parametrize("flavour", MODELS)
def test_what_a_step_returns_is_of_auto_axes_without_the_conversion(flavour, monkeypatch):
    """Negative control: JAX refuses to compute with it."""
    monkeypatch.setattr("zero_jax.sharding.auto_axes.as_context", lambda tree: tree)
    with pytest.raises(ValueError, match="should match the aval mesh"):
        train(MODELS[flavour](), 3, context=explicit())


def constrained(x):
    return jax.lax.with_sharding_constraint(x, P("data"))


def mapped(x):
    return jax.shard_map(lambda part: part * 1, in_specs=P("data"), out_specs=P("data"))(x)


@pytest.mark.grid
@pytest.mark.parametrize("flavour, inside", [("linen", constrained), ("nnx", mapped), slow("nnx", constrained),
                                             slow("linen", mapped)])
def test_specs_in_a_model_are_of_the_mesh_that_is_set(flavour, inside):
    check(train(MODELS[flavour](inside=inside), 3, context=explicit()), flavour)


def test_the_metadata_of_a_model_splits_over_the_users_axis():
    mesh = explicit(("fsdp", "tp"), (4, 2))
    for flavour in MODELS:
        run = train(MODELS[flavour](names=(None, "tp")), 3, mesh, mesh, axis_roles=TP["axis_roles"])
        check(run, flavour)
        assert "tp" in str(dict(named_leaves(run[3].params))["up/kernel"].sharding.spec)


REFUSED = {
    "reshard": (lambda x: jax.sharding.reshard(x, P("data")), "written for Explicit axes.*with_sharding_constraint"),
    "out_sharding": (lambda x: jnp.einsum("bi,ij->bj", x, jnp.eye(18), out_sharding=P("data")),
                     "written for Explicit axes.*with_sharding_constraint"),
    "named": (lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(explicit(), P("data"))),
              "written for Explicit axes.*NamedSharding of a mesh of Explicit"),
    "shard_map": (lambda x: jax.shard_map(lambda x: x, mesh=explicit(), in_specs=P("data"), out_specs=P("data"))(x),
                  "written for Explicit axes"),
    "closed over": (lambda x: x * jax.device_put(np.ones((1, 18), np.float32), NamedSharding(explicit(), P())),
                    "written for Explicit axes.*closes over as NumPy"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_models_written_for_explicit_axes_are_refused(case):
    inside, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        train(Net(inside=inside), 3, context=explicit())


@pytest.mark.parametrize("model, context, message", [
    (Net(inside=constrained), None, "inside of `with jax.set_mesh"),
    (Net(inside=mapped), None, "inside of `with jax.set_mesh"),
    (functools.partial(NnxNet, names=(None, "data")), None, "metadata of a parameter.*inside of it"),
    (Net(names=("embed", "mlp")), explicit, "metadata of a parameter.*logical axes")])
def test_specs_without_their_mesh_are_refused(model, context, message):
    with pytest.raises(ValueError, match=message):
        train(model, 3, context=context and context())


@pytest.mark.parametrize("names, sizes, options, message", [
    (("fsdp",), (8,), {}, r"has axes \{'fsdp': 8\} and no axis 'data'.*axis_roles=\{\"data\": 'fsdp'\}"),
    (("fsdp", "tp"), (4, 2), FSDP, r"'tp' has no role: .*axis_roles=\{\"tensor\": 'tp'\}"),
    (("fsdp", "tp"), (4, 2), {"axis_roles": TP["axis_roles"]}, r"an axis 'tp', and no parameter.*P\(None, \"tp\"\)"),
    (("fsdp",), (8,), {"axis_roles": {"fsdp": "data"}}, "no role 'fsdp': the roles are data, replica, context, tensor"),
    (("fsdp",), (8,), {"axis_roles": {"data": "dp"}}, r"the mesh \{'fsdp': 8\} has no axis 'dp'"),
    (("fsdp",), (8,), {**FSDP, "axis": "fsdp"}, "give one of the two"),
    (("a", "b"), (4, 2), {"axis_roles": {"data": ("a", "b"), "replica": "b"}}, "'b' would have two roles"),
    (("a", "b"), (4, 2), {"axis_roles": {"data": "a", "tensor": ("b",)}}, "tensor is one axis"),
    (("fsdp", "tp"), (4, 2), {**TP, "tensor_rules": [("up/kernel", (None, "fsdp"))]}, "None or 'tp'"),
    (("fsdp", "tp"), (4, 2), {**TP, "hpz_axes": "tp"}, r"give some of the axes \('fsdp',\)"),
    (("fsdp", "tp"), (4, 2), {**TP, "sequence_parallel": True}, "'tp'|sequence")])
def test_errors_name_the_users_axes(names, sizes, options, message):
    with pytest.raises(ValueError, match=message):
        step = flat_step(Net(), 3, mesh=explicit(names, sizes), loss=squares, **options)
        step.lower(BATCHES[0])


def test_roles_are_those_of_the_names_of_make_mesh():
    """As a mesh with the library's names, but for the names: sizes, batch axes, and whether it is flat."""
    own = MeshAxes.of(zero_jax.make_mesh(data=2, replica=2, tensor=2))
    other = MeshAxes.of(explicit(("dp", "fsdp", "tp"), (2, 2, 2)),
                        roles={"data": "fsdp", "replica": "dp", "tensor": "tp"})
    for name in ("zero_size", "replica_size", "context_size", "tensor_size", "batch_shards"):
        assert getattr(own, name) == getattr(other, name), name
    assert (other.batch, other.zero) == (("dp", "fsdp"), ("fsdp",))
    flat = MeshAxes.of(explicit(("fsdp", "cp"), (4, 2)), roles={"data": "fsdp", "context": "cp"})
    assert flat.zero == ("fsdp", "cp") and flat.context_enabled
