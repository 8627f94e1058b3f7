"""docs/notebooks/*.ipynb: the notebooks of the site, made by running their sources, docs/notebooks/*.py.

    python scripts/figures/notebooks.py [own_loop ...]

A source is a Python file in the "percent" format, which Jupyter's tools and editors know: `# %%` begins a cell of code,
`# %% [markdown]` one of text. It is what is written and reviewed; the .ipynb has what its cells printed and drew. All
cells of all notebooks run in this process, one notebook after another, each in a namespace of its own.
"""

import base64
import contextlib
import io
import os
import re
import sys
import time
import warnings
from pathlib import Path

import matplotlib
import nbformat

FOLDER = Path(__file__).parents[2] / "docs/notebooks"
TIMES = re.compile(r"\d[\d.,]* ?(?:ms|s|seconds)\b")


def cells_of(source: str) -> list[tuple[str, str]]:
    """(kind, text) of each cell of a source; kind is code or markdown."""
    cells = []
    for part in re.split(r"^# %%", source, flags=re.MULTILINE)[1:]:
        head, _, text = part.partition("\n")
        if "[markdown]" in head:
            cells.append(("markdown", re.sub(r"^# ?", "", text.strip(), flags=re.MULTILINE)))
        else:
            cells.append(("code", text.strip("\n")))
    return cells


def run(source: str, name: str) -> list[tuple[str, list[bytes]]]:
    """What each code cell prints, and the pictures that it draws, as PNG."""
    matplotlib.use("agg")
    from matplotlib import pyplot

    namespace, outputs = {"__name__": "__main__"}, []
    pyplot.close("all")
    for kind, text in cells_of(source):
        if kind == "markdown":
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*non-interactive.*")  # plt.show(), which Jupyter needs not
            exec(compile(text, f"{name}, cell {len(outputs) + 1}", "exec"), namespace)
        pictures = []
        for number in pyplot.get_fignums():
            drawn = io.BytesIO()
            pyplot.figure(number).savefig(drawn, format="png", dpi=80, bbox_inches="tight", metadata={"Software": None})
            pictures.append(drawn.getvalue())
        pyplot.close("all")
        outputs.append((printed.getvalue(), pictures))
    return outputs


def notebook(source: str, outputs: list[tuple[str, list[bytes]]]) -> nbformat.NotebookNode:
    """The notebook of a source and what its code cells left; nothing in it changes from run to run but times."""
    made, left = nbformat.v4.new_notebook(), iter(outputs)
    for number, (kind, text) in enumerate(cells_of(source)):
        cell = nbformat.v4.new_markdown_cell(text) if kind == "markdown" else nbformat.v4.new_code_cell(text)
        cell["id"] = f"cell-{number}"
        if kind == "code":
            printed, pictures = next(left)
            if printed:
                cell["outputs"].append(nbformat.v4.new_output("stream", name="stdout", text=printed))
            for picture in pictures:
                data = {"image/png": base64.b64encode(picture).decode(), "text/plain": "<figure>"}
                cell["outputs"].append(nbformat.v4.new_output("display_data", data))
        made["cells"].append(cell)
    made["metadata"] = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
                        "language_info": {"name": "python"}}
    return made


def without_times(text: str) -> str:
    """`text` with every time in it, as 3.1 ms, as the same word."""
    return TIMES.sub("<time>", text)


def main() -> None:
    for name, value in (("JAX_PLATFORMS", "cpu"), ("TPU_SKIP_MDS_QUERY", "1"), ("TF_CPP_MIN_LOG_LEVEL", "3"),
                        ("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")):  # no accelerator is used, nor searched for
        os.environ.setdefault(name, value)
    for path in sorted(FOLDER.glob("*.py")):
        if sys.argv[1:] and path.stem not in sys.argv[1:]:
            continue
        began, source = time.process_time(), path.read_text()
        nbformat.write(notebook(source, run(source, path.stem)), path.with_suffix(".ipynb"))
        print(f"{path.stem}: {time.process_time() - began:.0f} CPU seconds")


if __name__ == "__main__":
    main()
