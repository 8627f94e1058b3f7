"""The pages of docs/: their Python runs on eight simulated devices, prints what is shown, and names what exists.

`make docs` builds the site; the test that does so is slow. CONTRIBUTING.md and CITATION.cff are checked here, too.
"""

import ast
import contextlib
import io
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.pages import (
    NOT_RUN,
    ROOT,
    before_devices,
    blocks,
    commands,
    is_printed,
    links,
    lost_anchors,
    missing,
    only,
    run,
)

from zero_jax.xla import devices

PAGES = sorted((ROOT / "docs").rglob("*.md"))
RUN = [page for page in PAGES if only("python", page.read_text()).strip()]
LONG = ("fine_tuning.md", "from_functions.md", "from_train_state.md", "models.md", "models_and_losses.md",
        "from_maxtext.md", "diloco.md", "parallelism.md", "audit.md", "checkpoints.md", "inspect_and_plan.md",
        "communication.md", "offload.md", "laptop.md")
"""Pages whose Python compiles several steps."""
PASTED = [page for page in RUN if page.parent.name == "start"]
"""Pages that a stranger pastes into a fresh Python."""


def title(page: Path) -> str:
    return str(page.relative_to(ROOT))


def printed_by(text: str, name: str) -> str:
    """What the Python blocks of a page print, one after another in one namespace."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(only("python", text), name, "exec"), {"__name__": "__main__"})
    return printed.getvalue()


@pytest.mark.parametrize("page", [pytest.param(page, marks=[pytest.mark.slow] * (page.name in LONG)) for page in RUN],
                         ids=title)
def test_blocks_run_and_print_what_is_shown(page):
    text = page.read_text()
    if "h100:8" in only("python", text) and (extra := devices.missing_compiler("h100:8")):
        pytest.skip(f"needs {extra}")
    source = only("python", text)
    printed = run(source, title(page)) if page in PASTED else printed_by(text, title(page))
    for shown in blocks("text", text) if page.name != "architecture.md" else []:
        assert is_printed(shown, printed), printed


def test_devices_are_simulated_before_jax_starts():
    """Tests have eight devices already: a page that calls `simulate_devices` too late fails only where it is pasted."""
    late = {title(page): before for page in RUN if (before := before_devices(only("python", page.read_text())))}
    assert late == {}
    assert before_devices("import jax\nx = jax.numpy.ones(3)\nimport zero_jax\nzero_jax.simulate_devices(8)\n") == [
        "x = jax.numpy.ones(3)"]
    with pytest.raises(AssertionError, match="JAX has already started"):
        run("import jax, zero_jax\nx = jax.numpy.ones(3)\nzero_jax.simulate_devices(8)\n", "page")


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(NOT_RUN, page.read_text())], ids=title)
def test_blocks_that_are_not_run_are_python(page):
    for block in blocks(NOT_RUN, page.read_text()):
        compile(block, title(page), "exec")


def test_a_block_that_fails_is_found():
    with pytest.raises(ZeroDivisionError):
        printed_by("```python\n1 / 0\n```\n", "page")
    assert printed_by("```python\nprint(1)\n```\n```python norun\nprint(2)\n```\n", "page") == "1\n"
    with pytest.raises(SyntaxError):
        compile(blocks(NOT_RUN, "```python norun\n1 +\n```\n")[0], "page", "exec")


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=title)
def test_commands_files_and_links_exist(page):
    text = page.read_text()
    assert missing(text) == []
    assert [target for target in links(text) if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", [*PAGES, *sorted(ROOT.glob("[A-Z]*.md"))], ids=title)
def test_links_lead_to_headings_that_exist(page):
    assert lost_anchors(page, page.read_text()) == []


def test_a_link_to_no_heading_is_found():
    text = "# A `title`, of sorts\n\n[here](#a-title-of-sorts) [not](#a-title) [nor](docs/results.md#on-two-gpus)\n"
    assert lost_anchors(ROOT / "README.md", text) == ["#a-title", "docs/results.md#on-two-gpus"]


OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+")


def test_options_are_those_of_the_command_line():
    """Every option that a command on a page has is a field of a config of zero-jax, or in the text of a script."""
    for page in [*PAGES, ROOT / "README.md"]:
        for command in commands(page.read_text()):
            if wrong := wrong_options(command):
                pytest.fail(f"{title(page)}: {command}: no option {wrong}")
    assert wrong_options("zero-jax train --stages 2") == ["--stages"]
    assert wrong_options("python scripts/bench/gpu.py --modles 124m") == ["--modles"]


def wrong_options(command: str) -> list[str]:
    from zero_jax.cli.planning.plan_config import PlanConfig
    from zero_jax.cli.tokenize_command import TokenizeConfig
    from zero_jax.cli.train_config import InspectConfig, TrainConfig
    from zero_jax.cli.weights.file_configs import ChatConfig, EvaluateConfig, ExportConfig, GenerateConfig
    from zero_jax.distributed.launch import LaunchConfig

    configs = {"train": TrainConfig, "inspect": InspectConfig, "plan": PlanConfig, "export": ExportConfig,
               "tokenize": TokenizeConfig, "launch": LaunchConfig, "generate": GenerateConfig, "chat": ChatConfig,
               "evaluate": EvaluateConfig}
    wrong = []
    for part in re.findall(rf"(?:zero-jax|--) ({'|'.join(configs)})\b(.*?)(?= -- |\"|$)", command):
        fields = {f"--{name.replace('_', '-')}" for name in configs[part[0]].__dataclass_fields__}
        fields |= {"--help", "--help-all"} | {"--config"} if part[0] in ("train", "inspect") else set()
        wrong += [option for option in OPTION.findall(part[1]) if option not in fields]
    for script, rest in re.findall(r"python (scripts/[\w/]+\.py)(.*)", command):
        source = (ROOT / script).read_text()
        wrong += [option for option in OPTION.findall(rest) if f'"{option}"' not in source]
    return wrong


def test_the_table_of_layers_is_that_of_the_imports():
    rows = re.findall(r"^\| (-?\d+) \| (.*?) \|", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE)
    layers = {name: int(layer) for layer, names in rows for name in re.findall(r"`(\w+)`", names)}
    assigned = next(node for node in ast.parse((ROOT / "tests" / "test_imports.py").read_text()).body
                    if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "LAYERS")
    assert layers == {name: layer for name, layer in ast.literal_eval(ast.unparse(assigned.value)).items()
                      if not name.startswith("__")}


def test_every_public_name_is_in_the_reference():
    import zero_jax

    text = (ROOT / "docs" / "api.md").read_text()
    documented = {name.rpartition(".")[2] for name in re.findall(r"auto(?:function|class|exception):: ([\w.]+)", text)}
    assert documented - {"Plan"} == {*zero_jax.__all__}


def test_pictures_are_small_and_have_a_script():
    pictures = [path for path in (ROOT / "docs" / "images").iterdir()]
    scripts = "\n".join(path.read_text() for path in (ROOT / "scripts").rglob("*.py"))
    assert pictures
    for path in pictures:
        assert path.stat().st_size < 150_000, path
        assert f"docs/images/{path.name}" in scripts, path


def versions() -> set[str]:
    """The version that each file says: the one of pyproject.toml, which the package has, and those that repeat it."""
    found = [re.search(pattern, (ROOT / name).read_text(), re.MULTILINE) for name, pattern in (
        ("pyproject.toml", r'^version = "(.*)"$'), ("CITATION.cff", r"^version: (.*)$"),
        ("CHANGELOG.md", r"^## (.*)$"))]
    return {match[1] if match else "none" for match in found}


def test_all_files_have_one_version(monkeypatch, tmp_path):
    assert len(versions()) == 1 and "none" not in versions()
    assert "arXiv:1910.02054" in (ROOT / "CITATION.cff").read_text()
    for name in ("pyproject.toml", "CITATION.cff", "CHANGELOG.md"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    (tmp_path / "CITATION.cff").write_text("version: 0.0.1\n")
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    assert len(versions()) == 2


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "docs", str(tmp_path / "site")],
        cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    for page in PAGES:
        assert (tmp_path / "site" / page.relative_to(ROOT / "docs")).with_suffix(".html").exists()
