"""Checks of a model's sizes, which raise ValueError."""

from typing import Any


def check_at_least_one(config: Any, *names: str) -> None:
    """Each of these fields is 1 or more."""
    for name in names:
        if getattr(config, name) < 1:
            raise ValueError(f"{name}={getattr(config, name)} must be at least 1.")


def check_multiple(config: Any, name: str, of: str) -> None:
    """The field `name` is a multiple of the field `of`."""
    if getattr(config, name) % getattr(config, of):
        raise ValueError(f"{name}={getattr(config, name)} is not a multiple of {of}={getattr(config, of)}.")


def check_length(config: Any, tokens: Any) -> None:
    """There are at most `max_length` tokens, (batch, seq): a lookup of positions out of bounds would not raise."""
    if tokens.shape[-1] > config.max_length:
        raise ValueError(f"{tokens.shape[-1]} tokens are more than max_length={config.max_length}.")


def check_share(config: Any, name: str) -> None:
    """The field is a share of something that is not all of it."""
    if not 0 <= getattr(config, name) < 1:
        raise ValueError(f"{name}={getattr(config, name)} must be in [0, 1).")
