"""`zero-jax calibrate`: planted wrong rates are corrected, and the file reads back as it was written."""

import dataclasses
import itertools
import types

import pytest

from zero_jax.cli.main import main
from zero_jax.xla import calibrate
from zero_jax.xla.calibrate import Measured, calibrated, chip_text
from zero_jax.xla.chip import Rates, built_in, chip_files, read_chip

REACHED = Measured({"bf16": {512: 1e14, 1024: 5e14}, "f32": {512: 1e14, 1024: 2.47e14}}, 3.35e12 / 2, 2e-6, 45e9)


@pytest.mark.parametrize("name", chip_files())
def test_files_read_back(tmp_path, name):
    (tmp_path / "chip.toml").write_text(chip_text(built_in(name)))
    assert read_chip(str(tmp_path / "chip.toml")) == built_in(name)


def test_rates_by_hand():
    chip, lines = calibrated(built_in("h100"), REACHED)
    assert chip.rates.of_peak("bf16") == 5e14 / 989e12 and chip.rates.of_peak("f32") == 0.5 and not lines
    assert (chip.rates.hbm, chip.rates.links, chip.rates.launch, chip.rates.band) == (0.5, 0.1, 2e-6, ())
    assert chip.rates.attention == built_in("h100").rates.attention
    assert calibrated(built_in("v5e"), REACHED)[0].rates.links == built_in("v5e").rates.links


def test_figures_that_are_too_low_are_raised():
    low = dataclasses.replace(built_in("h100"), memory_bandwidth=1e12)
    chip, lines = calibrated(low, REACHED)
    assert chip.memory_bandwidth == REACHED.hbm and chip.rates.hbm == 1 and ["memory_bandwidth" in lines[0]] == [True]


@pytest.mark.parametrize("planted", [1.0, 1e-6])
def test_a_planted_rate_is_corrected(tmp_path, capsys, monkeypatch, planted):
    """By a clock on which each program takes a millisecond; by the planted rate a product is 20 times off."""
    ticks = itertools.count()
    monkeypatch.setattr(calibrate, "time", types.SimpleNamespace(perf_counter=lambda: 1e-3 * next(ticks)))
    wrong = dataclasses.replace(built_in("h100"), rates=Rates(matmul=planted))
    (tmp_path / "wrong.toml").write_text(chip_text(wrong))
    new = tmp_path / "new.toml"
    assert main(["calibrate", "--chip", str(tmp_path / "wrong.toml"), "--out", str(new), "--size", "256"]) == 0
    assert "links of 8 devices" in capsys.readouterr().out
    reached = 2 * 256**3 * calibrate.CHAIN / 1e-3

    def off(chip):
        return chip.rates.of_peak("f32") * chip.peak_flops["f32"] / reached

    assert off(read_chip(str(new))) == pytest.approx(1)
    assert not 1 / 20 < off(wrong) < 20


@pytest.mark.parametrize("flags, words", [
    (["--size", "2"], "at least 8"), (["--chip", "h1000"], "is not known"), (["--out", "none/chip.toml"], "make it"),
    ([], "no chip file is of")])
def test_bad_input(capsys, monkeypatch, tmp_path, flags, words):
    monkeypatch.chdir(tmp_path)
    assert main(["calibrate", *flags]) == 2
    assert words in capsys.readouterr().err
