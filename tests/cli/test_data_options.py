"""The data of a run from its options: tokenized text, mixtures, padded and packed documents, and what is refused."""

import dataclasses
import inspect
import json
import resource
from pathlib import Path

import numpy as np
import pytest
from support.command_line import refused, refused_without_jax, run

from models import gpt2
from zero_jax.cli.objectives.choose import objective_of
from zero_jax.cli.tokenize_command import TokenizeConfig, tokenize_command
from zero_jax.cli.train_config import TrainConfig
from zero_jax.data.documents import open_tokenized
from zero_jax.data.tokenizer import train_bpe

pytest.importorskip("grain"), pytest.importorskip("tokenizers")

LINES = [{"text": f"line {k}: " + "the quick brown fox " * (k % 5 + 1)} for k in range(300)]
SMALL = TrainConfig(model="gpt2:124m", batch_size=8, seq_len=32)
RUN = ["train", "--model", "gpt2:tiny", "--batch-size", "8", "--seq-len", "32", "--steps", "4", "--samples", "1",
       "--eval-every", "4", "--save-every", "2"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with a.jsonl, b.txt, tokenizer.json of 300 ids, and `tokens`, the first tokenized with the last."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    (folder / "b.txt").write_text("another text, over the lazy dog. " * 300)
    tokenizer = train_bpe([line["text"] for line in LINES], vocab_size=300)
    (folder / "tokenizer.json").write_bytes(tokenizer.files["tokenizer.json"])
    config = TokenizeConfig(folder / "tokens", (str(folder / "a.jsonl"),), tokenizer=folder / "tokenizer.json")
    config.check()
    assert "300 documents" in tokenize_command(config)[0]
    return folder


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where no run has left its checkpoints


def batches_of(config):
    train, held_out = objective_of(config).load_data().batches(None)
    return [train[k] for k in range(2)], list(held_out.once())[:2]


def test_a_folder_of_tokens_gives_the_batches_of_its_text(files):
    text = dataclasses.replace(SMALL, data=(str(files / "a.jsonl"),), tokenizer=files / "tokenizer.json")
    folder = dataclasses.replace(SMALL, data=(str(files / "tokens"),))
    for documents in ("concatenate", "pad", "pack"):
        found, expected = (batches_of(dataclasses.replace(config, documents=documents)) for config in (folder, text))
        for batch, other in zip(found[0] + found[1], expected[0] + expected[1], strict=True):
            assert batch.keys() == other.keys()
            assert all((batch[name] == other[name]).all() for name in batch)
        arrays = {name: (array.shape, array.dtype) for name, array in found[0][0].items()}
        shapes = objective_of(dataclasses.replace(folder, documents=documents)).batch_shapes()
        assert arrays == {name: (each.shape, each.dtype) for name, each in shapes.items()}  # as inspect compiles them
    assert set(found[0][0]) == {"inputs", "targets", "weights", "segment_ids", "positions"}
    bytes_ = batches_of(dataclasses.replace(SMALL, data=(str(files / "a.jsonl"),)))  # the control
    assert (bytes_[0][0]["inputs"] != batches_of(text)[0][0]["inputs"]).any()
    data = objective_of(folder).load_data()
    ids = open_tokenized(files / "tokens").documents().tokens
    ids = ids[:list(ids).index(0)]  # of the first document
    assert data.text(ids) == LINES[0]["text"] and data.baselines.keys() == {"bigram model"}


def test_a_folder_and_a_glob_are_read_as_the_files_that_they_stand_for(files, tmp_path):
    (tmp_path / "below").mkdir()
    (tmp_path / "below/a.jsonl").write_bytes((files / "a.jsonl").read_bytes())
    expected = batches_of(dataclasses.replace(SMALL, data=(str(files / "a.jsonl"),)))
    for name in ("", "/*", "/a.j*"):
        config = dataclasses.replace(SMALL, data=(f"{tmp_path}/below{name}",))
        found = batches_of(config)
        assert all((found[part][k]["inputs"] == expected[part][k]["inputs"]).all() for part in (0, 1) for k in (0, 1))
        assert config.data_vocab_size() == 256
    (tmp_path / "below/a.jsonl").write_text('{"body": "no text"}\n')
    with pytest.raises(ValueError, match="a.jsonl, line 1: it has no field 'text'"):
        dataclasses.replace(SMALL, data=(f"{tmp_path}/below",)).check_data()


@pytest.mark.parametrize("documents", ["concatenate", "pad"])
def test_data_that_are_named_twice_are_read_once(files, tmp_path, documents):
    (tmp_path / "ids.bin").write_bytes(np.arange(200, dtype=np.uint16).tobytes() * 20)
    for names in ((f"{files}/a.jsonl", f"{files}/*.jsonl"), (f"{files}/tokens", f"{files}/../{files.name}/tokens"),
                  ("ids.bin", f"{tmp_path}/ids.bin")):
        config = dataclasses.replace(SMALL, tokenizer=files / "tokenizer.json", documents=documents)
        once, twice = (dataclasses.replace(config, data=data) for data in (names[:1], names))
        assert objective_of(twice).load_data().summary == objective_of(once).load_data().summary, names


def test_a_parquet_in_a_folder_is_not_left_out(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": [line["text"] for line in LINES]}), tmp_path / "a.parquet")
    (tmp_path / "b.txt").write_text("another text, over the lazy dog. " * 300)
    both = dataclasses.replace(SMALL, data=(str(tmp_path),))
    text = dataclasses.replace(SMALL, data=(str(tmp_path / "b.txt"),))
    sizes = [sum(int(number.replace(",", "")) for number in objective_of(config).load_data().summary.split()
                 if number[0].isdigit()) for config in (both, text)]
    assert abs(sizes[0] - sizes[1] - sum(len(line["text"]) for line in LINES)) < 32


def test_weights_are_the_shares_of_the_sources(files):
    config = dataclasses.replace(SMALL, data=(str(files / "a.jsonl"), str(files / "b.txt")), data_weights=(0.25, 0.75))
    train, _ = objective_of(config).load_data().batches(None)
    lazy = sum(b"lazy" in bytes(row.astype(np.uint8)) or b"another" in bytes(row.astype(np.uint8))
               for k in range(10) for row in train[k]["inputs"])
    assert lazy == 60


def test_evaluation_and_training_data_are_apart(files):
    for documents in ("concatenate", "pad"):
        config = dataclasses.replace(SMALL, data=(str(files / "a.jsonl"),), documents=documents, eval_fraction=0.2)
        train, held_out = objective_of(config).load_data().batches(None)
        seen = {bytes(row.astype(np.uint8)) for k in range(train.batches_per_epoch) for row in train[k]["inputs"]}
        numbers = [{int(number) for row in part for number in _numbers(row)} for part in (
            seen, {bytes(row.astype(np.uint8)) for batch in held_out.once() for row in batch["inputs"]})]
        assert numbers[0] and numbers[1] and not numbers[0] & numbers[1]


def _numbers(row):
    text = row.rstrip(b"\0").decode()
    return [part.partition(":")[0] for part in text.split("line ")[1:] if ":" in part]


@pytest.mark.slow
def test_a_run_of_padded_documents_resumes_on_their_batches(files, tmp_path):
    args = [*RUN, "--out", str(tmp_path), "--data", str(files / "a.jsonl"), str(files / "b.txt"),
            "--data-weights", "0.5", "0.5", "--documents", "pad"]
    done = run(*args)
    assert done.returncode == 0, done.stderr
    assert "% tokens, and the rest padding (pad)" in done.stdout and "continued by the model" in done.stdout
    done = run(*args, "--resume")
    assert done.returncode == 0 and "Resumed after step 4 of 4" in done.stdout, done.stderr
    assert "Changed" not in done.stdout
    done = run(*args, "--resume", "--data-weights", "0.4", "0.6")
    assert done.returncode == 0 and "data_weights [0.5, 0.5] -> [0.4, 0.6]. The data are read from" in done.stdout


@pytest.mark.slow
def test_a_run_of_packed_documents(files, tmp_path):
    if "segment_ids" not in inspect.signature(gpt2.GPT2.__call__).parameters:
        pytest.skip("models.gpt2 takes no segment_ids yet")
    done = run(*RUN, "--out", str(tmp_path), "--data", str(files / "a.jsonl"), "--documents", "pack")
    assert done.returncode == 0, done.stderr


def write(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return str(folder / name)


BAD_INPUT = {
    "vocabulary": (["--tokenizer", "{}/tokenizer.json", "--data", "{}/a.jsonl"],
                   "The data's vocabulary of 300 is larger than vocab_size=256 of gpt2:tiny"),
    "folder's vocabulary": (["--data", "{}/tokens"], "The data's vocabulary of 300 is larger than vocab_size=256"),
    "no tokenizer": (["--tokenizer", "{}/b.txt"], "give a tokenizer.json of Hugging Face or a .model"),
    "another tokenizer": (["--tokenizer", "{}/other.json", "--data", "{}/tokens"],
                          "was tokenized with another tokenizer than"),
    "weights": (["--data", "{}/a.jsonl", "{}/b.txt", "--data-weights", "0.5", "0.4"], "their sum is 0.9 and not 1"),
    "negative weight": (["--data", "{}/a.jsonl", "{}/b.txt", "--data-weights", "1.5", "-0.5"],
                        "each is positive"),
    "one weight": (["--data", "{}/a.jsonl", "{}/b.txt", "--data-weights", "1"], "1 weights for 2 sources"),
    "a file of two weights": (["--data", "{}/a.jsonl", "{}/*.jsonl", "--data-weights", "0.5", "0.5"],
                              "a.jsonl is in two of the names"),
    "bytes of a token file": (["--data", "{}/ids.bin", "--max-bytes", "100"],
                              "ids.bin has tokens, all of which are read, and no text: leave it out"),
    "bytes of a folder of tokens": (["--data", "{}/b.txt", "{}/tokens", "--max-bytes", "100"],
                                    "--max-bytes 100: data: "),
    "bytes of tokens to evaluate on": (["--data", "{}/a.jsonl", "--eval-data", "{}/tokens", "--max-bytes", "100"],
                                       "--max-bytes 100: --eval-data: "),
    "field": (["--data", "{}/a.jsonl", "--text-field", "body"], "a.jsonl, line 1: it has no field 'body', but text"),
    "line": (["--data", "{}/bad.jsonl"], "bad.jsonl, line 2: it is no JSON"),
    "parquet": (["--data", "{}/bad.parquet"], "bad.parquet is no whole Parquet file"),
    "evaluated on what is trained on": (
        ["--data", "{}/a.jsonl", "{}/*.txt", "--eval-data", "{}/b.txt"], "b.txt is in data, too"),
    "the same bytes": (["--data", "{}/b.txt", "--eval-data", "{}/b.txt"], "b.txt is in data, too"),
    "fraction": (["--eval-fraction", "1"], "--eval-fraction 1.0: give a fraction"),
    "fraction of nothing": (["--eval-fraction", "0.2", "--eval-data", "{}/b.txt"], "0.2 with --eval-data"),
    "rows": (["--documents", "packed"], "--documents packed: it is none of the choices"),
    "documents of a token file": (["--data", "{}/ids.bin", "--documents", "pack"], "give the tokenizer that wrote it"),
}


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_has_one_message_and_status_2(name, files):
    write(files, "bad.jsonl", '{"text": "a"}\n{\n')
    write(files, "bad.parquet", "no parquet")
    (files / "ids.bin").write_bytes(np.arange(200, dtype=np.uint16).tobytes())
    (files / "other.json").write_bytes(train_bpe(["other text"], vocab_size=270).files["tokenizer.json"])
    args, expected = BAD_INPUT[name]
    said = refused("train", "--model", "gpt2:tiny", "--seq-len", "32", *(arg.format(files) for arg in args))
    for made in ("bad.jsonl", "bad.parquet", "ids.bin", "other.json"):
        (files / made).unlink()
    assert expected in said


def test_too_little_data_is_told_before_a_step_compiles(tmp_path):
    for name, text, expected in (("few.jsonl", '{"text": "ab"}\n' * 9, "are too few to hold"),
                                 ("none.jsonl", '{"text": ""}\n', "The data have no text")):
        assert expected in refused(*RUN, "--out", str(tmp_path / "run"), "--data", write(tmp_path, name, text))


def test_tokenize(tmp_path, files):
    out = tmp_path / "tokens"
    done = run("tokenize", "--data", str(files / "a.jsonl"), "--out", str(out), "--vocab-size", "290",
               "--sentinels", "2")
    assert done.returncode == 0, done.stderr
    assert "300 documents" in done.stdout and f"train --data {out} reads them." in done.stdout
    read = open_tokenized(out)
    assert read.vocab_size <= 290 and len(read.specials.sentinels) == 2 and read.num_documents == 300
    for args, expected in (
            (["--out", str(out)], "is not empty: give a new folder"),
            (["--out", str(tmp_path / "x"), "--vocab-size", "100"], "--vocab-size 100: 256 bytes and 3 special tokens"),
            (["--out", str(tmp_path / "x"), "--tokenizer", str(files / "tokenizer.json"), "--vocab-size", "300"],
             "leave one out"),
            (["--out", str(tmp_path / "x"), "--data", "nowhere"], "no file with text"),
            (["--out", str(tmp_path / "x"), "--text-field", "no"], "line 1: it has no field")):
        assert expected in refused("tokenize", "--data", str(files / "a.jsonl"), *args)


def test_tokens_that_the_disk_has_no_place_for(tmp_path, files):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))  # as a disk that is full
    try:
        said = refused("tokenize", "--data", str(files / "a.jsonl"), "--out", str(tmp_path / "x"), "--tokenizer",
                       str(files / "tokenizer.json"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert said.endswith("/x cannot be written (File too large): free space, or give another folder.")


def test_bad_data_is_refused_before_jax_starts(files):
    said = refused_without_jax(["train", "--data", f"{files}/a.jsonl", "--text-field", "no"],
                               ["train", "--data", f"{files}/b.txt", "--tokenizer", f"{files}/a.jsonl"],
                               ["tokenize", "--out", f"{files}/tokens", "--data", f"{files}/b.txt"])
    assert said.count("\n") == 3
