"""Modules grown at random from what modules are made of, beside a plain Flax and Optax loop on one device."""


import jax
import pytest
from support.covering import weekly
from support.module_pieces import PIECES
from support.program_controls import unsent_by_one_device
from support.random_modules import NOT_DRAWN, check, draw

FAST, NUM_SEEDS, GROUP = 3, 300, 10
NUM_SHORT = 240
"""Seeds whose initial values are drawn from a hash that compiles sooner."""
GROUPS = [pytest.param(range(first, first + GROUP), marks=[
    pytest.mark.slow, *[pytest.mark.short_random] * (first < FAST + NUM_SHORT)])
          for first in range(FAST, FAST + NUM_SEEDS, GROUP)]


@pytest.mark.grid
@weekly("seeds", [*[range(seed, seed + 1) for seed in reversed(range(FAST))], *GROUPS], ids=lambda seeds: (
    f"{seeds.start}-{seeds.stop - 1}"))
def test_a_module_grown_from_a_seed_has_the_numbers_of_one_device(seeds):
    failed = {}
    for seed in seeds:
        try:
            check(draw(seed))
        except Exception as error:
            failed[seed] = f"{draw(seed)}: {type(error).__name__}: {error}"
        jax.clear_caches()
    assert not failed, "\n\n".join(failed.values())


def test_seeds_draw_every_piece_and_setting():
    drawn = [draw(seed) for seed in range(FAST + NUM_SEEDS)]
    for flavour, pieces in PIECES.items():
        assert {piece for each in drawn if each.flavour == flavour for piece in each.pieces} == pieces - NOT_DRAWN
    assert {each.stage for each in drawn} == {0, 1, 2, 3} and len({each.hidden for each in drawn}) == 5
    assert {each.precision for each in drawn} == {"fp32", "bf16"}
    assert draw(3) == draw(3) and draw(3) != draw(4)


def test_a_gradient_that_one_device_does_not_send_is_caught():
    """Negative control: of an uneven module at stage 3."""
    seed = next(seed for seed in range(NUM_SEEDS) if not (drawn := draw(seed)).is_rounded and drawn.stage == 3
                and drawn.hidden % 8 and drawn.pieces[0] == "dense")
    with unsent_by_one_device() as sent, pytest.raises(AssertionError):
        check(draw(seed))
    assert sent and all(sent)
