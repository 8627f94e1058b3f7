"""Checkpoints of a run: saved at any stage on any mesh, restored bit for bit at any other, or refused."""

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import jax

from zero_jax.arguments import check_path, whole
from zero_jax.checkpoint import orbax_store as storage
from zero_jax.checkpoint.integrity import proven, read_arrays, read_manifest, verify
from zero_jax.checkpoint.logical_state import LogicalState, logical_state_of
from zero_jax.checkpoint.manifest import (
    PARAMS,
    DamagedCheckpointError,
    Leaf,
    Manifest,
    check_adapters,
    check_fit,
    check_given,
    check_names,
    package_versions,
    run_of,
)
from zero_jax.checkpoint.orbax_files import ArrayWriter
from zero_jax.checkpoint.outer_params import OUTER, read_outer, slices_in
from zero_jax.checkpoint.retention import LOG, Folder
from zero_jax.distributed.agreement import all_or_none
from zero_jax.errors import UsageError
from zero_jax.offload.disk_leaves import in_arrays
from zero_jax.sharding.auto_axes import in_any_context
from zero_jax.state import ZeroState
from zero_jax.step.call_checks import check_state, check_step
from zero_jax.step.disk.records import chunks
from zero_jax.step.step import ZeroTrainStep
from zero_jax.tree import merge, named_leaves

Method = TypeVar("Method", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True)
class Restored:
    """What `Checkpoints.restore` returns: the state for the step, and what was saved with it.

    step: the checkpoint's number. data, config: as passed to `save`. run: stage and mesh of the run that saved it.
    damaged: what was wrong with the later checkpoints that `fallback` skipped.
    """

    state: ZeroState
    step: int
    data: Any
    config: Any
    run: Mapping[str, Any]
    damaged: tuple[str, ...]


def _one_at_a_time(method: Method) -> Method:
    """Makes threads that call the methods of one object wait for each other; under any `jax.set_mesh`."""
    @functools.wraps(method)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        with self._threads:
            return method(self, *args, **options)

    return cast(Method, in_any_context(call))


class Checkpoints:
    """The checkpoints in a folder. In a run of several processes all of them call every method.

    One run at a time saves to a folder: `save` and `lock` put a file <folder>.lock beside it, until `close`. A thread
    that calls a method waits until those of other threads have returned.
    """

    def __init__(self, path: str | Path, *, keep_last: int | None = 3, keep_every: int | None = None,
                 read_only: bool = False):
        """Nothing is read or written yet.

        Args:
          path: a folder for nothing else, local or gs://bucket/folder (with the extra gcs; as text, not as a Path).
          keep_last: how many of the intact checkpoints that were saved last stay when a newer one is complete; None:
            all of them. Those that `restore` has abandoned stay in addition, until as many have been saved since.
          keep_every: checkpoints whose number is a multiple of this are never removed; None: none are.
          read_only: nothing is written, so that `restore` does not roll back, and `save` raises ValueError.

        Raises UsageError for numbers below 1, and for an object store that does not work here, as s3://.
        """
        kept = [None if value is None else whole(name, value, 1) for name, value in (
            ("keep_last", keep_last), ("keep_every", keep_every))]
        check_path("Checkpoints: path", path)
        self._folder = Folder(path, *kept)
        self._read_only = read_only
        self._threads, self._process = self._folder.threads, os.getpid()
        self._saving: tuple[int, Any] | None = None

    @_one_at_a_time
    def lock(self) -> str:
        """Claims the folder before the first save, so that a second run is refused before it trains.

        Where the process that has it is dead, the folder is taken over, which the returned message says (`save` logs
        it); of a process on another host that is found out in 20 seconds. An object store has no lock, which the
        message says. Raises CheckpointError with host, process and time where it is alive.
        """
        return self._folder.lock()

    @_one_at_a_time
    def save(self, step: ZeroTrainStep, state: ZeroState, *, at: int | None = None, data: Any = None,
             config: Any = None, only_params: bool = False, wait: bool = False) -> int:
        """Saves `state`, which may be donated as soon as this returns: the files are written asynchronously.

        What of it is in files (`Offload(disk=...)`) is written before this returns, leaf by leaf.
        A checkpoint appears when it is complete. Only then are older ones removed, by the next call of `save`, `wait`
        or `close`, which also raises an error of the writing.

        Args:
          step: the step that `state` belongs to.
          state: every leaf is saved but the gathered compute parameters, which `restore` recomputes.
          at: the checkpoint's number. Default: the number of steps that `state` has taken.
          data: position in the data, as `Batches.state()`; plain JSON.
          config: the configuration of the run; plain JSON.
          only_params: save parameters (of slices the outer ones, too), frozen ones and variables, for `load_params`.
          wait: return when the checkpoint is complete.

        Returns: the checkpoint's number. Raises CheckpointError if a checkpoint of that number exists that is not
        abandoned, or a later one that this object did not save and that was not there when it restored; and if the one
        before this, or with `wait` this one, could not be written.
        """
        if self._read_only:
            raise UsageError(f"read_only=True and saves to {self._folder.path}: leave read_only out.")
        check_step(step, state)
        check_state(state, step.layout())
        all_or_none(self.wait)
        logical = logical_state_of(in_arrays(step.layout()))
        names = [name for name in logical.names if not only_params or name.split("/")[0] in PARAMS or OUTER in name]
        check_names(names, "This state")
        number = int(state.step) if at is None else whole("at", at, 0)
        if number >= 2**53:
            raise UsageError(f"at={number} is not a checkpoint number: give one below 2^53.")
        check_given(step, data, config)
        manifest = Manifest(number, "params" if only_params else "state", logical.leaves(names), run_of(step), data,
                            config, package_versions())
        in_files, leaves = step.in_files(state), dict(named_leaves(state))
        arrays, digests = logical.from_leaves({name: leaves[name] for name in names if name in leaves})
        others = None if in_files is None else _LeavesToSave(logical, in_files, names, manifest, digests)
        try:
            if message := self._folder.lock():
                LOG.warning(message)
            place = self._folder.prepare(number)
        except UsageError:
            raise
        except Exception as error:
            raise self._folder.unwritten(number, error) from error
        try:  # with the leaves that are in files, of which there may be CheckpointErrors, too
            self._saving = number, self._folder.begin(lambda: storage.write(
                self._folder.at(number), arrays, manifest.to_json(digests), place, others))
        except Exception as error:
            raise self._folder.unwritten(number, error) from error
        if wait:
            self.wait()
        return number

    @_one_at_a_time
    def restore(self, step: ZeroTrainStep, batch: Any, *, at: int | None = None, fallback: bool = False,
                cast: bool = False, accept: Callable[[Manifest], None] | None = None) -> Restored:
        """The state of a checkpoint in the layout of `step`, whatever stage and mesh it was saved at.

        The manifest is compared with the step before any array is read, and every leaf's digest is verified afterwards.
        To restore an earlier one than the latest is to roll back: it becomes the latest, also for later runs, and what
        does not lead up to it is abandoned. To abandon nothing, use `Checkpoints(path, read_only=True)`.

        Args:
          step: gives the layout; its model, optimizer and options must be those of the run that saved.
          batch: any batch for it, arrays or `jax.ShapeDtypeStruct`s.
          at: the checkpoint's number. Default: the latest.
          fallback: where a checkpoint is damaged, log it and restore the one that was saved before it. Nothing is
            written by that; a save that follows continues from what was restored.
          cast: convert floating leaves that were saved in another dtype.
          accept: called with the manifest first of all; it raises an error if this is not the expected checkpoint.

        Raises CheckpointError where there is no checkpoint, it does not fit the step (with the leaf and both values),
        or it cannot be read, after some tries: that is no damage. DamagedCheckpointError where a file is gone or a
        checksum or parser says that a leaf or file is not as it was saved.
        """
        check_step(step)
        logical = logical_state_of(in_arrays(step.layout(batch)))

        def attempt(path: Any, manifest: Manifest) -> ZeroState:
            if accept is not None:
                accept(manifest)
            wanted = logical.leaves(logical.names)
            check_fit(manifest, wanted, str(path), cast=cast)
            check_adapters(step, manifest, str(path))
            saved = {name: manifest.leaves[name] for name in wanted}
            if step.layout().disk:
                return step.from_leaves(_LeavesOfCheckpoint(logical, path, saved))
            state, digests = logical.to_step(read_arrays(path, logical.abstract(saved)), saved)
            verify(path, saved, digests)
            return state

        number, manifest, state, damaged = self._first_good(at, fallback, attempt)
        if not self._read_only:
            self._folder.note_restored(number, is_wanted=number == at)
        return Restored(state, number, manifest.data, manifest.config, manifest.run, damaged)

    @_one_at_a_time
    def load_params(self, step: ZeroTrainStep, batch: Any, *, at: int | None = None, fallback: bool = False,
                    cast: bool = False) -> tuple[Any, Any]:
        """(parameters, variables) of a checkpoint of either kind, in logical shapes and sharded; nothing else is read.

        For a Linen model `model.apply({"params": parameters, **variables}, ...)`. Arguments and errors as `restore`.
        Of slices that train by themselves (DiLoCo) it is the outer parameters, whatever number of slices there were,
        and the means of their variables.
        """
        check_step(step)
        layout = in_arrays(step.layout(batch))
        logical = logical_state_of(layout)
        names = [name for name in logical.names if name.split("/")[0] in PARAMS]

        def attempt(path: Any, manifest: Manifest) -> dict[str, Any]:
            if (num_slices := slices_in(manifest)) is not None:
                return read_outer(path, manifest, layout.one_slice or layout, num_slices, cast=cast)
            wanted = logical.leaves(names)
            known = {name: leaf for name, leaf in manifest.leaves.items() if name.split("/")[0] in PARAMS}
            check_fit(dataclasses.replace(manifest, leaves=known), wanted, str(path), cast=cast)
            check_adapters(step, manifest, str(path))
            saved = {name: manifest.leaves[name] for name in names}
            arrays, digests = logical.to_leaves(read_arrays(path, logical.abstract(saved)), saved, store=False)
            verify(path, saved, digests)
            return arrays

        _, _, arrays, _ = self._first_good(at, fallback, attempt)
        params, frozen, variables = (logical.tree(arrays, kind) for kind in PARAMS)
        return merge(params, frozen), variables

    def steps(self) -> list[int]:
        """The numbers of the complete checkpoints that are not known to be damaged, ascending."""
        return self._folder.steps()

    def latest(self) -> int | None:
        """The one of `steps()` that was saved or restored last; None if there is none."""
        return self._folder.latest()

    def heads(self) -> list[tuple[int, int] | None]:
        """What `LocalCopies` needs to know of the latest checkpoint and of the one being saved."""
        return self._folder.heads()

    def manifest(self, at: int | None = None) -> Manifest:
        """The manifest of the checkpoint `at` (default: the latest); no array is read. Raises CheckpointError."""
        number = self._folder.candidates(at)[0]
        return proven(lambda: read_manifest(self._folder.at(number)), self._folder.at(number))

    @_one_at_a_time
    def wait(self) -> None:
        """Waits for the checkpoint that is being written, if any, and then removes those that need not stay.

        Raises CheckpointError if it could not be written; the ones before it are unchanged.
        """
        if self._saving is None or os.getpid() != self._process:  # a forked child has none of the threads that write
            return
        (number, response), self._saving = self._saving, None
        try:
            self._folder.finish(response)
        except Exception as error:
            raise self._folder.unwritten(number, error) from error
        self._folder.complete(number)

    @_one_at_a_time
    def close(self) -> None:
        """`wait`, and gives the folder back: call it at the end, or use the object in a `with` statement."""
        try:
            self.wait()
        finally:
            self._folder.unlock()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _first_good(self, at: int | None, fallback: bool, attempt: Any) -> tuple[int, Manifest, Any, tuple[str, ...]]:
        """(number, manifest, result of `attempt(path, manifest)`, messages of the damaged ones that were skipped)."""
        all_or_none(self.wait)
        folder, messages = self._folder, []
        candidates = folder.candidates(at)
        for number in candidates:
            path = folder.at(number)
            try:  # the attempt has collectives: no process is in it while another cannot read the manifest
                manifest = proven(functools.partial(read_manifest, path), path)
                result = proven(functools.partial(attempt, path, manifest), path)
            except DamagedCheckpointError as error:
                folder.damaged[number] = str(error)
                if not fallback:
                    raise
                LOG.warning("%s The checkpoint before it is tried.", error)
                messages.append(str(error))
            else:
                if at is None:
                    messages += folder.emptied(number)
                if messages:
                    LOG.warning("Checkpoint %d of %s is restored instead of %d.", number, folder.path, candidates[0])
                return number, manifest, result, tuple(messages)
        raise DamagedCheckpointError(f"No checkpoint of {folder.path} is intact: {' '.join(messages)}")


class _LeavesToSave:
    """The leaves in files of a state, for `orbax_store.write`, saved one by one: the whole of them is in no memory.

    names: of those with elements.
    """

    def __init__(self, logical: LogicalState, files: Any, names: Sequence[str], manifest: Manifest,
                 digests: dict[str, str]):
        """files: as `step.in_files` returns them. names: of what is to be saved, in memory or in files.

        digests: by name, those of leaves in memory, when `write` is called.
        """
        self._logical, self._files, self._manifest, self._digests = logical, files, manifest, digests
        self._names = sorted(files.layout.disk.intersection(names))
        self._likes = logical.abstract(logical.leaves(self._names))
        self.names = tuple(self._likes)

    def write(self, folder: Any) -> dict[str, Any]:
        """Writes them, and returns the manifest. Every process calls this."""
        writer = all_or_none(lambda: ArrayWriter(folder, self._likes))
        # Some at a time, which take no more of a device than the largest of them.
        for names in chunks(self._names, {name: self._files.leaves[name].like for name in self._names}):
            leaves, arrays = self._files.read_leaves(names), dict[str, jax.Array]()
            for name in names:
                saved, digests = self._logical.from_leaves({name: leaves.pop(name)})
                arrays |= saved
                self._digests |= digests
            all_or_none(lambda arrays=arrays: writer.write(arrays))
        all_or_none(writer.finish)
        return self._manifest.to_json(self._digests)


class _LeavesOfCheckpoint:
    """A checkpoint's leaves as a step stores them; `step.from_leaves` reads them, one by one where they go to files."""

    def __init__(self, logical: LogicalState, path: Any, saved: Mapping[str, Leaf]):
        """saved: the leaves by the manifest. Nothing is read yet."""
        self._logical, self._path, self._saved = logical, path, saved
        self._digests: dict[str, str] = {}

    def leaves(self, names: Sequence[str]) -> dict[str, Any]:
        """The leaves `names`, together."""
        saved = {name: self._saved[name] for name in names}
        leaves, digests = self._logical.to_leaves(read_arrays(self._path, self._logical.abstract(saved)), saved)
        self._digests |= digests
        return leaves

    def check(self) -> None:
        """Raises DamagedCheckpointError unless all that was read has the digests that were saved."""
        verify(self._path, self._saved, self._digests)
