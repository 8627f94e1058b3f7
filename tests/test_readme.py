"""The README: its Python runs, its output is what it says, its commands and files exist, its table is the code's."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from zero_jax import hardware
from zero_jax.stages import STAGES

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()


def only(kind: str, text: str) -> str:
    """`text` with every line blank that is not inside a fenced block of `kind`, so that line numbers stay."""
    kept, inside = [], None
    for line in text.split("\n"):
        fence = re.match("```(.*)", line)
        if fence:
            inside = fence[1] if inside is None else None
        kept.append(line if inside == kind and not fence else "")
    return "\n".join(kept)


def run(source: str) -> str:
    """What `source` prints in a process of its own, as a stranger would start it; warnings are errors."""
    env = {name: value for name, value in os.environ.items() if name not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", "import sys; exec(compile(sys.stdin.read(), 'README.md', 'exec'))"],
        input=source, text=True, capture_output=True, env=env, cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_blocks_run_and_print_what_is_shown():
    if extra := hardware.missing_compiler("h100:8"):
        pytest.skip(f"needs {extra}")
    printed = run(only("python", TEXT)).splitlines()
    shown = [line for line in only("text", TEXT).splitlines() if line]
    assert shown
    assert [line for line in shown if line not in printed] == []


def test_a_block_that_fails_is_found():
    with pytest.raises(AssertionError, match='README.md", line 3'):
        run(only("python", "text\n```python\nraise RuntimeError\n```\n"))
    assert only("python", "```console\n$ make test\n```\n```python\na = 1\n```\n").split() == ["a", "=", "1"]


def stage_rows(text: str) -> list[tuple[int, str, str, int]]:
    """(stage, state in fp32, state in bf16, wire) as the table of stages prints them."""
    found = re.findall(r"^\| (\d) \| .*? \| (.*?) \| (.*?) \| (\d) psi \|$", text, re.MULTILINE)
    return [(int(stage), fp32, bf16, int(wire)) for stage, fp32, bf16, wire in found]


@pytest.mark.parametrize("num_shards", [1, 8, 64])
def test_the_stage_table_is_that_of_the_code(num_shards):
    rows = stage_rows(TEXT)
    assert [(number, wire) for number, _, _, wire in rows] == [(stage.number, stage.wire) for stage in STAGES]
    for stage, (_, *columns, _) in zip(STAGES, rows, strict=True):
        for formula, low_precision in zip(columns, (False, True), strict=True):
            fixed, _, divided = formula.replace(" ", "").rpartition("+") if "/N" in formula else (formula, "", "0/N")
            bytes_each = float(fixed or 0) + float(divided.removesuffix("/N")) / num_shards
            assert bytes_each == stage.state_bytes(1, num_shards, low_precision=low_precision), (stage, formula)


def commands(text: str) -> list[str]:
    return [line.removeprefix("$ ") for line in only("console", text).splitlines() if line]


def missing(text: str) -> list[str]:
    """Make targets, modules, scripts, extras and files that `text` names and that do not exist."""
    makefile = (ROOT / "Makefile").read_text()
    project = (ROOT / "pyproject.toml").read_text()
    found = []
    for target in re.findall(r"\bmake ([a-z-]+)", "\n".join([*commands(text), *re.findall("`[^`]*`", text)])):
        if not re.search(rf"^{target}:", makefile, re.MULTILINE):
            found.append(f"make {target}")
    for module in re.findall(r"python -m (\w+)", text):
        if module != "pytest" and not (ROOT / module / "__main__.py").exists():
            found.append(f"python -m {module}")
    for extra in re.findall(r"\.\[([\w-]+)\]", text):
        if not re.search(rf"^{extra} = \[", project, re.MULTILINE):
            found.append(f"extra {extra}")
    for name in re.findall(r"`([\w/]+\.py)`", text):
        if not any((ROOT / folder / name).exists() for folder in (".", "zero_jax")):
            found.append(name)
    return sorted(set(found))


def test_commands_and_files_exist():
    assert commands(TEXT)
    assert missing(TEXT) == []


@pytest.mark.parametrize(
    "text",
    ["```console\n$ make coffee\n```", "`make coffee`", "`python -m zero_torch`", "`.[coffee]`", "`coffee.py`"],
)
def test_a_name_that_does_not_exist_is_found(text):
    assert len(missing(text)) == 1


def test_public_names_and_options_are_those_of_the_library():
    """Every `zero_jax.name` in prose and code is public."""
    import zero_jax

    named = set(re.findall(r"\bzero_jax\.(\w+)", re.sub(r"zero_jax/\S+", "", TEXT))) - {"jax"}
    assert named <= {*zero_jax.__all__}, named
    assert re.search("zero_jax.make_zero_train_step", TEXT)
