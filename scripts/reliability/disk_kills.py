"""Kills runs whose states are in files, tears what they write, and looks at what is left.

    python scripts/reliability/disk_kills.py                 # 200 kills, 200 torn files, 8 kills of whole train steps
    python scripts/reliability/disk_kills.py --kills 20 --torn 20 --train-kills 0
    python scripts/reliability/disk_kills.py --kills 0 --torn 0 --train-kills 0 --process-kills 40 --folder /dev/shm

A kill: a process commits generation after generation of records whose every byte follows from the generation, through
the same threads and buffers as a step, until SIGKILL at a random moment. The next one resumes: what it finds must be a
committed generation, whole, not older than the last one that was reported, and goes on from there.

A torn file: of two committed generations a random range of a random file is overwritten, cut off or zeroed, as a power
loss may leave it. The newest generation that is whole must be found; where both are damaged, an error must say so.

A kill of train steps: `make_zero_train_step(offload=Offload(disk=...))` in a process, killed at a random moment and
resumed with `stored_state`; every loss, and the state at the end, must be bitwise those of a run that was not killed.

A kill of one of two processes of `train --offload disk`, while it starts, resumes, trains or commits. Then the other is
ended and both start again with --resume, as `launch --restarts` does it. Each time the run must go on from the last
step in the log, or the next, and its losses and last checkpoint must be bitwise those of a run that was not killed.
Exits 1 on any fault.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from zero_jax.disk.generations import Generations
from zero_jax.disk.record_file import RecordLayout, aligned_buffer
from zero_jax.disk.streaming import Streaming
from zero_jax.distributed.launch import COORDINATOR, LAUNCHER, LOCAL_DEVICES, NUM_PROCESSES, PROCESS_ID, _free_port
from zero_jax.errors import CheckpointError, DamagedCheckpointError

ROOT = Path(__file__).parents[2]
RECORDS, ELEMENTS = 12, 40_000


def layout():
    """Some records of two leaves, and one that is written once."""
    records = RecordLayout()
    for number in range(RECORDS):
        records.add([(f"leaf{number}/mu", 0, (0,), (ELEMENTS,), "uint32"),
                     (f"leaf{number}/nu", 0, (0,), (ELEMENTS + number,), "uint32")])
    records.add([("frozen", 0, (0,), (1000,), "uint32")], once=True)
    return records


def value(record, generation):
    """What every element of a record is in a generation."""
    return np.uint32(record.number * 7919 + (0 if record.once else generation * 104_729))


def fill_with(generation):
    def fill(record, buffer):
        for part in record.parts:
            part.view(buffer)[...] = value(record, generation)

    return fill


def resumed(generations):
    """The generation that is found, of which every element was looked at; 0 of an empty folder."""
    generations.lock()
    for commit in generations.found():
        try:
            generations.resume(commit, random.getrandbits(32), aligned_buffer(generations.layout.largest))
        except DamagedCheckpointError:
            continue
        buffer = aligned_buffer(generations.layout.largest)
        for record in generations.layout.records:
            generations.read(record, buffer)
            for part in record.parts:
                assert (part.view(buffer) == value(record, commit.generation)).all(), f"{part.leaf} is mixed"
        return commit.generation
    if generations.found():
        raise DamagedCheckpointError("none is whole")
    generations.create(random.getrandbits(32))
    return 0


def commit_next(streaming, generation):
    """Commits a generation through the ring, reading the last one meanwhile, as a step does."""
    generations = streaming.files
    records = generations.layout.records
    if generations.committed is None:
        for record in records:
            streaming.write(record, fill_with(generation))
    else:
        with streaming.read(records, lambda record, buffer: int(record.parts[0].view(buffer)[0])) as ahead:
            for record, first in zip(records, ahead, strict=True):
                assert first == value(record, generation - 1)
                streaming.write(record, fill_with(generation))
    streaming.finish()
    generations.commit(generation)


def committing(folder, unlike):
    """The child: commits until it is killed, and reports each generation after its commit.

    unlike: as a control, commits say other checksums than the data have.
    """
    print("started", flush=True)
    generations = Generations(folder, layout())
    found = resumed(generations)
    print("found", found, flush=True)
    commit = generations.commit

    def commit_unlike(generation):
        generations._written = dict.fromkeys(generations._written, 0)
        return commit(generation)

    if unlike:
        generations.commit = commit_unlike
    streaming = Streaming(generations)
    while True:
        found += 1
        commit_next(streaming, found)
        print(found, flush=True)


def kill(folder, seconds, unlike):
    """The lines of a child that was killed `seconds` after it had started."""
    with subprocess.Popen([sys.executable, __file__, "--commit-in", str(folder), *["--unlike"] * unlike],
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "started\n"
        time.sleep(seconds)
        child.kill()
        lines = child.stdout.read().splitlines()
        if errors := child.stderr.read().splitlines():
            lines.append("error " + " | ".join(errors))
    return lines


def kills(folder, count, seed, unlike=False):
    """Faults of `count` kills of processes that go on from each other, and how often each was inside of a commit."""
    rng, faults, last, inside = random.Random(seed), [], 0, 0
    for number in range(count):
        lines = kill(folder, rng.uniform(0.02, 0.4), unlike)
        if any(line.startswith("error") for line in lines):
            faults.append(f"kill {number}: {lines[-1][:600]}")
        found = next((int(line.split()[1]) for line in lines if line.startswith("found")), None)
        if found is not None and found < last:
            faults.append(f"kill {number}: generation {found} was found, and {last} was committed")
        inside += found is not None and found > last  # it was killed after a commit, and before it could tell
        last = max([last, *(int(line) for line in lines if line.isdigit())])
    return faults, last, inside


def damage(path, rng):
    """Overwrites, zeroes or cuts off a random range of a file; returns what was done."""
    size = path.stat().st_size
    start, length = rng.randrange(size), rng.randrange(1, 20_000)
    how = rng.choice(["garbage", "zeros", "cut", "flip"])
    with path.open("r+b") as file:
        if how == "cut":
            file.truncate(start)
        else:
            file.seek(start)
            old = file.read(length)
            new = {"garbage": rng.randbytes(len(old)), "zeros": bytes(len(old)),
                   "flip": bytes([old[0] ^ 1 << rng.randrange(8)]) + old[1:]}[how]
            file.seek(start)
            file.write(new)
            if new == old:
                how = "nothing"
    return how


def torn(folder, count, seed, verify=True):
    """Faults of `count` damages of committed files; verify=False leaves checksums out, as a control."""
    rng, faults = random.Random(seed), []
    original = Path(folder) / "original"
    streaming = Streaming(Generations(original, layout()))
    resumed(streaming.files)
    for generation in (1, 2, 3):
        commit_next(streaming, generation)
    streaming.close()
    for number in range(count):
        copy = Path(folder) / "copy"
        shutil.copytree(original, copy)
        files = rng.sample(["generation-0.bin", "generation-1.bin", "commit-0.json", "commit-1.json"],
                           rng.choice([1, 1, 1, 2]))
        done = {name: damage(copy / "process-00000-of-00001" / name, rng) for name in files}
        slots = {int(name.split(".")[0][-1]) for name, how in done.items() if how != "nothing"}
        wanted = next((generation for generation in (3, 2) if generation % 2 not in slots), None)
        generations = Generations(copy, layout())
        if not verify:
            generations._verified = lambda *args: None
        try:
            found = resumed(generations)
        except AssertionError as error:
            faults.append(f"torn {number} {done}: {error}")
        except CheckpointError:
            if wanted is not None:
                faults.append(f"torn {number} {done}: no generation was found, and {wanted} is whole")
        else:
            if wanted is None and found or wanted is not None and found != wanted:
                faults.append(f"torn {number} {done}: generation {found} was found, and {wanted} is the newest whole")
        generations.close()
        shutil.rmtree(copy)
    return faults


def train(folder, steps, report=None):
    """Losses by step, and a digest of the last state, of a run in `folder` that goes on from what is there."""
    import hashlib

    import flax.linen as nn
    import jax
    import optax

    import zero_jax
    from zero_jax.sharding.mesh import simulate_local
    from zero_jax.tree import named_leaves

    simulate_local(2)
    step = zero_jax.make_zero_train_step(
        nn.Sequential([nn.Embed(61, 64), nn.Dense(67), nn.gelu, nn.Dense(61)]), 2, optimizer=optax.adamw(1e-3),
        precision="bf16", ema=0.9, offload=zero_jax.Offload(disk=folder, buffer_bytes=2**16))
    keys = jax.random.split(jax.random.key(1), steps)
    batches = [{name: jax.random.randint(jax.random.fold_in(key, at), (8, 8), 0, 61)
                for at, name in enumerate(("inputs", "targets"))} for key in keys]
    try:
        state = step.stored_state(batches[0])
    except CheckpointError as error:
        if "no committed state" not in str(error):
            raise
        state = step.init(jax.random.key(0), batches[0])
    for batch in batches[int(state.step):]:
        state, metrics = step(state, batch)
        line = f"{int(state.step)} {float(metrics['loss']).hex()}"
        print(line, flush=True) if report is None else report(line)
    digest = hashlib.sha256()
    for name, leaf in named_leaves(step.in_memory(state)[0]):
        plain = jax.random.key_data(leaf) if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        digest.update(name.encode() + np.asarray(plain).tobytes())
    print("digest", digest.hexdigest(), flush=True)


def run_training(folder, steps, seconds=None):
    """The lines of a run in a process of its own, killed after `seconds` of steps where given."""
    lines = []
    with subprocess.Popen([sys.executable, __file__, "--train-in", str(folder), "--steps", str(steps)],
                          stdout=subprocess.PIPE, text=True) as process:
        if seconds is not None:
            lines.append(process.stdout.readline().strip())
            time.sleep(seconds)
            process.kill()
        lines += process.stdout.read().splitlines()
    return [line for line in lines if line]


def train_kills(folder, count, seed, steps=30):
    """Faults of runs that are killed `count` times in all, beside one that is not."""
    rng, faults = random.Random(seed), []
    wanted = run_training(Path(folder) / "whole", steps)
    losses, lines, digest = {}, [], ""
    for number in range(count + 1):
        lines = run_training(Path(folder) / "killed", steps, rng.uniform(0.0, 0.5) if number < count else None)
        for line in lines:
            step, _, loss = line.partition(" ")
            if step == "digest":
                digest = line
            elif step.isdigit() and losses.setdefault(step, loss) != loss:
                faults.append(f"run {number}: the loss of step {step} is another one")
    for line in wanted:
        step, _, loss = line.partition(" ")
        if step.isdigit() and losses.get(step, loss) != loss:
            faults.append(f"the loss of step {step} is another one than without kills")
    if digest != wanted[-1]:
        faults.append(f"the last state is another one: {digest} and not {wanted[-1]}")
    return faults


class TwoProcesses:
    """Two processes of one `zero_jax train --offload disk`, forked from this one, which has no JAX backend yet."""

    def __init__(self, out, steps, *, resume=False):
        out.mkdir(parents=True, exist_ok=True)
        variables = {COORDINATOR: f"127.0.0.1:{_free_port()}", NUM_PROCESSES: "2", LOCAL_DEVICES: "1",
                     LAUNCHER: str(os.getpid()), "COLUMNS": "1000"}
        args = ["train", "--model", "support.pairs:small", "--batch-size", "4", "--seq-len", "16", "--max-bytes",
                "20000", "--samples", "0", "--steps", str(steps), "--save-every", "7", "--eval-every", str(steps),
                "--no-html", "--stage", "1", "--offload", "disk", "--offload-disk", str(out / "states"), "--out",
                str(out / "run"), "--heartbeat", "10", *["--resume"] * resume]
        self.running = {}
        for number in (0, 1):
            if pid := os.fork():
                self.running[number] = pid
                continue
            try:
                os.environ |= variables | {PROCESS_ID: str(number)}
                descriptor = os.open(out / f"output{number}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                for stream in (1, 2):
                    os.dup2(descriptor, stream)
                from zero_jax.cli.main import main

                os._exit(main(args))
            finally:
                os._exit(70)

    def ended(self):
        """The numbers of those that have ended since this was asked last."""
        numbers = []
        for number, pid in list(self.running.items()):
            if os.waitpid(pid, os.WNOHANG)[0]:
                del self.running[number]
                numbers.append(number)
        return numbers

    def kill(self, numbers=(0, 1)):
        """SIGKILL to those that run; returns when they are gone."""
        for number in numbers:
            if number in self.running:
                os.kill(self.running[number], signal.SIGKILL)
                os.waitpid(self.running.pop(number), 0)


def logged(out):
    """Losses by step in the log of a run."""
    path = out / "run/train.jsonl"
    text = path.read_text() if path.exists() else ""
    rows = [json.loads(line) for line in text[:text.rfind("\n") + 1].splitlines()]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def last_digests(out, steps):
    """Of the leaves of the last checkpoint."""
    manifest = json.loads((out / f"run/checkpoints/{steps}/manifest/data.json").read_text())["manifest"]
    return {name: leaf["digest"] for name, leaf in manifest["leaves"].items()}


def resumed_after(out):
    """After which step each start of a run went on, 0 for the beginning."""
    lines = (out / "output0").read_text().splitlines()
    return [0 if "starts from the beginning" in line else int(line.split("after step ")[1].split()[0])
            for line in lines if line.startswith("Resumed after step") or "starts from the beginning" in line]


def process_kills(folder, count, seed, forget=False):
    """(faults, number of kills that were right) of a run of two processes of which one is killed `count` times.

    forget: as a control, the states are removed after each kill, so that the run goes on from a checkpoint.
    """
    os.environ |= {"JAX_COMPILATION_CACHE_DIR": str(Path(folder) / "compiled"),
                   "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    os.chdir(ROOT / "tests")
    sys.path.insert(0, str(ROOT / "tests"))
    import zero_jax.cli.training.train  # noqa: F401  what all processes need, once

    rng, faults, right, steps, seconds = random.Random(seed), [], 0, 3 * count // 2 + 12, 400
    whole, killed = Path(folder) / "whole", Path(folder) / "killed"

    def wait(run, condition):
        """Whether `condition` comes true while both processes run."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not run.ended():
            if condition():
                return True
            time.sleep(0.01)
        return False

    def finish(run, out):
        end = time.monotonic() + seconds
        while time.monotonic() < end and run.running:
            run.ended()
            time.sleep(0.05)
        return bool(run.running) or max(logged(out), default=0) != steps

    unhurt, run, in_start, last = TwoProcesses(whole, steps), TwoProcesses(killed, steps), 0, 0
    for number in range(count):
        more = last + rng.randrange(3) // 2 + (not number)
        if in_start:  # the kill is within the start after the last one
            time.sleep(rng.uniform(0, 4))
        elif wait(run, lambda more=more: max(logged(killed), default=0) >= more):
            time.sleep(rng.uniform(0, 0.05))
        else:
            faults.append(f"kill {number}: the run ended or hung before: {(killed / 'output0').read_text()[-2000:]}")
            break
        first = rng.randrange(2)
        run.kill([first])
        time.sleep(rng.choice([0, 0, rng.uniform(0, 1)]))  # what the other one does meanwhile
        run.kill()
        last, starts, in_start = max(logged(killed), default=0), len(resumed_after(killed)), in_start + 1
        if forget:
            shutil.rmtree(killed / "states")
        run = TwoProcesses(killed, steps, resume=True)
        if rng.random() < 0.3 and number < count - 1:
            continue
        ready = wait(run, lambda starts=starts: len(resumed_after(killed)) > starts)
        if not ready or not last <= (found := resumed_after(killed)[-1]) <= last + 1:
            faults.append(f"kill {number}: the log ends with step {last}, and the run "
                          + (f"went on after step {found}" if ready else "did not go on"))
            if not ready:
                break
        else:
            right += in_start
        in_start = 0
        print(f"kill {number + 1}: {right} right", file=sys.stderr, flush=True)
    for each, out in ((run, killed), (unhurt, whole)):
        if finish(each, out):
            faults.append(f"the run {out.name} did not end: {(out / 'output0').read_text()[-2000:]}")
        each.kill()
    if logged(killed) != logged(whole) or len(logged(whole)) != steps:
        faults.append("the losses are others than without kills")
    elif last_digests(killed, steps) != last_digests(whole, steps):
        faults.append("the last state is another one than without kills")
    return faults, right


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--torn", type=int, default=200)
    parser.add_argument("--train-kills", type=int, default=8)
    parser.add_argument("--process-kills", type=int, default=0)
    parser.add_argument("--forget", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", help="on the disk to test; default: a temporary one")
    parser.add_argument("--commit-in", help=argparse.SUPPRESS)
    parser.add_argument("--unlike", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--train-in", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=30, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.commit_in:
        committing(options.commit_in, options.unlike)
    if options.train_in:
        train(options.train_in, options.steps)
        return 0
    folder = tempfile.mkdtemp(dir=options.folder)
    try:
        faults, last, inside = kills(Path(folder) / "kills", options.kills, options.seed)
        print(json.dumps({"kills": options.kills, "generations": last, "killed between commit and report": inside,
                          "faults": faults}), flush=True)
        torn_faults = torn(Path(folder) / "torn", options.torn, options.seed)
        print(json.dumps({"torn": options.torn, "faults": torn_faults}), flush=True)
        train_faults = train_kills(Path(folder) / "train", options.train_kills, options.seed) if (
            options.train_kills) else []
        print(json.dumps({"kills of train steps": options.train_kills, "faults": train_faults}), flush=True)
        process_faults, right = process_kills(Path(folder) / "processes", options.process_kills, options.seed,
                                              options.forget) if options.process_kills else ([], 0)
        print(json.dumps({"kills of one of two processes": options.process_kills, "right": right,
                          "faults": process_faults}), flush=True)
    finally:
        shutil.rmtree(folder)
    return 1 if faults or torn_faults or train_faults or process_faults else 0


if __name__ == "__main__":
    sys.exit(main())
