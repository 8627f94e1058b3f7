"""scripts/reliability/third_party.py: what it calls right, and (slow) a few of its models."""

import json
import subprocess
import sys

import pytest

from scripts.reliability import third_party

RIGHT = {"model": "gpt2", "package": "transformers 4", "note": "", "params": 1_000_000, "worst_loss": 1e-7,
         "worst_norm": 1e-7, "replicated": [], "up_front": [], "trace_s": 3.0, "plain_trace_s": 2.0, "compile_s": 4.0,
         "plain_compile_s": 2.0, "targets": {"h100:8": {"3": {"ratio": 1.0, "violations": []}}}}


def test_a_row_is_right_only_with_the_numbers_of_one_device_and_its_contract():
    assert third_party.is_right(RIGHT)
    assert third_party.cells(RIGHT, ["h100:8"]) == ["gpt2", "1,000", "1e-07", "0", "0", "1.000", "1.5", "2.0",
                                                    "transformers 4"]
    broken = {"h100:8": {"3": {"ratio": 2.0, "violations": ["too much"]}}}
    assert third_party.cells({**RIGHT, "targets": broken}, ["h100:8"])[5] == "2.000!"
    for change in ({"worst_loss": 1e-3}, {"worst_norm": 1.0}, {"targets": broken}, {"error": "ValueError: no"}):
        assert not third_party.is_right({**RIGHT, **change})
    assert not third_party.is_right({**RIGHT, "worst_loss": float("nan")})


def test_a_model_that_fails_is_a_row_with_its_error():
    row = {"model": "gpt2", "error": "Traceback\nModuleNotFoundError: No module named 'transformers'"}
    cells = third_party.cells(row, ["h100:8"])
    assert cells[2] == "failed" and cells[-1].startswith("ModuleNotFoundError")
    assert len(cells) == len(third_party.cells(RIGHT, ["h100:8"]))


@pytest.mark.slow
def test_some_of_them_are_right(tmp_path):
    pytest.importorskip("transformers.models.gpt2.modeling_flax_gpt2")
    out = tmp_path / "rows.tsv"
    subprocess.run([sys.executable, third_party.__file__, "--only", "gpt2", "t5", "--stages", "2", "3", "--targets",
                    "--out", out], check=True)
    rows = json.loads(out.with_suffix(".json").read_text())
    assert [row["model"] for row in rows] == ["gpt2", "t5"] and not any(row["up_front"] for row in rows)
