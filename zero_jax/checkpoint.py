"""Checkpoints of a run: saved at any stage on any mesh, restored at any other, bit for bit, or refused."""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any

import jax

from zero_jax import storage
from zero_jax.integrity import read_arrays, read_manifest, verify
from zero_jax.manifest import PARAMS, CheckpointError, DamagedCheckpointError, Manifest, check_fit, check_names
from zero_jax.portable import portable_of
from zero_jax.processes import all_or_none
from zero_jax.retention import LOG, Folder
from zero_jax.state import ZeroState
from zero_jax.step import ZeroTrainStep
from zero_jax.tree import merge

_PACKAGES = ("zero-jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


@dataclasses.dataclass(frozen=True)
class Restored:
    """What `Checkpoints.restore` gives: the state for the step, and what was saved with it.

    step: the checkpoint's number. data, config: as they were given to `save`. run: stage and mesh of the run that saved
    it. damaged: what was wrong with the later ones that `fallback` passed over.
    """

    state: ZeroState
    step: int
    data: Any
    config: Any
    run: Mapping[str, Any]
    damaged: tuple[str, ...]


class Checkpoints:
    """The checkpoints in a folder. In a run of several processes all of them call every method."""

    def __init__(self, path: str | Path, *, keep_last: int | None = 3, keep_every: int | None = None):
        """Nothing is read or made yet.

        Args:
          path: a folder of its own, local or what orbax can reach, as gs://bucket/folder.
          keep_last: how many of the newest good checkpoints stay when a newer one is complete; None: all of them.
          keep_every: checkpoints whose number is a multiple of this stay for good; None: none do.

        Raises ValueError for numbers below 1.
        """
        for name, value in (("keep_last", keep_last), ("keep_every", keep_every)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name}={value!r}: give an integer of at least 1, or None.")
        self._folder = Folder(path, keep_last, keep_every)
        self._saving: tuple[int, Any] | None = None

    def save(self, step: ZeroTrainStep, state: ZeroState, *, at: int | None = None, data: Any = None,
             config: Any = None, only_params: bool = False, wait: bool = False) -> int:
        """Saves `state`, which may be donated as soon as this returns; the files are written meanwhile.

        A checkpoint appears when it is complete, and only then are older ones removed, at the next call of `save`,
        `wait` or `close`. An error of the writing is raised there, too.

        Args:
          step: what made the state.
          state: every leaf is saved but the working copy of the parameters, which is made anew.
          at: the checkpoint's number. Default: the steps that `state` has taken.
          data: where in the data the run is, as `Batches.state()`; plain JSON.
          config: what the run was told; plain JSON.
          only_params: parameters, frozen ones and variables only, for `load_params`.
          wait: until the checkpoint is complete.

        Returns: the checkpoint's number. Raises CheckpointError if there is one of that number, and if the checkpoint
        before this one, or with `wait` this one, could not be written.
        """
        self.wait()
        portable = portable_of(step.layout())
        kind = "params" if only_params else "state"
        names = [name for name in portable.names if not only_params or name.split("/")[0] in PARAMS]
        check_names(names, "This state")
        number = int(state.step) if at is None else at
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < 2**53:
            raise ValueError(f"at={at!r} is no number of a checkpoint: give an integer from 0 on.")
        _check_json(data=data, config=config)
        arrays, digests = portable.pack(state, names)
        leaves = {name: dataclasses.replace(leaf, digest=digests[name])
                  for name, leaf in portable.leaves(names).items()}
        manifest = Manifest(number, kind, leaves, _run(step), data, config, _versions())
        try:
            self._folder.make_room(number)
            self._saving = number, storage.write(self._folder.at(number), arrays, manifest.to_json())
        except CheckpointError:
            raise
        except Exception as error:
            raise self._folder.unwritten(number, error) from error
        if wait:
            self.wait()
        return number

    def restore(self, step: ZeroTrainStep, batch: Any, *, at: int | None = None, fallback: bool = False,
                cast: bool = False, accept: Callable[[Manifest], None] | None = None) -> Restored:
        """The state of a checkpoint as `step` takes it, whatever stage and mesh it was saved at.

        The manifest is held against the step before any array is read, and every leaf's digest is computed anew after.

        Args:
          step: gives the layout; its model, optimizer and options must be those of the run that saved.
          batch: any batch for it, arrays or `jax.ShapeDtypeStruct`s.
          at: the checkpoint's number. Default: the latest.
          fallback: where a checkpoint is damaged, log so and take the one before it.
          cast: convert floating leaves that were saved in another dtype.
          accept: is shown the manifest before all else, and raises an error of its own if it is not what was expected.

        Raises CheckpointError where there is no checkpoint or one does not fit the step, with the leaf and both values;
        DamagedCheckpointError where a leaf or file is not as it was saved.
        """
        portable = portable_of(step.layout(batch))

        def attempt(path: Any, manifest: Manifest) -> ZeroState:
            if accept is not None:
                accept(manifest)
            wanted = portable.leaves(portable.names)
            check_fit(manifest, wanted, str(path), cast=cast)
            held = {name: manifest.leaves[name] for name in wanted}
            state, digests = portable.unpack(read_arrays(path, portable.abstract(held)), held)
            verify(path, held, digests)
            return state

        number, manifest, state, damaged = self._first_good(at, fallback, attempt)
        return Restored(state, number, manifest.data, manifest.config, manifest.run, damaged)

    def load_params(self, step: ZeroTrainStep, batch: Any, *, at: int | None = None, fallback: bool = False,
                    cast: bool = False) -> tuple[Any, Any]:
        """(parameters, variables) of a checkpoint of either kind in true shapes, in parts; nothing else is read.

        For a Linen model `model.apply({"params": parameters, **variables}, ...)`. Arguments and errors as `restore`.
        """
        portable = portable_of(step.layout(batch))
        names = [name for name in portable.names if name.split("/")[0] in PARAMS]

        def attempt(path: Any, manifest: Manifest) -> dict[str, Any]:
            wanted = portable.leaves(names)
            known = {name: leaf for name, leaf in manifest.leaves.items() if name.split("/")[0] in PARAMS}
            check_fit(dataclasses.replace(manifest, leaves=known), wanted, str(path), cast=cast)
            held = {name: manifest.leaves[name] for name in names}
            arrays, digests = portable.unpack_some(read_arrays(path, portable.abstract(held)), held)
            verify(path, held, digests)
            return arrays

        _, _, arrays, _ = self._first_good(at, fallback, attempt)
        params, frozen, variables = (portable.tree(arrays, kind) for kind in PARAMS)
        return merge(params, frozen), variables

    def steps(self) -> list[int]:
        """The numbers of the complete checkpoints that are not known to be damaged, in order."""
        return self._folder.steps()

    def latest(self) -> int | None:
        """The last of `steps`; None if there is none."""
        return next(reversed(self.steps()), None)

    def manifest(self, at: int | None = None) -> Manifest:
        """What the checkpoint `at` (default: the latest) holds; no array is read. Raises CheckpointError."""
        number = self._folder.existing(at)
        return all_or_none(lambda: read_manifest(self._folder.at(number)))

    def wait(self) -> None:
        """Waits for the checkpoint under way, if there is one, and then removes those that need not be kept.

        Raises CheckpointError if it could not be written; the ones before it are as they were.
        """
        if self._saving is None:
            return
        (number, response), self._saving = self._saving, None
        try:
            response.result()
        except Exception as error:
            raise self._folder.unwritten(number, error) from error
        self._folder.complete(number)

    def close(self) -> None:
        """As `wait`: call it at the end, or use the checkpoints in a `with` statement."""
        self.wait()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    def _first_good(self, at: int | None, fallback: bool, attempt: Any) -> tuple[int, Manifest, Any, tuple[str, ...]]:
        """(number, manifest, what `attempt(path, manifest)` gives, messages of the damaged ones before it)."""
        self.wait()
        folder, told = self._folder, []
        newest = folder.existing(at)
        for number in reversed([number for number in folder.steps() if number <= newest]):
            def one(number: int = number) -> tuple[Manifest, Any]:
                manifest = read_manifest(folder.at(number))
                return manifest, attempt(folder.at(number), manifest)

            try:
                manifest, result = all_or_none(one)
            except DamagedCheckpointError as error:
                folder.damaged[number] = str(error)
                if not fallback:
                    raise
                LOG.warning("%s The checkpoint before it is tried.", error)
                told.append(str(error))
            else:
                if told:
                    LOG.warning("Checkpoint %d of %s is restored instead of %d.", number, folder.path, newest)
                return number, manifest, result, tuple(told)
        raise DamagedCheckpointError(f"No checkpoint of {folder.path} is whole: {' '.join(told)}")


def _check_json(**values: Any) -> None:
    for name, value in values.items():
        try:
            same = json.loads(json.dumps(value, allow_nan=False)) == value
        except (TypeError, ValueError, RecursionError):
            same = False
        if not same:
            raise ValueError(f"{name}={value!r} is not plain JSON: give dicts with text as keys, lists, text, numbers.")


def _run(step: ZeroTrainStep) -> dict[str, Any]:
    mesh = step.mesh
    return {"stage": step.stage.number, "mesh": dict(mesh.shape), "devices": mesh.size,
            "platform": mesh.devices.flat[0].platform, "processes": jax.process_count()}


def _versions() -> dict[str, str]:
    def known(names: Iterable[str]) -> Iterable[tuple[str, str]]:
        for name in names:
            with contextlib.suppress(metadata.PackageNotFoundError):
                yield name, metadata.version(name)

    return dict(known(_PACKAGES))
