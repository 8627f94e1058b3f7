"""`launch --restarts`: processes of a run are killed at random, and it ends as one that nothing interrupted.

    python scripts/reliability/elastic_test.py --runs 14 --kills 3       # 42 kills, half an hour on two cores

Runs are of 2 and 3 processes by turns. In every other one the process that is killed is gone for good, and its devices
with it (`--min-processes`). The losses and the checksums of the last checkpoint must be bitwise those of a run without
kills on the same device counts: one that is resumed from the same checkpoints on the devices that were left.
"""

import argparse
import dataclasses
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from zero_jax.distributed.launch import NUM_PROCESSES, PROCESS_ID

ROOT = Path(__file__).parents[2]
STEPS, EVERY, DEVICES = 240, 20, 2
"""Steps of a run, how often it saves, devices of each process. 12 sequences divide over 6, 4 and 2 devices."""


@dataclasses.dataclass(frozen=True)
class Run:
    """A run of the smallest model in a folder."""

    out: Path

    def start(self, processes: int, *args: str, restarts: int = 0, least: int | None = None) -> subprocess.Popen:
        """Starts `launch`."""
        elastic = ["--restarts", str(restarts)] + (["--min-processes", str(least)] if least else [])
        command = [
            sys.executable, "-m", "zero_jax", "launch", "--processes", str(processes), "--devices-per-process",
            str(DEVICES), *elastic, "--", "train", "--model", "support.pairs:small", "--batch-size", "12",
            "--seq-len", "16", "--max-bytes", "50000", "--samples", "0", "--steps", str(STEPS), "--save-every",
            str(EVERY), "--max-to-keep", "100", "--eval-every", str(STEPS), "--out", str(self.out), *args]
        self.out.mkdir(parents=True, exist_ok=True)
        with open(self.out / "output", "ab") as output:
            return subprocess.Popen(command, cwd=ROOT / "tests", stdout=output, stderr=subprocess.STDOUT,
                                    env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"})

    @property
    def output(self) -> str:
        return (self.out / "output").read_text(errors="replace")

    @property
    def rows(self) -> list[dict]:
        path = self.out / "train.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    @property
    def losses(self) -> dict[int, float]:
        """By step; of a step that was taken twice the later one."""
        return {row["step"]: row["loss"] for row in self.rows if "loss" in row}

    @property
    def starts(self) -> list[tuple[int, int]]:
        """(checkpoint, number of devices) of each start."""
        return [(row["resumed_after"], len(row["devices"])) for row in self.rows if "config" in row]

    @property
    def last(self) -> dict[str, str]:
        """Checksums of all leaves of the checkpoint after the last step, and the position in the data."""
        body = json.loads((self.out / f"checkpoints/{STEPS}/manifest/data.json").read_text())["manifest"]
        return {name: leaf["digest"] for name, leaf in body["leaves"].items()} | {"data": json.dumps(body["data"])}


class References:
    """Runs without kills, by what they started from."""

    def __init__(self, folder: Path):
        self._folder, self._known = folder, {}

    def get(self, starts: list[tuple[int, int]]) -> Run:
        """A run on the device counts of `starts`, each of which begins at a checkpoint of the one before."""
        counts: list[tuple[int, int]] = []
        for after, devices in starts:  # starts on the same devices change nothing
            counts = [each for each in counts if each[0] < after]
            counts += [(after, devices)] if not counts or counts[-1][1] != devices else []
        if (key := tuple(counts)) not in self._known:
            self._known[key] = self._make(counts)
        return self._known[key]

    def _make(self, counts: list[tuple[int, int]]) -> Run:
        after, devices = counts[-1]
        run = Run(self._folder / "-".join(f"{each}x{count}" for each, count in counts))
        if len(counts) > 1:
            before = self.get(counts[:-1])
            shutil.copytree(before.out, run.out)
            for path in run.out.glob("checkpoints/*"):
                if not path.name.isdigit() or int(path.name) > after:
                    shutil.rmtree(path)
        process = run.start(devices // DEVICES, *["--resume"] * (len(counts) > 1))
        if process.wait(timeout=1800):
            raise RuntimeError(f"a run without kills failed: {run.output[-3000:]}")
        return run


def children(launcher: int) -> dict[int, int]:
    """Process IDs of a launcher's processes, by their number in the run."""
    found = {}
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        try:
            environ = dict(pair.split("=", 1) for pair in
                           Path(f"/proc/{child}/environ").read_bytes().decode().split("\0") if "=" in pair)
            found[int(environ[PROCESS_ID])] = int(child)
            assert NUM_PROCESSES in environ
        except (OSError, KeyError):
            continue
    return found


def kill_one(run: Run, process: subprocess.Popen, starts: int, draw: random.Random) -> tuple[str, float]:
    """Kills a process of the start number `starts` at a random moment; returns (what, time)."""
    moment, end = draw.choice(("start", "step", "step", "step", "save")), time.monotonic() + 300
    wanted = draw.randint(EVERY // 2, 2 * EVERY)  # steps of this start

    def reached() -> bool:
        begun = run.starts
        if moment == "start":  # imports, connects, restores, compiles
            return bool(children(process.pid))
        if len(begun) < starts:
            return False
        rows = run.rows
        last = max(number for number, row in enumerate(rows) if "config" in row)
        return sum("loss" in row for row in rows[last:]) >= wanted and (moment == "step" or any(
            ".zero_jax-tmp" in path.name for path in run.out.glob("checkpoints/*")))

    while not reached():
        if process.poll() is not None or time.monotonic() > end:
            raise AssertionError(f"{moment} was not seen: {run.output[-3000:]}")
        time.sleep(0.02)
    time.sleep(draw.uniform(0, 6) if moment == "start" else draw.uniform(0, 0.05))
    there = children(process.pid)
    if not there:
        raise AssertionError("the kill came too late")
    victim = draw.choice(sorted(there))
    os.kill(there[victim], signal.SIGKILL)
    return f"{victim} of {len(there)} at {moment}", time.monotonic()


def trial(run: Run, processes: int, kills: int, least: int | None, references: References, draw: random.Random) -> str:
    """A run with `kills` kills; raises AssertionError unless it ends as its reference; returns a summary."""
    process, killed, seconds = run.start(processes, restarts=kills, least=least), [], []
    try:
        for number in range(kills):
            what, when = kill_one(run, process, len(run.starts) + 1, draw)
            killed.append(what)
            end, steps = time.monotonic() + 300, len(run.rows)
            while run.output.count("Restart ") <= number:
                assert time.monotonic() < end and process.poll() is None, f"no restart: {run.output[-3000:]}"
                time.sleep(0.05)
            while number + 1 == kills and process.poll() is None and not any("loss" in row for row in run.rows[steps:]):
                time.sleep(0.05)
            seconds += [time.monotonic() - when] if number + 1 == kills else []
        assert process.wait(timeout=1800) == 0, f"status {process.returncode}: {run.output[-3000:]}"
    finally:
        process.kill()
        process.wait()
    whole = references.get(run.starts)
    assert run.losses == whole.losses and len(whole.losses) == STEPS, f"losses differ: {run.starts}"
    assert run.last == whole.last, f"the last states differ: {run.starts}"
    assert whole.losses[STEPS] != whole.losses[STEPS - 1]
    lost = [int(number) for number in re.findall(r"Lost: (\d+) steps", run.output)]
    return (f"{', '.join(killed)}; devices {[devices for _, devices in run.starts]}, resumed after "
            f"{[after for after, _ in run.starts]}, lost steps {lost}; first step {seconds[-1]:.1f} s after the last "
            "kill")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--kills", type=int, default=3, help="of each run")
    parser.add_argument("--processes", type=int, choices=(2, 3), help="default: 2 and 3 by turns")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="keep all that the runs write here")
    args = parser.parse_args()
    draw, passed = random.Random(args.seed), 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        references = References(folder / "whole")
        for number in range(args.runs):
            processes, least = args.processes or 2 + number % 2, 1 if number // 2 % 2 else None
            name = f"run {number}: {processes} processes{', not replaced' * bool(least)}"
            try:
                summary = trial(Run(folder / f"run{number}"), processes, args.kills, least, references, draw)
                passed += 1
                print(f"{name}: {summary}", flush=True)
            except (AssertionError, RuntimeError, subprocess.TimeoutExpired) as error:
                print(f"{name}: FAILED: {error}", flush=True)
    print(f"{passed} of {args.runs} runs with {args.kills} kills each ended as without kills")
    return 0 if passed == args.runs else 1


if __name__ == "__main__":
    sys.exit(main())
