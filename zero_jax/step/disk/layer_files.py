"""What a program that runs layer by layer reads from files and writes there: parameters and gradients."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np

from zero_jax.disk.records import Record
from zero_jax.step.disk.layer_gradients import LayerGradients
from zero_jax.step.disk.leaf import StoredLeaf, layer_of
from zero_jax.step.disk.states import DiskStates


class LayerFiles:
    """The layers of one step's parameters, as they are committed, and of its gradients."""

    def __init__(self, states: DiskStates, gradients: LayerGradients | None):
        """gradients: None where they stay on the devices."""
        self._states, self.gradients = states, gradients
        self._parts = {name: StoredLeaf(layer_of(states.leaves[name].like)) for name in states.records.layers}

    @contextlib.contextmanager
    def opened(self, folder: Path) -> Iterator[None]:
        """In it, layers can be read and written; at its end all that was written is in the file."""
        if self.gradients is None:
            yield
            return
        with self.gradients.file.opened(folder):
            yield
            self.gradients.file.streaming.finish()

    @contextlib.contextmanager
    def read(self, names: Sequence[str], order: Sequence[int]) -> Iterator[Callable[[], dict[str, jax.Array]]]:
        """In it, the parts of the leaves `names` of the layers `order`, one layer at each call, read a layer ahead."""
        if not names:
            yield dict
            return
        of_layer = [[(name, record) for name in dict.fromkeys(names)
                     for record in self._states.records.layers[name][index]] for index in order]

        def use(record: Record, buffer: memoryview) -> list[np.ndarray]:
            return [np.array(part.view(buffer)[0]) for part in record.parts]

        records = [record for layer in of_layer for _, record in layer]
        ahead = len(of_layer[0]) + 1
        with self._states.streaming.read(records, use, ahead=ahead) as blocks:
            layers = iter(of_layer)

            def fetched() -> dict[str, jax.Array]:
                parts: dict[str, list[list[np.ndarray]]] = {}
                for name, _ in next(layers):
                    parts.setdefault(name, []).append(next(blocks))
                return {name: self._joined(name, each) for name, each in parts.items()}

            yield fetched

    def _joined(self, name: str, blocks: Sequence[Sequence[np.ndarray]]) -> jax.Array:
        """The layer of a leaf from its blocks, each of every shard."""
        return self._parts[name].array([shards[0] if len(shards) == 1 else np.concatenate(shards)
                                        for shards in zip(*blocks, strict=True)])

    def write(self, parts: Mapping[str, jax.Array], index: int) -> None:
        """Writes the gradients of layer `index`, by the name of the parameter."""
        assert self.gradients is not None or not parts
        for name, part in parts.items():
            self.gradients.write(name, index, part)  # type: ignore[union-attr]

    def close(self) -> None:
        """Gives the space of the gradients back."""
        if self.gradients is not None:
            self.gradients.file.close()
