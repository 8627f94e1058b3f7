"""What SECURITY.md promises of the package's own code, read from the sources."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "code", "codeop",
           "runpy", "ctypes", "urllib.request", "http.client", "requests", "ftplib", "smtplib", "xmlrpc"}
CALLS = {"eval", "exec", "compile", "__import__", "input", "breakpoint", "os.system", "os.popen", "os.execv",
         "os.execve", "os.spawnv", "torch.load", "jnp.load", "yaml.load", "subprocess.getoutput",
         "subprocess.getstatusoutput"}


def faults(source: str) -> list[str]:
    """What runs code out of data, starts a shell or opens a connection in `source`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if _banned(alias.name)]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [f"{node.module}.{alias.name}" for alias in node.names
                      if _banned(node.module) or _banned(f"{node.module}.{alias.name}")]
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in CALLS:
                found.append(f"{name}()")
            for keyword in node.keywords:
                if keyword.arg in ("shell", "allow_pickle") and not _is_false(keyword.value):
                    found.append(f"{name}({keyword.arg}=...)")
            if name.endswith(("np.load", "numpy.load")) and not any(
                    keyword.arg == "allow_pickle" and _is_false(keyword.value) for keyword in node.keywords):
                found.append(f"{name}() without allow_pickle=False")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in ("0.0.0.0", "::", "[::]"):
            found.append(f"{node.value!r}: every interface")
    return found


def _banned(name: str) -> bool:
    return any(name == module or name.startswith(module + ".") for module in MODULES)


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


@pytest.mark.parametrize("path", [path for folder in ("zero_jax", "models") for path in sorted(
    (ROOT / folder).glob("**/*.py"))], ids=lambda path: path.stem)
def test_nothing_runs_what_it_reads(path):
    assert faults(path.read_text()) == []


@pytest.mark.parametrize("source", [
    "import pickle", "from pickle import loads", "import pickle as p", "eval(x)", "exec(x)", "__import__('os')",
    "torch.load(f)", "np.load(f)", "np.load(f, allow_pickle=True)", "np.load(f, allow_pickle=flag)", "os.system(x)",
    "subprocess.run(x, shell=True)", "subprocess.run(x, shell=flag)", "import urllib.request", "bind(('0.0.0.0', 1))",
    "def f():\n    from marshal import loads", "breakpoint()"])
def test_what_is_broken_is_found(source):
    assert faults(source)


@pytest.mark.parametrize("source", [
    "np.load(f, allow_pickle=False)",
    "subprocess.Popen([x])", "re.compile(x)", "model.eval()", "jnp.exec", "json.load(f)",
    "subprocess.run(x, shell=False)", "lowered.compile()"])
def test_what_is_allowed_is_not_refused(source):
    assert faults(source) == []
