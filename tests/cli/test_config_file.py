"""`--config run.toml`: options from a file, flags over it, and the file that a run leaves for the same run."""

import dataclasses
import math
from pathlib import Path

import pytest
from support import run_log
from support.command_line import refused, refused_without_jax, run

from zero_jax.cli import main
from zero_jax.cli.config_file import config_text, expand_config, read_options
from zero_jax.cli.train_config import InspectConfig, TrainConfig

CONFIGS = {"train": TrainConfig, "inspect": InspectConfig}


def parsed(*args: str) -> object:
    return main._parse(args)


def write(path: Path, text: str) -> str:
    (path / "run.toml").write_text(text)
    return str(path / "run.toml")


def test_flags_win_wherever_they_stand(tmp_path):
    file = write(tmp_path, 'stage = 1\nlearning-rate = 1e-4\ndata = ["a", "b"]\nresume = true\nout = "runs/x"\n'
                           'ema = 0.5\ndistributed = true\n')
    config = parsed("train", "--stage", "2", "--config", file, "--no-distributed", "--ema", "None")
    assert config == TrainConfig(stage=2, learning_rate=1e-4, data=("a", "b"), resume=True, out=Path("runs/x"))
    assert parsed("train", f"--config={file}", "--data", "c").data == ("c",)
    assert isinstance(parsed("inspect", "--config", file), InspectConfig)
    assert parsed("train") == TrainConfig()  # negative control: without the file there are the defaults


@pytest.mark.parametrize("config", [
    TrainConfig(),
    TrainConfig(stage=1, data=('a "b"', "c\\d\n\x7f\u00e9"), grad_clip_norm=math.inf, learning_rate=1e-5, ema=0.999,
                init_from=Path("x y.safetensors"), devices=4, hang_exit=True, hang_after=1.5, seed=2**32 - 1)])
def test_what_a_run_saves_gives_the_same_run(tmp_path, config):
    file = write(tmp_path, config_text(config))
    read = read_options(file, TrainConfig)
    assert TrainConfig(**{**read, "data": tuple(read["data"])}) == dataclasses.replace(
        config, init_from=read.get("init_from"))
    assert parsed("train", "--config", file) == config
    assert parsed("train", "--config", file, "--seed", "7") != config


@pytest.mark.parametrize("text, message", [
    ("learning_rte = 1e-3", "there is no option 'learning_rte'. Did you mean 'learning_rate'? There are: stage, "),
    ("stage = 4", "stage = 4 is not of type Literal[0, 1, 2, 3]"),
    ("stage = true", "stage = True is not of type Literal[0, 1, 2, 3]"),
    ('steps = "many"', "steps = 'many' is not of type int"),
    ("steps = 1.5", "steps = 1.5 is not of type int"),
    ('resume = "yes"', "resume = 'yes' is not of type bool"),
    ('data = "python"', "data = 'python' is not of type tuple[str, ...]"),
    ("[optimizer]\nname = 1", "optimizer = {'name': 1} is not of type Literal['adamw', "),
    ("[model]\nname = 1", "model = {'name': 1} is not of type str"),
    ("seq-len = 64\nseq_len = 32", "--seq-len stands there twice"),
    ("stage 3", "is not TOML"),
    ("config = 'b.toml'", "there is no option 'config'"),
    ("out = ''", "--out is empty"),
])
def test_a_wrong_file_is_refused_in_one_line(tmp_path, text, message):
    assert message in refused("train", "--config", write(tmp_path, text))


@pytest.mark.parametrize("args, message", [
    (["train", "--config"], "--config: give a TOML file"),
    (["train", "--config", "no/such.toml"], "--config no/such.toml cannot be read (No such file"),
    (["train", "--config", "a.yaml"], "write it as TOML"),
    (["train", "--config", "a.toml", "--config=b.toml"], "--config is given 2 times"),
    (["plan", "--config", "a.toml"], "it holds options of train and inspect; 'plan' takes none"),
    (["train", "--config", "/dev/zero"], "it is a pipe, a socket or a device")])
def test_what_is_no_file_is_refused(args, message):
    assert message in refused(*args)


def test_a_wrong_key_is_refused_before_jax_starts(tmp_path):
    said = refused_without_jax(["train", "--config", write(tmp_path, "stagee = 3")], cwd=tmp_path)
    assert "Did you mean 'stage'" in said


def test_a_file_as_editors_on_windows_write_it(tmp_path):
    text = "stage = 2\nseq-len = 64\n"
    (tmp_path / "run.toml").write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    assert read_options(tmp_path / "run.toml", TrainConfig) == {"stage": 2, "seq_len": 64}


def test_no_config_leaves_the_arguments_alone():
    assert expand_config(["plan", "--stage", "3"], CONFIGS) == ["plan", "--stage", "3"]


def test_values_of_a_file_are_checked_as_those_of_flags(tmp_path):
    assert "--steps 0: give at least 1" in refused("train", "--config", write(tmp_path, "steps = 0"))


@pytest.mark.slow
def test_the_saved_file_starts_the_same_run(tmp_path):
    short = ["--model", "gpt2:tiny", "--batch-size", "8", "--seq-len", "16", "--max-bytes", "100000", "--steps", "2",
             "--samples", "0", "--save-every", "0", "--schedule", "linear", "--seed", "3"]
    done = run("train", *short, "--out", str(tmp_path / "a"))
    assert done.returncode == 0 and "not the default:\nmodel = " in done.stdout and 'schedule = "linear"' in done.stdout
    again = run("train", "--config", str(tmp_path / "a/config.toml"), "--out", str(tmp_path / "b"))
    other = run("train", "--config", str(tmp_path / "a/config.toml"), "--out", str(tmp_path / "c"), "--seed", "4")
    assert again.returncode == other.returncode == 0, again.stderr + other.stderr

    def losses(name):
        return [*run_log.losses(tmp_path / name).values()]

    assert losses("a") == losses("b") and len(losses("a")) == 2
    assert losses("a") != losses("c")
    saved = {name: read_options(tmp_path / name / "config.toml", TrainConfig) for name in "abc"}
    assert saved["a"] | {"out": ""} == saved["b"] | {"out": ""} and saved["c"]["seed"] == 4
