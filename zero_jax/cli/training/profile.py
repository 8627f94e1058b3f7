"""A trace of some steps by JAX's profiler, and in words where their time goes."""

import collections
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import jax

from zero_jax.xla.events import Done, Event, Loop, Start, Work

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")
PRODUCTS, KERNELS, OTHER = "matrix products", "custom kernels", "elementwise operations, reductions and copies"
CONTROL = ("while", "conditional", "call")
"""Instructions whose time is that of those inside of them, which the trace has, too."""


class Profile:
    """Traces the steps `first` to `last` of a loop into `folder`, once."""

    def __init__(self, folder: Path, first: int, last: int):
        self.folder, self._first, self._last, self._on = folder, first, last, False

    def starts(self, step: int) -> bool:
        """Whether the trace begins with this step, so that nothing before it may still run."""
        return step == self._first

    def ends(self, step: int) -> bool:
        """Whether the trace ends with this step, once it is done."""
        return self._on and step == self._last

    def start(self) -> None:
        """Begins the trace."""
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # with it a trace is of the interpreter: 100 times as many events
        jax.profiler.start_trace(str(self.folder), profiler_options=options)
        self._on = True

    def stop(self) -> None:
        """Ends the trace, if there is one."""
        if self._on:
            self._on = False
            jax.profiler.stop_trace()


@dataclasses.dataclass(frozen=True)
class ProfileSummary:
    """Seconds by kind of operation, and by operation, of all devices in all traced steps."""

    kinds: Mapping[str, float]
    operations: Mapping[str, float]

    def text(self, steps: int, devices: int) -> str:
        """In words, for a trace of so many steps on so many devices."""
        total = sum(self.kinds.values())
        if not total:
            return ("The trace has no operation of the step by name: open it with xprof or TensorBoard's profile "
                    "plugin.")
        shares = ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in _largest(self.kinds))
        top = "\n".join(f"  {seconds / total:6.1%}  {1000 * seconds / steps / devices:10.3f} ms  {name}"
                        for name, seconds in _largest(self.operations)[:10])
        return (f"In {steps} steps operations took {1000 * total / steps / devices:,.1f} ms a step on each of "
                f"{devices} devices, where waiting for others inside of a collective counts: {shares}.\n"
                f"The longest, with their share and time in a step of one device:\n{top}")


def summarize(events: Iterable[tuple[str, float]], schedule: Iterable[Event]) -> ProfileSummary:
    """The times of a trace by what the compiled program says of each operation.

    events: (name of an HLO instruction, seconds). schedule: of the compiled step.
    """
    flat = list(_flat(schedule))
    works = {event.name: event for event in flat if isinstance(event, Work)}
    sent = {event.collective.name: event.collective.kind for event in flat if isinstance(event, Start | Done)}
    kinds: collections.defaultdict[str, float] = collections.defaultdict(float)
    operations: collections.defaultdict[str, float] = collections.defaultdict(float)
    for name, seconds in events:
        if name.split(".")[0] in CONTROL:
            continue
        work = works.get(name)
        kind = sent.get(name) or next((kind for kind in COLLECTIVES if name.startswith(kind)), None) or (
            PRODUCTS if work and work.flops else KERNELS if work and work.opaque else OTHER)
        kinds[kind] += seconds
        operations[f"{name}{f' ({work.op_name})' if work and work.op_name else ''}"] += seconds
    return ProfileSummary(kinds, operations)


def traced_operations(folder: Path, module: str) -> Iterator[tuple[str, float]]:
    """(HLO instruction, seconds) of each operation of the program `module` in the newest trace in `folder`."""
    files = sorted(folder.glob("**/*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    if not files:
        return
    for plane in jax.profiler.ProfileData.from_file(str(files[-1])).planes:
        for line in plane.lines:
            for event in line.events:
                stats = {name: value for name, value in event.stats if name in ("hlo_op", "hlo_module")}
                if "hlo_op" in stats and str(stats.get("hlo_module", "")).startswith(module):
                    yield str(stats["hlo_op"]), event.duration_ns / 1e9


def profile_writer(profile: Profile, schedule: Iterable[Event], module: str, *, steps: int, devices: int
                   ) -> Callable[[], str]:
    """A function that writes summary.txt beside a trace that has ended, and returns its text."""
    def write() -> str:
        text = summarize(traced_operations(profile.folder, module), schedule).text(steps, devices)
        (profile.folder / "summary.txt").write_text(text + "\n", encoding="utf-8")
        return text

    return write


def _flat(events: Iterable[Event]) -> Iterator[Event]:
    for event in events:
        if isinstance(event, Loop):
            yield from _flat(event.body)
        else:
            yield event


def _largest(values: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(values.items(), key=lambda item: -item[1])
