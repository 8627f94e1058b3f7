"""States in host memory are saved from copies: NumPy reads host memory in place, and a GPU cannot donate that then."""

import jax
import numpy as np
import pytest
from support.covering import weekly
from support.saved import BATCH, batch_of, make_step

import zero_jax
from zero_jax.checkpoint import logical_state
from zero_jax.checkpoint.logical_state import logical_state_of
from zero_jax.step import step as step_module
from zero_jax.tree import named_leaves


def left_after_a_step(offload, count):
    """Leaves in host memory that a step did not update in place, while what is saved is looked at as Orbax does."""
    step = make_step(3, count, offload=offload)
    state = step.init(jax.random.key(0), BATCH)
    logical, leaves = logical_state_of(step.layout()), dict(named_leaves(state))
    saved, _ = logical.from_leaves({name: leaves[name] for name in logical.names})
    views = {name: [np.asarray(shard.data) for shard in array.addressable_shards] for name, array in saved.items()}
    before = {name: [view.copy() for view in each] for name, each in views.items()}
    step(state, batch_of(1))
    for name, each in views.items():
        for view, old in zip(each, before[name], strict=True):
            np.testing.assert_array_equal(view, old, err_msg=name)
    on_host = {name: leaf for name, leaf in leaves.items() if leaf.sharding.memory_kind == "pinned_host"}
    assert on_host
    return {name for name, leaf in on_host.items() if not leaf.is_deleted()}


@weekly("offload, count", [("optimizer", 1), ("optimizer", 2)])
def test_the_next_step_updates_in_place_what_is_being_saved(offload, count, monkeypatch):
    assert left_after_a_step(offload, count) == set()
    monkeypatch.setattr(logical_state, "copied_on_host", lambda leaf: leaf)
    assert left_after_a_step(offload, count)  # the control


def test_a_view_that_keeps_a_gpu_from_it_is_told(monkeypatch):
    """XLA:GPU's words, which simulated devices do not have: those copy."""
    step = make_step(3, 1, offload="optimizer")
    state = step.init(jax.random.key(0), BATCH)

    def refuses(*_):
        raise ValueError("INVALID_ARGUMENT: Invalid buffer passed to Execute() as argument 18 to replica 0: "
                         "INVALID_ARGUMENT: Donation requested for buffer with external reference")

    step(state, BATCH)
    state = step.init(jax.random.key(0), BATCH)
    monkeypatch.setattr(step, "_jitted", refuses)
    monkeypatch.setattr(step, "_jit", lambda batch: refuses)
    with pytest.raises(zero_jax.UsageError, match=r"NumPy looks at it in place.*np.array\(leaf, copy=True\)"):
        step(state, BATCH)
    monkeypatch.setattr(step_module, "check_state", lambda *_: None)
    with pytest.raises(ValueError, match="external reference"):  # the control
        step(state, BATCH)
