"""The command that reproduces the paper's numbers: what it counts, what it writes, and that it can fail."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tables

ROOT = Path(__file__).parents[2]
SUMMARY = {
    "cells of Table 1": 54, "columns' bold cells": 9, "cells of Table 2": 20, "communication volumes": 16,
    "facts of ZeRO-R": 21, "numbers of Table 3": 25, "run configurations": 48, "runs within 32 GB by formula": 47,
    "others' formulas": 14, "errata": 13,
}


def test_everything_agrees(tmp_path):
    """As a user runs it."""
    done = subprocess.run([sys.executable, ROOT / "scripts/paper/tables.py", "--out", tmp_path / "paper"],
                          capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    for group, count in SUMMARY.items():
        assert f"\n{count} of {count} {group}\n" in done.stdout
    assert "WRONG" not in done.stdout
    result = json.loads((tmp_path / "paper/tables.json").read_text())
    assert result["wrong"] == 0 and all(row["ok"] for row in result["checks"])
    assert f"{len(result['checks'])} of {len(result['checks'])} agree" in done.stdout
    image = (tmp_path / "paper/figure1.png").read_bytes()
    assert image.startswith(b"\x89PNG\r\n\x1a\n") and len(image) > 10_000


def falsified(table, key, old, new):
    row = table[key]
    swap = lambda part: part.replace(old, new) if isinstance(part, str) else part  # noqa: E731
    changed = swap(row) if isinstance(row, str) else tuple(map(swap, row))
    assert changed != row
    return {**table, key: changed}


@pytest.mark.parametrize("table, key, old, new", [
    ("TABLE_1", 64, "16.6", "16.8"), ("TABLE_1", 1024, "15.6*", "15.6"), ("TABLE_2", 4, "57.6B", "57.9B"),
    ("TABLE_3", "C4", "25.5", "25.7"), ("COMMUNICATION", 3, "1.5x", "1.7x"), ("WRONG_HIDDEN", "40b", "17.7B", "39.9B"),
    ("T5_3B_GIB", "ZeRO-3", "6.10", "6.30"), ("BLOCK_PARAMS", "8b", "8.15B", "8.17B")])
def test_a_false_number_is_found(monkeypatch, tmp_path, capsys, table, key, old, new):
    monkeypatch.setattr(tables.paper, table, falsified(getattr(tables.paper, table), key, old, new))
    monkeypatch.setattr(tables, "draw_figure_1", lambda path: None)
    assert tables.main(["--out", str(tmp_path)]) == 1
    assert capsys.readouterr().out.count("\nWRONG: ") == 1
    assert json.loads((tmp_path / "tables.json").read_text())["wrong"] == 1


def test_a_false_run_is_found(monkeypatch):
    """Each of the appendix's rules alone."""
    from runs import Run

    def wrong(run):
        monkeypatch.setattr(tables.checks, "RUNS", (run,))
        return [row.note for row in tables.checks.runs() if row.group == "run configurations"]

    assert wrong(Run(2, "8b", 400, 4, 24, 64, 6400)) == [""]
    assert wrong(Run(2, "8b", 400, 4, 24, 64, 6401)) == ["total"]
    assert wrong(Run(2, "17b", 256, 16, 28, 1, 16)) == ["heads % MP"]
    monkeypatch.setattr(tables.paper, "MISLABELLED", "")
    assert wrong(Run(4, "1.38b", 128, 1, 16, 1, 128)) == ["size"]


def test_what_agrees():
    agrees = tables.paper.agrees
    assert agrees("513", 513.5) and agrees("41.3", 41.25) and not agrees("513", 514.5) and not agrees("41.3", 41.5)
    assert agrees("0.5T", 512e9) and not agrees("0.5T", 612e9)
    assert agrees("~60", 67.1) and not agrees("~33", 67.1) and agrees("<10", 8.3) and not agrees(">10", 8.3)
