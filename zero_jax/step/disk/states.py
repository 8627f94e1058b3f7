"""The state of training in files: how arrays get in and out, and which generation of them is taken.

A generation in the files is a whole state: the leaves that are only there, and a copy of every other one, which a step
writes and does not read, so that a run that was killed goes on from the files alone.
"""

import collections
import contextlib
import functools
import itertools
import logging
import secrets
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from zero_jax.disk.generations import Commit, Generations, check_processes, process_folder, read_commits
from zero_jax.disk.record_file import Record
from zero_jax.disk.streaming import Streaming
from zero_jax.distributed.agreement import all_or_none, broadcast_from_first, gather
from zero_jax.errors import CheckpointError, DamagedCheckpointError, UsageError
from zero_jax.layout.layout import Layout
from zero_jax.state import ZeroState
from zero_jax.step.disk.records import StateRecords, resharded
from zero_jax.step.disk.update import Before, UpdatePlan
from zero_jax.step.update import Updated
from zero_jax.tree import named_leaves

LOG = logging.getLogger("zero_jax")


class DiskStates:
    """The states of one layout in a folder."""

    def __init__(self, layout: Layout, plan: UpdatePlan, folder: Any):
        """plan: of the update, whose blocks the records follow."""
        self.layout, self.plan = layout, plan
        self.records = StateRecords(layout, plan)
        self.leaves, self.blocks = self.records.leaves, self.records.blocks
        self.generations = Generations(folder, self.records.layout, process=jax.process_index(),
                                       num_processes=jax.process_count())
        self.streaming = Streaming(self.generations)
        self.is_open = False

    @property
    def token(self) -> tuple[int, int] | None:
        """Of the generation that is committed."""
        committed = self.generations.committed
        return None if committed is None else committed.token

    def create(self, *, replaces: bool = False) -> str:
        """Makes the files for a new state; returns a message where the folder was that of a dead process.

        replaces: what the files have of the same model goes, as of a state that a checkpoint has.

        Raises UsageError where they have the state of another run, CheckpointError where the disk is too small.
        """
        with self._given_back_by_errors():
            message, folder = all_or_none(self.generations.lock), self.generations.path.parent
            if not self.is_open:
                commits = all_or_none(self.generations.found)
                if not replaces and (common := in_common(commits, self.generations.damaged, folder)):
                    raise UsageError(f"disk: {folder} already holds the state of a run, after step {common[0].step:,}: "
                                     "go on from it with step.stored_state(batch), or remove the folder, or name "
                                     "another one.")
            session, after = _session(), int(gather(np.array(self.generations.newest, np.uint32)).max())
            all_or_none(lambda: self.generations.create(session, after))
        self.is_open = True
        return message

    @contextlib.contextmanager
    def _given_back_by_errors(self) -> Iterator[None]:
        """At the end of the `with` by an error the folder is free again, if it was not open before."""
        try:
            yield
        except BaseException:
            if not self.is_open:
                self.generations.close()
            raise

    def resume(self) -> Commit:
        """Goes on from the newest generation that every process has, and has as it was written.

        Raises CheckpointError where there is none, DamagedCheckpointError where none is whole.
        """
        with self._given_back_by_errors(), self.streaming.buffer() as buffer:
            all_or_none(self.generations.lock)
            commits, folder = all_or_none(self.generations.found), self.generations.path.parent
            if not (common := in_common(commits, self.generations.damaged, folder)):
                raise CheckpointError(f"disk: {folder} holds no committed state: start with step.init, or restore a "
                                      "checkpoint.")
            messages, session = list(self.generations.damaged), _session()
            for commit in common:
                try:
                    all_or_none(functools.partial(self.generations.resume, commit, session, buffer))
                except DamagedCheckpointError as error:
                    messages.append(str(error))
                else:
                    self.is_open = True
                    for message in messages:
                        LOG.warning("%s The state after step %d is taken.", message, commit.step)
                    return commit
            raise DamagedCheckpointError(f"disk: no generation is whole: {' '.join(messages)} Restore a checkpoint.")

    def write_all(self, value_of: Callable[[str], Any], step: int, note: Any,
                  check: Callable[[], None] = lambda: None) -> Commit:
        """Commits a generation of `value_of(name)` for each leaf, asked for once, and dropped after its records.

        check: called before the commit, when all leaves in files were asked for; it raises where one was not right.
        """
        shards: dict[str, list[np.ndarray]] = {}

        def write(record: Record) -> None:
            for part in record.parts:
                if part.leaf not in shards:
                    shards[part.leaf] = self.leaves[part.leaf].shards(value_of(part.leaf))
            # What is waiting to be written keeps its arrays when the next ones are made.
            kept = {part.leaf: shards[part.leaf] for part in record.parts}

            def fill(record: Record, buffer: memoryview) -> None:
                for part in record.parts:
                    part.view(buffer)[...] = kept[part.leaf][part.shard][part.index]

            self.streaming.write(record, fill)

        with self.streaming.abandoned_by_errors():
            for _, blocks in itertools.groupby(self.blocks, lambda block: block.group):
                for block in blocks:
                    for record in block.writes:
                        write(record)
                self.streaming.finish()
                shards.clear()
            check()
            return self.finish(value_of, step, note)

    def read_leaves(self, names: Iterable[str]) -> dict[str, Any]:
        """The named leaves as arrays, on all processes or on none."""
        wanted = set(names)
        shards = {name: [np.empty(self.leaves[name].local, self.leaves[name].dtype) for _ in self.leaves[name].owners]
                  for name in wanted}
        flat = {name: [each.reshape(-1).view(np.uint8) for each in shards[name]] for name in wanted}
        whole = {record.number for record in self.records.others}

        def take(record: Record, buffer: memoryview) -> None:
            for part in record.parts:
                if part.leaf in wanted:
                    target = flat if record.number in whole else shards
                    target[part.leaf][part.shard][part.index] = part.view(buffer)

        records = [record for record in self.records.layout.records
                   if any(part.leaf in wanted for part in record.parts)]

        def read() -> None:
            with self.streaming.read(records, take) as ahead:
                collections.deque(ahead, 0)

        all_or_none(read)  # what follows has collectives
        flat.clear()
        likes = dict(named_leaves(self.layout.shardings))
        return {name: resharded(self.leaves[name].array(shards.pop(name)), likes[name]) for name in sorted(wanted)}

    def update(self, plan: UpdatePlan, state: ZeroState, before: Before) -> dict[int, Any]:
        """The results of the update that stay in memory, by number; the blocks of the next generation are written.

        A block is read while the one before is computed, and the last one written.

        What the update replaces of `state` is deleted.
        """
        layout, jaxpr = plan.layout, plan.closed.jaxpr
        values = dict(zip(plan.values, before.values, strict=True))
        fields = named_leaves(Updated(state.params, state.opt_state, state.ema,
                                      state.weights if layout.stage.shards_params else None))
        numbers = {name: number for number, name in enumerate(plan.names)}
        numbered = {number for unit in plan.units for number in plan.programs.buffers_of(unit)}
        for name, leaf in fields:
            number = numbers[name]
            sharding = NamedSharding(layout.mesh, plan.specs[number])
            if number in numbered and not leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
                leaf, whole = resharded(leaf, sharding), leaf
                jax.block_until_ready(leaf)
                whole.delete()
            values[jaxpr.invars[number]] = leaf
        buffers = {number: values.get(jaxpr.invars[number]) if number < len(plan.names) else _zeros(plan, number)
                   for number in sorted(numbered)}
        for number in numbered:
            if number < len(plan.names):
                del values[jaxpr.invars[number]]  # donated with each block
        with self.streaming.abandoned_by_errors(), self._read_blocks() as ahead:
            for block, stored in zip(self.blocks, ahead, strict=True):
                # Of this trace of the update, whose variables `values` has: `self.plan` is another.
                group = plan.groups[block.group]
                order = [plan.programs.buffers_of(unit) for unit in group.units]
                read = [[stored[plan.names[number]] for number in unit.stored] for unit in group.units]
                new, whole, blocks = plan.programs.run(
                    group, block.index, read, [[buffers[number] for number in each] for each in order], values)
                del stored, read
                for each, filled in zip(order, whole, strict=True):
                    buffers.update(zip(each, filled, strict=True))
                replaced = [plan.programs.replaced_of(unit) for unit in group.units]
                written = {plan.names[number]: value for numbers, filled in ((replaced, new), (order, blocks))
                           for of_unit, each in zip(numbers, filled, strict=True)
                           for number, value in zip(of_unit, each, strict=True) if number < len(plan.names)}
                for record in block.writes:
                    self.streaming.write(record, self._filler(written))
                del new, whole, blocks, written
        return {**before.results, **buffers}

    @contextlib.contextmanager
    def _read_blocks(self) -> Iterator[Iterator[dict[str, Any]]]:
        """In it, for each block of the update what it reads as arrays, by leaf, read ahead."""
        def use(record: Record, buffer: memoryview) -> dict[str, Any]:
            parts: dict[str, list[Any]] = {}
            for part in record.parts:
                parts.setdefault(part.leaf, []).append(part)
            return {leaf: self.leaves[leaf].array([part.view(buffer) for part in each],
                                                  self.leaves[leaf].block_shape(each[0].sizes))
                    for leaf, each in parts.items()}

        with self.streaming.read([block.reads for block in self.blocks if block.reads is not None], use) as ahead:
            yield ({} if block.reads is None else next(ahead) for block in self.blocks)

    def _filler(self, values: dict[str, Any]) -> Callable[[Record, memoryview], None]:
        """What copies those of the blocks `values`, by leaf, that a record has into its buffer; waits for them."""
        def fill(record: Record, buffer: memoryview) -> None:
            shards = {leaf: self.leaves[leaf].shards(values[leaf]) for leaf in dict.fromkeys(
                part.leaf for part in record.parts)}
            for part in record.parts:
                part.view(buffer)[...] = shards[part.leaf][part.shard]

        return fill

    def finish(self, value_of: Callable[[str], Any], step: int, note: Any) -> Commit:
        """Writes `value_of(name)` of each leaf that is in no block, and commits the next generation."""
        def fill(record: Record, buffer: memoryview) -> None:
            for part in record.parts:
                flat = np.ascontiguousarray(self.leaves[part.leaf].shards(value_of(part.leaf))[part.shard]).reshape(-1)
                part.view(buffer)[...] = flat.view(np.uint8)[part.index]

        for record in self.records.others:
            self.streaming.write(record, fill)
        self.streaming.finish()
        return self.generations.commit(step, note)

    def close(self) -> None:
        """Gives the folder back; what is committed stays there."""
        self.is_open = False
        self.streaming.close()


def _zeros(plan: UpdatePlan, number: int) -> jax.Array:
    out: Any = plan.closed.jaxpr.outvars[number].aval
    return jnp.zeros(out.shape, out.dtype, device=NamedSharding(plan.layout.mesh, plan.specs[number]))


def _session() -> int:
    return broadcast_from_first([secrets.randbits(32)])[0]


def newest_commit(folder: Any) -> Commit | None:
    """This process's commit of the newest generation that all have, by the records alone; all processes call this.

    None where no run has begun there. Raises as `in_common`.
    """
    process, count = jax.process_index(), jax.process_count()
    commits, damaged = all_or_none(lambda: read_commits(Path(folder) / process_folder(process, count)))
    return next(iter(in_common([commit for commit in commits if commit is not None], damaged, Path(folder))), None)


def in_common(commits: list[Commit], damaged: list[str], folder: Path) -> list[Commit]:
    """Those of the `commits` that all processes have, newest first; all call this. Empty where no run has begun.

    So it is, too, where some have the first generation and others none: a run was killed while it wrote that. damaged:
    what is wrong with this process's records. Raises DamagedCheckpointError where a run has begun and there is nothing
    in common, and CheckpointError where it was one of another number of processes.
    """
    rows = np.zeros((2, 2), np.uint32)
    for at, commit in enumerate(commits[:2]):
        rows[at] = commit.token
    everywhere = [{(int(session), int(generation)) for session, generation in each} for each in gather(rows)]

    def check() -> None:
        if damaged:
            raise DamagedCheckpointError(f"disk: {' '.join(damaged)[:-1]}, and no generation is whole: restore a "
                                         f"checkpoint, or remove {folder}.")
        if max(generation for each in everywhere for _, generation in each) > 1:
            raise DamagedCheckpointError(f"disk: {folder}: there is no generation that all {len(everywhere)} processes "
                                         "have: restore a checkpoint, or remove the folder.")
        check_processes(folder, len(everywhere))

    common = [commit for commit in commits if all(commit.token in each for each in everywhere)]
    if not common:
        all_or_none(check)
    return sorted(common, key=lambda commit: -commit.generation)
