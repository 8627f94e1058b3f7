"""Options of a step drawn at random, as many as are accepted together, beside a plain loop on one device."""


import jax
import pytest
from support.program_controls import unsent_by_one_device
from support.random_options import MESHES, OPTIONS, Drawn, check, draw

FAST, NUM_SEEDS, GROUP = 1, 160, 8
GROUPS = [pytest.param(range(first, first + GROUP), marks=[pytest.mark.slow, pytest.mark.short_random])
          for first in range(FAST, FAST + NUM_SEEDS, GROUP)]


@pytest.mark.grid
@pytest.mark.parametrize("seeds", [*[range(seed, seed + 1) for seed in range(FAST)], *GROUPS], ids=lambda seeds: (
    f"{seeds.start}-{seeds.stop - 1}"))
def test_options_drawn_from_a_seed_have_the_numbers_of_one_device(seeds):
    failed = {}
    for seed in seeds:
        try:
            check(draw(seed))
        except Exception as error:
            failed[seed] = f"{draw(seed)}: {type(error).__name__}: {error}"
        if len(seeds) > 1:
            jax.clear_caches()
    assert not failed, "\n\n".join(failed.values())


def test_seeds_draw_every_option_and_mesh():
    drawn = [draw(seed) for seed in range(FAST + NUM_SEEDS)]
    for name, values in OPTIONS.items():
        assert all(any((name, value) in each.options for each in drawn) for value in values), name
    assert {each.mesh for each in drawn} == MESHES.keys() and {each.stage for each in drawn} == {0, 1, 2, 3}
    assert draw(3) == draw(3) != draw(4)


def test_a_gradient_that_one_device_does_not_send_is_caught():
    """Negative control: of an uneven model at stage 3."""
    drawn = Drawn(0, "linen", True, 60, 3, "fp32", "flat", "momentum", True, (("accumulate", 2), ("remat", "full")))
    with unsent_by_one_device() as sent, pytest.raises(AssertionError):
        check(drawn)
    assert sent and all(sent)
