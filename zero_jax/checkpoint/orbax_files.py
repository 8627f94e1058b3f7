"""What Orbax does not do: arrays written one after another into its files, and a log without its noise.

Orbax writes all arrays from devices that hold all of them. Each process's arrays are a TensorStore of their own
(`ocdbt.process_*`), and at the end Orbax merges all that there are: so that one more of them, of arrays that were
written here (`ArrayWriter`), is part of the checkpoint, in the format of any other. `ArraysAndLeaves` is the handler of
Orbax that has both saved as one.
"""

import contextlib
import gc
import json
import logging
import math
import re
import sys
import time
import traceback
import warnings
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts
from etils import epath
from orbax.checkpoint.experimental.v1 import handlers

INDEX = "_METADATA"
"""The file in which Orbax lists the arrays of a checkpoint."""

MAX_CHUNK_BYTES = 2**30
"""Bytes of a chunk, at most: what is read and decoded at once."""

_PROCESS = "ocdbt.process_"


class ArrayWriter:
    """Writes the shards of this process's devices."""

    def __init__(self, folder: epath.Path, likes: Mapping[str, jax.ShapeDtypeStruct]):
        """folder: of a checkpoint's arrays, before Orbax merges what is in it. likes: the arrays, sharded, by name."""
        where = str(folder / f"{_PROCESS}{jax.process_index()}leaves")
        specs = {name: _write_spec(where, name, like) for name, like in likes.items()}
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


def _kvstore(folder: str, name: str) -> dict[str, Any]:
    base = f"{folder.rstrip('/')}/"
    return {"driver": "ocdbt", "path": f"{name}/",
            "base": base if "://" in base else {"driver": "file", "path": base}}


def _write_spec(folder: str, name: str, like: jax.ShapeDtypeStruct) -> dict[str, Any]:
    """As Orbax 0.12 writes an array: its codecs, and the configuration of its store."""
    sharding: Any = like.sharding
    chunk = chunk_shape(sharding.shard_shape(like.shape), like.dtype)
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


class Leaves(Protocol):
    """Arrays that are written one by one. names: of those."""

    names: tuple[str, ...]

    def write(self, folder: Any) -> dict[str, Any]:
        """Writes them into the folder of a checkpoint's arrays, as `ArrayWriter` does; returns the manifest."""
        ...


class WithLeaves(NamedTuple):
    """What `ArraysAndLeaves` saves.

    arrays: in memory, at least one. names: of the others. write: called with the folder of the arrays, it writes these
    there, as `ArrayWriter` does, and returns when they are in the files.
    """

    arrays: Mapping[str, jax.Array]
    names: tuple[str, ...]
    write: Callable[[Any], None]


class ArraysAndLeaves:
    """Orbax's handler of arrays, and what is written one by one, before it merges the stores of processes."""

    async def save(self, directory: Any, checkpointable: WithLeaves) -> Awaitable[None]:
        """Returns when those are written; the arrays are, and both are merged, when the result is awaited."""
        checkpointable.write(await directory.await_creation())
        background = await handlers.PyTreeHandler().save(directory, dict(checkpointable.arrays))
        return self._indexed(directory, background, checkpointable)

    async def _indexed(self, directory: Any, background: Awaitable[None], checkpointable: WithLeaves) -> None:
        await background
        if jax.process_index() == 0:
            index = await directory.await_creation() / INDEX
            index.write_text(json.dumps(_with_names(json.loads(index.read_text()), checkpointable.names)))

    async def load(self, directory: Any, abstract_checkpointable: Any = None) -> Awaitable[Any]:
        """As Orbax's."""
        return await handlers.PyTreeHandler().load(directory, abstract_checkpointable)

    async def metadata(self, directory: Any) -> Any:
        """As Orbax's."""
        return await handlers.PyTreeHandler().metadata(directory)

    def is_handleable(self, checkpointable: Any) -> bool:
        """Whether it is what this saves."""
        return isinstance(checkpointable, WithLeaves)

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool:
        """Nothing is loaded by this."""
        return False


# A checkpoint says by the name of its handler how it is read: as any other is.
ArraysAndLeaves.__module__ = handlers.PyTreeHandler.__module__
ArraysAndLeaves.__qualname__ = handlers.PyTreeHandler.__qualname__


def _with_names(index: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """The list of arrays with `names`, each as those that Orbax has listed."""
    tree = index["tree_metadata"]
    like = next(iter(tree.values()))
    for name in names:
        tree[f"({name!r},)"] = {
            "key_metadata": [{**like["key_metadata"][0], "key": name}],
            "value_metadata": {key: value for key, value in like["value_metadata"].items() if key != "write_shape"}}
    return index | {"tree_metadata": dict(sorted(tree.items()))}


def is_not_raised_too(record: logging.LogRecord) -> bool:
    """False for the tracebacks that are logged of errors in Orbax's threads and tasks: `.result()` raises the first."""
    if "never retrieved" in record.getMessage() and record.exc_info:
        return not any("orbax" in frame.filename for frame in traceback.extract_tb(record.exc_info[2]))
    return "_SignalingThread.run() raised an exception" not in record.getMessage()


def log_no_raised() -> None:
    """Leaves out of the log, from now on, what `is_not_raised_too` is False for."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(is_not_raised_too)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppresses what Orbax's other concurrent reads print when one of them fails and its error is raised."""
    before = sys.unraisablehook
    log = logging.getLogger("asyncio")

    def hook(unraisable: Any) -> None:
        if not re.search("Event loop is closed|was never awaited", str(unraisable.exc_value)):
            before(unraisable)

    def keep(record: logging.LogRecord) -> bool:
        return "never retrieved" not in record.getMessage()

    sys.unraisablehook = hook
    log.addFilter(keep)
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:  # the coroutines of the reads live as long as the frames of the error
            traceback.clear_frames(cause.__traceback__)
            cause = cause.__cause__ or cause.__context__
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*was never awaited", RuntimeWarning)
            time.sleep(0.1)  # the other reads end in threads of their own
            gc.collect()
        raise
    finally:
        log.removeFilter(keep)
        sys.unraisablehook = before
