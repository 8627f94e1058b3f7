"""The memory that a process gets of a device, by its environment, and the limit that XLA is given."""

import os
from unittest import mock

import pytest
from support.targets import target_devices

from zero_jax.errors import UsageError
from zero_jax.xla.chip import built_in
from zero_jax.xla.devices import memory_options
from zero_jax.xla.process_memory import (
    FRACTION,
    JAX_FRACTION,
    OURS,
    RESERVED,
    fraction_text,
    limit_percent,
    memory_fraction,
    process_bytes,
    set_fraction,
)

H100, V5P = built_in("h100"), built_in("v5p")


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Without what the tests' own environment names."""
    for name in (FRACTION, "XLA_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(("variables", "fraction"), [
    ({}, JAX_FRACTION), ({FRACTION: "0.5"}, 0.5), ({"XLA_CLIENT_MEM_FRACTION": "0.9"}, 0.9), ({FRACTION: ""}, 0.75)])
def test_a_process_gets_the_fraction_of_its_environment(variables, fraction):
    with mock.patch.dict(os.environ, variables):
        assert memory_fraction() == fraction and f"{fraction:.0%}" in fraction_text()
        assert process_bytes(H100) == int(fraction * H100.memory_bytes)
        assert process_bytes(V5P) == V5P.memory_bytes  # libtpu gives all that it has


def test_no_process_gets_what_the_driver_needs():
    with mock.patch.dict(os.environ, {FRACTION: "1.0"}):
        assert process_bytes(H100) == H100.memory_bytes - RESERVED


@pytest.mark.parametrize("wrong", ["x", "0", "-1", "1.5", "nan"])
def test_a_fraction_that_is_none_is_refused(wrong):
    with mock.patch.dict(os.environ, {FRACTION: wrong}), pytest.raises(UsageError, match=f"{FRACTION}='{wrong}'"):
        memory_fraction()


@pytest.mark.parametrize("given", [{}, {FRACTION: "0.6"}, {"XLA_CLIENT_MEM_FRACTION": "0.6"}])
def test_the_command_line_sets_what_is_not_named(given):
    with mock.patch.dict(os.environ, given):
        set_fraction()
        assert memory_fraction() == (0.6 if given else OURS)
        assert sum(name in os.environ for name in (FRACTION, "XLA_CLIENT_MEM_FRACTION")) == 1  # jaxlib refuses both


def test_xla_is_given_the_memory_of_the_process():
    """Its limit by its own formula is that of the process to a percent; control: at 95 %, its default, it is not."""
    (device, *_), state = target_devices("h100:8"), 10 * 2**30
    assert memory_options(device, state) == {}  # JAX's own fraction, for which XLA's default is made
    with mock.patch.dict(os.environ, {FRACTION: "0.92"}):
        percent = memory_options(device, state)["xla_gpu_memory_limit_slop_factor"]
        limits = [(H100.memory_bytes * 80 // 100 - state) * each / 100 + state for each in (percent, percent + 1, 95)]
        assert limits[0] <= process_bytes(H100) < limits[1] and limits[2] < 0.8 * H100.memory_bytes
        assert limit_percent(V5P, 0) is None and limit_percent(H100, H100.memory_bytes) is None
