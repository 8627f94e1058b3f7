"""The time of a step as measured and as predicted: in both only where a chip file is of the devices."""

import contextlib
import dataclasses
import io
import json

import pytest
from support.programs import PROGRAMS, program

from zero_jax.cli.main import main
from zero_jax.xla import live_chip
from zero_jax.xla.calibrate import chip_text
from zero_jax.xla.chip import Rates, built_in

SHORT = ["--model", "gpt2:tiny", "--batch-size", "8", "--seq-len", "32", "--max-bytes", "200000"]


@pytest.fixture
def chip_file(tmp_path):
    """Of a CPU, by hand: with products a thousandth as fast as those of an H100."""
    slow = dataclasses.replace(built_in("h100"), name="cpu", rates=Rates(matmul=1e-3, hbm=0.01))
    (tmp_path / "cpu.toml").write_text(chip_text(slow))
    return str(tmp_path / "cpu.toml")


def printed(*args: str) -> str:
    with contextlib.redirect_stdout(text := io.StringIO()):
        assert main([*args]) == 0
    return " ".join(text.getvalue().split())


def test_train_prints_measured_beside_predicted(tmp_path, chip_file):
    """The run by a chip file, and as a control the same run without, which says nothing of either."""
    found = {}
    for name, chip in (("with", ["--chip", chip_file]), ("without", [])):
        out = tmp_path / name
        text = printed("train", *SHORT, "--steps", "3", "--save-every", "0", "--out", str(out), *chip)
        summary = json.loads((out / "train.jsonl").read_text().splitlines()[-1])["summary"]
        found[name] = text, summary, (out / "report.html").read_text()
    text, summary, page = found["with"]
    measured, predicted = summary["step_seconds"], summary["predicted_seconds"]
    line = f"{1e3 * measured:.3g} ms measured (median), {1e3 * predicted:.3g} ms predicted"
    assert measured > 0 < predicted and line in text and line in page and "ms exposed" in page and "MFU" in page
    text, summary, page = found["without"]
    assert summary["step_seconds"] > 0 and summary["predicted_seconds"] is None
    assert not [words for words in ("predicted", "measured (median)", "ms exposed", "n/a") if words in text + page]


def test_inspect_predicts_by_a_chip_file(chip_file):
    text = printed("inspect", *SHORT, "--chip", chip_file)
    assert "step, bound by" in text and "ms exposed" in text
    text = printed("inspect", *SHORT)
    assert "step, bound by" not in text and "exposed" not in text and "asynchronous" not in text


@pytest.mark.parametrize("flags, words", [
    (["--chip", "v5e"], "links of a TPU, and the devices here are cpu"), (["--chip", "h1000"], "is not known"),
    (["--chip", "none.toml"], "cannot be read"),
    (["--chip", "h100", "--dry-run", "--target", "h100:8"], "leave one of them out")])
def test_bad_chips(capsys, tmp_path, flags, words):
    assert main(["train", *SHORT, "--steps", "1", "--out", str(tmp_path), *flags]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["NVIDIA H100 80GB HBM3", "cpu"])
def test_the_report_of_verify_has_exposed_time_where_a_chip_file_is_of_the_devices(monkeypatch, kind):
    """Of described H100s; the control: that program, of devices that no chip file is of."""
    step, batch = PROGRAMS["h100 stage 3"].make()
    compiled = dataclasses.replace(program("h100 stage 3"), layout=step.layout(batch))
    monkeypatch.setattr(type(step), "compiled_step", lambda *_: compiled)
    monkeypatch.setattr(live_chip, "chip_of_kind", {compiled.layout.mesh.devices.flat[0].device_kind: None}.get
                        if kind == "cpu" else live_chip.chip_of_kind)
    report = step.verify(batch)
    if kind == "cpu":
        assert not report.seconds and "exposed" not in str(report)
        return
    alone, exposed = map(sum, zip(*report.seconds, strict=True))
    assert 0 < exposed <= alone and str(report).count("ms exposed") == sum(
        bool(each.collectives) for each in report.results)
