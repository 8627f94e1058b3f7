"""`zero-jax diff`: what changed between two audits, and the finding that is why."""

import copy
import json
import re

import pytest
from support.audited_steps import WHOLE, scanned

import zero_jax
from zero_jax.auditing.compare import changes
from zero_jax.cli import main as command_line


def report(**fault):
    step = scanned(target=None, **fault)
    return json.loads(json.dumps(zero_jax.audit(step.jitted, *step.shapes).to_json()))


def test_a_regression_is_named_with_its_place():
    before, after = report(), report(moments=WHOLE)
    lines = changes(before, after)
    assert "memory: optimizer: 128.00 -> 1,024.00 MiB (+700 %)" in lines
    assert any(line.startswith("new: optimizer_replicated") and "mu['down']" in line for line in lines), lines
    assert any(line.startswith("gone: optimizer_replicated") for line in changes(after, before))
    assert any(re.match(r"all-gather f32 of \w+: 0.00 -> 896.00 MiB at .*\.py:\d+$", line)
               for line in lines), lines
    assert changes(before, before) == [] == changes(after, copy.deepcopy(after))


REPORT = {"target": "h100:8", "devices": 8, "stage": 3, "sent_bytes": 100 << 20, "device_bytes": 200 << 20,
          "flops": 1e12, "seconds": 0.1, "exposed_seconds": 0.01, "sent_by_purpose": {"gather": 100 << 20},
          "sent_by_collective": {"all-gather f32 of a": {"bytes": 2 << 20, "source": "b.py:5"}},
          "memory": {"params": 50 << 20}, "findings": []}


@pytest.mark.parametrize("key, value, line", [
    ("sent_bytes", 150 << 20, "sent: 100.00 -> 150.00 MiB (+50 %)"),
    ("device_bytes", 100 << 20, "memory of a device: 200.00 -> 100.00 MiB (-50 %)"),
    ("flops", 2e12, "FLOPs of a device: 1,000.00 -> 2,000.00 GFLOP (+100 %)"),
    ("seconds", 0.11, "step: 100.00 -> 110.00 ms (+10 %)"),
    ("exposed_seconds", 0.02, "waiting for collectives: 10.00 -> 20.00 ms (+100 %)"),
    ("sent_by_collective", {"all-gather f32 of a": {"bytes": 3 << 20, "source": "b.py:7"}},
     "all-gather f32 of a: 2.00 -> 3.00 MiB (+50 %) at b.py:7"),
    ("stage", 1, "stage: 3 -> 1"),
    ("sent_by_purpose", {"gather": 100 << 20, "rest": 5 << 20}, "sent for rest: 0.00 -> 5.00 MiB"),
])
def test_each_number_is_compared(key, value, line):
    assert changes(REPORT, REPORT | {key: value}) == [line]
    assert changes(REPORT, REPORT | {"sent_bytes": (100 << 20) * 1.005}) == []


def test_the_command(tmp_path, capsys):
    old, new, other = (tmp_path / name for name in ("old.json", "new.json", "other.json"))
    old.write_text(json.dumps(REPORT))
    new.write_text(json.dumps(REPORT | {"seconds": 0.2}))
    other.write_text("[]")
    assert command_line.main(["diff", str(old), str(new)]) == 1
    assert capsys.readouterr().out == "step: 100.00 -> 200.00 ms (+100 %)\n"
    assert command_line.main(["diff", str(old), str(old)]) == 0
    assert command_line.main(["diff", str(old), str(other)]) == 2
    assert "give a file of zero-jax audit --json" in capsys.readouterr().err
