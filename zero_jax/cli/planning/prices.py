"""Prices of devices in a TOML file: `[prices]`, dollars per device-hour by chip or target. No JAX."""

import math
from pathlib import Path

from zero_jax.arguments import shown
from zero_jax.cli.config_file import read_toml
from zero_jax.errors import UsageError, named
from zero_jax.xla.targets import Target


def price_of(path: Path, text: str, target: Target) -> float:
    """Dollars per device-hour of `target`: those of `text`, as it was typed, else those of its chip, as h100.

    A chip of a user's own file has that file's name without .toml. Raises UsageError for a file that cannot be read,
    is not such a file, or has no price of either, and for any price that is no positive number.
    """
    read = read_toml("prices", path)
    prices = read.get("prices")
    if not isinstance(prices, dict) or len(read) > 1:
        raise UsageError(f"prices={path}: write a table [prices], and nothing else, with a line h100 = 2.5 for each "
                         "chip: dollars per device-hour.")
    for name, value in prices.items():
        if not (type(value) in (int, float) and 0 < value < math.inf):
            raise UsageError(f"prices={path}: {named(name)} = {shown(value)} is no positive number: give dollars per "
                             "device-hour.")
    chip = target.text.rpartition(":")[0]
    chip = Path(chip).stem if chip.endswith(".toml") else chip
    for name in (text, chip):
        if name in prices:
            return float(prices[name])
    raise UsageError(f"prices={path} has no price of {named(chip)}: add a line {chip} = DOLLARS, per device-hour, to "
                     f"[prices], which has {', '.join(map(named, prices)) or 'none'}.")
