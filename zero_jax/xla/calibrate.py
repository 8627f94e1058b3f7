"""A chip's rates as the devices that are here reach them: products, memory, launches, links; and the chip as a file."""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zero_jax.xla.chip import Chip, Rates

CHAIN, RUNS, SMALL = 8, 5, 8
"""Times that a program does the work, each on what the last one gave; runs timed; rows of a product that is a launch
and next to nothing else."""
DTYPES = {"bf16": jnp.bfloat16, "f32": jnp.float32}


@dataclasses.dataclass(frozen=True)
class Measured:
    """What devices reach. products: FLOP/s by HLO dtype and rows, smallest first; the others in bytes/s and seconds.

    links: bytes/s that each device sends in an all-gather among those of this process; 0 of one device.
    """

    products: Mapping[str, Mapping[int, float]]
    hbm: float
    launch: float
    links: float = 0.0


def measure(devices: Sequence[jax.Device], size: int) -> Measured:
    """What `devices`, of one process, reach: products of up to `size` x `size`, copies of as many fp32, and the others.

    Each is the median of `RUNS` runs of one program that does it `CHAIN` times.
    """
    with jax.default_device(devices[0]):
        sizes = sorted({max(SMALL, size // 4), max(SMALL, size // 2), size})
        products = {name: {rows: 2 * rows**3 / _product_seconds(rows, dtype) for rows in sizes}
                    for name, dtype in DTYPES.items()}
        copied = jnp.ones((size, size), jnp.float32)
        memory = _seconds(lambda x: jax.lax.fori_loop(0, CHAIN, lambda _, x: x * 1.0001 + 0.5, x), copied)
        launch = _product_seconds(SMALL, jnp.float32)
    return Measured(products, 2 * copied.nbytes / memory, launch, _links(devices, size) if len(devices) > 1 else 0.0)


def _product_seconds(rows: int, dtype: Any) -> float:
    def chain(x: jax.Array) -> jax.Array:
        weights = x
        for _ in range(CHAIN):
            x = x @ weights
        return x

    return _seconds(chain, jnp.full((rows, rows), 1 / rows, dtype))


def _links(devices: Sequence[jax.Device], size: int) -> float:
    mesh, number = Mesh(list(devices), ("data",)), len(devices)

    def chain(x: jax.Array) -> jax.Array:
        for _ in range(CHAIN):
            whole = jax.lax.all_gather(x, "data", tiled=True)
            x = whole.reshape(number, *x.shape).sum(0) / number
        return x

    rows = math.ceil(size / number)
    x = jax.device_put(jnp.ones((rows * number, size), jnp.float32), NamedSharding(mesh, P("data")))
    return (number - 1) * rows * size * 4 / _seconds(
        jax.shard_map(chain, mesh=mesh, in_specs=P("data"), out_specs=P("data")), x)


def _seconds(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> float:
    """Of one of the `CHAIN` links of `function(x)`."""
    run, found = jax.jit(function).lower(x).compile(), []
    for _ in range(RUNS + 1):
        began = time.perf_counter()
        jax.block_until_ready(run(x))
        found.append(time.perf_counter() - began)
    return statistics.median(found[1:]) / CHAIN


def calibrated(chip: Chip, measured: Measured) -> tuple[Chip, list[str]]:
    """`chip` with the rates that were measured, and a line for each figure that was too low, which is raised to it.

    Of a dtype's products the largest counts. Attention stays as it was; no band is left, for nothing was compared. A
    TPU's links stay, too: how many of them an all-gather uses depends on its torus.
    """
    peaks, lines, products = dict(chip.peak_flops), [], dict(chip.rates.products)

    def share(name: str, reached: float, figure: float) -> float:
        if reached > figure:
            lines.append(f"{name}: {reached:.3g} a second is above the file's {figure:.3g}, which is raised to it")
        return min(1.0, reached / figure)

    for dtype, by_size in measured.products.items():
        reached = by_size[max(by_size)]
        products[dtype] = share(f"peak_flops.{dtype}", reached, peaks[dtype])
        peaks[dtype] = max(peaks[dtype], reached)
    hbm, links, fields = share("memory_bandwidth", measured.hbm, chip.memory_bandwidth), chip.rates.links, {}
    if measured.links and chip.gpu:
        links = share("link_bandwidth", measured.links, chip.link_bandwidth)
        fields["link_bandwidth"] = max(chip.link_bandwidth, measured.links)
    rates = dataclasses.replace(chip.rates, matmul=products.get("bf16", chip.rates.matmul), hbm=hbm, links=links,
                                launch=measured.launch, band=(), products=products)
    return dataclasses.replace(chip, rates=rates, peak_flops=peaks,
                               memory_bandwidth=max(chip.memory_bandwidth, measured.hbm), **fields), lines


def chip_text(chip: Chip) -> str:
    """`chip` as a file that `read_chip` reads: fields that are their defaults are left out."""
    return "\n".join(_table(chip, "")) + "\n"


def _table(record: Chip | Rates | Any, within: str) -> list[str]:
    lines, tables = [], []
    for field in dataclasses.fields(record):
        value, name = getattr(record, field.name), f"{within}{field.name}"
        if value is None or value == field.default or isinstance(value, Mapping) and not value:
            continue
        if dataclasses.is_dataclass(value):
            tables += ["", f"[{name}]", *_table(value, f"{name}.")]
        elif isinstance(value, Mapping):
            tables += ["", f"[{name}]", *(f"{_toml(key)} = {_toml(each)}" for key, each in value.items())]
        else:
            lines.append(f"{field.name} = {_toml(value)}")
    return lines + tables


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"' if isinstance(value, str) else repr(value)
