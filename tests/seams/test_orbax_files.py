"""What is assumed of the files that Orbax writes."""

import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support.seams import mend

import zero_jax
from zero_jax.checkpoint import array_files, orbax_store


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
        files = array_files.files_of(path, "params/w")
        assert files and all((path / file).exists() for file in files) and not array_files.files_of(path, "params/v")
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
