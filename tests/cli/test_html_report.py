"""report.html: one file without others, with the numbers of the run, whatever its texts contain."""

import dataclasses
import html.parser
import io
import json
import re
import shlex
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console
from support.covering import weekly
from support.program_controls import partitioned
from support.programs import PROGRAMS, program

import zero_jax
from models import gpt2
from zero_jax.cli import main
from zero_jax.cli.config_file import save_config
from zero_jax.cli.model_lookup import find_model
from zero_jax.cli.reports.html_report import MAX_POINTS, curves, memory_parts, report_html, thinned
from zero_jax.cli.reports.measures import TEXT
from zero_jax.cli.reports.report import summary_table
from zero_jax.cli.train_config import TrainConfig
from zero_jax.cli.training.run_head import folder_text
from zero_jax.contract.violations import counted_bytes
from zero_jax.errors import UsageError

NAME = "h100 stage 3"
EVALUATION = {"validation_loss": 2.625, "validation_perplexity": 13.805, "validation_accuracy": 0.3125}
SUMMARY = {"steps": 30, "steps_taken": 30, "loss": 2.5, "evaluation": EVALUATION, "baselines": {"bigram model": 2.417},
           "items_per_second": 54321.0, "seconds": 12.0, "peak_bytes": 3 << 30, "simulated": False,
           "interrupted": False, "preempted": False, "step_seconds": 0.125, "predicted_seconds": None,
           "log": "train.jsonl", "curve": None, "report": None}


class Checked(html.parser.HTMLParser):
    """Fails on tags that are not closed in order; collects text and attributes."""

    def __init__(self, page):
        super().__init__()
        self.open, self.text, self.attributes = [], [], []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.attributes += [(tag, *attr) for attr in attrs]
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.attributes += [(tag, *attr) for attr in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture(scope="module")
def compiled():
    step, batch = PROGRAMS[NAME].make()
    return dataclasses.replace(program(NAME), layout=step.layout(batch))


def page(tmp_path, compiled, **changes):
    rows = [{"config": {}}, *({"step": k, "loss": 5 / k, "grad_norm": 1.0, "learning_rate": 1e-3, "mfu": 0.1 * k / 30,
                               "hfu": None, "tokens_per_second": 100.0} for k in range(1, 31)),
            {"step": 30, "validation_loss": 2.625, "validation_accuracy": 0.3125}, {"summary": {}}]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return report_html(**{
        "title": "A <model>", "head": ["Mesh: data 8."], "options": "steps = 30\n", "log": tmp_path / "train.jsonl",
        "program": compiled, "summary": SUMMARY, "versions": {"jax": "0.10.2"},
        "samples": ["--- held-out:\n<script>alert(1)</script>"], **changes})


def test_it_has_the_numbers_of_the_run_and_needs_no_other_file(tmp_path, compiled):
    parsed = Checked(text := page(tmp_path, compiled))
    words = " ".join(parsed.text)
    for expected in ("A <model>", "Mesh: data 8.", "2.625", "13.805", "31.2 %", "54,321", "3.0 GiB", "steps = 30",
                     "jax 0.10.2", "<script>alert(1)</script>", "Learning rate", "Utilisation of the peak",
                     "parameters gathered for the forward and once more for the backward pass", "all-gather"):
        assert expected in words, expected
    assert "<script" not in text and "Wait for data" not in words  # escaped; what was not logged has no figure
    assert not [each for each in parsed.attributes if each[1] in ("src", "href") and each[2]]
    assert not re.findall(r"url\((?!#)", text)
    assert all(value.startswith("#") for _, name, value in parsed.attributes if name == "xlink:href")
    # The control: another run has another page.
    other = page(tmp_path, compiled, summary=SUMMARY | {"evaluation": {"validation_loss": 1.5}})
    assert other.count("1.500") > text.count("1.500")


@weekly("taken, steps, rate", [(30, "30 steps", True), (10, "10 of 30 steps", True),
                                                      (0, "0 of 30 steps", False)])
def test_time_and_speed_are_of_the_steps_that_this_process_took(tmp_path, compiled, taken, steps, rate):
    summary = SUMMARY | {"steps_taken": taken} | ({} if rate else {"items_per_second": 0.0})
    console = Console(width=120, file=io.StringIO())
    console.print(summary_table(summary, TEXT))
    printed = " ".join(console.file.getvalue().split())
    assert f"time 12 s for {steps}" in printed and ("speed 54,321 tokens/s" in printed) == ("speed" in printed) == rate
    words = " ".join(Checked(page(tmp_path, compiled, summary=summary)).text)
    assert f"seconds for {steps}" in words and ("54,321 tokens per second" in words) == rate


def test_memory_is_of_the_whole_step(compiled):
    parts = memory_parts(compiled)
    assert sum(parts.values()) == pytest.approx(compiled.device_bytes, rel=0.01)
    assert parts["opt_state"] == pytest.approx(2 * parts["params"], rel=0.01)


def test_long_curves_are_thinned_and_keep_their_ends():
    series = [(step, float(step)) for step in range(100_000)] + [(100_000, float("nan"))]
    assert len(thinned(series)) == MAX_POINTS and thinned(series)[0] == (0, 0.0) and thinned(series)[-1][0] == 99_999
    assert len(curves({"loss": series}, title="t", unit="u")) < 100_000
    assert "<svg" in curves({"none": []}, title="t", unit="u")


def test_a_folder_says_what_is_in_it():
    text = folder_text(TrainConfig(log_to=("tensorboard",), profile="steps=3:5"), find_model("gpt2:bytes"))
    for words in ("gpt2:bytes", "config.toml", "--config runs/train/config.toml --resume", "report.html",
                  "tensorboard/", "a trace of steps 3 to 5", "checkpoints/", "--checkpoint runs/train/checkp"):
        assert words in text
    less = folder_text(TrainConfig(html=False, save_every=0), find_model("gpt2:bytes"))
    assert not any(words in less for words in ("report.html", "checkpoints", "tensorboard", "profile", "wandb"))


RUNS = {
    "text": ({}, {"train", "generate", "export"}),
    "images": ({"model": "vit:digits", "data": ("digits",)}, {"train", "export"}),
    "masks": ({"model": "bert:bytes"}, {"train", "export"}),
    "messages": ({"objective": "instruct", "data": ("a.jsonl",)}, {"train", "generate", "chat", "export"}),
    "adapters": ({"lora_rank": 4, "model": "llama:tiny"}, {"train", "generate", "export"}),
    "a folder with a space": ({"out": Path("my runs/a")}, {"train", "generate", "export"}),
    "ids": ({"data": ("ids.bin",)}, {"train", "generate", "export"}),
    "nothing saved": ({"save_every": 0}, {"train"})}


@pytest.mark.parametrize("run", RUNS)
def test_each_command_of_a_folder_parses(run, tmp_path, monkeypatch):
    """As a shell splits it; and there is one of each kind that the run can be used with."""
    monkeypatch.chdir(tmp_path)
    options, commands = RUNS[run]
    config = TrainConfig(**options)
    config.out.mkdir(parents=True)
    save_config(config, config.out, {})
    lines = re.findall("^    python -m zero_jax (.*)$", folder_text(config, find_model(config.model)), re.MULTILINE)
    parsed = [main._parse(shlex.split(line)) for line in lines]
    assert {line.split()[0] for line in lines} == commands and len(lines) > 2
    assert {type(each) for each in parsed} == {main.COMMANDS[command] for command in commands}
    assert [each.steps for each in parsed[:3]] == [700, 1400, 700] and all(
        each.model == config.model for each in parsed[:3])
    assert {each.checkpoint for each in parsed[3:]} <= {f"{config.out}/checkpoints"}
    assert ("--merge" in "".join(lines)) == (config.lora_rank is not None)
    assert ("'1 2 3'" in "".join(lines)) == (run == "ids")
    with pytest.raises(UsageError):  # negative control
        main._parse([*shlex.split(lines[0]), "--checkpoints", "x"])


def test_a_model_of_the_users_is_named_in_the_commands(tmp_path, monkeypatch):
    (tmp_path / "mine_of_a_run.py").write_text("PRESETS = {'small': None}\nbuild = decoder = print\n")
    monkeypatch.syspath_prepend(tmp_path)
    text = folder_text(TrainConfig(model="mine_of_a_run:small"), find_model("mine_of_a_run:small"))
    assert "generate --checkpoint runs/train/checkpoints --model mine_of_a_run:small --prompt TEXT" in text
    assert "--model" not in folder_text(TrainConfig(), find_model("gpt2:bytes"))


def test_what_is_sent_counts_as_its_budget_does():
    """XLA:CPU reduces by an all-reduce where the partitioner is asked: twice what the budget counts."""
    batch = {name: jax.ShapeDtypeStruct((8, 16), np.int32) for name in ("inputs", "targets")}
    step = zero_jax.make_zero_train_step(gpt2.build(gpt2.PRESETS["tiny"]), 2)
    with partitioned():
        report = step.compiled_step(batch).report
    counted = sum(counted_bytes(result, report.contract) for result in report.results)
    assert counted <= report.contract.communication_bytes + report.contract.slack
    assert report.communication_bytes > 1.3 * counted  # negative control


def test_curves_of_a_run_that_ended_before_its_first_step():
    """Matplotlib warns of a legend without lines, and warnings are errors here."""
    assert "<svg" in curves({"loss": [], "validation": []}, title="Loss", unit="nats")
