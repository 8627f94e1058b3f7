"""`zero-jax calibrate`: a chip file from the device that is here."""

import dataclasses
from pathlib import Path

from zero_jax.errors import UsageError
from zero_jax.files import write_text
from zero_jax.xla.chip import Chip, named_chip


@dataclasses.dataclass(frozen=True)
class CalibrateConfig:
    """Measure products, memory, launches and links of the devices that are here, and write a chip file for --target."""

    out: Path = Path("chip.toml")
    """The file; zero-jax plan --target ./chip.toml:8 plans by it."""
    chip: str = ""
    """Whose figures are completed: a name of zero-jax targets, as h100, or a chip file. Empty: that of the devices."""
    size: int = 8192
    """Rows and columns of the largest product; 256 MiB of fp32 are copied at 8192."""

    def check(self) -> Chip | None:
        """The chip that is named; raises UsageError for what is wrong and can be known before JAX is imported."""
        if self.size < 8:
            raise UsageError(f"size={self.size}: products of so few rows say nothing: give at least 8, best 8192.")
        if not self.out.parent.is_dir():
            raise UsageError(f"out={self.out}: there is no folder {self.out.parent}: make it.")
        return named_chip(self.chip) if self.chip else None


def calibrate_command(config: CalibrateConfig) -> None:
    """Writes the file, and prints what was measured beside what the chip's file had."""
    chip = config.check()
    import jax

    from zero_jax.xla.calibrate import calibrated, chip_text, measure
    from zero_jax.xla.live_chip import chip_of_kind

    devices = jax.local_devices()
    chip = chip or chip_of_kind(devices[0].device_kind)
    if chip is None:
        raise UsageError(f"no chip file is of a {devices[0].device_kind!r}: give chip= the one that is most like it.")
    measured = measure(devices, config.size)
    new, lines = calibrated(chip, measured)
    for dtype, by_size in measured.products.items():
        for rows, reached in by_size.items():
            print(f"products {dtype} {rows} x {rows}: {reached / 1e12:,.3g} TFLOP/s, "
                  f"{reached / new.peak_flops[dtype]:.2g} of the peak; the file had {chip.rates.of_peak(dtype):.2g}")
    print(f"memory: {measured.hbm / 1e9:,.3g} GB/s, {new.rates.hbm:.2g}; the file had {chip.rates.hbm:.2g}")
    print(f"a launch: {measured.launch * 1e6:,.3g} us; the file had {chip.rates.launch * 1e6:,.3g}")
    if measured.links:
        print(f"links of {len(devices)} devices: {measured.links / 1e9:,.3g} GB/s, {new.rates.links:.2g}; the file had "
              f"{chip.rates.links:.2g}")
    print(*lines, f"{config.out}: for --target {config.out}:{len(devices)}", sep="\n")
    write_text(config.out, f"# Measured by zero-jax calibrate on {devices[0].device_kind}, JAX {jax.__version__}.\n"
                + chip_text(new))
