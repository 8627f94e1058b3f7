"""Arrays of a checkpoint written and read piece by piece: what Orbax's files are, as TensorStore writes and reads them.

Orbax writes an array from devices that hold all of it. Each process's arrays are a TensorStore of their own
(`ocdbt.process_*`), and at the end Orbax merges all that there are: so that one more of them, of arrays whose pieces
were written here, is part of the checkpoint, in the format of any other.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts
from etils import epath

from zero_jax.errors import DamagedCheckpointError

MAX_CHUNK_BYTES = 2**30
"""Bytes of a chunk, at most: what is read and decoded at once."""

_PROCESS = "ocdbt.process_"


class PieceWriter:
    """Writes the pieces of this process's devices."""

    def __init__(self, folder: epath.Path, likes: Mapping[str, jax.ShapeDtypeStruct],
                 pieces: Mapping[str, tuple[int, ...]]):
        """folder: of a checkpoint's arrays, before Orbax merges what is in it.

        likes: the arrays, whole, by name. pieces: of each the shape of a device's part of a piece, which divides it.
        """
        where = str(folder / f"{_PROCESS}{jax.process_index()}pieces")
        specs = {name: _write_spec(where, name, like, chunk_shape(pieces[name], like.dtype))
                 for name, like in likes.items()}
        context = ts.Context()
        if jax.process_index() == 0:
            with ts.Transaction(atomic=True) as transaction:
                for spec in specs.values():
                    ts.open(spec, create=True, open=True, context=context, transaction=transaction).result()
        self._stores = {name: ts.open(spec, open=True, assume_metadata=True, context=context).result()
                        for name, spec in specs.items()}
        self._pending: Any = None

    def write(self, pieces: Sequence[tuple[str, tuple[int, ...], Any]]) -> None:
        """Writes (name, start, array) for each piece, together; each part once, by the process that has replica 0.

        An array may lack leading dims of size 1. What was written before is waited for first.
        """
        self.finish()
        transaction, futures = ts.Transaction(atomic=True), []
        for name, start, array in pieces:
            store = self._stores[name].with_transaction(transaction)
            for shard in array.addressable_shards:
                if shard.replica_id == 0:
                    futures.append(store[_box(start, shard.index, array.shape)].write(
                        _unsqueezed(np.asarray(shard.data), len(start))))
        for future in futures:
            future.result()  # is copied
        self._pending = transaction.commit_async()

    def finish(self) -> None:
        """Waits until all that was written is in the files."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()


class PieceReader:
    """Reads pieces of the arrays of a complete checkpoint."""

    def __init__(self, folder: epath.Path, cache_bytes: int = 0):
        """folder: of its arrays. cache_bytes: of chunks that stay in memory, since more than one piece is in them."""
        self._folder, self._context = str(folder), ts.Context({"cache_pool": {"total_bytes_limit": cache_bytes}})
        self._stores: dict[str, Any] = {}

    def chunk_shape(self, name: str) -> tuple[int, ...]:
        """What of an array is read at once."""
        return tuple(self._store(name).chunk_layout.read_chunk.shape)

    def read(self, name: str, like: jax.ShapeDtypeStruct, start: tuple[int, ...]) -> list[tuple[Any, np.ndarray]]:
        """(device, its part) of the piece like `like` that begins at `start`, for each device of this process.

        Raises what TensorStore does where it cannot be read, DamagedCheckpointError where the array has another shape
        or dtype.
        """
        store, sharding = self._store(name), like.sharding
        shape = (*(1,) * (len(start) - len(like.shape)), *like.shape)
        if len(store.shape) != len(shape) or store.dtype.numpy_dtype != like.dtype or any(
                first + size > whole for first, size, whole in zip(start, shape, store.shape, strict=True)):
            raise DamagedCheckpointError(f"{name} is {store.dtype.numpy_dtype} {list(store.shape)} there")
        parts: dict[Any, Any] = {}
        where = {}
        for device, index in sharding.addressable_devices_indices_map(like.shape).items():  # type: ignore[union-attr]
            box = _box(start, index or (), like.shape)
            where[device] = key = tuple((each.start, each.stop) for each in box)
            if key not in parts:
                parts[key] = store[box].read()
        found = {key: future.result() for key, future in parts.items()}
        return [(device, found[key].reshape(found[key].shape[len(start) - len(like.shape):]))
                for device, key in where.items()]

    def _store(self, name: str) -> Any:
        if name not in self._stores:
            self._stores[name] = ts.open({
                "driver": "zarr3", "kvstore": _kvstore(self._folder, name), "recheck_cached_data": False,
                "recheck_cached_metadata": False, "fill_missing_data_reads": False}, open=True, read=True,
                context=self._context).result()
        return self._stores[name]


def joined(like: jax.ShapeDtypeStruct, parts: Sequence[tuple[Any, np.ndarray]]) -> jax.Array:
    """The array like `like` of what `PieceReader.read` returns."""
    # A copy for each device: JAX on CPU uses the memory of an array that it is given.
    arrays = [jax.device_put(np.array(part), device) for device, part in parts]
    sharding: Any = like.sharding
    return jax.make_array_from_single_device_arrays(like.shape, sharding, arrays)


def chunk_shape(part: tuple[int, ...], dtype: Any) -> tuple[int, ...]:
    """The chunks in which a device's part is written: its own shape, divided where that is larger than a chunk."""
    sizes = list(part)
    for dim in range(len(sizes)):
        while math.prod(sizes) * jnp.dtype(dtype).itemsize > MAX_CHUNK_BYTES and sizes[dim] > 1:
            sizes[dim] //= next(factor for factor in range(2, sizes[dim] + 1) if sizes[dim] % factor == 0)
    return tuple(sizes)


def _box(start: tuple[int, ...], index: Any, shape: tuple[int, ...]) -> tuple[slice, ...]:
    """Where the part `index` of a piece of `shape` at `start` is in its array."""
    lead = len(start) - len(shape)
    sizes = [each.indices(size)[:2] for each, size in zip((*index, *[slice(None)] * len(shape)), shape, strict=False)]
    return tuple(slice(first, first + 1) for first in start[:lead]) + tuple(
        slice(first + low, first + high) for first, (low, high) in zip(start[lead:], sizes, strict=True))


def _unsqueezed(part: np.ndarray, dims: int) -> np.ndarray:
    return part.reshape((*(1,) * (dims - part.ndim), *part.shape))


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
