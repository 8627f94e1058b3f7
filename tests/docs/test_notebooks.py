"""The notebooks of the site: what is committed is what their sources print and draw, and is small enough to review."""

import importlib.util
import re

import nbformat
import pytest
from support.pages import ROOT, links

from zero_jax.xla import devices

FOLDER = ROOT / "docs/notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
MACHINE_PATH = re.compile(rf"{re.escape(str(ROOT))}|(?<![\w.])/(?:home|mnt|opt|root|tmp|usr|var|Users)/[\w.-]+")
NEEDS = {"plan_128_gpus": "h100:8", "why_slow": "h100:8", "tpu_slice": "v5p:2x2x1"}

_spec = importlib.util.spec_from_file_location("notebooks", ROOT / "scripts/figures/notebooks.py")
assert _spec is not None and _spec.loader is not None
notebooks = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(notebooks)


def committed(name):
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def outputs(cell):
    """What a code cell printed, without times, and how many pictures it has."""
    printed = "".join(output.text for output in cell.outputs if output.output_type == "stream")
    return notebooks.without_times(printed), sum(output.output_type == "display_data" for output in cell.outputs)


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_has_the_cells_of_its_source_and_no_noise(name):
    source, notebook = (FOLDER / f"{name}.py").read_text(), committed(name)
    assert [(cell.cell_type, cell.source) for cell in notebook.cells] == notebooks.cells_of(source)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count is None and not cell.metadata for cell in code)
    assert any(outputs(cell)[1] for cell in code), "no plot"
    assert (FOLDER / f"{name}.ipynb").stat().st_size < 150_000
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    assert [target for target in links(text) if not (FOLDER / target).exists()] == []
    printed = "".join(outputs(cell)[0] for cell in code)
    assert MACHINE_PATH.findall("\n".join([text, source, printed])) == []


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of matplotlib's and of a profiler's, which readers do not see either
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_prints_and_draws_what_is_committed(name):
    if name in NEEDS and (extra := devices.missing_compiler(NEEDS[name])):
        pytest.skip(f"needs {extra}")
    ran = notebooks.run((FOLDER / f"{name}.py").read_text(), name)
    found = [(notebooks.without_times(printed), len(pictures)) for printed, pictures in ran]
    assert found == [outputs(cell) for cell in committed(name).cells if cell.cell_type == "code"]


def test_a_source_with_another_output_is_found():
    source = "# %% [markdown]\n# # Title\n#\n# Text.\n\n# %%\nx = 2\nprint(x, '3.1 ms')\n\n# %%\nx += 1\nprint(x)\n"
    ran = notebooks.run(source, "source")
    assert ran == [("2 3.1 ms\n", []), ("3\n", [])]
    made = notebooks.notebook(source, ran)
    assert [cell.cell_type for cell in made.cells] == ["markdown", "code", "code"]
    assert made.cells[0].source == "# Title\n\nText."
    assert outputs(made.cells[1]) == ("2 <time>\n", 0)
    other = notebooks.run(source.replace("x += 1", "x += 2"), "source")
    assert outputs(notebooks.notebook(source, other).cells[2]) != outputs(made.cells[2])
    with pytest.raises(ZeroDivisionError):
        notebooks.run("# %%\n1 / 0\n", "source")


def test_a_path_of_a_machine_is_found():
    assert MACHINE_PATH.findall(f"see (/home/me/run/log.txt) and {ROOT}/docs") == ["/home/me", str(ROOT)]
    assert MACHINE_PATH.findall("tokens/s, https://example.org/usr/b, ../opt/x, while/body/jit, /while/body") == []
