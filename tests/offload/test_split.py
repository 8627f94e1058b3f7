"""The units of an update, as a program reads them from host memory and as they are read once from files."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from zero_jax.offload.split import split_update, traced_update

PARAMS = {"table": np.ones((8, 4), np.float32), "up": np.ones((4, 6), np.float32)}


def split(optimizer, *, apart):
    """The units of `optimizer`, whose states are stored apart from the device, and which carried arrays are."""
    def update(carried, grads):
        updates, state = optimizer.update(grads, carried[1], carried[0])
        return (optax.apply_updates(carried[0], updates), state), None

    carried = PARAMS, optimizer.init(PARAMS)
    leaves, treedef = jax.tree.flatten((carried, PARAMS))
    closed, _ = traced_update(update, leaves, treedef)
    old = jax.tree.leaves(carried)
    stored = [number >= len(PARAMS) and leaf.ndim > 0 for number, leaf in enumerate(old)]
    return split_update(closed, [P()] * len(old), stored, apart=apart), stored


def test_an_elementwise_update_has_the_same_units_either_way():
    (host, stored), (files, _) = (split(optax.adamw(1e-2), apart=apart) for apart in (False, True))
    assert [(unit.shape, unit.stored) for unit in host.units] == [(unit.shape, unit.stored) for unit in files.units]
    assert [unit.shape for unit in files.units] == [leaf.shape for leaf in PARAMS.values()]
    assert [len(unit.eqns) for unit in host.units] == [len(unit.eqns) for unit in files.units]
    # Each stored array is read and replaced by one unit, and each parameter is replaced by that of its moments.
    assert sorted(number for unit in files.units for number in unit.stored) == [
        number for number, each in enumerate(stored) if each]
    assert [sorted(number for _, number in unit.writes if number is not None)[0] for unit in files.units] == [0, 1]


@pytest.mark.parametrize("optimizer, num_units", [
    (optax.chain(optax.scale_by_adam(), optax.clip_by_global_norm(1.0)), 1),
    (optax.chain(optax.scale_by_adam(), optax.scale_by_trust_ratio()), 2)])
def test_a_norm_of_stored_arrays_is_a_later_level_on_the_host_and_one_unit_in_files(optimizer, num_units):
    """The control of the test above: what is not elementwise is split in another way for files."""
    host, files = (split(optimizer, apart=apart)[0] for apart in (False, True))
    assert max(unit.level for unit in host.units) > 0 and all(unit.in_blocks for unit in host.units)
    assert len(files.units) == num_units and not any(unit.in_blocks or unit.level for unit in files.units)
    assert sorted(number for unit in files.units for number in unit.stored) == sorted(
        {number for unit in host.units for number in unit.stored})


def test_a_stored_array_that_stays_as_it_is_has_a_unit_in_files_alone():
    """A generation of files is a whole state; in host memory what does not change is not touched."""
    frozen = optax.GradientTransformation(
        lambda params: {"kept": jnp.ones((8, 4)), "mu": params}, lambda grads, state, params: (
            grads, {"kept": state["kept"], "mu": jax.tree.map(lambda mu, grad: mu + grad, state["mu"], grads)}))
    (host, stored), (files, _) = (split(frozen, apart=apart) for apart in (False, True))
    assert {number for unit in files.units for _, number in unit.writes} >= {
        number for number, each in enumerate(stored) if each}
    assert [len(unit.eqns) for unit in files.units].count(0) == 1 and len(host.units) == len(files.units) - 1
