"""What is assumed of the files that Orbax writes."""

import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore
from etils import epath
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support.seams import mend

import zero_jax
from zero_jax.checkpoint import integrity, orbax_files, orbax_store


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint's folder, and what was beside it while it was written."""
    root = epath.Path(tmp_path_factory.mktemp("seam"))
    array = jax.device_put(jnp.arange(8 * 4096.0), NamedSharding(zero_jax.make_mesh(8), P("data")))
    writing = orbax_store.write(root / "3", {"params/w": array}, {"format": 1}, None)
    during = sorted(each.name for each in root.iterdir())
    writing.result()
    return root, during, array


def test_files_of_a_checkpoint(saved):
    root, during, array = saved
    path = root / "3"
    with mend("checkpoint/orbax_store.py"):
        assert (path / orbax_store._COMMITTED).exists() and orbax_store.committed(root) == [3]
        assert orbax_store.manifest_path(path).exists()
        for index in (path / "_CHECKPOINT_METADATA", path / "state" / "_METADATA", path / "state" / "_sharding"):
            assert index.exists(), index
        assert list((path / "state" / "array_metadatas").iterdir()) and orbax_store.broken_index(path) is None
        assert all(name == "3" or re.fullmatch(rf"3{orbax_store._TEMPORARY}.*", name) for name in during), during
        files = integrity.files_of(path, "params/w")
        assert files and all((path / file).exists() for file in files) and not integrity.files_of(path, "params/v")
        abstract = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
        np.testing.assert_array_equal(orbax_store.read(path, {"params/w": abstract})["params/w"], array)


def test_a_missing_or_broken_file_is_found(saved, tmp_path):
    """Negative control: without the commit file there is no checkpoint, and an index that is no JSON is named."""
    root, _, _ = saved
    copy = epath.Path(tmp_path) / "3"
    shutil.copytree(root / "3", copy)
    (copy / orbax_store._COMMITTED).unlink()
    (copy / "state" / "_METADATA").write_text("{")
    assert orbax_store.committed(copy.parent) == [] and orbax_store.present(copy.parent) == [3]
    assert orbax_store.broken_index(copy) == copy / "state" / "_METADATA"


def chunk_shape(folder, name):
    """What of an array is read at once."""
    spec = {"driver": "zarr3", "kvstore": orbax_files._kvstore(str(folder), name)}
    store = tensorstore.open(spec, open=True).result()
    return tuple(store.chunk_layout.read_chunk.shape)


class _Rows:
    """The rows of `array` one by one, of which a manifest is known when they are written."""

    names = ("params/u", "params/v")

    def __init__(self, array):
        self.array = array

    def write(self, folder):
        assert sorted(each.name for each in folder.iterdir()) == []
        sharding = NamedSharding(zero_jax.make_mesh(8), P("data"))
        like = jax.ShapeDtypeStruct(self.array.shape[1:], self.array.dtype, sharding=sharding)
        writer = orbax_files.ArrayWriter(folder, dict.fromkeys(self.names, like))
        for name, row in zip(self.names, self.array, strict=True):
            writer.write({name: jax.device_put(row, sharding)})
        writer.finish()
        return {"format": 2}


def test_what_is_written_one_by_one_is_merged_and_listed_and_the_manifest_is_written_after_it(saved, tmp_path):
    """Orbax merges every `ocdbt.process_*`, lists arrays in `_METADATA`, and writes JSON behind."""
    _, _, array = saved
    rows, path = jnp.arange(2 * 64.0).reshape(2, 64), epath.Path(tmp_path) / "7"
    with mend("checkpoint/orbax_files.py"):
        orbax_store.write(path, {"params/w": array}, {"format": 1}, None, _Rows(rows)).result()
        assert json.loads(orbax_store.manifest_path(path).read_text()) == {"format": 2, "order": None}
        kinds = json.loads((path / "_CHECKPOINT_METADATA").read_text())["item_handlers"]
        assert kinds == json.loads((saved[0] / "3" / "_CHECKPOINT_METADATA").read_text())["item_handlers"]
        tree = json.loads((path / "state" / "_METADATA").read_text())["tree_metadata"]
        assert list(tree) == ["('params/u',)", "('params/v',)", "('params/w',)"]
        likes = {name: jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=array.sharding.update(spec=P(None)))
                 for name, each in (("params/u", rows[0]), ("params/v", rows[1]), ("params/w", array))}
        found = orbax_store.read(path, likes)
        np.testing.assert_array_equal(np.stack([found["params/u"], found["params/v"]]), rows)
        np.testing.assert_array_equal(found["params/w"], array)
        assert integrity.files_of(path, "params/v")
        # The parts of an array are its devices' shards, whoever wrote it.
        assert chunk_shape(path / "state", "params/v") == (8,) and chunk_shape(path / "state", "params/w") == (4096,)


def test_an_array_that_is_not_listed_is_not_there(saved, tmp_path, monkeypatch):
    """The control: what is merged and not listed, Orbax does not read."""
    _, _, array = saved
    monkeypatch.setattr(orbax_files, "_with_names", lambda index, names: index)
    path, rows = epath.Path(tmp_path) / "7", jnp.arange(2 * 64.0).reshape(2, 64)
    orbax_store.write(path, {"params/w": array}, {"format": 1}, None, _Rows(rows)).result()
    like = jax.ShapeDtypeStruct(rows.shape[1:], rows.dtype, sharding=array.sharding.update(spec=P(None)))
    with pytest.raises(zero_jax.UsageError, match="params/v/. is not there"):
        orbax_store.read(path, {"params/v": like})
