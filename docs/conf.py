"""The site: `make docs` builds it into build/docs, and warnings are errors."""

import re
import sys
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the library as it stands in this checkout, and models/

project = "zero_jax"
author = "the zero_jax authors"
copyright = author
release = metadata.version("zero-jax")

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
exclude_patterns = ["_build", "images"]
nitpicky = False  # types of other libraries have no inventory here: builds need no network

html_theme = "sphinx_book_theme"
html_title = "zero_jax"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {
    "show_toc_level": 2, "home_page_in_toc": True, "show_navbar_depth": 1,
    "navbar_persistent": [],  # the sidebar has a search field
}

# Pages are Markdown; their blocks are run by tests/docs, not while the site is built.
nb_execution_mode = "off"
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 4
suppress_warnings = ["myst.xref_missing"]  # links of README.md and CONTRIBUTING.md that lead out of docs/

add_module_names = False  # users import these names from zero_jax itself
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "mixed"
napoleon_google_docstring = True
napoleon_numpy_docstring = False

copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True


def _to_rest(app, what, name, obj, options, lines):
    """Docstrings here are plain text: `code` in single backticks, and "name: meaning" lines for fields.

    Sphinx reads reStructuredText: code gets two backticks (with a separator before a plural's s), and a paragraph of
    fields becomes a list.
    """
    text = re.sub(r"(?<![`\w])`([^`\n]+)`(?!`)", r"``\1``\\ ", "\n".join(lines))
    text = re.sub(r"``\\ (?=[\s.,;:)]|$)", "``", text, flags=re.MULTILINE)
    lines[:] = _fields_as_list(text.split("\n"))


def _fields_as_list(lines):
    """`lines` with every paragraph of the form "name: text", "name, name: text", at the margin, as a list."""
    found, inside = [], False
    for line in lines:
        field = re.match(r"([a-z_]+(?:, [a-z_]+)*): (.*)", line)
        starts = field and (inside or not found or not found[-1].strip())
        if starts:
            inside = True
            found.append(f"* **{field[1]}**: {field[2]}")
        elif inside and line.strip():
            found.append(f"  {line.strip()}")
        else:
            inside = False
            found.append(line)
    return found


def setup(app):
    """Docstrings are translated before napoleon (priority 500) reads their sections."""
    app.connect("autodoc-process-docstring", _to_rest, priority=400)
