"""Copies to and from host memory on GPUs: by copy engines from jax 0.11.2 on, in programs whose rows are checked."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.targets import simulated
from support.workloads import token_batches

import zero_jax
from models import gpt2
from zero_jax.offload import host_update
from zero_jax.step import programs
from zero_jax.xla import devices
from zero_jax.xla.host_copies import ANNOTATOR, WrongRows, copy_options
from zero_jax.xla.platform import platform_of

CONFIG = gpt2.Config(num_layers=3, width=128, num_heads=4, vocab_size=509, max_length=64)
TINY = gpt2.Config(2, 32, 4, vocab_size=64, max_length=16)
ROWS = {"P_a+cpu": {"remat": "full", "partition_activations": "cpu"},
        "optimizer": {"offload": zero_jax.Offload(buffer_bytes=2**18)},
        "parameters": {"offload": zero_jax.Offload(parameters="host", buffer_bytes=2**18)},
        "both": {"remat": "full", "partition_activations": "cpu", "offload": "parameters"},
        "gradients": {"offload": zero_jax.Offload(parameters="host", gradients="host", buffer_bytes=2**18)}}
KERNELS = "both", "gradients"
"""Of which XLA would write other rows, or read none ahead."""
RIGHT = jax.__version_info__ >= (0, 11, 2)
DEFAULT = [("h100:1", name) for name in ROWS if RIGHT]


def gpu(target="h100:1"):
    if extra := devices.missing_compiler(target):
        pytest.skip(f"needs {extra}")
    return devices.target_devices(target)


def step_on(target, config=CONFIG, **row):
    mesh = zero_jax.make_mesh(len(gpu(target)), devices=gpu(target))
    return zero_jax.make_zero_train_step(gpt2.build(config), 3, mesh=mesh, precision="bf16",
                                         optimizer=optax.adamw(1e-3), **row)


def test_which_devices_have_them(monkeypatch):
    cpu, (h100,) = jax.devices()[0], gpu()
    for version, expected in (((0, 10, 2), False), ((0, 11, 1), False), ((0, 11, 2), True), ((0, 12, 0, 1), True)):
        monkeypatch.setattr(jax, "__version_info__", version)
        there, here = platform_of(h100), platform_of(cpu)
        assert there.has_copy_engines == there.copies_both_ways == expected and not here.has_copy_engines
        assert zero_jax.Offload().block_bytes(there) == (2**26 if expected else 2**24)
        assert zero_jax.Offload(parameters="host", gradients="host").block_bytes(there) == 2**24
    assert zero_jax.Offload(buffer_bytes=2**20).block_bytes(there) == 2**20
    assert zero_jax.Offload().block_bytes(here) == 2**24 and here.copies_both_ways
    graphs = "xla_gpu_enable_command_buffer"
    assert copy_options(h100, engines=True)[graphs] == "" and graphs not in copy_options(h100, engines=False)
    assert ANNOTATOR in copy_options(h100, engines=False)["xla_disable_hlo_passes"]


@pytest.mark.parametrize("target, name", [
    pytest.param(target, name, marks=[] if (target, name) in DEFAULT else [pytest.mark.slow, pytest.mark.grid])
    for target in ("h100:1", "h100:8") for name in ROWS])
def test_steps_copy_by_engines_where_all_rows_are_right(target, name):
    """As compiled. The control is the same step without them, and jax 0.10.2, which has none."""
    batch = token_batches(1, 8, 64, 509)[0]
    step = step_on(target, **ROWS[name])
    compiled = step.compiled_step(batch)
    compiled.verify()
    assert step.options.copy_engines  # it has not gone on without them
    slices = compiled.host_slices
    assert slices and all(each.is_right for each in slices) and any(each.walk for each in slices) == (
        RIGHT and name not in KERNELS)
    step = step_on(target, **ROWS[name])
    step.functions.options = dataclasses.replace(step.options, copy_engines=False)
    assert not any(each.walk for each in step.compiled_step(batch).host_slices)


@pytest.mark.skipif(not RIGHT, reason="jax without copy engines")
def test_a_program_of_other_rows_does_without_them(monkeypatch):
    """XLA writes blocks of several rows of an array that the loop does not read to others, if their index allows it."""
    monkeypatch.setattr(host_update, "_from_data", lambda start, value: start)
    step = step_on("h100:1", **ROWS["parameters"])
    batch = token_batches(1, 8, 64, 509)[0]
    with pytest.warns(RuntimeWarning, match="copy other rows of host memory"):
        compiled = step.compiled_step(batch)
    compiled.verify()
    assert not step.options.copy_engines and not any(each.walk for each in compiled.host_slices)


@pytest.fixture
def _engines_on_cpu():
    """Simulated devices with the decisions of such that have copy engines, without the options of GPUs."""
    with simulated("h100:8"):
        yield


def trained(sizes=(8, 8), **changes):
    step = zero_jax.make_zero_train_step(
        gpt2.build(TINY), 3, mesh=zero_jax.make_mesh(8), offload="optimizer", **changes)
    batches = [token_batches(1, size)[0] for size in sizes]
    state, losses = step.init(jax.random.key(0), batches[0]), []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return step, losses


@pytest.mark.usefixtures("_engines_on_cpu")
def test_rows_are_checked_before_a_program_runs_and_once(monkeypatch):
    checked = []
    monkeypatch.setattr(programs, "check_rows", lambda text: checked.append(text[:9]))
    _, losses = trained((8, 16, 8, 16))
    assert checked == ["HloModule"] * 2 and np.isfinite(losses).all()  # for each shape of a batch


@pytest.mark.usefixtures("_engines_on_cpu")
def test_wrong_rows_never_run(monkeypatch):
    """The step goes on with kernels, tells it, and has their numbers. The control: nothing is wrong."""
    def wrong(text):
        raise WrongRows("a slice reads others")

    monkeypatch.setattr(programs, "check_rows", wrong)
    with pytest.warns(RuntimeWarning, match="a slice reads others"):
        step, losses = trained()
    assert not step.options.copy_engines
    monkeypatch.setattr(programs, "check_rows", lambda text: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other, wanted = trained()
    assert other.options.copy_engines and losses == wanted
    monkeypatch.setattr(programs, "check_rows", wrong)
    with pytest.warns(RuntimeWarning, match="a slice reads others"):
        other.verify(jax.tree.map(jnp.asarray, token_batches(1)[0]))
