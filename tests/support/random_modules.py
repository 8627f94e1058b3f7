"""Modules that are grown at random: the same seed grows the same module, and draws how it is trained."""

import dataclasses
import functools
import random
from typing import Any

import numpy as np
import optax

from support.module_pieces import LOOSE, PIECES, WIDTH, Grown, NnxGrown, squares
from support.oracle import oracle, train

ROWS = 16
SGD = optax.sgd(0.05, momentum=0.9)
NOT_DRAWN = {"ragged_dot", "fused attention"}
"""Pieces that came later: a seed keeps its module."""


@dataclasses.dataclass(frozen=True)
class Drawn:
    """What a seed gave."""

    seed: int
    flavour: str
    pieces: tuple[str, ...]
    hidden: int
    stage: int
    precision: str

    def model(self) -> Any:
        """As a user would hand it over."""
        if self.flavour == "linen":
            return Grown(self.pieces, self.hidden)
        return functools.partial(NnxGrown, self.pieces, self.hidden)

    @property
    def is_rounded(self) -> bool:
        """Whether numbers are compared up to the rounding of bfloat16."""
        return self.precision == "bf16" or not LOOSE.isdisjoint(self.pieces)


def draw(seed: int) -> Drawn:
    """The module of `seed`, and how it is trained."""
    rng = random.Random(seed)
    flavour = rng.choice(["linen", "nnx"])
    pieces = rng.choices(sorted(PIECES[flavour] - NOT_DRAWN), k=rng.randint(1, 3))
    hidden, stage, precision = rng.choice([8, 16, 7, 10, 13]), rng.randrange(4), rng.choice(["fp32", "fp32", "bf16"])
    if flavour == "nnx" and "spectral norm" in pieces:
        precision = "fp32"  # in bfloat16 Flax's own writes float32 to it, of which JAX warns
    return Drawn(seed, flavour, tuple(pieces), hidden, stage, precision)


def batches(number: int = 2) -> list[dict[str, np.ndarray]]:
    """Inputs and targets that bfloat16 holds."""
    rng = np.random.default_rng(0)
    return [{"x": np.round(rng.normal(size=(ROWS, WIDTH)) * 8).astype(np.float32) / 8,
             "y": np.round(rng.normal(size=(ROWS, 1)) * 8).astype(np.float32) / 8} for _ in range(number)]


def check(drawn: Drawn) -> None:
    """Two steps of it and of a plain loop on one device: AssertionError unless losses, parameters, variables agree."""
    options = {"batches": batches(), "loss": squares, "optimizer": SGD, "precision": drawn.precision}
    one, many = oracle(drawn.model(), **options), train(drawn.model(), drawn.stage, 8, **options)
    tolerance = 3e-2 if drawn.is_rounded else 2e-5
    assert np.isfinite(many.losses).all()
    np.testing.assert_allclose(many.losses, one.losses, rtol=tolerance, err_msg=str(drawn))
    assert many.params.keys() == one.params.keys(), drawn
    for found, expected in ((many.params, one.params), (many.variables, one.variables)):
        for name in found.keys() & expected.keys():
            a, b = (np.asarray(leaf[name], np.float64) for leaf in (found, expected))
            np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * (1 + np.abs(b).max()), err_msg=f"{name}: {drawn}")
