"""The commands `plan` and `inspect`, as a user runs them."""

import json
from typing import Any

import pytest
from support.command_line import message, run, run_process

from zero_jax.cli.main import DOES_NOT_FIT
from zero_jax.cli.planning import plan_command
from zero_jax.cli.planning.plan_config import PlanConfig
from zero_jax.errors import UsageError
from zero_jax.xla import devices as xla_devices


@pytest.fixture(autouse=True)
def compiler():
    if extra := xla_devices.missing_compiler("h100:8"):
        pytest.skip(f"needs {extra}")


@pytest.mark.slow
def test_plan_as_json(monkeypatch):
    """And not a word of the devices that are not here, which JAX would look for."""
    monkeypatch.delenv("JAX_PLATFORMS")
    done = run_process("plan", "--model", "gpt2:tiny", "--target", "h100:2x4", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)["plan"]
    assert found["fits"] and found["devices"] == 8 and found["batch_size"] == 8
    assert not found["communication"]["violations"]
    assert {row["name"] for row in found["memory"]} >= {"master", "momentum", "variance", "activations"}
    assert {link["link"] for link in found["links"]} == {"network"}  # two hosts
    assert found["timing"]["bound"] in found["timing"]["spent"]


@pytest.mark.slow
def test_a_plan_that_does_not_fit_says_what_would_help():
    done = run("plan", "--model", "gpt2:1.5b", "--target", "v5e:2x2", "--stage", "0")
    assert done.returncode == DOES_NOT_FIT
    assert "Does not fit" in done.stdout and "stage 3" in done.stdout and "Traceback" not in done.stderr


@pytest.mark.slow
def test_volta_is_told_to_be_compiled_as_something_else(tmp_path):
    png = tmp_path / "figures" / "stages.png"
    done = run("plan", "--model", "gpt2:tiny", "--target", "v100-32gb:1x1", "--png", str(png))
    assert done.returncode == 0, done.stderr
    assert "Note: compiled as Ampere" in done.stdout
    assert png.read_bytes().startswith(b"\x89PNG")


def test_inspect_reports_on_the_step_that_train_runs():
    options = ("--model", "gpt2:tiny", "--seq-len", "64", "--batch-size", "8")
    done = run("inspect", *options)
    assert done.returncode == 0, done.stderr
    for words in ("State by module", "Communication by purpose", "gradients summed and scattered", "activations"):
        assert words in done.stdout
    refused = run("inspect", *options, "--devices", "3")
    assert refused.returncode == 2 and "does not divide over 3 devices" in message(refused)


USERS = """
import dataclasses
import flax.linen as nn

@dataclasses.dataclass(frozen=True)
class Config:
    width: int

PRESETS = {"mine": Config(128)}

class Net(nn.Module):
    width: int

    @nn.compact
    def __call__(self, tokens):
        return nn.Dense(256)(nn.relu(nn.Dense(self.width)(nn.Embed(256, 64)(tokens))))

def build(config):
    return Net(config.width)
"""


@pytest.mark.parametrize("model", ["gpt2:tiny", "a_users_net:mine"])
def test_the_figure_is_drawn_before_anything_is_compiled(tmp_path, monkeypatch, model):
    """Of our presets and of a user's. Control: without --png the same plan compiles, and draws nothing."""
    def compiled(*_, **__):
        raise UsageError("something is compiled")

    (tmp_path / "a_users_net.py").write_text(USERS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(plan_command, "examine", compiled)
    length = 32 if "users" in model else None
    for png in (tmp_path / "figures" / "stages.png", None):
        with pytest.raises(UsageError, match="something is compiled"):
            config: dict[str, Any] = {"seq_len": length, "png": png}
            plan_command.plan_command(PlanConfig(model=model, target="h100:8", **config))
        assert [each.name for each in tmp_path.glob("*/*.png")] == ["stages.png"] * bool(png)
        if png:
            assert png.read_bytes().startswith(b"\x89PNG")
            png.unlink()
