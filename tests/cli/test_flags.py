"""Flags: what they read, what --help says of them, and how messages name them."""

import dataclasses
import re

import pytest
from support.command_line import message, refused, run

from zero_jax.cli.flags import FIRST, OTHER_NAMES, SUBJECTS, flag_of, help_text, in_flags, read_flags, subjects_of
from zero_jax.cli.main import COMMANDS
from zero_jax.cli.options.choices import Within
from zero_jax.cli.planning.plan_config import PlanConfig
from zero_jax.cli.train_config import TrainConfig
from zero_jax.cli.weights.file_configs import GenerateConfig


def read(*args):
    return read_flags("train", TrainConfig, args)


def shown(command, *, everything=False, width=100):
    return help_text(command, COMMANDS[command], program="zero-jax", everything=everything, width=width)


def flags_in(text):
    return re.findall(r"^  (--[a-z-]+)", text, re.MULTILINE)


def test_values_are_read_in_every_way_they_are_written():
    config = read("--steps=1e3", "--seq_len", "2.56e2", "--learning-rate", "-0", "--data", "a", "b", "--no-html",
                  "--resume", "--ema", "None", "--stage", "1", "--data-weights", "0.5", "5e-1")
    assert config == TrainConfig(steps=1000, seq_len=256, learning_rate=0.0, data=("a", "b"), html=False, resume=True,
                                 stage=1, data_weights=(0.5, 0.5))
    assert isinstance(config.steps, int) and config != read("--steps", "1001")
    assert read_flags("generate", GenerateConfig, ["--checkpoint", ".", "--prompt=--x", "-1"]).prompt == ("--x", "-1")


@pytest.mark.parametrize("args, said", [
    (["--steps", "1e-3"], "--steps 1e-3: give a whole number."), (["--steps", "many"], "--steps many: give a whole"),
    (["--steps", "1e999999999"], "--steps 1e999999999: give a whole number."), (["--steps", "inf"], "give a whole"),
    (["--steps", "nan"], "give a whole number"), (["--learning-rate", "fast"], "--learning-rate fast: give a number."),
    (["--steps"], "--steps has no value: give INT."), (["--out", "--resume"], "--out has no value: give PATH."),
    (["--resume=yes"], "--resume=yes: it takes no value"), (["--resume", "yes"], "yes follows no option"),
    (["--no-steps", "3"], "train has no option --no-steps"), (["runs"], "runs follows no option"),
    (["--qqq"], "train has no option --qqq: zero-jax train --help-all lists all."),
    (["--no-htm"], "train has no option --no-htm. Did you mean --html?"),
])
def test_what_is_no_value_is_refused_in_a_line(args, said):
    assert said in refused("train", *args)


def test_what_is_required_is_asked_for():
    assert "generate needs --checkpoint: zero-jax generate --help" in refused("generate", "--prompt", "a")
    assert "needs --old and --new" in refused("diff")


@pytest.mark.parametrize("args, field, value", [
    (["--lr", "1e-4"], "learning_rate", 1e-4), (["--gradient-accumulation-steps", "2"], "accumulate", 2),
    (["--max_grad_norm", "2"], "grad_clip_norm", 2.0), (["--max-seq-length=64"], "seq_len", 64),
    (["--lr-scheduler-type", "linear"], "schedule", "linear"), (["--global-batch-size", "32"], "batch_size", 32)])
def test_names_of_others_are_ours(args, field, value):
    assert getattr(read(*args), field) == value != getattr(TrainConfig, field)


@pytest.mark.parametrize("command, args, said", [
    ("train", ["--per-device-train-batch-size", "4"], "train has no option --per-device-train-batch-size: give"),
    ("train", ["--batch-per-device", "4"], "give --batch-size, the sequences of a step over all devices"),
    ("train", ["--bf16"], "train has no option --bf16: give --precision bf16."),
    ("train", ["--deepspeed", "ds.json"], "zero_jax.interop.from_deepspeed reads its JSON"),
    ("chat", ["--bf16"], "chat has no option --bf16: zero-jax chat --help-all lists all.")])
def test_names_without_an_option_of_ours_say_what_to_give(command, args, said):
    assert said in message(run(command, *args))


def test_the_table_of_names_leads_to_options():
    fields = {field.name for config in COMMANDS.values() for field in dataclasses.fields(config)}
    led = {name for name in OTHER_NAMES.values() if " " not in name}
    flags = {flag[2:].replace("-", "_") for text in OTHER_NAMES.values() for flag in re.findall(r"--[a-z-]+", text)}
    assert led | flags <= fields, (led | flags) - fields
    assert not {"lr", "qqq"} <= fields  # negative control


def test_per_device_batches_are_those_of_plan():
    assert read_flags("plan", PlanConfig, ["--micro-batch-size", "4"]).batch_per_device == 4


@pytest.mark.parametrize("command", ["train", "plan"])
def test_the_short_help_has_15_options_and_the_whole_one_all(command):
    config = COMMANDS[command]
    options = [flag_of(field.name) for field in dataclasses.fields(config)]
    short, whole = shown(command), shown(command, everything=True)
    assert flags_in(short) == [flag_of(name) for name in FIRST[command].split()] and len(flags_in(short)) == 15
    assert sorted(flags_in(whole)) == sorted(options) and f"explains all {len(options)} options" in short
    assert len(short.splitlines()) < 55 and len(whole.splitlines()) > 2 * len(short.splitlines())


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("width", [60, 80, 100])
def test_help_is_wrapped_once(command, width):
    """No line is too long, and none ends far before the next word's place, as where a source's breaks were kept."""
    lines = shown(command, everything=True, width=width).splitlines()
    assert max(map(len, lines)) <= width
    assert early(lines, width) == []
    assert early([" " * 30 + "a word", " " * 30 + "b"], width) != []  # negative control


def early(lines, width):
    """The lines of a text that had room for the first word of the next."""
    inside = [(line, after) for line, after in zip(lines, lines[1:], strict=False)
              if after.startswith(" " * 26) and line.startswith(" " * 26)]
    return [line for line, after in inside if len(line) + 1 + len(after.split()[0]) <= width]


def test_options_are_in_one_subject_each():
    for config in (TrainConfig, PlanConfig):
        names = [name for names in subjects_of(config).values() for name in names]
        assert sorted(names) == sorted(field.name for field in dataclasses.fields(config))
        assert not {first for first in subjects_of(config) if first.startswith("What is trained, on what")}
    listed = " ".join(SUBJECTS.values()).split()
    fields = {field.name for config in (TrainConfig, PlanConfig) for field in dataclasses.fields(config)}
    assert len(listed) == len({*listed}) and {*listed} <= fields


def test_help_is_shown_with_status_0_wherever_it_is_asked_for():
    for args in (["-h"], ["--help"]):
        assert (done := run(*args)).returncode == 0 and "zero-jax" in done.stdout and "  train " in done.stdout
    for args in (["train", "--help"], ["train", "--steps", "x", "-h"], ["launch", "--", "train", "--help"]):
        assert (done := run(*args)).returncode == 0 and flags_in(done.stdout)[0] == "--model"
    assert len(flags_in(run("plan", "--help-all").stdout)) == len(dataclasses.fields(PlanConfig))
    assert run("trian", "--help").returncode == 2


def test_messages_name_flags():
    names = ["seq_len", "data", "mesh", "html", "resume", "eval_data", "steps"]
    for text, said in {
            "seq_len=60: give more": "--seq-len 60: give more", "mesh=(4, 2) is": "--mesh 4 2 is",
            "leave html=False or resume=True out": "leave --no-html or --resume out",
            "data: none; data are in 'eval_data'": "--data: none; data are in 'eval_data'",
            "of data/steps=3, a lower seq_len": "of data/steps=3, a lower --seq-len",
            "leave data out": "leave --data out", "data is not": "data is not"}.items():
        assert in_flags(text, names) == said


def test_python_names_stay_where_python_raises():
    """Negative control: only the command line writes flags."""
    with pytest.raises(ValueError, match="^seq_len=0: give at least 1"):
        TrainConfig(seq_len=0)
    assert message(run("train", "--seq-len", "0")) == "error: --seq-len 0: give at least 1."


def test_a_range_without_an_end_has_no_inf():
    with pytest.raises(ValueError, match=r"a=-1: give at least 0\.$"):
        Within(0).check("a", -1)
