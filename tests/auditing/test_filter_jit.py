"""The audit of what `eqx.filter_jit` returns: arguments have functions beside arrays, and these are donated by half."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P
from support.audited_steps import mesh_of_8, shape
from support.targets import target_devices

import zero_jax
from zero_jax.auditing.audit import cached_report

KERNEL = 4 * 1024 * 4096 / 8
"""Bytes of a device's shard of one of the two kernels."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=("up", "down", "activation"), meta_fields=())
@dataclasses.dataclass
class Mlp:
    """A module whose activation is a leaf, as in Equinox."""

    up: jax.Array
    down: jax.Array
    activation: object

    def __call__(self, x):
        return (self.activation or jax.nn.relu)(x @ self.up) @ self.down


def is_array(leaf):
    return isinstance(leaf, jax.Array)


class OurFilterJit:
    """As `eqx.filter_jit` has it: `lower`, a call that jits the arrays among the arguments, and `__wrapped__`."""

    def __init__(self, function, donate):
        self.__wrapped__, self.donate = function, donate

    def __call__(self, *args):
        leaves, treedef = jax.tree.flatten(args)
        numbers = [number for number, leaf in enumerate(leaves) if is_array(leaf)]
        first = {number for number in numbers if number < len(jax.tree.leaves(args[0]))}
        functions = {}

        def inner(donated, kept):
            values = donated | kept
            out, out_tree = jax.tree.flatten(self.__wrapped__(*jax.tree.unflatten(
                treedef, [values.get(number, leaf) for number, leaf in enumerate(leaves)])))
            functions.update({number: leaf for number, leaf in enumerate(out) if not is_array(leaf)}, tree=out_tree)
            return [leaf for leaf in out if is_array(leaf)]

        given = {"all": set(numbers), "all-except-first": set(numbers) - first, "none": set()}[self.donate]
        arrays = iter(jax.jit(inner, donate_argnums=0)({number: leaves[number] for number in given}, {
            number: leaves[number] for number in numbers if number not in given}))
        tree = functions.pop("tree")
        return jax.tree.unflatten(tree, [functions[number] if number in functions else next(arrays)
                                         for number in range(tree.num_leaves)])

    def lower(self, *args):
        raise NotImplementedError("the audit reads a call")


def filter_jit(library):
    if library == "as equinox":
        return OurFilterJit
    if library == "static arguments":  # the optimizer; a module's activation is no static argument of jax.jit
        donated = {"all": (0, 1, 2), "all-except-first": (1, 2), "none": ()}
        return lambda function, donate: jax.jit(function, donate_argnums=donated[donate], static_argnums=3)
    equinox = pytest.importorskip("equinox")
    return lambda function, donate: equinox.filter_jit(function, donate=donate)


def arguments(activation=jax.nn.relu):
    """Batch, model, state and optimizer: the last is functions alone."""
    mesh, optimizer = mesh_of_8(), optax.adam(1e-3)
    model = Mlp(shape(mesh, (1024, 4096), P("data")), shape(mesh, (4096, 1024), P("data")), activation)
    arrays = dataclasses.replace(model, activation=None)
    state = jax.tree.map(lambda leaf: shape(mesh, leaf.shape, P("data") if leaf.ndim else P(), leaf.dtype),
                         jax.eval_shape(optimizer.init, arrays))
    return shape(mesh, (8 * 4096, 1024), P("data")), model, state, optimizer


def make_step(x, model, state, optimizer):
    def loss(arrays):
        return (dataclasses.replace(arrays, activation=model.activation)(x) ** 2).mean()

    arrays = dataclasses.replace(model, activation=None)
    value, grads = jax.value_and_grad(loss)(arrays)
    updates, state = optimizer.update(grads, state, arrays)
    return dataclasses.replace(optax.apply_updates(arrays, updates), activation=model.activation), state, value


@pytest.mark.parametrize("library", ["as equinox", "static arguments", "equinox"])
def test_a_step_of_filter_jit_is_read_as_one_of_arrays(library):
    """Control: the step that donates nothing is named, with the bytes of what is held twice."""
    target_devices("h100:8")
    args, reports = arguments(None if library == "static arguments" else jax.nn.relu), {}
    for donate in ("all", "all-except-first", "none"):
        reports[donate] = zero_jax.audit(filter_jit(library)(make_step, donate), *args, target="h100:8")
    clean = reports["all-except-first"]
    assert {leaf.label: (leaf.role, leaf.num_shards, leaf.donated) for leaf in clean.program.leaves if leaf.shape} == {
        "x": ("batch", 8, False), "model.up": ("params", 8, True), "model.down": ("params", 8, True),
        "state[0].mu.up": ("optimizer", 8, True), "state[0].mu.down": ("optimizer", 8, True),
        "state[0].nu.up": ("optimizer", 8, True), "state[0].nu.down": ("optimizer", 8, True)}
    assert clean.to_json()["stage"] == 3
    assert [each.code for each in clean.findings] == ["weights_kept"]  # it has no jax.checkpoint
    assert [leaf.donated for leaf in reports["all"].program.leaves if leaf.label == "x"] == [True]
    held = {each.code: each for each in reports["none"].findings}["not_donated"]
    assert held.bytes == pytest.approx(6 * KERNEL, rel=1e-3) and "model.up" in held.place


def test_the_same_at_stage_3_and_the_cache_take_it_too(tmp_path):
    """Control: another `donate` is another program, and is compiled."""
    target_devices("h100:8")
    args, jitted = arguments(), OurFilterJit(make_step, "all")
    report = zero_jax.audit(jitted, *args, target="h100:8",
                            loss=lambda model, x: (jax.nn.relu(x @ model.up) @ model.down).astype(jnp.float32).sum())
    assert report.stage_3.memory()["params"] == 2 * KERNEL
    for donate, files in (("all", 1), ("all", 1), ("none", 2)):
        cached_report(tmp_path, OurFilterJit(make_step, donate), args, target="h100:8", params=None)
        assert len(list(tmp_path.iterdir())) == files


def test_what_does_not_trace_is_a_line():
    """Control: the same step of all its arguments is audited above."""
    with pytest.raises(zero_jax.UsageError, match="the step does not lower for these arguments"):
        zero_jax.audit(OurFilterJit(make_step, "all"), *arguments()[:3])
