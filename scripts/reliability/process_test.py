"""Preemption and death of processes: what SIGTERM saves, how soon survivors exit, and that a resumed run is the same.

    python scripts/reliability/process_test.py --preempt 60 --kill 40       # about an hour on two cores

A run is interrupted while it compiles, steps or saves, and resumed. Its losses and the checksums of its last checkpoint
must be bitwise those of an uninterrupted run. Every line is one trial.
"""

import argparse
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from zero_jax.distributed.launch import COORDINATOR, LOCAL_DEVICES, NUM_PROCESSES, PREEMPTED, PROCESS_ID, _free_port

ROOT = Path(__file__).parents[2]
HEARTBEAT, MARGIN = 10, 5
STEPS = {1: (700, 70), 2: (120, 15)}
"""By the number of processes: steps of a run, and how often it saves. A step takes 1 ms or some 20 ms."""
MOMENTS = ("compile", "step", "save")


@dataclasses.dataclass(frozen=True)
class Run:
    """A run of the smallest model on 8 devices in `count` processes, in a folder."""

    out: Path
    count: int

    def start(self, *args: str, processes: int | None = None) -> list[subprocess.Popen]:
        """Starts its processes (or another number), without `launch`, so that none of them ends another."""
        count = processes or self.count
        steps, every = STEPS[self.count]
        command = [
            sys.executable, "-m", "zero_jax", "train", "--model", "support.pairs:small", "--batch-size", "8",
            "--seq-len", "16", "--max-bytes", "50000", "--samples", "0", "--steps", str(steps), "--save-every",
            str(every), "--eval-every", str(steps), "--no-html", "--heartbeat", str(HEARTBEAT), "--out", str(self.out),
            *args]
        self.out.mkdir(parents=True, exist_ok=True)
        address, started = f"127.0.0.1:{_free_port()}", []
        for number in range(count):
            variables = {COORDINATOR: address, NUM_PROCESSES: str(count), PROCESS_ID: str(number),
                         LOCAL_DEVICES: str(8 // count)} if count > 1 else {}
            environ = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"} | variables
            with open(self.out / f"output{number}", "ab") as output:
                started.append(subprocess.Popen(command, cwd=ROOT / "tests", env=environ, stdout=output,
                                                stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL))
        return started

    def finish(self, *args: str, processes: int | None = None) -> None:
        """Runs it to its end; raises RuntimeError with the output of a process that fails."""
        started = self.start(*args, processes=processes)
        try:
            for number, process in enumerate(started):
                if process.wait(timeout=600):
                    raise RuntimeError(f"process {number} exited with {process.returncode}: "
                                       f"{self.output(number)[-3000:]}")
        finally:
            end(started)

    def output(self, number: int = 0) -> str:
        """What a process has printed."""
        return (self.out / f"output{number}").read_text(errors="replace")

    @property
    def losses(self) -> dict[int, float]:
        """By step; of a step that was taken twice the later one."""
        path = self.out / "train.jsonl"
        text = path.read_text() if path.exists() else ""
        rows = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        return {row["step"]: row["loss"] for row in rows if "loss" in row}

    @property
    def last(self) -> dict[str, str]:
        """Checksums of all leaves of the checkpoint after the last step, and the position in the data."""
        manifest = json.loads((self.out / f"checkpoints/{STEPS[self.count][0]}/manifest/data.json").read_text())
        body = manifest["manifest"]
        return {name: leaf["digest"] for name, leaf in body["leaves"].items()} | {"data": json.dumps(body["data"])}

    def saved(self) -> list[int]:
        """The numbers of its checkpoints."""
        return sorted(int(path.name) for path in self.out.glob("checkpoints/*") if path.name.isdigit())

    def reached(self, moment: str) -> bool:
        """Whether it now compiles, has taken some steps, or saves."""
        if moment == "compile":
            return "optimizer state: " in self.output() and "Compiled step" not in self.output()
        if moment == "step":
            return len(self.losses) > STEPS[self.count][1] + 3
        return len(self.losses) > 3 and any(
            ".zero_jax-tmp" in path.name for path in self.out.glob("checkpoints/*"))


def wait_until(run: Run, processes: list[subprocess.Popen], moment: str, delay: float) -> None:
    """Waits for the moment and `delay` seconds more."""
    end = time.monotonic() + 300
    while not run.reached(moment):
        if time.monotonic() > end or any(process.poll() is not None for process in processes):
            raise RuntimeError(f"{moment} was not seen: {run.output()[-3000:]}")
        time.sleep(0.001)
    time.sleep(delay)


def check_same(run: Run, whole: Run) -> None:
    """Raises AssertionError unless both runs took the same steps to the same state."""
    assert run.losses == whole.losses and len(whole.losses) == STEPS[whole.count][0], "losses differ"
    assert run.last == whole.last, "the last states differ"


def preempt(folder: Path, count: int, moment: str, delay: float, whole: Run, *, to: tuple[int, ...] | None = None
            ) -> str:
    """SIGTERM to the processes `to` (None: all) at a moment, then resumed; returns a summary."""
    run = Run(folder, count)
    processes = run.start()
    try:
        wait_until(run, processes, moment, delay)
        for number in range(count) if to is None else to:
            processes[number].send_signal(signal.SIGTERM)
        start = time.monotonic()
        statuses = [process.wait(timeout=120) for process in processes]
        seconds = time.monotonic() - start
    finally:
        end(processes)
    assert statuses == [PREEMPTED] * count, f"{statuses}: {run.output()[-3000:]}"
    steps, saved = max(run.losses, default=0), run.saved()
    assert saved[-1:] == ([steps] if steps else []), f"{saved} were saved of {steps} steps"
    assert steps < STEPS[count][0], "it came too late"
    before = dict(run.losses)
    run.finish("--resume")
    check_same(run, whole)
    assert all(before[step] == whole.losses[step] for step in before)
    return f"ended after step {steps} in {seconds:.1f} s"


def kill(folder: Path, moment: str, victim: int, delay: float, whole: Run, number: int = signal.SIGKILL) -> str:
    """Kills or stops one of two processes at a moment; the other must exit, and both are resumed."""
    run = Run(folder, 2)
    processes = run.start()
    try:
        wait_until(run, processes, moment, delay)
        processes[victim].send_signal(number)
        start = time.monotonic()
        status = processes[1 - victim].wait(timeout=HEARTBEAT + MARGIN)
        seconds = time.monotonic() - start
    finally:
        end(processes)
    assert status != 0, "the survivor exits with 0"
    assert len(run.losses) < STEPS[2][0], "it came too late"
    run.finish("--resume")
    check_same(run, whole)
    return f"survivor exited with {status} in {seconds:.1f} s"


def end(processes: list[subprocess.Popen]) -> None:
    """Kills all processes of a trial."""
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preempt", type=int, default=6, help="trials of SIGTERM, in one and two processes by turns")
    parser.add_argument("--kill", type=int, default=4, help="trials of killing one of two processes")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    draw, failed = random.Random(args.seed), 0
    with tempfile.TemporaryDirectory() as folder:
        whole = {count: Run(Path(folder) / f"whole{count}", count) for count in (1, 2)}
        for run in whole.values():
            run.finish()
        trials = [(f"preempt {i}: {count} process(es), {moment}", preempt,
                   (Path(folder) / f"p{i}", count, moment, draw.uniform(0, 0.2 if moment != "save" else 0.02),
                    whole[count]), {"to": draw.choice([None, (0,), (1,)]) if count == 2 else None})
                  for i in range(args.preempt) for count, moment in [(1 + i // 3 % 2, MOMENTS[i % 3])]]
        trials += [(f"kill {i}: process {victim}, {moment}", kill,
                    (Path(folder) / f"k{i}", moment, victim, draw.uniform(0, 0.2 if moment != "save" else 0.02),
                     whole[2]), {}) for i in range(args.kill) for moment, victim in [(MOMENTS[1 + i % 2], i // 2 % 2)]]
        for name, trial, arguments, options in trials:
            try:
                print(f"{name}: {trial(*arguments, **options)}", flush=True)
            except (AssertionError, RuntimeError, subprocess.TimeoutExpired) as error:
                failed += 1
                print(f"{name}: FAILED: {error}", flush=True)
    print(f"{len(trials) - failed} of {len(trials)} passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
