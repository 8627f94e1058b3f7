"""The checks of an audit: each reads a compiled program, and names a place, a cost and a remedy."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from zero_jax.auditing.compare import MIB
from zero_jax.auditing.program import Program
from zero_jax.auditing.roles import BATCH, OPTIMIZER, PARAMS, Leaf
from zero_jax.errors import few
from zero_jax.xla.chip import Chip
from zero_jax.xla.collective import Collective, total_bytes
from zero_jax.xla.devices import coords
from zero_jax.xla.events import Loop, Work, totals
from zero_jax.xla.parser import Instruction
from zero_jax.xla.process_memory import memory_fraction
from zero_jax.xla.shapes import HOST, shape_bytes
from zero_jax.xla.timing import HOP_SECONDS, START_SECONDS

REPLICATED_SHARE = 0.02
"""Share of the bytes of parameters, or of the optimizer's state, that may be replicated: norms and biases."""
WHOLE_SHARE = 0.05
"""Share of the gradients that may be all-reduced whole. Sums over rows, which XLA scatters nowhere, are below 0.02."""
MOVED_SHARE = 0.1
"""Activations that are sent over the data axes, beside what ZeRO-3 sends."""
BLOCKING_SHARE = 0.3
"""Share of the bytes that may be sent while nothing is computed. The first gather of a step has nothing before it."""
EXPOSED_SHARE = 0.25
"""Share of the predicted step that may be spent waiting for collectives."""
SMALL_PAYLOAD, MANY_SMALL = MIB, 64
"""Bytes of a small collective, and how many of them a step may run."""
EXTRA_FLOPS = 1.15
"""Compiled products beside those of the step as written."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that costs, and how to mend it.

    Attributes:
        code: its name, one of `CHECKS`.
        message: what is the matter, in a sentence.
        place: labels of the arrays; "" where it is of the whole step.
        source: "file:line"; "" if unknown.
        bytes: what it costs a device and step: sent, or held.
        seconds: what it costs of the predicted step; None where that is not known.
        remedy: what to write.
    """

    code: str
    message: str
    place: str
    source: str
    bytes: float
    seconds: float | None
    remedy: str

    def __str__(self) -> str:
        time = "" if self.seconds is None else f", {1e3 * self.seconds:.2f} ms"
        where = "; ".join(filter(None, (self.place, self.source)))
        return (f"{self.code}: {self.message} ({self.bytes / MIB:,.1f} MiB a device{time})"
                + f"\n    at {where}" * bool(where) + f"\n    {self.remedy}")


def ideal_bytes(program: Program) -> dict[int, float]:
    """Bytes that a device sends in a step of ZeRO 1, 2 and 3: 2, 2 and 3 times its parameters, by (N - 1) / N."""
    others = program.num_devices // program.data_size
    params = sum(leaf.bytes / min(others, _other_shards(leaf, program)) for leaf in program.of(PARAMS))
    ring = (program.data_size - 1) / program.data_size
    return {1: 2 * params * ring, 2: 2 * params * ring, 3: 3 * params * ring}


def stage(program: Program) -> int:
    """The ZeRO stage of the storage: 3 where most parameters are cut by the data axes, 1 where the optimizer's are."""
    if _cut_share(program, PARAMS) > 0.5:
        return 3
    return 1 if _cut_share(program, OPTIMIZER) > 0.5 else 0


def _other_shards(leaf: Leaf, program: Program) -> int:
    return math.prod(program.axis_sizes.get(name, 1) for name in leaf.axes - program.data_axes)


def _is_cut(leaf: Leaf, program: Program) -> bool:
    return bool(leaf.axes & program.data_axes) or (not leaf.axes and leaf.num_shards > 1)


def _cut_share(program: Program, role: str) -> float:
    leaves = program.of(role)
    total = sum(leaf.bytes for leaf in leaves)
    return sum(leaf.bytes for leaf in leaves if _is_cut(leaf, program)) / total if total else 0.0


def _seconds(program: Program, num_bytes: float) -> float | None:
    """Seconds that sending them takes over the link of all devices."""
    if program.target is None or program.num_devices < 2:
        return None
    return num_bytes / program.target.link([coords(each) for each in program.devices]).bandwidth


def _finding(program: Program, code: str, message: str, remedy: str, *, num_bytes: float,
             leaves: Iterable[Leaf] | None = None, collectives: Sequence[Collective] = (), source: str = "",
             seconds: float | None = None, is_sent: bool = True) -> Finding:
    """leaves: default: the parameters that `collectives` serve. seconds: default: of sending the bytes of these."""
    if collectives:
        source = max(collectives, key=lambda each: each.step_bytes).source
        seconds = _seconds(program, num_bytes) if is_sent and seconds is None else seconds
    if leaves is None:
        leaves = [leaf for each in collectives for leaf in program.served(each, PARAMS)]
    labels = dict.fromkeys(leaf.label for leaf in sorted(leaves, key=lambda leaf: (-leaf.bytes, leaf.label)))
    return Finding(code, message, few(labels, 3), source, num_bytes, seconds, remedy)


def _serving(program: Program, *kinds: str) -> list[Collective]:
    return [each for each in program.collectives if each.kind in kinds and program.served(each, PARAMS)]


def state_replicated(program: Program) -> Iterator[Finding]:
    """Parameters or optimizer state of which each device of the data axes has a copy."""
    if program.data_size == 1:
        return
    for role, name in ((PARAMS, "parameters"), (OPTIMIZER, "optimizer state")):
        leaves = program.of(role)
        whole = [leaf for leaf in leaves if leaf.size > 1 and not _is_cut(leaf, program)]
        wasted = sum(each.device_bytes for each in whole)
        total = sum(each.device_bytes * each.num_shards for each in leaves)
        if role == PARAMS and stage(program) == 1 or wasted <= REPLICATED_SHARE * total:
            continue
        axes = ", ".join(sorted(program.data_axes))
        yield _finding(program, f"{'params' if role == PARAMS else 'optimizer'}_replicated",
                       f"{len(whole)} arrays of {name} are whole on each of {program.data_size} devices",
                       f"Store them as NamedSharding(mesh, P({axes!r})) along a dim that {program.data_size} divides, "
                       "in jax.jit's in_shardings and out_shardings too.", leaves=whole,
                       num_bytes=wasted * (1 - 1 / program.data_size))


def batch_replicated(program: Program) -> Iterator[Finding]:
    """A batch that every device computes whole."""
    leaves = [leaf for leaf in program.of(BATCH) if leaf.output is None]
    largest = max((leaf.shape[0] for leaf in leaves if leaf.shape), default=0)
    whole = [leaf for leaf in leaves if leaf.shape and leaf.shape[0] == largest and leaf.num_shards == 1]
    if program.num_devices == 1 or not whole or largest % program.data_size or any(
            leaf.num_shards > 1 for leaf in leaves if leaf.shape and leaf.shape[0] == largest):
        return
    yield _finding(program, "batch_replicated", f"each of {program.num_devices} devices computes the whole batch",
                   "Give the batch NamedSharding(mesh, P(axis)) along its first dim.", leaves=whole,
                   num_bytes=sum(each.bytes for each in whole) * (1 - 1 / program.num_devices))


def gradients_whole(program: Program) -> Iterator[Finding]:
    """Gradients that are all-reduced whole where state is in shards. XLA:CPU scatters none, and is left out."""
    if program.platform == "cpu" or stage(program) == 0:
        return
    whole = [each for each in _serving(program, "all-reduce") if set(each.axes(program.axis_sizes))
             & program.data_axes and any(shape_bytes(*shape) > 2**16 for shape in each.shapes)]
    if total_bytes(whole) > WHOLE_SHARE * ideal_bytes(program)[2]:
        yield _finding(program, "gradients_whole", "gradients are all-reduced whole, of which a device needs its shard",
                       "Constrain them to the layout of the state: jax.lax.with_sharding_constraint(grads, shardings); "
                       "in shard_map jax.lax.psum_scatter in place of psum.",
                       collectives=whole, num_bytes=total_bytes(whole) / 2)


def activations_moved(program: Program) -> Iterator[Finding]:
    """Activations that are sent over the data axes. What a step asks for by all_to_all or ppermute is its own."""
    sizes = {leaf.size // cut for role in (PARAMS, OPTIMIZER) for leaf in program.of(role)
             for cut in {1, _other_shards(leaf, program), *leaf.shape[:1]} if leaf.size >= cut > 0}
    moved = [each for each in program.collectives if not each.serves
             and not each.op_name.endswith(("/ppermute", "/all_to_all"))
             and set(each.axes(program.axis_sizes)) & program.data_axes
             and sum(math.prod(dims) for _, dims in each.shapes if math.prod(dims) not in sizes
                     and math.prod(dims) * each.group_size not in sizes) > 2**14]
    if total_bytes(moved) > MOVED_SHARE * max(ideal_bytes(program)[3], 1):
        yield _finding(program, "activations_moved", "activations are sent between devices that share no parameter, "
                       "where weights should be",
                       "Keep the batch's dim cut: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(axis))) "
                       "after each layer.", collectives=moved, num_bytes=total_bytes(moved))


def repeated_in_loop(program: Program) -> Iterator[Finding]:
    """Parameters gathered, or gradients reduced, in each microbatch: one collective sends them more than once."""
    for code, kinds, verb, remedy in (
            ("gathered_each_microbatch", ("all-gather",), "gathered",
             "Fewer and larger microbatches, or gather once before their loop where memory allows (zero_jax: "
             "gather=\"step\")."),
            ("reduced_each_microbatch", ("all-reduce", "reduce-scatter"), "reduced",
             "Sum the gradients of a device over its microbatches, and reduce once after the loop (zero_jax: "
             "reduce=\"once\").")):
        found = [each for each in _serving(program, *kinds) if _times(program, each) > 1.5]
        if found:
            times = max(_times(program, each) for each in found)
            yield _finding(program, code, f"parameters are {verb} {times:.0f} times a step by the same collective, in "
                           "a loop", remedy, collectives=found,
                           num_bytes=sum(each.step_bytes * (1 - 1 / _times(program, each)) for each in found))


def _times(program: Program, collective: Collective) -> float:
    """How often one collective, in its loops, sends the parameters that it serves; 1 for a loop over their layers."""
    size = sum(leaf.size / _other_shards(leaf, program) for leaf in program.served(collective, PARAMS))
    if not collective.in_loop or collective.payload_bytes <= 2**16 or not size:
        return 1.0
    return collective.elements * collective.count / size


def _gathered(program: Program) -> tuple[list[Collective], float]:
    """The gathers of parameters, and how often a step gathers all; a loop over microbatches counts once."""
    gathers = _serving(program, "all-gather")
    elements = sum(each.elements * each.count / max(1.0, _times(program, each)) for each in gathers)
    need = sum(leaf.size / _other_shards(leaf, program) for leaf in program.of(PARAMS) if _is_cut(leaf, program))
    return gathers, elements / need if need else 0.0


def weights_kept(program: Program) -> Iterator[Finding]:
    """Parameters in shards that are gathered once: what forward gathers is held for backward."""
    leaves = program.of(PARAMS)
    gathers, times = _gathered(program)
    in_loop = any(_times(program, each) > 1.5 for each in gathers)
    if stage(program) < 3 or max(leaf.bytes for leaf in leaves) > 0.6 * sum(leaf.bytes for leaf in leaves) or (
            not 0.5 < times < 1.5 or in_loop):
        return
    width = max(shape_bytes(dtype, ()) for each in gathers for dtype, _ in each.shapes)
    kept = width * sum(leaf.size / _other_shards(leaf, program) for leaf in leaves)
    yield _finding(program, "weights_kept", "gathered parameters are held from forward to backward: the memory within "
                   "a step is that of ZeRO-2", "Gather again in backward: jax.checkpoint around each layer, in a "
                   "jax.lax.scan over layers.", collectives=gathers, num_bytes=kept, is_sent=False)


def gathered_often(program: Program) -> Iterator[Finding]:
    """Parameters gathered more than twice a step, loops over microbatches apart."""
    gathers, times = _gathered(program)
    if times > 2.5:
        yield _finding(program, "gathered_often", f"parameters are gathered {times:.1f} times a step, and forward and "
                       "backward need two", "Nest no jax.checkpoint within another, and read each parameter once per "
                       "pass.", collectives=gathers, num_bytes=total_bytes(gathers) * (1 - 2 / times))


def update_whole(program: Program) -> Iterator[Finding]:
    """Optimizer state, or reduced gradients, that are gathered: each device computes the whole update.

    At stage 1 one gather of all parameters is the stage's own: of master weights, where they are such.
    """
    sizes = {leaf.size for leaf in program.of(PARAMS)}
    gathers = [each for each in program.collectives if each.kind == "all-gather" and not program.served(each, PARAMS)
               and (each.serves or all(math.prod(dims) in sizes for _, dims in each.shapes))]
    elements = sum(each.elements for each in program.collectives if each.kind == "all-gather")
    own = stage(program) == 1 and elements <= 1.1 * sum(leaf.size for leaf in program.of(PARAMS))
    if total_bytes(gathers) > REPLICATED_SHARE * max(ideal_bytes(program)[3], 1) and stage(program) and not own:
        yield _finding(program, "update_whole", "gradients or optimizer state are gathered, and each device computes "
                       "the whole update", "Constrain gradients and updates to the layout of the optimizer state.",
                       leaves=[leaf for each in gathers for leaf in program.served(each, OPTIMIZER)],
                       collectives=gathers, num_bytes=total_bytes(gathers))


def blocking(program: Program) -> Iterator[Finding]:
    """Collectives that nothing may overlap with. All of XLA:CPU's are such, and are left out."""
    if program.platform == "cpu":
        return
    found = [each for each in program.collectives if not each.asynchronous and each.payload_bytes > 2**16]
    if total_bytes(found) > max(BLOCKING_SHARE * total_bytes(program.collectives), MIB):
        remedy = ("Leave xla_gpu_disable_async_collectives out, and put compute that does not need it before its first "
                  "use." if program.platform == "gpu" else
                  "Give jax.jit XLA's options by which collectives run beside compute (zero_jax: overlap=True).")
        yield _finding(program, "blocking", f"{len(found)} collectives block: nothing is computed while they send",
                       remedy, collectives=found, num_bytes=total_bytes(found))


def exposed(program: Program) -> Iterator[Finding]:
    """Time in which nothing but communication runs."""
    timing = program.timing
    if timing is None or not timing.seconds:
        return
    waiting = sum(timing.exposed_seconds.values())
    if waiting > EXPOSED_SHARE * timing.seconds:
        busy = max(timing.compute_seconds, timing.hbm_seconds)
        remedy = ("Compute is shorter than communication: more examples a device, or microbatches that reduce once."
                  if sum(timing.communication_seconds.values()) > busy else
                  "Write layers as a jax.lax.scan, so that a layer's gather runs beside the one before.")
        yield _finding(program, "exposed", f"{1e3 * waiting:.2f} of {1e3 * timing.seconds:.2f} ms are spent waiting "
                       "for collectives", remedy, leaves=(), collectives=program.collectives,
                       num_bytes=total_bytes(program.collectives), seconds=waiting)


def uncombined(program: Program) -> Iterator[Finding]:
    """Many small collectives, each of which costs a latency. XLA:CPU combines none, and is left out."""
    small = [each for each in program.collectives if each.payload_bytes < SMALL_PAYLOAD]
    if program.platform == "cpu" or sum(each.count for each in small) <= MANY_SMALL:
        return
    seconds, count = None, sum(each.count for each in small)
    if program.target:
        name = program.target.link([coords(each) for each in program.devices]).name
        seconds = count * (START_SECONDS[program.target.chip.platform]
                           + (program.num_devices - 1) * HOP_SECONDS[name])
    yield _finding(program, "uncombined", f"{count} collectives of less than 1 MiB run one by one",
                   "Leave XLA's combine thresholds as they are; in shard_map give one psum a tree of arrays; stack the "
                   "layers.", collectives=small, num_bytes=total_bytes(small), seconds=seconds)


def wide_gathers(program: Program) -> Iterator[Finding]:
    """Parameters gathered in 32 bits for products in 16. At stage 1 what is gathered is stored, and not cast.

    XLA:CPU of jaxlib 0.12 sends bf16 as fp32, and is left out.
    """
    flops = totals(program.schedule).flops
    narrow = flops.get("bf16", 0) + flops.get("f16", 0) > 0.5 * sum(flops.values())
    if program.platform == "cpu" or stage(program) < 3 or not narrow:
        return
    gathers = _serving(program, "all-gather")
    wide = [each for each in gathers if "f32" in each.dtypes]
    num_bytes = sum(each.step_bytes * _share(each, "f32") for each in wide)
    if num_bytes > 0.1 * total_bytes(gathers):
        yield _finding(program, "sent_in_fp32", "parameters are gathered in fp32, and products compute in 16 bits",
                       "Cast the shard before it is gathered: jax.lax.with_sharding_constraint(w.astype(jnp.bfloat16), "
                       "sharding_of_the_shard).", collectives=wide, num_bytes=num_bytes / 2)


def _share(collective: Collective, dtype: str) -> float:
    """The share of a dtype in what it sends: XLA combines the gather of a norm's scale with those of kernels."""
    return sum(shape_bytes(*each) for each in collective.shapes if each[0] == dtype) / collective.payload_bytes


def not_donated(program: Program) -> Iterator[Finding]:
    """State of which the step has the old and the new at one time."""
    state = [(number, leaf) for number, leaf in enumerate(program.leaves) if leaf.output is not None]
    held = [leaf for number, leaf in state if number not in program.updated_in_place and not leaf.donated]
    wasted = sum(leaf.device_bytes for leaf in held)
    if wasted > REPLICATED_SHARE * sum(leaf.device_bytes for _, leaf in state):
        yield _finding(program, "not_donated", f"{len(held)} arrays of the state are not donated: old and new are held",
                       "jax.jit(step, donate_argnums=...) with the numbers of the state's arguments.",
                       leaves=held, num_bytes=wasted)


def host_waits(program: Program) -> Iterator[Finding]:
    """Copies to and from host memory that take longer than what runs between their start and their end."""
    target = program.target
    if target is None or not target.chip.host_link_bandwidth:
        return
    chip, computation = target.chip, program.module.computations[program.module.entry]
    busy = {event.name: _busy(event, chip) for event in program.schedule if isinstance(event, Work)}
    loops = iter([_busy(event, chip) for event in program.schedule if isinstance(event, Loop)])
    clock, now = {}, 0.0
    for name, each in computation.instructions.items():
        clock[name] = now
        now += next(loops, 0.0) if each.opcode == "while" else busy.get(name, 0.0)
    waited, num_bytes = 0.0, 0
    for name, each in computation.instructions.items():
        if each.opcode not in ("copy", "copy-start"):
            continue
        arrays = [*computation.arrays(each.operands[0]).values(), *each.arrays.values()]
        if len({array.space for array in arrays if array.dims} & {0, HOST}) < 2:
            continue
        ends = [user.name for user, _ in computation.users.get(name, ()) if user.opcode == "copy-done"]
        seconds = arrays[0].bytes / chip.host_link_bandwidth - (clock[ends[0]] - clock[name] if ends else 0.0)
        if seconds > 0:
            waited, num_bytes = waited + seconds, num_bytes + arrays[0].bytes
    if num_bytes > MIB and waited > 0.05 * now:
        yield _finding(program, "host_copies_waited_for", "copies to or from host memory take longer than what runs "
                       "beside them", "Copy one layer while the one before computes: a jax.lax.scan over layers, or "
                       "zero_jax's offload.", num_bytes=num_bytes, seconds=waited)


def _busy(event: Work | Loop, chip: Chip) -> float:
    """Seconds that some work takes at the chip's peak; collectives are left out."""
    work = totals([event])
    compute = sum(flops / chip.peak_flops.get(dtype, chip.peak_flops["f32"]) for dtype, flops in work.flops.items())
    return max(compute, work.hbm_bytes / chip.memory_bandwidth)


def recomputed(program: Program) -> Iterator[Finding]:
    """What XLA computes twice since it ran out of memory: it names the copies so."""
    copies = [each for each in _instructions(program) if ".remat" in each.name and each.opcode in (
        "fusion", "dot", "custom-call", "convolution", "all-gather-start", "all-gather")]
    if copies:
        yield _finding(program, "recomputed_by_xla", f"XLA computes {len(copies)} results a second time, since memory "
                       "is short", "Choose what is recomputed: jax.checkpoint with a policy around each layer; or a "
                       "smaller batch.", num_bytes=sum(map(_bytes, copies)),
                       source=program.module.metadata(max(copies, key=_bytes))[1])


def _instructions(program: Program) -> Iterator[Instruction]:
    return (each for computation in program.module.computations.values() for each in computation.instructions.values())


def _bytes(instruction: Instruction) -> int:
    return sum(array.bytes for array in instruction.arrays.values())


def extra_flops(program: Program) -> Iterator[Finding]:
    """Products that several devices compute alike, or that are not in the step as written."""
    compiled = sum(totals(program.schedule).flops.values()) * program.num_devices
    useful = program.traced_flops
    if useful and compiled > EXTRA_FLOPS * useful:
        rate = program.target and program.target.chip.peak_flops["bf16"]
        yield _finding(program, "extra_flops", f"devices compute {compiled:.3g} FLOPs, and the step as written has "
                       f"{useful:.3g}: {compiled / useful:.1f} times as many",
                       "Cut what is computed alike: the batch by every data axis, heads or vocabulary by the others.",
                       num_bytes=0, seconds=(compiled - useful) / program.num_devices / rate if rate else None)


def memory_short(program: Program) -> Iterator[Finding]:
    """A step that needs more than the device has, or than a process gets of it."""
    need = program.device_bytes
    if program.target is None or need is None:
        return
    have, usable = program.target.chip.memory_bytes, memory_fraction() * program.target.chip.memory_bytes
    text = f"the step needs {need / 2**30:.1f} GiB"
    if need > have:
        yield _finding(program, "does_not_fit", f"{text}, and {program.target.chip.name} has {have / 2**30:.1f} GiB",
                       "Cut the state by more devices, recompute layers by jax.checkpoint, or split the batch.",
                       leaves=program.leaves, num_bytes=need - have)
    elif program.platform == "gpu" and need > usable:
        yield _finding(program, "near_the_limit", f"{text}; a JAX process gets {usable / 2**30:.1f}, of "
                       f"{have / 2**30:.1f} GiB", "XLA_PYTHON_CLIENT_MEM_FRACTION=0.95, or a smaller batch.",
                       leaves=program.leaves, num_bytes=need - usable)


def constants(program: Program) -> Iterator[Finding]:
    """Arrays that the step has captured, and of which each device holds a copy."""
    found = [each for each in _instructions(program) if each.opcode == "constant" and _bytes(each) > MIB]
    if found:
        yield _finding(program, "captured_arrays", f"{len(found)} arrays are constants of the program, on each device",
                       "Pass them to the step as arguments, with a sharding.", num_bytes=sum(map(_bytes, found)),
                       source=program.module.metadata(found[0])[1])


CHECKS: tuple[Callable[[Program], Iterator[Finding]], ...] = (
    memory_short, batch_replicated, state_replicated, not_donated, gradients_whole, activations_moved, repeated_in_loop,
    weights_kept, gathered_often, update_whole, wide_gathers, blocking, exposed, uncombined, host_waits,
    recomputed, extra_flops, constants)
"""All checks, the dearest faults first."""


def findings(program: Program) -> list[Finding]:
    """What the checks find, in their order."""
    return [found for check in CHECKS for found in check(program)]
