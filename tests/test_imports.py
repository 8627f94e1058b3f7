"""The layers: which package may import which, read from the sources; nothing is imported here."""

import ast
import functools
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAX_LINES = 600

LAYERS: dict[str, int] = {
    "errors": -2,
    "arguments": -1, "files": -1, "versions": -1,
    "combinations": 0, "typing": 0, "tree": 0, "stages": 0, "jaxpr": 0,
    "precision": 1, "state": 1, "xla": 1, "data": 1, "disk": 1,
    "sharding": 2,
    "gather": 3,
    "layout": 4, "distributed": 4,
    "offload": 5,
    "transforms": 6, "optim": 6,
    "views": 7, "frontends": 7, "contract": 7,
    "step": 8,
    "planning": 9, "checkpoint": 9, "interop": 9, "diloco": 9,
    "auditing": 10,
    "__init__": 11,
    "cli": 12,
    "__main__": 13,
}
"""By the first name after `zero_jax`, a package or a module at the top: it imports from lower layers and from itself.

Inside of a package modules import each other without a circle.
"""

ONLY: dict[str, set[str]] = {
    "flax": {"frontends"},
    "orbax": {"checkpoint"}, "tensorstore": {"checkpoint"}, "etils": {"checkpoint"},
    "rich": {"cli"},
    "jax.extend": {"jaxpr"},
    "grain": {"data"}, "tokenizers": {"data"}, "sentencepiece": {"data"}, "pyarrow": {"data"}, "sklearn": {"data"},
    "jinja2": {"data"}, "xxhash": {"files"},
}
"""The packages that alone may import a dependency."""


@functools.cache
def nodes(source: str) -> list[ast.AST]:
    """Everything in the syntax tree of `source`."""
    return list(ast.walk(ast.parse(source)))


def imported(source: str) -> Iterator[str]:
    """Every dotted name that `source` imports, at any depth; `from a import b` gives a.b."""
    for node in nodes(source):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                yield "relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@functools.cache
def attributes(source: str) -> list[str]:
    """Every dotted expression in `source`: jax._src.core and its like need no import."""
    def dotted_name(node: ast.expr) -> str:
        return f"{dotted_name(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else (
            node.id if isinstance(node, ast.Name) else "()")

    return [dotted_name(node) for node in nodes(source) if isinstance(node, ast.Attribute)]


def layer_of(name: str) -> str | None:
    """The entry of LAYERS that holds the dotted `name`; `__init__` for the package itself, None for others' names."""
    package, *rest = name.split(".")
    if package != "zero_jax":
        return None
    return rest[0] if rest and rest[0] in LAYERS else "__init__"


def violations(module: str, source: str) -> list[str]:
    """What breaks a rule in `source`, the text of the dotted `module` of zero_jax, as step.guard."""
    package = module.split(".")[0]
    if package not in LAYERS:
        return [f"zero_jax/{package} has no layer: place it in LAYERS, tests/test_imports.py"]
    broken = []
    for name in imported(source):
        layer = layer_of(name)
        if layer is not None and layer != package and LAYERS[layer] >= LAYERS[package]:
            broken.append(f"{module} (layer {LAYERS[package]}) imports {name} (layer {LAYERS[layer]})")
        broken += only(module, name)
        if name.split(".")[0] == "models" or name == "relative import":
            broken.append(f"{module}: {name}")
    lines = source.count("\n")
    broken += private(module, source) + opened_equations(module, source) + plain_value_errors(module, source)
    return broken + ([f"{module}: {lines} lines"] if lines > MAX_LINES else [])


def only(module: str, name: str) -> list[str]:
    """What `module` may not use of the dotted `name`, by `ONLY`."""
    return [f"{module} imports {name}: only {sorted(allowed)} may" for dependency, allowed in ONLY.items()
            if module.split(".")[0] not in allowed and (name == dependency or name.startswith(dependency + "."))]


def opened_equations(module: str, source: str) -> list[str]:
    """Where `source` looks into equations, which `zero_jax.jaxpr` alone does, and `views`, which has a rule for each.

    Others may not write `.primitive`, `make_jaxpr`, `x.params[...]`, `x.params.get(...)` or `{**x.params}`, nor use
    `jax.extend` as an attribute. They may read and replace what a jaxpr is made of: `eqns`, `invars`, `outvars`,
    `constvars`, `consts` and `aval`.
    """
    if module.split(".")[0] in ("jaxpr", "views"):
        return []
    def opened(node: ast.AST) -> bool:
        if isinstance(node, ast.Attribute) and (node.attr in ("primitive", "make_jaxpr") or is_params(node.value)):
            return True
        return isinstance(node, ast.Subscript) and is_params(node.value) or (
            isinstance(node, ast.Dict) and any(key is None and is_params(value)
                                               for key, value in zip(node.keys, node.values, strict=True)))

    broken = [f"{module} opens an equation: {ast.unparse(node)}: zero_jax/jaxpr has functions for that"
              for node in nodes(source) if opened(node)]
    return broken + [message for name in attributes(source) if name.startswith("jax.extend")
                     for message in only(module, name)]


def plain_value_errors(module: str, source: str) -> list[str]:
    """Where `source` raises a ValueError that the command line cannot tell from one of JAX."""
    if module in ("xla.parser", "xla.shapes"):  # of what XLA wrote, and no user
        return []
    if module == "interop.program_loader":  # copied to where there is no zero_jax: see the test of its imports
        return []
    return [f"{module}, line {node.lineno}: raise UsageError, or another error that is not what a user gave"
            for node in nodes(source) if isinstance(node, ast.Raise)
            and isinstance(node.exc, ast.Call) and ast.unparse(node.exc.func) == "ValueError"]


def is_params(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "params"


def private(module: str, source: str) -> list[str]:
    """What `source` takes from inside JAX."""
    names = {*imported(source), *attributes(source)}
    return [f"{module} uses {name}" for name in sorted(names) if name.startswith("jax._src") or "._src." in name]


def model_violations(module: str, source: str) -> list[str]:
    """What breaks a rule in `source`, the text of models/`module`.py: a model knows nothing of sharding."""
    return [f"models/{module} imports {name}" for name in imported(source)
            if name.split(".")[0] == "zero_jax" or name.startswith("jax.sharding")] + private(module, source)


def circle(graph: dict[str, set[str]]) -> list[str]:
    """The modules of one circle of imports in `graph` (module to those that it imports); empty if there is none."""
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module):], module]
        if module not in done:
            for other in sorted(graph.get(module, ())):
                if found := visit(other, [*path, module]):
                    return found
            done.add(module)
        return []

    return next((found for module in sorted(graph) if (found := visit(module, []))), [])


def import_graph(texts: dict[str, str]) -> dict[str, set[str]]:
    """Which modules each of `texts`, by dotted name without `zero_jax`, imports."""
    def owners(source: str) -> Iterator[str]:
        for name in imported(source):
            if name.startswith("zero_jax."):
                parts = name.split(".")[1:]
                yield from (dotted for dotted in (".".join(parts), ".".join(parts[:-1])) if dotted in texts)

    return {module: set(owners(source)) - {module} for module, source in texts.items()}


def sources(folder: str) -> list[Path]:
    paths = sorted((ROOT / folder).glob("**/*.py"))
    assert paths
    return paths


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT / "zero_jax").with_suffix("").parts)


@pytest.mark.parametrize("path", sources("zero_jax"), ids=dotted)
def test_layers_of_zero_jax(path):
    assert violations(dotted(path), path.read_text()) == []


@pytest.mark.parametrize("path", sources("models"), ids=lambda path: path.stem)
def test_models_know_nothing_of_sharding(path):
    assert model_violations(path.stem, path.read_text()) == []


def test_no_circle():
    texts = {dotted(path): path.read_text() for path in sources("zero_jax")}
    assert circle(import_graph(texts)) == []


def test_a_circle_is_found():
    texts = {"step.a": "from zero_jax.step import b", "step.b": "from zero_jax.step.c import f",
             "step.c": "from zero_jax.step.a import g"}
    assert circle(import_graph(texts)) == ["step.a", "step.b", "step.c", "step.a"]


def test_the_table_names_what_there_is():
    assert sorted(LAYERS) == sorted({dotted(path).split(".")[0] for path in sources("zero_jax")})


def test_a_package_says_its_duty_and_exports_nothing():
    for path in (ROOT / "zero_jax").glob("*/__init__.py"):
        body = ast.parse(path.read_text()).body
        assert len(body) == 1 and ast.get_docstring(ast.parse(path.read_text())), path


@pytest.mark.parametrize(
    "module, source, violation",
    [
        ("tree", "raise ValueError('no')", "tree, line 1: raise UsageError"),
        ("tree", "from zero_jax.step.make import make_zero_train_step", "tree (layer 0) imports"),
        ("sharding.mesh", "from zero_jax.step import step", "imports zero_jax.step.step (layer 8)"),
        ("sharding.mesh", "import zero_jax.step.step as s", "imports zero_jax.step.step"),
        ("optim.presets", "from zero_jax.transforms import remat", "imports zero_jax.transforms.remat (layer 6)"),
        ("tree", "import zero_jax", f"imports zero_jax (layer {LAYERS['__init__']})"),
        ("step.step", "from zero_jax import make_mesh", f"(layer {LAYERS['__init__']})"),
        ("tree", "def f():\n    from zero_jax.step import step\n", "imports zero_jax.step.step"),
        ("step.step", "from . import layout", "relative import"),
        ("step.step", "import flax.linen as nn", "only ['frontends'] may"),
        ("step.step", "from flax import nnx", "only ['frontends'] may"),
        ("cli.training.train", "import orbax.checkpoint", "only ['checkpoint'] may"),
        ("planning.plan", "from rich.table import Table", "only ['cli'] may"),
        ("step.step", "from models import gpt2", "models.gpt2"),
        ("step.step", "from jax._src import core", "uses jax._src.core"),
        ("step.step", "import jax._src.core", "uses jax._src.core"),
        ("step.step", "import jax\njax._src.core.Jaxpr", "uses jax._src"),
        ("transforms.remat", "from jax.extend import core", "only ['jaxpr'] may"),
        ("transforms.remat", "from jax.extend.core.primitives import scan_p", "only ['jaxpr'] may"),
        ("transforms.remat", "import jax\njax.extend.core.Jaxpr", "only ['jaxpr'] may"),
        ("transforms.remat", "length = eqn.params['length']", "opens an equation: eqn.params['length']"),
        ("transforms.remat", "length = eqn.params.get('length')", "opens an equation: eqn.params.get"),
        ("transforms.remat", "eqn.replace(params={**eqn.params, 'length': 2})", "opens an equation: {**eqn.params"),
        ("planning.flops", "eqn.primitive.name == 'scan'", "opens an equation: eqn.primitive"),
        ("planning.flops", "jax.make_jaxpr(fun)(x).jaxpr.eqns", "opens an equation: jax.make_jaxpr"),
        ("step.step", "x = 1\n" * (MAX_LINES + 1), f"step.step: {MAX_LINES + 1} lines"),
        ("utils.misc", "", "has no layer"),
    ],
)
def test_a_broken_rule_is_found(module, source, violation):
    assert any(violation in found for found in violations(module, source)), violations(module, source)


@pytest.mark.parametrize(
    "source", ["import zero_jax", "from zero_jax.sharding.mesh import make_mesh", "from jax.sharding import Mesh"])
def test_a_model_that_knows_of_sharding_is_found(source):
    assert model_violations("gpt2", source)


def test_what_is_allowed_is_not_refused():
    assert violations("frontends.linen", "import flax.linen as nn\nfrom zero_jax.frontends import nnx\n"
                                         "import zero_jax.tree\n") == []
    assert violations("jaxpr.primitives", "from jax.extend import core\neqn.params['length']\n") == []
    assert violations("transforms.remat", "[eqn.invars for eqn in jaxpr.eqns]\nstate.params\n") == []
    assert model_violations("gpt2", "import flax.linen as nn\nimport jax\nfrom models.gpt2 import Config\n") == []


def test_the_loader_of_programs_needs_only_jax():
    """A copy of it is in every folder that `export --format programs` writes."""
    source = (ROOT / "zero_jax/interop/program_loader.py").read_text()
    packages = {name.split(".")[0] for name in imported(source)}
    assert "jax" in packages and packages <= {*sys.stdlib_module_names, "jax", "numpy"}
