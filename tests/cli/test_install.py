"""What is installed: a wheel leaves the name `models` to the user, and short names find our models everywhere."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from scripts.reliability.installed_wheel import PROGRAM, wrong_tag

ROOT = Path(__file__).parents[2]
OWN_MODEL = "PRESETS = {'small': None}\nbuild = print\n"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Our wheel, built from this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index",
                    "-w", str(folder), str(ROOT)], check=True, timeout=120)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The folder that the wheel was installed into."""
    folder = tmp_path_factory.mktemp("site")
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(folder),
                    str(wheel)], check=True, timeout=120)
    return folder


@pytest.fixture
def project(tmp_path) -> Path:
    """A user's project with a package `models` of its own, which has a gpt2 too, and a module beside it."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models/__init__.py").write_text("")
    (tmp_path / "models/gpt2.py").write_text(OWN_MODEL)
    (tmp_path / "mymodels.py").write_text(OWN_MODEL)
    return tmp_path


def python(*args: str, cwd: Path, path: Path) -> subprocess.CompletedProcess:
    """Python in `cwd` with the installation at `path`: without site, whose .pth files name editable checkouts."""
    packages = sysconfig.get_paths()["purelib"]
    return subprocess.run([sys.executable, "-S", "-W", "error", *args], cwd=cwd, text=True, capture_output=True,
                          timeout=120, env={**os.environ, "PYTHONPATH": f"{path}{os.pathsep}{packages}"})


def found(*names: str, cwd: Path, path: Path) -> list[str]:
    """For each --model: its name, the module of its `build`, and whose `models` Python has then; or what is raised."""
    program = ("import sys\nfrom zero_jax.cli.model_lookup import find_model\n"
               "for name in sys.argv[1:]:\n"
               "    try:\n        choice = find_model(name)\n"
               "        print(choice.name, choice.build.__module__, sys.modules.get('models'))\n"
               "    except ValueError as error:\n        print(error)\n")
    done = python("-c", program, *names, cwd=cwd, path=path)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_wheel_takes_one_name(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if "dist-info" not in name} == {"zero_jax"}
    assert {Path(name).name for name in names if name.startswith("zero_jax/models/")} == {
        path.name for path in (ROOT / "models").rglob("*.py")}
    (entry_points,) = (name for name in names if name.endswith("entry_points.txt"))
    text = zipfile.ZipFile(wheel).read(entry_points).decode()
    assert "zero-jax = zero_jax.cli.main:main" in text
    assert "[pytest11]\nzero_jax = zero_jax.auditing.pytest_plugin" in text


def test_pytest_finds_the_plugin_of_the_wheel(installed, project):
    done = python("-m", "pytest", "--help", cwd=project, path=installed)
    assert done.returncode == 0 and "--zero-jax-budgets" in done.stdout, done.stderr
    assert "--zero-jax-budgets" not in python("-m", "pytest", "--help", "-p", "no:zero_jax", cwd=project,
                                              path=installed).stdout


@pytest.mark.parametrize("where", ["wheel", "checkout"])
def test_ours_and_theirs_are_found(where, project, request):
    path = request.getfixturevalue("installed") if where == "wheel" else ROOT
    ours, nnx, theirs, other, missing = found(
        "gpt2:tiny", "gpt2_nnx:tiny", "models.gpt2:small", "mymodels:small", "models.gpt2:tiny", cwd=project, path=path)
    assert ours == "gpt2:tiny zero_jax.models.gpt2 None"
    assert nnx == "gpt2_nnx:tiny zero_jax.models.gpt2_nnx None"
    assert theirs == f"models.gpt2:small builtins <module 'models' from {str(project / 'models/__init__.py')!r}>"
    assert other.startswith("mymodels:small builtins ")
    assert missing == "model='models.gpt2:tiny': models.gpt2 has no preset 'tiny'. There are: small."


def test_the_command_line_of_the_wheel_runs_beside_their_models(installed, project):
    for name, message in (("gpt2:byte", "gpt2 has no preset 'byte'. Did you mean 'bytes'"),
                          ("models.gpt2:smal", "models.gpt2 has no preset 'smal'. Did you mean 'small'")):
        done = python("-m", "zero_jax", "train", "--model", name, cwd=project, path=installed)
        assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_the_wheel_trains_where_no_source_is(installed, project):
    done = python("-c", PROGRAM, str(installed), cwd=project, path=installed)
    assert done.returncode == 0 and "loss" in done.stdout, done.stderr
    # Negative control: with the checkout on the path it is not the wheel that trains.
    done = python("-c", PROGRAM, str(installed), cwd=project, path=ROOT)
    assert done.returncode == 1 and "is not what was installed" in done.stderr, done.stderr


def test_a_tag_that_is_of_another_version_is_refused(wheel):
    version = wheel.name.split("-")[1]
    assert "and its commit has the tag v9.9.9" in wrong_tag(wheel.name, ["v9.9.9", "nightly"])
    assert not any(wrong_tag(wheel.name, tags) for tags in ([], ["nightly"], [f"v{version}", "v9.9.9"]))
