"""The command line as a user meets it: help, and each kind of bad input with one message and status 2."""

import ast
import dataclasses
import gzip
import inspect
import os
import platform
import subprocess
import sys
import textwrap
from importlib import metadata

import numpy as np
import pytest
from support.command_line import ROOT, message, refused, refused_without_jax, run, run_process

from zero_jax.cli.main import main, version_text
from zero_jax.cli.train_config import TrainConfig
from zero_jax.errors import CheckpointError, ReplicaError, UnwrittenCheckpointError

BAD_INPUT = {
    "no command": ([], "no command: give one of train, plan, "),
    "unknown command": (["trian"], "there is no command trian. Did you mean 'train'? There"),
    "unknown option": (["train", "--stagee", "3"], "train has no option --stagee. Did you mean --stage?"),
    "stage 4": (["train", "--stage", "4"], "--stage 4: it is none of the choices. There are: 0, 1, 2, 3."),
    "stage three": (["train", "--stage", "three"], "--stage three: it is none of the choices."),
    "precision": (["train", "--precision", "fp8"], "--precision fp8: it is none of the choices. Did you mean"),
    "microbatches": (["train", "--accumulate", "3"], "16 does not divide over 8 devices and 3 microbatches"),
    "reduced once": (["train", "--reduce", "once"], "--reduce once without --accumulate: the gradient"),
    "quantised at stage 0": (["train", "--stage", "0", "--quantize-weights", "int8"], "at stage 0"),
    "quantised master weights": (["plan", "--stage", "2", "--precision", "fp32", "--quantize-weights", "int8"],
                                 "rounding would add up"),
    "quantised in one hop": (["train", "--quantize-gradients", "int4", "int8"],
                             "--quantize-gradients int4 int8 where gradients are sent in one hop"),
    "quantised thrice": (["plan", "--quantize-gradients", "int4", "int8", "int8"], "give one format, or two"),
    "planned microbatches": (["plan", "--accumulate", "2"], "--batch-per-device 1 does not divide into 2 microbatches"),
    "devices 0": (["train", "--devices", "0"], "--devices 0: give at least 1"),
    "steps": (["train", "--steps", "0"], "--steps 0: give at least 1"),
    "too many steps": (["train", "--steps", str(2**31)], "--steps 2147483648: give at most 2147483647"),
    "keep": (["train", "--max-to-keep", "0"], "--max-to-keep 0: give at least 1"),
    "save": (["train", "--save-every", "-1"], "--save-every -1: give at least 0"),
    "rate": (["train", "--learning-rate", "-1"], "--learning-rate -1.0 is not within"),
    "module": (["train", "--model", "gtp2:bytes"], "no module 'gtp2'. Did you mean 'gpt2'? There are: bert, gpt2, "),
    "a path for a module": (["train", "--model", "../x:a"], "names no module: write MODULE:PRESET, as gpt2:124m, or "),
    "no out": (["train", "--out", ""], "--out is empty: give PATH"),
    "no out after =": (["train", "--out="], "--out is empty: give PATH"),
    "no data": (["train", "--data", ""], "--data is empty"),
    "no folder for states": (["train", "--offload", "disk", "--offload-disk", ""], "--offload-disk is empty: give PA"),
    "no folder for copies": (["train", "--local-checkpoints=", "--local-every", "2"], "--local-checkpoints is empty"),
    "long out": (["train", "--out", "n" * 256], f"error: {'n' * 256} is longer than names of files and folders can be"),
    "long data": (["train", "--data", "n" * 256], "is longer than names of files and folders can be: give a shorter"),
    "long folder of tokens": (["tokenize", "--out", "n" * 256], "is longer than names of files and folders can be"),
    "long folder of states": (["train", "--offload", "disk", "--offload-disk", "n" * 256], "is longer than names of"),
    "many devices": (["train", "--devices", "999999"], "--batch-size 16 does not divide over 999999"),
    "many devices for as many examples": (
        ["train", "--devices", "999999", "--batch-size", "999999"], "--devices 999999: there is no accelerator"),
    "relative": (["train", "--model", ".gpt2:bytes"], "names no module: write MODULE:PRESET"),
    "remat": (["train", "--remat", "half"], "--remat half: it is none of the choices"),
    "remat of a config without it": (["plan", "--model", "resnet:tiny", "--remat", "yes"], "has no field 'remat'"),
    "package": (["train", "--model", "nowhere.gpt2:bytes"], "no module 'nowhere.gpt2'"),
    "preset": (["train", "--model", "gpt2:byte"], "Did you mean 'bytes'? There are: tiny, bytes, 124m"),
    "no preset": (["train", "--model", "gpt2"], "name a preset, as in gpt2:PRESET. There are: tiny"),
    "not a model": (["train", "--model", "json:tiny"], "json lacks PRESETS"),
    "file": (["train", "--data", "no/such.txt"], "no/such.txt: no such file"),
    "evaluation file": (["train", "--eval-data", "no/such.txt"], "--eval-data: no/such.txt: no such file"),
    "field of what has none": (["train", "--text-field", "body"], "--text-field body: no file of python has fields"),
    "field of text to tokenize": (["tokenize", "--text-field", "body", "--data", "python", "--out", "new-folder"],
                                  "--text-field body: no file of python has fields"),
    "writer": (["train", "--log-to", "tensorbord"], "--log-to tensorbord: it is none of the choices. Did you mean"),
    "dry run's target": (["train", "--dry-run", "--target", "h10:8"], "unknown target 'h10:8'"),
    "dry run's devices": (["train", "--dry-run", "--target", "h100:8", "--devices", "4"], "but --target h100:8 has 8"),
    "dry run's batch": (["train", "--dry-run", "--target", "h100:3x8"], "--batch-size 16 does not divide over 24"),
    "profile": (["train", "--profile", "10-15"], "--profile 10-15: write FIRST:LAST, as in 10:15"),
    "profile of nothing": (["train", "--profile", "steps=15:10"], "--profile steps=15:10 has no step"),
    "profile too late": (["train", "--profile", "steps=9:11", "--steps", "10"], "ends after the last of --steps 10"),
    "inspected profile": (["inspect", "--profile", "steps=1:2"], "--profile: inspect trains nothing"),
    "no evaluation": (["train", "--eval-batches", "0"], "--eval-batches 0: give at least 1"),
    "batch": (["train", "--batch-size", "12"], "--batch-size 12 does not divide over 8 devices"),
    "batch, told devices": (["train", "--batch-size", "4", "--devices", "3"], "--batch-size 4 does not divide over 3"),
    "replica": (["train", "--replica", "3"], "--replica 3 does not divide the 8 devices"),
    "tensor": (["train", "--tensor", "3"], "--tensor 3 does not divide the 8 devices"),
    "tensor without rules": (["train", "--model", "resnet:resnet50", "--tensor", "2"], "has no tensor_rules"),
    "activations over no axis": (["plan", "--partition-activations", "yes", "--remat", "full"],
                                 "--partition-activations yes without --tensor: it splits activations over the"),
    "context": (["train", "--context", "8", "--seq-len", "60"], "--seq-len 60 does not divide over --context 8"),
    "planned tensor": (["plan", "--target", "h100:8", "--tensor", "3"], "tensor, context, replica 3, 1, 1 is of"),
    "length": (["train", "--model", "gpt2:tiny", "--seq-len", "65"], "longer than max_length=64"),
    "out": (["train", "--out", f"{__file__}/run"], "cannot be written"),
    "start": (["train", "--init-from", "no/such.safetensors"], "no/such.safetensors cannot be read (No such file"),
    "start of another kind": (["train", "--init-from", __file__], "is not a safetensors file"),
    "launch what": (["launch", "--processes", "2"], "no command to run. Give one after --"),
    "launched command": (["launch", "--", "plan"], "plan does not run as several processes; train does"),
    "launched option": (["launch", "--", "train", "--stage", "4"], "--stage 4: it is none of the choices"),
    "launched mistake": (["launch", "--", "train", "--batch-size", "12"], "does not divide over 8 devices"),
    "launched devices": (["launch", "--", "train", "--devices", "16"], "--devices 16 does not fit 2 processes with 4"),
    "processes": (["launch", "--processes", "0", "--", "train"], "--processes 0: give at least 1"),
    "samples": (["train", "--samples", "-1"], "--samples -1 is not within"),
    "exported from": (["export", "--checkpoint", "nowhere", "--out", "x.safetensors"], "--checkpoint nowhere: no such"),
    "exported to": (["export", "--checkpoint", ".", "--out", "x.bin"], "--out x.bin does not end in .safetensors"),
    "imported from": (["import", "--model", "gpt2:tiny", "--weights", "nowhere", "--out", "x.safetensors"],
                      "nowhere cannot be read"),
    "imported names": (["import", "--model", "json:tiny", "--weights", ".", "--out", "x.safetensors"],
                       ". has neither model.safetensors nor model.safetensors.index.json: name the file"),
    "a prompt that is no UTF-8": (["generate", "--checkpoint", ".", "--prompt", "caf\udce9"],
                                  r"the argument caf\udce9 is no UTF-8 (at its character 4): write a text in UTF-8"),
    "a name that is no UTF-8": (["train", "--data", "caf\udce9.txt"], r"the argument caf\udce9.txt is no UTF-8"),
    "a folder that is no UTF-8": (["launch", "--", "train", "--out=\udce9"], r"the argument --out=\udce9 is no UTF-8"),
    "objective": (["train", "--objective", "masked"], "for models of masked tokens, and gpt2:bytes is a model of next"),
    "another objective's option": (["train", "--mask-fraction", "0.3"], "it is of --objective masked, and this run"),
    "text of images": (["train", "--model", "vit:digits"], "--data python is text, and vit:digits classifies images"),
    "images of text": (["train", "--data", "digits"], "--data digits are images, and gpt2:bytes reads text"),
    "length of images": (["plan", "--model", "vit:tiny", "--seq-len", "8"], "vit:tiny takes no sequences"),
    "generated from": (["generate", "--checkpoint", "nowhere", "--prompt", "a"], "--checkpoint nowhere: no such"),
    "generated from nothing": (["generate", "--checkpoint", ".", "--prompt", ""], "--prompt is empty: give a text"),
    "no probability": (["generate", ".", "--prompt", "a", "--top-p", "0"], "--top-p 0.0 is not within"),
    "no likeliest": (["chat", ".", "--top-k", "0"], "--top-k 0 is not within 1"),
    "stop at once": (["chat", ".", "--stop", ""], "--stop has an empty text"),
    "no run": (["chat", "no/such"], "--checkpoint no/such: no such folder"),
    "no tokens": (["generate", "--checkpoint", ".", "--prompt", "a", "--tokens", "0"], "--tokens 0 is not within 1"),
    "rank of adapters": (["train", "--lora-rank", "0"], "--lora-rank 0 is not within 1"),
    "adapters' target": (["train", "--lora-rank", "4", "--lora-targets", "qkw"],
                         "the target 'qkw' matches no parameter of GPT2; the nearest are blocks/qkv/kernel"),
    "adapters' pattern": (["train", "--lora-rank", "4", "--lora-targets", "("], "'(' is no regular expression"),
    "planned adapters": (["plan", "--model", "llama:tiny", "--lora-rank", "40", "--lora-targets", "attn/k"],
                         "rank=40 is more than blocks/attn/k/kernel has, a matrix of 64 x 32"),
    "target": (["plan", "--target", "h10:8"], "unknown target 'h10:8', nearest is 'h100:8'"),
    "slice": (["plan", "--target", "v5p:8x8"], "is not written as v5p:XxYxZ"),
    "GPUs of a host": (["plan", "--target", "h100:64"], "a host has at most 8 GPUs"),
    "target file": (["plan", "--target", "./no-chip.toml:8"], "target file ./no-chip.toml cannot be read"),
    "mesh": (["plan", "--mesh", "4", "4"], "--mesh 4 4 is of 16 devices, and h100:8 has 8"),
    "batch per device": (["plan", "--batch-per-device", "0"], "--batch-per-device 0: give at least 1"),
    "planned vocabulary": (["plan", "--vocab-size", "0"], "--vocab-size 0: give at least 1"),
    "too large a vocabulary": (["plan", "--vocab-size", str(10**14)], f"--vocab-size {10**14}: give at most 21474836"),
    "too large a batch per device": (["plan", "--batch-per-device", str(10**14)], "give at most 2147483647"),
    "planned model": (["plan", "--model", "gpt2:15b"], "has no preset '15b'"),
    "planned length": (["plan", "--model", "gpt2:tiny", "--seq-len", "65"], "longer than max_length=64"),
    "png": (["plan", "--png", "stages.pdf"], "does not end in .png"),
    "png folder": (["plan", "--png", f"{__file__}/stages.png"], "cannot be written"),
    "no layers": (["plan", "--model", "resnet:tiny", "--search", "layers"], "has no field 'num_layers'"),
    "inspected batch": (["inspect", "--batch-size", "12"], "--batch-size 12 does not divide over 8 devices"),
}


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_has_one_message_and_status_2(name):
    args, expected = BAD_INPUT[name]
    assert expected in refused(*args)


def test_a_process_exits_with_the_status():
    """What is called in this process below, as the shell sees it."""
    done = run_process("train", "--stage", "4")
    assert done == run("train", "--stage", "4") and done.returncode == 2


@pytest.mark.parametrize(
    "write, expected",
    [
        (lambda path: path.write_text("too short"), "The data has 9 tokens"),
        (lambda path: path.write_text(""), "the file is empty"),
        (lambda path: path.write_bytes(gzip.compress(b"text " * 10_000)), "is compressed: unpack it first"),
        (lambda path: path.mkdir(), "no file with text"),
    ],
)
def test_data_without_a_run_in_it(tmp_path, write, expected):
    write(tmp_path / "text.txt")
    assert expected in refused("train", "--data", str(tmp_path / "text.txt"), "--out", str(tmp_path / "out"))


def test_an_evaluation_set_of_another_kind_or_too_short(tmp_path):
    np.save(tmp_path / "ids.npy", np.arange(100, dtype=np.uint16))
    (tmp_path / "text.txt").write_text("too short")
    args = ("train", "--eval-data", str(tmp_path / "text.txt"), "--out", str(tmp_path / "out"))
    assert "one is a file of tokens and the other is text" in refused(*args, "--data", str(tmp_path / "ids.npy"))
    assert "--eval-data has 9 tokens, and one batch takes 2,049" in refused(*args)


def test_ids_beyond_the_models_vocabulary(tmp_path):
    np.save(tmp_path / "ids.npy", np.arange(10_000, dtype=np.uint16))
    said = refused("train", "--data", str(tmp_path / "ids.npy"), "--out", str(tmp_path / "out"))
    assert "token ids reach 0..9999 but vocab_size=256" in said


def test_a_module_in_the_users_folder_is_found_as_ours_are(tmp_path):
    (tmp_path / "mine.py").write_text("PRESETS = {'small': None, 'large': None}\nbuild = print\n")
    done = run_process("train", "--model", "mine:smal", cwd=tmp_path)
    assert done.returncode == 2 and "Did you mean 'small'? There are: small, large." in message(done)


MODULES = {
    "import nowhere": "the module raises in {file}, line 1: import nowhere: ModuleNotFoundError: No module named 'nowh",
    "x = 1\n1 / 0": "raises in {file}, line 2: 1 / 0: ZeroDivisionError: division by zero",
    "import json\njson.loads('[')": "raises in {file}, line 2: json.loads('['): JSONDecodeError: Expecting value",
    "import sys\nsys.exit(0)": "ends the process in {file}, line 2: sys.exit(0): SystemExit: 0",
    "def f(:": "raises in {file}, line 1: def f(:: SyntaxError",
    "PRESETS = {'small': None}\nbuild = print\ndef tensor_rules(config):\n    return config.rules":
        "raises in {file}, line 4: return config.rules: AttributeError: 'NoneType' object has no attribute 'rules'",
}


@pytest.mark.parametrize("number", range(len(MODULES)))
def test_an_error_in_the_users_module_is_told_with_its_line(number, tmp_path, monkeypatch):
    (tmp_path / f"mine{number}.py").write_text([*MODULES][number] + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    args = ("train", "--model", f"mine{number}:small", "--tensor", "2")
    assert [*MODULES.values()][number].format(file=tmp_path / f"mine{number}.py") in refused(*args)
    monkeypatch.setenv("ZERO_JAX_TRACEBACK", "1")
    assert "Traceback (most recent call last)" in run(*args).stderr


def test_an_error_in_a_forward_pass_is_told_with_its_line(tmp_path, monkeypatch):
    (tmp_path / "narrow.py").write_text(
        "import flax.linen as nn\nPRESETS = {'small': None}\n\nclass Narrow(nn.Module):\n    @nn.compact\n"
        "    def __call__(self, tokens):\n        x = nn.Embed(256, 8)(tokens)\n        return x @ x\n\n"
        "def build(config):\n    return Narrow()\n")
    monkeypatch.syspath_prepend(tmp_path)
    done = run("train", "--model", "narrow:small", "--batch-size", "8", "--seq-len", "16", "--max-bytes", "20000",
               "--out", str(tmp_path / "out"))
    told = f"error: the module raises in {tmp_path}/narrow.py, line 8: return x @ x: TypeError: dot_general requires"
    assert done.returncode == 2 and done.stderr.startswith(told) and "Traceback" not in done.stderr


def test_an_error_that_is_not_the_users_is_shown_as_it_is(monkeypatch):
    """Negative control: not every ValueError is bad input."""
    names = {}
    exec("def fails(config):\n    raise ValueError('of JAX')", names)  # whose code is in no file of a user
    monkeypatch.setattr(TrainConfig, "check", names["fails"])
    with pytest.raises(ValueError, match="of JAX"):
        run("train")


def test_empty_data_is_refused_before_jax_starts(tmp_path):
    (tmp_path / "empty.txt").touch()
    os.mkfifo(tmp_path / "pipe.txt")
    said = refused_without_jax(["train", "--data", "empty.txt"], ["train", "--data", "pipe.txt"], cwd=tmp_path)
    assert "the file is empty" in said and "it is a pipe" in said


def test_help_and_what_is_refused_early_import_no_jax():
    program = (
        "import sys\nfrom zero_jax.cli import main as cli\n"
        "for args in (['--help'], ['--version'], ['train', '--help'], ['train', '--stage', '4'],\n"
        "             ['train', '--data', 'nowhere']):\n"
        "    try:\n        cli.main(args)\n    except SystemExit:\n        pass\n"
        "assert 'jax' not in sys.modules and 'flax' not in sys.modules\n")
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "--learning-rate" in done.stdout and "Traceback" not in done.stderr


def test_output_that_nobody_reads_ends_quietly(monkeypatch):
    closed, unread = os.pipe()
    os.close(closed)
    command = [sys.executable, "-m", "zero_jax", "train", "--help"]
    with open(unread, "wb") as reader_ended:
        done = subprocess.run(command, cwd=ROOT, stdout=reader_ended, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 141 and not done.stderr

    def fails(args):
        raise BrokenPipeError("some other pipe")

    monkeypatch.setattr("zero_jax.cli.main._status", fails)
    with pytest.raises(BrokenPipeError, match="other"):  # negative control: not that of the output
        main([])


@pytest.mark.parametrize("error, status", [(UnwrittenCheckpointError, 1), (ReplicaError, 1), (CheckpointError, 2)])
def test_a_run_that_fails_ends_with_1_and_bad_input_with_2(monkeypatch, capsys, error, status):
    def fails(args):
        raise error("what it says")

    monkeypatch.setattr("zero_jax.cli.main._parse", fails)
    assert main(["train"]) == status and capsys.readouterr().err == "error: what it says\n"


@pytest.mark.parametrize("redirect, status, expected", [
    ("> /dev/full", 2, "error: standard output cannot be written (No space left on device)"),
    (">&-", 0, ""), (">&- 2>&-", 0, "")])
def test_output_that_goes_nowhere(redirect, status, expected, monkeypatch):
    command = f"exec '{sys.executable}' -m zero_jax --version {redirect}"
    done = subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == status and not done.stdout
    assert done.stderr.startswith(expected) and done.stderr.count("\n") == bool(expected)

    def fails(args):
        raise OSError("some other file")

    monkeypatch.setattr("zero_jax.cli.main._status", fails)
    with pytest.raises(OSError, match="other"):  # negative control: not that of the output
        main([])


def test_no_file_gets_the_number_of_closed_output(tmp_path):
    program = ("import os, sys\nfrom zero_jax.cli import main as cli\nif len(sys.argv) > 1:\n"
               "    cli._open_closed_streams = lambda: setattr(sys, 'stdout', sys.stderr)\n"
               "cli._status = lambda args: os.open('file', os.O_WRONLY | os.O_CREAT)\nsys.exit(cli.main([]))\n")

    def number(*args):
        command = ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-c", program, *args]
        return subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=60).returncode

    assert number() > 2
    assert number("as before") == 1  # negative control


def test_every_field_says_what_it_is():
    fields = set()
    for options in TrainConfig.__mro__[:-1]:
        config = ast.parse(textwrap.dedent(inspect.getsource(options))).body[0]
        assert isinstance(config, ast.ClassDef)
        for field, text in zip(config.body, config.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign):
                assert isinstance(text, ast.Expr), f"{ast.unparse(field)} has no docstring"
                fields.add(ast.unparse(field.target))
    assert fields == {field.name for field in dataclasses.fields(TrainConfig)}


def test_the_versions_are_told_without_importing_any_of_them():
    done = run("--version")
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout == version_text() + "\n"
    for package in ("zero-jax", "jax", "jaxlib"):
        assert metadata.version(package) in done.stdout
    assert platform.python_version() in done.stdout
