"""`zero-jax audit FILE.py:NAME`: what a file defines, in words and as JSON, with its exit status."""

import json
import textwrap

import pytest

from zero_jax.cli import main as command_line
from zero_jax.cli.audit_command import FOUND

FILE = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

mesh = Mesh(np.array(jax.devices()), ("data",))

def loss(params, batch):
    return ((batch @ params["w"]) ** 2).mean()

def update(params, batch):
    grads = jax.grad(loss)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

train_step = jax.jit(update, donate_argnums=0)
sick_step = jax.jit(update)

def example_args():
    def shape(dims):
        return jax.ShapeDtypeStruct(dims, jnp.float32, sharding=NamedSharding(mesh, P("data")))
    return {"w": shape((512, 512))}, shape((4096, 512))
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "some_train.py"
    path.write_text(textwrap.dedent(FILE))
    return path


def test_a_step_of_a_file(file, capsys, tmp_path):
    assert command_line.main(["audit", "--step", f"{file}:train_step"]) == 0
    out = capsys.readouterr().out
    assert "nothing found" in out and "stage 3 here" not in out
    command_line.main(["audit", f"{file}:train_step", "--loss", "loss"])
    assert "the same at stage 3 here: sends" in capsys.readouterr().out
    page = tmp_path / "page.html"
    status = command_line.main(["audit", f"{file}:sick_step", "--args", "example_args", "--json", "--html",
                                str(page)])
    assert status == FOUND and "not_donated" in page.read_text()
    assert [each["code"] for each in json.loads(capsys.readouterr().out)["findings"]] == ["not_donated"]


@pytest.mark.parametrize("args, message", [
    (["--step", "train_step"], "write FILE.py:NAME"),
    (["--step", "nowhere.py:train_step"], "there is no file nowhere.py"),
    (["--step", "{file}:other"], "has no other"),
    (["--step", "{file}:train_step", "--args", "none"], "has no none: define the step's arguments there"),
    (["--step", "{file}:update"], "update is not jitted"),
    (["--step", "{file}:train_step", "--target", "h10:8"], "unknown target"),
])
def test_bad_input_is_status_2_and_a_line(file, capsys, args, message):
    assert command_line.main(["audit", *(each.format(file=file) for each in args)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ") and error.count("\n") == 1
