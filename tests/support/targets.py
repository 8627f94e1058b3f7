"""Meshes of target devices, for which programs are compiled and on which nothing runs."""

import contextlib

import pytest

import zero_jax
from zero_jax.xla import devices as xla_devices
from zero_jax.xla.targets import target_of


def target_devices(target):
    """The devices of a target, in XLA's order; skips the test where no compiler for it is installed."""
    if extra := xla_devices.missing_compiler(target):
        pytest.skip(f"needs zero-jax[{extra}]")
    return xla_devices.target_devices(target_of(target))


def mesh_of(target, **sizes):
    """`zero_jax.make_mesh` of a target's devices, or for "cpu" of the simulated ones."""
    return zero_jax.make_mesh(devices=None if target == "cpu" else target_devices(target), **sizes)


@contextlib.contextmanager
def simulated(platform):
    """The eight simulated devices with the decisions of a target of eight; None: with their own."""
    zero_jax.simulate_devices(8, platform=platform)
    try:
        yield
    finally:
        zero_jax.simulate_devices(8)
