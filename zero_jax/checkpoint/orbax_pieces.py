"""Arrays that Orbax saves beside others that are written one by one: a handler of Orbax that has both saved as one."""

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
from orbax.checkpoint.experimental.v1 import handlers

INDEX = "_METADATA"
"""The file in which Orbax lists the arrays of a checkpoint."""


class Pieces(Protocol):
    """Arrays that are written one by one. names: of those."""

    names: tuple[str, ...]

    def write(self, folder: Any) -> dict[str, Any]:
        """Writes them into the folder of a checkpoint's arrays, as `ArrayWriter` does; returns the manifest."""
        ...


class WithPieces(NamedTuple):
    """What `ArraysAndPieces` saves.

    arrays: in memory, at least one. names: of the others. write: called with the folder of the arrays, it writes these
    there, as `ArrayWriter` does, and returns when they are in the files.
    """

    arrays: Mapping[str, jax.Array]
    names: tuple[str, ...]
    write: Callable[[Any], None]


class ArraysAndPieces:
    """Orbax's handler of arrays, and what is written one by one beside it, before it merges the stores of processes."""

    async def save(self, directory: Any, checkpointable: WithPieces) -> Awaitable[None]:
        """Returns when those are written; the arrays are, and both are merged, when the result is awaited."""
        checkpointable.write(await directory.await_creation())
        background = await handlers.PyTreeHandler().save(directory, dict(checkpointable.arrays))
        return self._indexed(directory, background, checkpointable)

    async def _indexed(self, directory: Any, background: Awaitable[None], checkpointable: WithPieces) -> None:
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
        return isinstance(checkpointable, WithPieces)

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool:
        """Nothing is loaded by this."""
        return False


# A checkpoint says by the name of its handler how it is read: as any other is.
ArraysAndPieces.__module__ = handlers.PyTreeHandler.__module__
ArraysAndPieces.__qualname__ = handlers.PyTreeHandler.__qualname__


def _with_names(index: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """The list of arrays with `names`, each as those that Orbax has listed."""
    tree = index["tree_metadata"]
    like = next(iter(tree.values()))
    for name in names:
        tree[f"({name!r},)"] = {
            "key_metadata": [{**like["key_metadata"][0], "key": name}],
            "value_metadata": {key: value for key, value in like["value_metadata"].items() if key != "write_shape"}}
    return index | {"tree_metadata": dict(sorted(tree.items()))}
