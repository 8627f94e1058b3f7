"""Arrays of a checkpoint written one after another: what Orbax's files are, as TensorStore writes them.

Orbax writes all arrays from devices that hold all of them. Each process's arrays are a TensorStore of their own
(`ocdbt.process_*`), and at the end Orbax merges all that there are: so that one more of them, of arrays that were
written here, is part of the checkpoint, in the format of any other.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts
from etils import epath

MAX_CHUNK_BYTES = 2**30
"""Bytes of a chunk, at most: what is read and decoded at once."""

_PROCESS = "ocdbt.process_"


class ArrayWriter:
    """Writes the shards of this process's devices."""

    def __init__(self, folder: epath.Path, likes: Mapping[str, jax.ShapeDtypeStruct]):
        """folder: of a checkpoint's arrays, before Orbax merges what is in it. likes: the arrays, sharded, by name."""
        where = str(folder / f"{_PROCESS}{jax.process_index()}pieces")
        specs = {name: _write_spec(where, name, like, chunk_shape(_shard_shape(like), like.dtype))
                 for name, like in likes.items()}
        context = ts.Context()
        if jax.process_index() == 0:
            with ts.Transaction(atomic=True) as transaction:
                for spec in specs.values():
                    ts.open(spec, create=True, open=True, context=context, transaction=transaction).result()
        self._stores = {name: ts.open(spec, open=True, assume_metadata=True, context=context).result()
                        for name, spec in specs.items()}
        self._pending: Any = None

    def write(self, arrays: Mapping[str, jax.Array]) -> None:
        """Writes some arrays, together; each part once, by the process that has replica 0.

        What was written before is waited for first.
        """
        self.finish()
        transaction, futures = ts.Transaction(atomic=True), []
        for name, array in arrays.items():
            store = self._stores[name].with_transaction(transaction)
            for shard in array.addressable_shards:
                if shard.replica_id == 0:
                    futures.append(store[shard.index].write(np.asarray(shard.data)))
        for future in futures:
            future.result()  # is copied
        self._pending = transaction.commit_async()

    def finish(self) -> None:
        """Waits until all that was written is in the files."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()


def chunk_shape(part: tuple[int, ...], dtype: Any) -> tuple[int, ...]:
    """The chunks in which a device's part is written: its own shape, divided where that is larger than a chunk."""
    sizes = list(part)
    for dim in range(len(sizes)):
        while math.prod(sizes) * jnp.dtype(dtype).itemsize > MAX_CHUNK_BYTES and sizes[dim] > 1:
            sizes[dim] //= next(factor for factor in range(2, sizes[dim] + 1) if sizes[dim] % factor == 0)
    return tuple(sizes)


def _shard_shape(like: jax.ShapeDtypeStruct) -> tuple[int, ...]:
    sharding: Any = like.sharding
    return sharding.shard_shape(like.shape)


def _kvstore(folder: str, name: str) -> dict[str, Any]:
    base = f"{folder.rstrip('/')}/"
    return {"driver": "ocdbt", "path": f"{name}/",
            "base": base if "://" in base else {"driver": "file", "path": base}}


def _write_spec(folder: str, name: str, like: jax.ShapeDtypeStruct, chunk: tuple[int, ...]) -> dict[str, Any]:
    """As Orbax 0.12 writes an array: its codecs, and the configuration of its store."""
    codecs = {"name": "sharding_indexed", "configuration": {
        "chunk_shape": list(chunk), "index_location": "end",
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}},
                   {"name": "zstd", "configuration": {"level": 3}}],
        "index_codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]}}
    return {
        "driver": "zarr3", "dtype": jnp.dtype(like.dtype).name, "store_data_equal_to_fill_value": True,
        "recheck_cached_data": False, "recheck_cached_metadata": False,
        "kvstore": {**_kvstore(folder, name), "target_data_file_size": 2**31, "assume_config": True, "config": {
            "max_inline_value_bytes": 1024, "max_decoded_node_bytes": 100000000, "manifest_kind": "single"}},
        "metadata": {"shape": list(like.shape), "codecs": [codecs], "chunk_grid": {
            "name": "regular", "configuration": {"chunk_shape": list(chunk)}}}}
