"""Budgets: each injected regression exceeds the budget of the clean step and is named; the command; the plugin."""

import functools
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import flax.linen as nn
import jax
import numpy as np
import pytest
import yaml
from jax.sharding import PartitionSpec as P
from support.audited_steps import TOKENS, WHOLE, scanned
from support.pages import blocks, is_printed
from support.targets import target_devices

import zero_jax
from scripts.tables import budgets as script
from zero_jax.auditing import budgets
from zero_jax.auditing.audit import cached_report
from zero_jax.auditing.budgets import LIMITS, Budget, compared, read_budgets
from zero_jax.cli import main as command_line
from zero_jax.cli.audit_command import FOUND

ROOT = Path(__file__).parents[2]
BLOCKING = {"xla_gpu_disable_async_collectives": "ALLCOLLECTIVES"}

REGRESSIONS = {
    # name: (fault, limits exceeded, text of the lines that say why)
    "state_replicated": (dict(moments=WHOLE), {"memory_gib"},
                         ["optimizer_replicated", "mu['down']", "memory: optimizer: 128.00 -> 1,024.00 MiB"]),
    "gradients_all_reduced": (dict(params=WHOLE, cast="no"), {"memory_gib"}, ["gradients_whole", "all-reduce"]),
    "sent_in_fp32": (dict(cast="whole"), {"sent_mib"},
                     ["all-gather f32 of params['up']: 0.00 -> 224.00 MiB at", "sent_in_fp32", "audited_steps.py:"]),
    "not_donated": (dict(donate=()), {"memory_gib"}, ["not_donated", "donate_argnums"]),
    "collective_in_microbatches": (dict(microbatches=4), {"sent_mib"},
                                   ["gathered_each_microbatch", "audited_steps.py:"]),
    "batch_doubled": (dict(tokens=2 * TOKENS), {"memory_gib", "gflop"}, ["memory: batch: 128.00 -> 256.00 MiB"]),
    "gathered_and_kept": (dict(remat=False), {"memory_gib"}, ["weights_kept", "params['up']"]),
    "gradients_gathered": (dict(grads=WHOLE), {"sent_mib"}, ["update_whole", "all-gather"]),
    "batch_replicated": (dict(batch=WHOLE, activations=WHOLE), {"gflop", "memory_gib"}, ["batch_replicated", "batch"]),
    "blocking": (dict(options=BLOCKING), {"exposed_ms"}, ["blocking", "waiting for collectives"]),
    "activations_moved": (dict(activations=P(None, "data")), {"sent_mib"}, ["activations_moved", "audited_steps.py:"]),
}
FAST = ("not_donated", "gathered_and_kept", "batch_doubled", "sent_in_fp32")


@functools.cache
def report(name=None):
    target_devices("h100:8")  # skips where its compiler is not installed
    step = scanned(**REGRESSIONS[name][0] if name else {})
    return json.loads(json.dumps(zero_jax.audit(step.jitted, *step.shapes, **step.options).to_json()))


def budget_of(folder, before, **values):
    """The budget that `update` writes for the step of a report."""
    limits = {key: before[name] / unit for key, (name, unit) in LIMITS.items()}
    result = Budget(folder / "budgets.toml", "train.py:train_step", {}, limits | values)
    result.reports.write_text(json.dumps({result.step: before}))
    return result


def exceeded(lines):
    return {line.partition(":")[0] for line in lines if not line.startswith((" ", "finding "))}


def named_by(tmp_path, before, after, limits, why):
    over, _ = compared(budget_of(tmp_path, before), after)
    assert limits <= exceeded(over), over
    for text in why:
        assert any(text in line for line in over), (text, over)
    assert compared(budget_of(tmp_path, before), before) == ([], [])


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow)
                                  for name in REGRESSIONS])
def test_an_injected_regression_fails_and_is_named(name, tmp_path):
    _, limits, why = REGRESSIONS[name]
    named_by(tmp_path, report(), report(name), limits, why)


def test_recomputation_and_a_second_gather_that_remat_adds_are_named(tmp_path):
    named_by(tmp_path, report("gathered_and_kept"), report(), {"recomputed_gflop", "gflop", "sent_mib"},
             ["recomputed FLOPs: 0.00 -> 2,199.02 GFLOP",
              "all-gather bf16 of params['up']: 112.00 -> 224.00 MiB (+100 %) at"])


FILE = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

mesh = Mesh(np.array(jax.devices()), ("data",))
print("a file may print")

def update(params, batch):
    grads = jax.grad(lambda w: ((batch @ w) ** 2).mean())(params)
    return params - 0.1 * jax.lax.with_sharding_constraint(grads, NamedSharding(mesh, P("data")))

train_step = jax.jit(update, donate_argnums=0)

def example_args():
    def shape(dims):
        return jax.ShapeDtypeStruct(dims, jnp.float32, sharding=NamedSharding(mesh, P("data")))
    return shape((1024, 1024)), shape((65536, 1024))
"""
SECTION = """# What a step may cost.
["some_train.py:train_step"]  # of the large model
target = "h100:8"
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    target_devices("h100:8")
    (tmp_path / "some_train.py").write_text(FILE)
    (tmp_path / "budgets.toml").write_text(SECTION)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_budgets_are_written_and_checked_and_a_program_is_compiled_once(folder, capsys):
    assert command_line.main(["budgets", "update", "--cache", "cache"]) == 0
    text = (folder / "budgets.toml").read_text()
    assert text.startswith(SECTION) and set(LIMITS) < set(tomllib.loads(text)["some_train.py:train_step"])
    stored = json.loads((folder / "budgets.json").read_text())["some_train.py:train_step"]
    assert {each["source"].partition(":")[0] for each in stored["sent_by_collective"].values()} - {""} == {
        "some_train.py"}
    (cached,) = (folder / "cache").iterdir()
    cached.write_text(json.dumps(stored | {"sent_bytes": 0.0}))  # what is there is what is read
    (folder / "some_train.py").write_text("# A comment.\n" + FILE)  # which changes no program
    capsys.readouterr()
    assert command_line.main(["budgets", "check", "--cache", "cache"]) == 0
    assert "sent_mib: 0, and its budget is" in (printed := capsys.readouterr().out) and "could be tightened" in printed
    (folder / "some_train.py").write_text("# A comment.\n" + FILE.replace("65536", "131072"))
    assert command_line.main(["budgets", "check", "--cache", "cache"]) == FOUND
    assert "memory: batch: 32.00 -> 64.00 MiB (+100 %)" in capsys.readouterr().out
    assert len(list((folder / "cache").iterdir())) == 2


def test_steps_of_this_library_are_cached_and_what_is_not_known_is_not(tmp_path):
    def cached(step, *shapes):
        return cached_report(tmp_path, step, shapes, target=None, params=None)

    batch = {"inputs": np.zeros((16, 8), np.int32), "targets": np.zeros((16, 8), np.int32)}
    step, other = (zero_jax.make_zero_train_step(nn.Sequential([nn.Embed(256, 64), nn.Dense(256)]), stage=stage)
                   for stage in (3, 1))
    first = cached(step, batch)
    (file,) = tmp_path.iterdir()
    file.write_text("{}")
    assert first["stage"] == 3 and cached(step, batch) == {} and cached(other, batch)["stage"] == 1
    plain = scanned(target=None, width=64, hidden=64, tokens=64)  # may have options of XLA that are not in its text
    assert cached(plain.jitted, *plain.shapes)["devices"] == 8 and len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("limit, tolerance, value, outcome", [
    (2, 0.02, 2.05, "over"), (2, 0.02, 2.03, ""), (2, 0.1, 2.05, ""), (2, 0.02, 1.9, "below"), (2, 0.02, 1.97, ""),
    (1e-4, 0.02, 1.1e-4, "over"), (1e-4, 0.02, 0.9e-4, "below"), (0, 0.02, 1e-4, ""), (0, 0.02, 0.01, "over"),
    (1.00000, 0, 1.000004, ""),  # as the file rounds it
])
def test_the_tolerance_is_a_share(tmp_path, limit, tolerance, value, outcome):
    budget = Budget(tmp_path / "budgets.toml", "a.py:b", {}, {"memory_gib": limit}, tolerance)
    over, below = compared(budget, {"device_bytes": value * 2**30, "findings": []})
    assert (bool(over), bool(below)) == (outcome == "over", outcome == "below")


def test_update_keeps_what_else_stands_in_the_file(tmp_path, monkeypatch):
    path = tmp_path / "budgets.toml"
    path.write_text("# a\n['a.py:b']\ngflop = 7 # of last year\n# c\n[\"d.py:e\"]\n\n[\"f.py:g\"]\n")
    report = {name: 2 * unit for name, unit in LIMITS.values()} | {"exposed_seconds": None, "findings": []}
    monkeypatch.setattr(budgets, "audited", lambda budget, cache: report)
    lines = [budgets.update(each) for each in read_budgets(path)]
    all_limits = "sent_mib = 2\nmemory_gib = 2\nrecomputed_gflop = 2\ngflop = 2\n"
    assert path.read_text() == (f"# a\n['a.py:b']\ngflop = 2 # of last year\n# c\n\n[\"d.py:e\"]\n{all_limits}\n"
                                f"[\"f.py:g\"]\n{all_limits}")
    assert lines[0] == ["gflop = 2 (was 7)"] and len(lines[1]) == 4
    assert [compared(each, report) for each in read_budgets(path)] == [([], [])] * 3


@pytest.mark.parametrize("text, message", [
    (SECTION + "sent_mb = 3\n", "there is no key 'sent_mb': write target, args, params, tolerance, sent_mib"),
    (SECTION.replace("h100:8", "h10:8"), "unknown target 'h10:8'"),
    (SECTION + 'gflop = "3"\n', "gflop = '3' is no number from 0 on"),
    (SECTION + "args = 3\n", "args = 3 is no text: write it in quotes"),
    (SECTION.replace('"some_train.py:train_step"', "train"), "'train' names no step"),
    (SECTION + "args = \n", "is no TOML that can be read"),
    ("", "has no section"),
    (SECTION + 'args = "none"\n', "has no none: define the step's arguments there"),
    (SECTION.replace(":train_step", ":update"), "update is not jitted"),
    (SECTION.replace("some_train", "other"), "there is no file other.py"),
])
def test_bad_input_is_status_2_and_a_line(folder, capsys, text, message):
    (folder / "budgets.toml").write_text(text)
    assert command_line.main(["budgets", "check"]) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ") and error.count("\n") == 1


def test_no_file_and_no_compiler_are_lines(folder, capsys, monkeypatch):
    assert command_line.main(["budgets", "check", "--file", "none.toml"]) == 2
    assert "there is no none.toml: write one" in capsys.readouterr().err
    (folder / "shadow/jax_plugins").mkdir(parents=True)
    (folder / "shadow/jax_plugins/__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(folder / "shadow"), prepend=os.pathsep)
    assert command_line.main(["budgets", "check"]) == 2
    error = capsys.readouterr().err
    assert "no compiler for 'h100:8' is installed: pip install" in error and error.count("\n") == 1


CONFTEST = """
import sys
def pytest_sessionfinish():
    print("imported:", [name for name in ("jax", "zero_jax.auditing.budgets") if name in sys.modules])
"""


def pytest_in(folder, *args):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "pytest", "-p", "zero_jax.auditing.pytest_plugin", *args], cwd=folder,
        text=True, capture_output=True, env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}, timeout=300)
    return done.returncode, done.stdout + done.stderr


def test_the_pytest_plugin(folder):
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_other.py").write_text("def test_other(): pass\n")
    (folder / "sick.py").write_text(FILE.replace("donate_argnums=0", ""))
    (folder / "budgets.toml").write_text(SECTION + 'sent_mib = 9999\n["sick.py:train_step"]\ntarget = "h100:8"\n'
                                         "memory_gib = 0.01\n")
    status, printed = pytest_in(folder)
    assert status == 0 and "1 passed" in printed and "imported: []" in printed  # without the flag
    status, printed = pytest_in(folder, "--zero-jax-budgets")
    assert status == 1 and "1 failed, 2 passed" in printed and "imported: ['zero_jax.auditing.budgets']" in printed
    assert re.search(r"memory_gib: 0\.\d+, and its budget is 0\.01 \(tolerance 2 %\)", printed)
    assert "new: not_donated" in printed and "Traceback" not in printed
    assert re.search(r"budgets.toml::some_train.py:train_step: sent_mib: .* could be tightened", printed)
    assert len(list((folder / ".pytest_cache/d/zero_jax_budgets").iterdir())) == 2  # a report of each program
    (folder / "budgets.toml").write_text(SECTION + "wrong = 1\n")
    status, printed = pytest_in(folder, "--zero-jax-budgets")
    assert status == 4 and "there is no key 'wrong'" in printed


def test_the_workflow_runs_commands_that_exist():
    workflow = yaml.safe_load((ROOT / "docs/recipes/budgets_workflow.yml").read_text())
    runs = [step["run"] for step in workflow["jobs"]["budgets"]["steps"] if "run" in step]
    extras = re.findall(r"zero-jax\[(.*)\]", runs[0])[0].split(",")
    assert set(extras) <= set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    config = command_line._parse(runs[1].split()[1:])
    assert config.action == "check" and str(config.cache) == workflow["jobs"]["budgets"]["steps"][2]["with"]["path"]


@pytest.mark.slow
def test_the_page_shows_what_is_printed(capsys):
    if jax.__version__ != "0.10.2":
        pytest.skip("the page shows what jax 0.10.2 compiles")
    target_devices("h100:8")
    shown = blocks("text", (ROOT / "docs/guide/budgets.md").read_text())
    script.main([])
    printed = capsys.readouterr().out
    assert [is_printed(each, printed) for each in shown] == [True] * 3 + [False]  # the last has another JAX


def test_no_line_of_this_library_is_named():
    sources = [each["source"] for each in report("activations_moved")["sent_by_collective"].values()]
    assert not any("zero_jax/auditing" in source for source in sources), sources
    assert ("" in sources) == (jax.__version_info__ < (0, 12))  # where jax 0.12 names a line of the step
    assert any("audited_steps.py:" in source for source in sources)
