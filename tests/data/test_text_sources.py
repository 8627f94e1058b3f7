"""Documents from files of each format, and what is wrong with a file, by its line."""

import bz2
import gzip
import json
import lzma

import numpy as np
import pytest
from support import command_line

from zero_jax.data import corpus, extras
from zero_jax.data.conversations import read_rows
from zero_jax.data.documents import cut_text
from zero_jax.data.text_sources import check_file, check_not_compressed, files_of, has_documents, read_documents

TEXTS = ["one", "two\nlines", "", "täta \U0001f600"]


def jsonl(path, rows):
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return str(path)


def parquet(path, **columns):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet as writer

    writer.write_table(pyarrow.table(columns), path)
    return str(path)


def array_record(path, records):
    module = pytest.importorskip("array_record.python.array_record_module")
    writer = module.ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()
    return str(path)


def test_each_format_gives_its_documents(tmp_path):
    whole = [text for text in TEXTS if text]
    assert [*read_documents(jsonl(tmp_path / "a.jsonl", [{"text": text, "n": 1} for text in TEXTS]))] == whole
    bodies = jsonl(tmp_path / "b.ndjson", [{"body": "x"}, "", {"body": "y"}])
    assert [*read_documents(bodies, field="body")] == ["x", "y"]
    assert [*read_documents(parquet(tmp_path / "a.parquet", text=TEXTS, n=[1, 2, 3, 4]))] == whole
    assert [*read_documents(array_record(tmp_path / "a.array_record", [text.encode() for text in TEXTS]))] == whole
    (tmp_path / "a.txt").write_text("caf\xe9\n")
    assert [*read_documents(str(tmp_path / "a.txt"))] == ["caf\xe9\n"]
    assert next(read_documents("python"))  # of the library


def test_a_folder_of_hugging_face_datasets(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import ipc

    table = pyarrow.table({"text": ["one", "", "two"], "prompt": ["a", "b", "c"]})
    path = tmp_path / "data-00000-of-00001.arrow"
    with ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table)
    (tmp_path / "dataset_info.json").write_text("{}")
    (tmp_path / "state.json").write_text("{}")
    check_file(path)
    assert [*read_documents(str(tmp_path))] == ["one", "two"]
    assert [row["prompt"] for _, row in read_rows([str(tmp_path)])] == ["a", "b", "c"]
    with pytest.raises(ValueError, match="no column 'body', but"):
        check_file(path, field="body")
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(ValueError, match="no whole Arrow stream"):
        check_file(path)
    with ipc.new_stream(str(path), table.schema):
        pass
    with pytest.raises(ValueError, match="no rows"):
        [*read_documents(str(path))]
    for split in ("test", "train"):
        (tmp_path / "splits" / split).mkdir(parents=True)
    (tmp_path / "splits" / "dataset_dict.json").write_text("{}")
    with pytest.raises(ValueError, match="has the splits test, train of a dataset: name one"):
        files_of(str(tmp_path / "splits"))
    (tmp_path / "splits" / "dataset_dict.json").unlink()
    path.unlink()  # the control: without Arrow files, these are text as any other
    assert [*read_documents(str(tmp_path))] == ["{}", "{}"]


def test_folders_and_globs(tmp_path):
    jsonl(tmp_path / "b.jsonl", [{"text": "two"}])
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / ".hidden").write_text("no")
    (tmp_path / "c.bin").write_bytes(b"\0\1\2")
    (tmp_path / "empty.txt").touch()
    assert [path.name for path in files_of(str(tmp_path))] == ["a.txt", "b.jsonl"]
    assert sorted(read_documents(str(tmp_path))) == ["one", "two"]
    assert [*read_documents(f"{tmp_path}/*.jsonl")] == ["two"]
    with pytest.raises(ValueError, match="no file with text"):
        files_of(str(tmp_path / "*.json"))


def test_the_formats_of_folders_and_globs_are_those_of_their_files(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / ".hidden.jsonl").write_text("{}")
    assert not any(has_documents(f"{tmp_path}{name}") for name in ("", "/*.txt", "/none", "/none*"))
    (tmp_path / "below").mkdir()
    jsonl(tmp_path / "below/b.jsonl", [{"text": "two"}])
    for name in ("", "/**/*", "/below/*", "/below/b.jsonl", "/none.parquet"):
        assert has_documents(f"{tmp_path}{name}"), name
    assert not has_documents(f"{tmp_path}/b*")  # a folder that a glob matches is no file


def test_names_below_a_folder_need_not_be_utf8(tmp_path):
    try:
        (tmp_path / "caf\udce9.txt").write_text("one")
    except OSError:
        pytest.skip("the file system has names in UTF-8 alone")
    assert [*read_documents(str(tmp_path))] == ["one"] and corpus.read_text(tmp_path).tobytes() == b"one"


def test_a_file_of_several_names_is_read_once(tmp_path):
    one, two = jsonl(tmp_path / "a.jsonl", [{"text": "one"}]), jsonl(tmp_path / "b.jsonl", [{"text": "two"}])
    (tmp_path / "link.jsonl").symlink_to(two)
    names = [one, f"{tmp_path}/*.jsonl", str(tmp_path), f"{tmp_path}/../{tmp_path.name}/a.jsonl"]
    assert [*read_documents(names)] == ["one", "two"]
    assert [row["text"] for _, row in read_rows(names)] == ["one", "two"]
    assert len([*read_documents(["python", "python"])]) == len([*read_documents("python")])


@pytest.mark.parametrize("rows, message", [
    ([{"text": "a"}, {"body": "b"}], r"line 2: it has no field 'text', but body: name the one with the text"),
    ([{"text": "a"}, "", "{", {"text": "b"}], r"line 3: it is no JSON"),
    ([{"text": "a"}, {"text": 5}], r"line 2: 'text' is int and no text"),
    ([{"text": None}], r"line 1: 'text' is NoneType and no text"),
    ([[1, 2]], r"line 1: it is no object"),
])
def test_lines_that_are_none(tmp_path, rows, message):
    name = jsonl(tmp_path / "a.jsonl", rows)
    with pytest.raises(ValueError, match=message) as caught:
        list(read_documents(name))
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=message):  # and before JAX starts
        check_file(tmp_path / "a.jsonl")


@pytest.mark.parametrize("row, objective", [
    ({"messages": [{"role": "user", "content": "a"}]}, "instruct"), ({"prompt": "a", "completion": "b"}, "instruct"),
    ({"prompt": "a", "chosen": "b", "rejected": "c"}, "preferences"), ({"prompt": "a", "body": "b"}, None)])
def test_examples_with_responses_name_their_objective(tmp_path, row, objective):
    said = f"give --objective {objective}, or name the one" if objective else ": name the one with the text"
    files = [jsonl(tmp_path / "a.jsonl", [row]), parquet(tmp_path / "a.parquet", **{k: [v] for k, v in row.items()})]
    for name in files:
        done = command_line.run("train", "--data", name, "--out", str(tmp_path / "run"))
        assert done.returncode == 2 and done.stderr.count("\n") == 1
        assert said in done.stderr and ("--objective" in done.stderr) == bool(objective)  # negative control: the last
        assert "--text-field" in done.stderr


def test_what_json_can_spell_and_utf8_cannot(tmp_path):
    assert [*read_documents(jsonl(tmp_path / "a.jsonl", ['{"text": "a\\ud800b"}']))] == ["a���b"]


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress])
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.txt"])
def test_compressed_files_are_no_text(tmp_path, compress, name):
    content = b'{"text": "a"}\n' * 50
    (tmp_path / name).write_bytes(compress(content))
    for check in (check_file, check_not_compressed):
        with pytest.raises(ValueError, match="is compressed: unpack it first"):
            check(tmp_path / name)
    (tmp_path / name).write_bytes(content)  # negative control
    check_file(tmp_path / name)


def test_text_in_other_codes_than_utf8(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("text", encoding="utf-16")
    with pytest.raises(ValueError, match="no text in UTF-8, since it has zero bytes: convert it"):
        check_file(path)
    for before in ("", "a" * 10_000):  # within what is looked at before a run, and behind it
        path.write_text(f"{before}caf\xe9", encoding="latin-1")
        with pytest.raises(ValueError, match=rf"no text in UTF-8: its byte {len(before) + 3:,} is 0xe9. Convert it"):
            check_file(path)
            [*read_documents(str(path))]
    path.write_text("a" * 8191 + "\xe9")  # its two bytes are on either side of where the look ends
    check_file(path)
    path.write_text("text", encoding="utf-8-sig")
    check_file(path)


def test_parquet_files_that_are_none(tmp_path):
    good = parquet(tmp_path / "a.parquet", text=TEXTS * 100, n=list(range(400)))
    check_file(tmp_path / "a.parquet")
    content = (tmp_path / "a.parquet").read_bytes()
    for name, bad in (("cut", content[:-10]), ("text", b"no parquet"), ("empty", b"")):
        (tmp_path / f"{name}.parquet").write_bytes(bad)
        with pytest.raises(ValueError, match=f"{name}.parquet is no whole Parquet file"):
            check_file(tmp_path / f"{name}.parquet")
    damaged = bytearray(content)
    damaged[4:200] = bytes(196)
    (tmp_path / "damaged.parquet").write_bytes(damaged)
    with pytest.raises(ValueError, match="damaged.parquet is (damaged after row|no whole Parquet file)"):
        list(read_documents(str(tmp_path / "damaged.parquet")))
    with pytest.raises(ValueError, match="it has no column 'body', but text, n"):
        check_file(tmp_path / "a.parquet", field="body")
    with pytest.raises(ValueError, match="the column 'n' is of type int64 and no text"):
        list(read_documents(good, field="n"))
    with pytest.raises(ValueError, match="row 2: 'text' is NoneType"):
        list(read_documents(parquet(tmp_path / "b.parquet", text=["a", None])))
    with pytest.raises(ValueError, match="the file has no rows"):
        check_file(tmp_path / parquet(tmp_path / "c.parquet", text=np.array([], "U1")))


def test_array_records_that_are_none(tmp_path):
    (tmp_path / "a.array_record").write_bytes(b"nothing of that kind")
    with pytest.raises(ValueError, match="a.array_record is no array_record file|record 1: it is damaged"):
        list(read_documents(str(tmp_path / "a.array_record")))
    with pytest.raises(ValueError, match="record 2: it is damaged or no UTF-8"):
        list(read_documents(array_record(tmp_path / "b.array_record", [b"a", b"\xff"])))


def test_packages_that_are_not_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(extras.importlib.util, "find_spec", lambda name: None)
    for name, package in (("a.parquet", "pyarrow"), ("a.array_record", "grain")):
        (tmp_path / name).write_bytes(b"x")
        with pytest.raises(ValueError, match=rf"{name} needs the package {package}: pip install 'zero-jax\[data\]'"):
            check_file(tmp_path / name)


def test_text_is_cut_at_its_bytes():
    assert [*cut_text(["abc", "dä", "e"], 5)] == ["abc", "d"] and [*cut_text(["abc", "e"], None)] == ["abc", "e"]
    assert [*cut_text(["abc", "e"], 3)] == ["abc"]
