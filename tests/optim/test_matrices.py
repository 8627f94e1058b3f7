"""Optimizers of whole matrices: owner and gather have the numbers of one device, and what each sends and computes."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from support.covering import weekly
from support.oracle import loss_difference, oracle, param_difference, slow, train
from support.workloads import KEY_BIAS, classify, token_batches, vector_batches

import zero_jax
from models import gpt2
from zero_jax.contract import verify as contract
from zero_jax.tree import map_named, named_leaves
from zero_jax.xla import devices as xla_devices
from zero_jax.xla import hlo
from zero_jax.xla.events import totals
from zero_jax.xla.schedule import schedule

BATCHES = vector_batches(4, size=16)


class Model(nn.Module):
    """Three matrices of one shape and two others: no number of any shape divides by eight."""

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(32)(x))
        for _ in range(3):
            x = x + nn.relu(nn.Dense(32)(x))
        return nn.Dense(8)(x)


def whitened(rate=0.1, decay=0.9):
    """A small Shampoo: the momentum of a matrix times the inverse root of its own second moment, by eigenvalues."""

    def init(params):
        return jax.tree.map(lambda p: jnp.zeros((p.shape[0], p.shape[0])), params)

    def update(grads, state, params=None):
        state = jax.tree.map(lambda s, g: decay * s + g @ g.T, state, grads)

        def root(s):
            values, vectors = jnp.linalg.eigh(s + 1e-2 * jnp.eye(len(s)))
            return (vectors * values[None] ** -0.5) @ vectors.T

        return jax.tree.map(lambda s, g: -rate * root(s) @ g, state, grads), state

    return optax.GradientTransformation(init, update)


INNER = {
    "muon": functools.partial(optax.contrib.muon, 1e-2, weight_decay=0.1),
    "whitened": whitened,
    "polyak": functools.partial(optax.polyak_sgd, 0.1),  # takes the loss's value, and norms of its matrix
}


def optimizer(name, mesh, placement):
    inner = INNER[name]()
    matrices = inner if placement is None else zero_jax.whole_matrices(inner, mesh, placement)
    return optax.partition({"matrix": matrices, "rest": optax.adam(1e-2, eps=1e-6)}, lambda params: jax.tree.map(
        lambda leaf: "matrix" if leaf.ndim > 1 else "rest", params))


@functools.cache
def alone(name):
    return oracle(Model(), batches=BATCHES, loss=classify, optimizer=optimizer(name, None, None))


@functools.cache
def run(name, stage, placement):
    return train(Model(), stage, 8, batches=BATCHES, loss=classify,
                 optimizer=optimizer(name, zero_jax.make_mesh(8), placement))


@pytest.mark.grid
@weekly("name, stage, placement", [
    ("muon", 3, "owner"), slow("muon", 1, "owner"), slow("muon", 3, "gather"), slow("whitened", 3, "owner"),
    ("whitened", 3, "gather")])
def test_placements_are_one_device(name, stage, placement):
    one, many = alone(name), run(name, stage, placement)
    assert loss_difference(many, one) < 2e-6
    assert param_difference(many, one) < 1e-5
    for leaf, declared in zip(jax.tree.leaves(many.state), jax.tree.leaves(many.step.layout(BATCHES[0]).state),
                              strict=True):
        assert leaf.sharding.is_equivalent_to(declared.sharding, leaf.ndim)


def test_each_device_holds_the_state_of_its_own_matrices_alone():
    layout = run("muon", 3, "owner").step.layout(BATCHES[0])
    rows = {row.name.split("/owned/")[1]: row for row in layout.placements() if "/owned/" in row.name}
    moments = {name: row for name, row in rows.items() if name.endswith("mu")}
    assert {row.shape for row in moments.values()} == {(8, 16, 32), (8, 32, 32), (8, 32, 8)}
    assert all(row.device_bytes * 8 == row.bytes for row in rows.values())


@pytest.mark.slow
def test_the_loss_reaches_what_asks_for_it():
    """Each matrix has a step of its own: on one device, an optimizer of its own."""
    many = run("polyak", 3, "owner")
    single = {f"Dense_{number}/kernel": INNER["polyak"]() for number in range(5)}
    one = oracle(Model(), batches=BATCHES, loss=classify, optimizer=optax.partition(
        {**single, "rest": optax.adam(1e-2, eps=1e-6)}, lambda params: map_named(
            lambda name, leaf: name if leaf.ndim > 1 else "rest", params)))
    assert loss_difference(many, one) < 2e-6
    assert loss_difference(alone("polyak"), one) > 1e-3  # the control: one step for all of them


def test_what_is_no_matrix_and_what_is_no_placement():
    mesh = zero_jax.make_mesh()
    step = zero_jax.make_zero_train_step(Model(), 3, loss=classify, optimizer=zero_jax.whole_matrices(whitened(), mesh))
    with pytest.raises(ValueError, match="Dense_0/bias of shape .32,., which is no matrix.*optax.partition"):
        step.layout(BATCHES[0])
    with pytest.raises(ValueError, match="placement='spread' is unknown: give 'owner'"):
        zero_jax.whole_matrices(whitened(), mesh, "spread")


def test_half_a_matrix_is_caught():
    """Negative control: devices that orthogonalize what they hold of a matrix have another trajectory."""

    def parts(params):
        return jax.tree.map(lambda leaf: leaf.reshape(8, -1, leaf.shape[-1]), params)

    inner = whitened()

    def update(grads, state, params=None):
        new, state = jax.vmap(inner.update)(parts(grads), state)
        return jax.tree.map(lambda u, g: u.reshape(g.shape), new, grads), state

    local = optax.GradientTransformation(lambda params: jax.vmap(inner.init)(parts(params)), update)
    broken = train(Model(), 3, 8, batches=BATCHES, loss=classify, optimizer=optax.partition(
        {"matrix": local, "rest": optax.adam(1e-2, eps=1e-6)},
        lambda params: jax.tree.map(lambda leaf: "matrix" if leaf.ndim > 1 else "rest", params)))
    assert loss_difference(broken, alone("whitened")) > 1e-3


def kernels(params):
    return jax.tree.map_with_path(lambda path, _: "matrix" if "kernel" in str(path) else "rest", params)


def muon_of_kernels(mesh, placement, decay=0.0):
    """Muon on every kernel: 2-D, and 3-D where layers are scanned, which Muon itself is told of."""
    if placement is None:
        inner = optax.contrib.muon(1e-2, weight_decay=decay, muon_weight_dimension_numbers=lambda params: jax.tree.map(
            lambda leaf: optax.contrib.MuonDimensionNumbers(leaf.ndim - 2, leaf.ndim - 1), params))
    else:
        inner = zero_jax.whole_matrices(optax.contrib.muon(1e-2, weight_decay=decay), mesh, placement)
    return optax.partition({"matrix": inner, "rest": optax.adam(1e-3, eps=1e-6)}, kernels)


@pytest.mark.grid
@pytest.mark.parametrize(("scanned", "width"), [slow(True, 32), slow(False, 32), slow(True, 68)],
                         ids=["scanned", "unrolled", "uneven"])
def test_stacked_and_single_matrices_are_one_device(scanned, width):
    model = gpt2.build(gpt2.Config(2, width, 2, vocab_size=64, max_length=16, scan_layers=scanned))
    batches = token_batches(4)
    one = oracle(model, batches=batches, optimizer=muon_of_kernels(None, None))
    many = train(model, 3, 8, batches=batches, optimizer=muon_of_kernels(zero_jax.make_mesh(8), "owner"))
    assert loss_difference(many, one) < 2e-6
    assert param_difference(many, one, KEY_BIAS) < 2e-5


@functools.cache
def update_on_gpus(placement, scanned):
    """(bytes sent, FLOPs, elements of matrices) of the update alone, compiled for eight H100."""
    if extra := xla_devices.missing_compiler("h100:8"):
        pytest.skip(f"needs {extra}")
    mesh = zero_jax.make_mesh(devices=xla_devices.target_devices("h100:8"))
    optimizer = muon_of_kernels(mesh, placement)
    config = gpt2.Config(6, 256, 4, vocab_size=512, max_length=64, scan_layers=scanned)
    step = zero_jax.make_zero_train_step(gpt2.build(config), 3, mesh=mesh, optimizer=optimizer)
    layout = step.layout({name: jax.ShapeDtypeStruct((8, 64), jnp.int32) for name in ("inputs", "targets")})
    text = jax.jit(
        optimizer.update, donate_argnums=(0, 1), out_shardings=(layout.gradients, layout.shardings.opt_state)).lower(
            layout.state.params, layout.state.opt_state, layout.state.params).compile(
                compiler_options=xla_devices.compiler_options(mesh.devices.flat[0])).as_text()
    flops = sum(totals(schedule(text)).flops.values())
    psi = sum(leaf.size for name, leaf in named_leaves(layout.state.params) if "kernel" in name)
    return hlo.communication_bytes(text), flops, psi


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize("scanned", [True, False], ids=["scanned", "unrolled"])
def test_owner_sends_and_computes_an_eighth(scanned):
    """6 matrices of a shape on 8 devices: two of them compute zeros, so an eighth of 8/6."""
    alone, gather, owner = (update_on_gpus(placement, scanned) for placement in (None, "gather", "owner"))
    whole = 4 * owner[2] * 7 / 8  # what a device sends to gather psi elements in float32
    assert owner[0] == pytest.approx(2 / 8 * 8 / 6 * whole, rel=0.01)  # there and back
    assert gather[0] == pytest.approx(2 * whole, rel=0.01)  # gradients and momentum
    assert alone[0] > 3 * gather[0]  # what the partitioner makes of Newton-Schulz
    assert owner[1] == pytest.approx(gather[1] / 8 * 8 / 6, rel=0.02)


@functools.cache
def whole_step(target, placement, stage, decay=0.0, width=128):
    """(contract, compiled text, elements of matrices) of a step with three matrices of each shape on eight devices."""
    if target == "cpu":
        mesh = zero_jax.make_mesh(8)
    elif extra := xla_devices.missing_compiler(target):
        pytest.skip(f"needs {extra}")
    else:
        mesh = zero_jax.make_mesh(devices=xla_devices.target_devices(target))
    step = zero_jax.make_zero_train_step(
        gpt2.build(gpt2.Config(3, width, 4, vocab_size=512, max_length=64)), stage, mesh=mesh,
        optimizer=muon_of_kernels(mesh, placement, decay))
    batch = {name: jax.ShapeDtypeStruct((8, 64), jnp.int32) for name in ("inputs", "targets")}
    psi = sum(leaf.size for name, leaf in named_leaves(step.layout(batch).state.params) if "kernel" in name)
    return step.contract(batch), step.compile(batch).as_text(), psi


@pytest.mark.grid
@pytest.mark.parametrize(("target", "placement", "stage", "decay", "moved"), [
    ("cpu", "owner", 3, 0.0, 2 / 8 * 8 / 3),
    slow("h100:8", "owner", 3, 0.0, 2 / 8 * 8 / 3), slow("h100:8", "gather", 3, 0.1, 3),
    slow("cpu", "owner", 3, 0.1, 3 / 8 * 8 / 3), slow("cpu", "gather", 1, 0.0, 2)])
def test_the_contract_promises_what_the_placement_moves(target, placement, stage, decay, moved):
    """Gradients, momentum where it is gathered, parameters where they decay; three matrices are filled up to eight."""
    promised, text, psi = whole_step(target, placement, stage, decay)
    *_, matrices = contract.verify(text, promised).results
    assert matrices.budget.communication_bytes == pytest.approx(moved * 4 * psi * 7 / 8, rel=1e-3)
    assert matrices.communication_bytes == pytest.approx(matrices.budget.communication_bytes, rel=1e-3)


@pytest.mark.parametrize("target", [slow("h100:8"), "cpu"])
def test_what_breaks_the_contract_of_matrices(target):
    """Negative controls: Muon as the partitioner splits it is told what to do, and each byte of the promise counts."""
    (owner, kept, _), (alone, text, _) = whole_step(target, "owner", 3), whole_step(target, None, 3)
    assert len(alone.budgets) == 3
    for promised in (alone, owner):
        with pytest.raises(contract.ContractError, match="optax.*_muon.py.*give them to zero_jax.whole_matrices"):
            contract.verify(text, promised)
    *others, matrices = owner.budgets
    less = dataclasses.replace(matrices, communication_bytes=0.9 * matrices.communication_bytes)
    (line,) = contract.check(kept, dataclasses.replace(owner, budgets=(*others, less))).violations
    assert "bytes of whole matrices travel" in line


@pytest.mark.slow
def test_uneven_matrices_break_the_contract():
    """What is known not to keep it, and is told so: no dim of 100 x 300 divides by eight."""
    promised, text, _ = whole_step("cpu", "owner", 3, width=100)
    with pytest.raises(contract.ContractError, match="whole matrices travel.*choose dims that divide"):
        contract.verify(text, promised)
