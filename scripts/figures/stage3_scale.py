"""How far stage 3 scales: the exposed share of a step of Llama 3.1 8B, on 8 to 4,096 H100s with the same batch on each.

    python scripts/figures/stage3_scale.py --programs FOLDER --compile    # 15 programs, kept there; 5 CPU minutes
    python scripts/figures/stage3_scale.py --programs FOLDER              # docs/images/stage3_scale.svg, and the table

Compiled are steps for 16 GPUs. Other numbers are derived from those programs: the group of each collective becomes that
of the new devices, with the same payload, and the time model runs again. Compute stays as it is for 16 GPUs, since the
batch on each does; the update, which would shrink, stays too. Programs for 1,024 and 4,096 show how far off that is.
"""

import argparse
import dataclasses
import gzip
import sys
from pathlib import Path

from zero_jax.xla.collective import Collective
from zero_jax.xla.events import Done, Loop, Start
from zero_jax.xla.schedule import schedule
from zero_jax.xla.targets import Target, target_of
from zero_jax.xla.timing import HOP_SECONDS, START_SECONDS, predict

ROOT = Path(__file__).parents[2]
DEVICES = tuple(2**power for power in range(3, 13))
COMPILED, CHECKED, NODE, LENGTH = 16, (1024, 4096), 8, 4096
PROGRAMS = {  # sequences on each GPU, hpZ, quantised collectives
    "1 sequence": (1, False, False), "2 sequences": (2, False, False), "4 sequences": (4, False, False),
    "1 sequence, hpZ": (1, True, False), "1 sequence, ZeRO++": (1, True, True)}
SLICES = "1 sequence, DiLoCo"
EVERY = 100
"""Steps between two averages of DiLoCo's slices, of a host each."""


def target_for(devices: int) -> Target:
    """As many H100s, in hosts of `NODE`."""
    return target_of(f"h100:{devices // NODE}x{NODE}")


def coords_of(devices: int) -> list[tuple[int, int]]:
    """Host and number of each device."""
    return [(number // NODE, number) for number in range(devices)]


def rescaled(events, before: int, after: int):
    """`events` of a program for `before` devices as for `after`: a group across hosts has all the new hosts.

    A group within a host stays, unless `before` is one host, which it fills.
    """
    new: dict[int, Collective] = {}

    def group_of(group: tuple[int, ...]) -> tuple[int, ...]:
        hosts, inside = {each // NODE for each in group}, sorted({each % NODE for each in group})
        if len(hosts) < before // NODE or before == NODE and len(inside) < NODE:
            return group
        return tuple(host * NODE + each for host in range(after // NODE) for each in inside)

    def moved(collective: Collective) -> Collective:
        if id(collective) not in new:
            new[id(collective)] = dataclasses.replace(collective, group=group_of(collective.group))
        return new[id(collective)]

    return tuple(_moved(events, moved))


def _moved(events, moved):
    """`events`, those of loops too, with what `moved` makes of their collectives."""
    for event in events:
        if isinstance(event, Loop):
            yield dataclasses.replace(event, body=tuple(_moved(event.body, moved)))
        elif isinstance(event, Start | Done):
            yield dataclasses.replace(event, collective=moved(event.collective))
        else:
            yield event


def seconds_of(events, devices: int) -> tuple[float, float]:
    """(The predicted step, what of it is exposed)."""
    timed = predict(events, target_for(devices), coords_of(devices), tokens=0.0, model_flops=0.0)
    return timed.seconds, sum(timed.exposed_seconds.values())


def average_seconds(params: float, devices: int) -> float:
    """Of an average of DiLoCo's slices: each GPU all-reduces its shard in fp32, in a ring of a GPU per host."""
    hosts, target = devices // NODE, target_for(devices)
    if hosts < 2:
        return 0.0
    rate = target.chip.network_bandwidth * target.chip.rates.links
    latency = START_SECONDS["cuda"] + 2 * (hosts - 1) * HOP_SECONDS["network"]
    return latency + 2 * (hosts - 1) / hosts * 4 * params / NODE / rate


def compiled(name: str, devices: int) -> str:
    """The text of the program of that name."""
    import jax
    import jax.numpy as jnp
    import optax

    import zero_jax
    from models import llama
    from zero_jax.xla.devices import target_devices

    batch, hpz, codes = PROGRAMS[name]
    mesh = zero_jax.make_mesh((devices // NODE, NODE) if hpz else -1, devices=target_devices(target_for(devices)))
    options = {"weights": "int8", "gradients": ("int8", "fp4")} if codes else {}
    sent = zero_jax.Communication(hpz_axes="data_1" if hpz else (), **options)
    config = dataclasses.replace(llama.PRESETS["3.1-8b"], max_length=LENGTH, remat=True,
                                 attention=zero_jax.attention(mesh))
    step = zero_jax.make_zero_train_step(llama.build(config), 3, mesh=mesh, precision="bf16",
                                         optimizer=optax.adamw(1e-4), communication=sent)
    shape = jax.ShapeDtypeStruct((batch * devices, LENGTH), jnp.int32)
    return step.compiled_step({"inputs": shape, "targets": shape}).text


def kept(folder: Path, name: str, devices: int, compile_it: bool) -> str:
    """The text of a program in `folder`, where it is compiled first if it is not there."""
    path = folder / f"{name.replace(', ', '_').replace(' ', '_')}_{devices}.hlo.gz"
    if compile_it and not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        text = compiled(name, devices)
        with gzip.open(path, "wt") as file:
            file.write(text)
        print(f"compiled: {name}, {devices} GPUs", file=sys.stderr, flush=True)
    with gzip.open(path, "rt") as file:
        return file.read()


def curves(programs: dict[str, tuple], params: float) -> dict[str, list[float]]:
    """Exposed share by name for each of `DEVICES`; programs: events by name, for `COMPILED` devices."""
    found = {}
    for name, events in programs.items():
        times = [seconds_of(rescaled(events, COMPILED, each), each) for each in DEVICES]
        found[name] = [exposed / seconds for seconds, exposed in times]
    seconds, exposed = seconds_of(rescaled(programs["1 sequence"], COMPILED, NODE), NODE)
    more = [average_seconds(params, each) / EVERY for each in DEVICES]
    return found | {SLICES: [(exposed + each) / (seconds + each) for each in more]}


def draw(found: dict[str, list[float]], path: Path) -> None:
    """The curves as SVG, the same file from the same numbers."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "stage3_scale"
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.add_subplot(title="Llama 3.1 8B, stage 3, 4,096 tokens a sequence: exposed share of a step",
                              xlabel="H100s (predicted, derived from programs for 16)", ylabel="% of the step")
    for name, shares in found.items():
        axes.plot(DEVICES, [100 * share for share in shares], marker="o", markersize=3, label=name + " on each"
                  * name.endswith("sequences"))
    axes.set_xscale("log", base=2)
    axes.set_xticks(DEVICES, [f"{each:,}" for each in DEVICES])
    axes.set_ylim(0, 100)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Prints the table, and draws it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=Path, required=True)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/images/stage3_scale.svg")
    options = parser.parse_args()
    programs = {name: schedule(kept(options.programs, name, COMPILED, options.compile)) for name in PROGRAMS}
    found = curves(programs, params=8.03e9)
    print("| of each GPU | s for 16 | " + " | ".join(f"{each:,}" for each in DEVICES) + " |")
    print("| --- | --- |" + " --- |" * len(DEVICES))
    for name, shares in found.items():
        seconds, _ = seconds_of(programs.get(name, programs["1 sequence"]), COMPILED)
        print(f"| {name} | {seconds:.2f} | " + " | ".join(f"{100 * share:.1f}" for share in shares) + " |")
    print("\nDerived / compiled for as many:\n\n| of each GPU | " + " | ".join(f"{each:,}" for each in CHECKED) + " |")
    print("| --- |" + " --- |" * len(CHECKED))
    for name in PROGRAMS:
        cells = []
        for count in CHECKED:
            seconds, exposed = seconds_of(schedule(kept(options.programs, name, count, options.compile)), count)
            cells.append(f"{100 * found[name][DEVICES.index(count)]:.1f} / {100 * exposed / seconds:.1f}")
        print(f"| {name} | {' | '.join(cells)} |")
    draw(found, options.out)


if __name__ == "__main__":
    main()
