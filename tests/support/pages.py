"""Markdown pages as tests: their fenced blocks, what a block prints, and the commands and files that they name."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

NOT_RUN = "python norun"
"""The fence of a Python block that needs an accelerator or a cluster: it is compiled, and not run."""


def only(kind: str, text: str) -> str:
    """`text` with every line blank that is not inside a fenced block of `kind`, so that line numbers stay."""
    lines, inside = [], None
    for line in text.split("\n"):
        fence = re.match("```(.*)", line)
        if fence:
            inside = fence[1].strip() if inside is None else None
        lines.append(line if inside == kind and not fence else "")
    return "\n".join(lines)


def blocks(kind: str, text: str) -> list[str]:
    """The fenced blocks of `kind` in `text`, in order, without their fences."""
    return [block.strip("\n") for block in re.findall(rf"^```{kind}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)]


def run(source: str, name: str) -> str:
    """What `source` prints in a process of its own, as a stranger would start it; warnings are errors."""
    env = {key: value for key, value in os.environ.items() if key not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"import sys; exec(compile(sys.stdin.read(), {name!r}, 'exec'))"],
        input=source, text=True, capture_output=True, env=env, cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def before_devices(source: str) -> list[str]:
    """The statements other than imports and docstrings that stand before the call of `simulate_devices`, if any."""
    body = ast.parse(source).body
    calls = [index for index, node in enumerate(body) if "simulate_devices(" in ast.unparse(node)]
    return [ast.unparse(node) for node in body[:calls[0] if calls else 0]
            if not isinstance(node, (ast.Import, ast.ImportFrom))]


def is_printed(shown: str, printed: str) -> bool:
    """Whether the lines of `shown` follow each other in `printed`; a line `...` stands for any lines."""
    pattern = r"\n".join("(?:.*\n)*?.*" if line == "..." else re.escape(line) for line in shown.splitlines())
    return re.search(rf"^{pattern}$", printed, re.MULTILINE) is not None


def commands(text: str) -> list[str]:
    """Every command of the `console` blocks of `text`."""
    joined = only("console", text).replace("\\\n", " ")
    return [line.removeprefix("$ ") for line in joined.splitlines() if line.startswith("$ ")]


def missing(text: str) -> list[str]:
    """Make targets, modules, console commands, extras and files that `text` names and that do not exist."""
    makefile = (ROOT / "Makefile").read_text()
    project = (ROOT / "pyproject.toml").read_text()
    absent = []
    for target in re.findall(r"\bmake ([a-z][a-z-]*)", "\n".join([*commands(text), *re.findall("`[^`]*`", text)])):
        if not re.search(rf"^{target}:", makefile, re.MULTILINE):
            absent.append(f"make {target}")
    for module in re.findall(r"python -m (\w+)", text):
        if module not in ("pytest", "pip", "venv") and not (ROOT / module / "__main__.py").exists():
            absent.append(f"python -m {module}")
    for name in re.findall(r"^(zero-jax)\b", "\n".join(commands(text)), re.MULTILINE):
        if not re.search(rf"^{name} = ", project, re.MULTILINE):
            absent.append(f"console script {name}")
    for extra in re.findall(r"\.\[([\w-]+)\]", text):
        if not re.search(rf"^{extra} = \[", project, re.MULTILINE):
            absent.append(f"extra {extra}")
    packages = [ROOT, ROOT / "zero_jax", *(path for path in (ROOT / "zero_jax").iterdir() if path.is_dir())]
    for name in [*re.findall(r"`([\w/]+\.py)`", text), *re.findall(r"python ([\w/]+\.py)", text)]:
        if not any((folder / name).exists() for folder in packages):
            absent.append(name)
    return sorted(set(absent))


def links(text: str) -> list[str]:
    """Targets of the Markdown links and images of `text` that are files, without anchors."""
    return [target for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) if "://" not in target]


def anchors(text: str) -> set[str]:
    """What `#...` may name in a page: its headings, as Markdown renderers write them."""
    found = set()
    for heading in re.findall(r"^#{1,4} (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL),
                              re.MULTILINE):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        found.add(re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-"))
    return found


def lost_anchors(page: Path, text: str) -> list[str]:
    """The links of `text`, as it would stand at `page`, to headings that their page does not have."""
    lost = []
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", text):
        other = page.parent / target if target else page
        if "://" not in target and other.suffix == ".md" and other.exists():
            if anchor not in anchors(other.read_text() if target else text):
                lost.append(f"{target}#{anchor}")
    return lost
