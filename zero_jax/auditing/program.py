"""Any jitted step, compiled for live devices or a target topology, and what the audit reads of it."""

import contextlib
import dataclasses
import functools
import inspect
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from zero_jax.auditing.roles import BATCH, PARAMS, Leaf, Selector, with_roles
from zero_jax.errors import UsageError
from zero_jax.frontends.nnx import is_nnx_jit, pure_step
from zero_jax.jaxpr.equations import all_eqns, primitive_of, trace, variables
from zero_jax.jaxpr.primitives import SHARD_MAP, donated_inputs
from zero_jax.planning.flops import traced_flops
from zero_jax.planning.temporaries import LiveTemporaries
from zero_jax.xla import events
from zero_jax.xla.collective import Collective
from zero_jax.xla.devices import compiled_for, coords, target_devices
from zero_jax.xla.live_chip import topology_of
from zero_jax.xla.parser import Module, parse
from zero_jax.xla.platform import platform_of
from zero_jax.xla.schedule import schedule
from zero_jax.xla.shapes import aliases
from zero_jax.xla.targets import Target, target_of
from zero_jax.xla.timing import Span, Timing, predict, timeline


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled step of someone, and what its inputs are.

    Attributes:
        text: the scheduled HLO module.
        memory: `jax.stages.Compiled.memory_analysis()`; None where the backend has none.
        leaves: the arrays of the arguments, in order.
        kept: the numbers of the leaves that the program takes, in the order of its parameters.
        devices: in the order of the partitions.
        target: their topology; None where the chip has no file in zero_jax/xla/chips.
        traced_flops: products of the step as it is written, on all devices; None where that is not known.
    """

    text: str = dataclasses.field(repr=False)
    memory: Any = dataclasses.field(repr=False)
    leaves: tuple[Leaf, ...] = dataclasses.field(repr=False)
    kept: tuple[int, ...] = dataclasses.field(repr=False)
    devices: tuple[Any, ...] = dataclasses.field(repr=False)
    target: Target | None
    traced_flops: float | None

    @functools.cached_property
    def module(self) -> Module:
        """The parsed text. Its inputs are named by their numbers, so that `Collective.serves` has these."""
        module = parse(self.text)
        entry = module.computations[module.entry]
        for position, name in entry.parameters.items():
            leaf, number = self.leaves[self.kept[position]], self.kept[position]
            if leaf.role in (PARAMS, "optimizer") and leaf.shape:
                old = entry.instructions[name]
                tail = f'{position}), metadata={{op_name="params[\'{number}\']"}}'
                entry.instructions[name] = dataclasses.replace(old, tail=tail)
        places = {number: position for position, number in enumerate(self.kept)}
        pairs = ", ".join(f"{{{leaf.output}}}: ({places[number]}, {{}}, may-alias)"
                          for number, leaf in enumerate(self.leaves) if leaf.output is not None and number in places)
        module.header = re.sub(r"input_output_alias=\{.*?\) \}, ", "", module.header)
        module.header = f"input_output_alias={{ {pairs} }}, " + re.sub(r"^HloModule \S+ ", "", module.header)
        return module

    @functools.cached_property
    def updated_in_place(self) -> frozenset[int]:
        """Numbers of the leaves that the compiled program writes an output over."""
        header = self.text.partition("\n")[0]
        table = re.search(r"input_output_alias=\{(.*?)\) \}", header)
        return frozenset(self.kept[number] for _, number, _ in aliases(table[0] if table else "")
                         if number < len(self.kept))

    @functools.cached_property
    def schedule(self) -> tuple[events.Event, ...]:
        """What runs, in order."""
        return schedule(self.module)

    @functools.cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """Every collective that sends something, in the order of the schedule.

        What XLA adds at the call of an exported step has a line of this file as its source, which is left out.
        """
        return tuple(dataclasses.replace(each, source="") if each.source.startswith(f"{__file__}:") else each
                     for each in events.collectives(self.schedule) if each.communication_bytes)

    @functools.cached_property
    def temporaries(self) -> LiveTemporaries:
        """The temporaries at the instant of most memory, by purpose."""
        return LiveTemporaries(self.module, [each.name for each in self.collectives
                                             if each.kind == "all-gather" and self.served(each, PARAMS)])

    def peak(self) -> dict[str, int]:
        """Bytes of a device at the instant of most memory: arguments by role, and temporaries by purpose."""
        result = self.argument_bytes()
        if self.memory is not None:
            for each in self.temporaries.live:
                result[each.what] = result.get(each.what, 0) + each.bytes
            rest = self.memory.temp_size_in_bytes - sum(each.bytes for each in self.temporaries.live)
            result["allocated, not alive"] = max(0, rest)
        return {name: size for name, size in result.items() if size}

    @functools.cached_property
    def timing(self) -> Timing | None:
        """The predicted step; None where the chip is not known."""
        if self.target is None:
            return None
        return predict(self.schedule, self.target, [coords(each) for each in self.devices], tokens=1,
                       model_flops=self.traced_flops or 0.0)

    @functools.cached_property
    def spans(self) -> list[Span]:
        """What a device computes, sends and waits for in the predicted step; none where the chip is not known."""
        if self.target is None:
            return []
        return timeline(self.schedule, self.target, [coords(each) for each in self.devices])

    def waits(self) -> list[tuple[float, Collective]]:
        """Collectives that the predicted step waits for, with the seconds of all their runs, the longest first."""
        seconds = self.timing.collectives if self.timing else {}
        waits = [(seconds.get((each.computation, each.name), (0.0, 0.0))[1], each) for each in self.collectives]
        return sorted((each for each in waits if each[0]), key=lambda each: -each[0])

    @property
    def platform(self) -> str:
        """"cpu", "gpu" or "tpu"."""
        return platform_of(self.devices[0]).name

    @property
    def num_devices(self) -> int:
        """Of the step."""
        return len(self.devices)

    @functools.cached_property
    def data_axes(self) -> frozenset[str]:
        """The mesh axes that cut the batch; all of them where nothing cuts it."""
        cut = frozenset[str]().union(*(leaf.axes for leaf in self.of(BATCH)))
        return cut or frozenset(name for name, size in self.axis_sizes.items() if size > 1)

    @functools.cached_property
    def axis_sizes(self) -> Mapping[str, int]:
        """Name -> size of the axes of the mesh, in its order; one axis where no input has a `NamedSharding`."""
        meshes = [leaf.sharding.mesh for leaf in self.leaves if isinstance(leaf.sharding, NamedSharding)]
        largest = max(meshes, key=lambda mesh: mesh.size, default=None)
        return dict(largest.shape) if largest is not None else {"devices": self.num_devices}

    @property
    def data_size(self) -> int:
        """Over how many devices the data axes go."""
        return math.prod(self.axis_sizes[name] for name in self.data_axes)

    def of(self, role: str) -> list[Leaf]:
        """The leaves of a role."""
        return [leaf for leaf in self.leaves if leaf.role == role]

    def argument_bytes(self) -> dict[str, int]:
        """Bytes of a device by role."""
        return {role: sum(leaf.device_bytes for leaf in self.of(role))
                for role in dict.fromkeys(leaf.role for leaf in self.leaves)}

    def served(self, collective: Collective, role: str) -> list[Leaf]:
        """The leaves of a role that a collective gathers, or whose gradients it reduces."""
        leaves = (self.leaves[int(number)] for number in collective.serves if number.isdecimal())
        return [leaf for leaf in leaves if leaf.role == role]

    @property
    def device_bytes(self) -> int | None:
        """Memory that the step needs of each device; None where the backend does not say."""
        memory = self.memory
        return None if memory is None else (
            memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
            + memory.temp_size_in_bytes)


def compile_step(jitted: Any, shapes: Sequence[Any], *, target: str | None = None, params: Selector | None = None,
                 batch: Selector | None = None, compiler_options: Mapping[str, Any] | None = None) -> Program:
    """The step `jitted(*shapes)`, compiled; nothing is executed. Raises UsageError for what cannot be audited.

    With a target the step is exported and compiled for that target's devices: meshes of `shapes`, and those that the
    step itself names, are of as many live or simulated devices. Arguments are those of `audit`.
    """
    if not hasattr(jitted, "lower"):
        name = getattr(jitted, "__name__", type(jitted).__name__)
        raise UsageError(f"{name} is not jitted: give what jax.jit returns, as audit(jax.jit({name}), *shapes).")
    try:
        lowered = jitted.lower(*shapes)
    except (TypeError, ValueError) as error:
        raise _not_lowered(error) from error
    leaves, outputs = _inputs(jitted, shapes, lowered), _outputs(lowered)
    options = dict(compiler_options or {})
    if target is None:
        compiled = _compiled(jitted, shapes, lowered, options)
        shardings = jax.tree.leaves(compiled.input_shardings)
        devices = _devices_of(shardings)
        topology = topology_of(devices) if devices[0].platform != "cpu" else None
        kept = _kept(compiled.as_text() or "", leaves)
        numbers = range(len(leaves)) if len(shardings) == len(leaves) else kept
        for number, sharding in zip(numbers, shardings, strict=False):
            leaves[number] = dataclasses.replace(leaves[number], sharding=sharding)
    else:
        topology = target_of(target)
        compiled, devices = _for_target(jitted, shapes, leaves, topology, options)
        kept = tuple(range(len(leaves)))
    if params is None and hasattr(jitted, "abstract_state"):  # stages 1 and 2 may keep a copy of another dtype
        has_copy = any(leaf.label.startswith("state.weights") for leaf in leaves)
        params = "state.weights" if has_copy else "state.params"
    leaves = with_roles(leaves, outputs, params=params, batch=batch)
    if not any(leaf.output is not None for leaf in leaves) and params is None:
        raise UsageError("the step has no state: no output has the shapes of an argument. Give a step that returns its "
                         "new parameters, or name them: params=\"state.params\".")
    if not any(leaf.role == PARAMS for leaf in leaves):
        raise UsageError("no argument was found to be parameters: name them, as params=\"state.params\".")
    return Program(compiled.as_text() or "", compiled.memory_analysis(), tuple(leaves), kept, tuple(devices), topology,
                   _traced(jitted, shapes))


def plain_step(jitted: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """(A `jax.jit` function of arrays, its arguments) of what `nnx.jit` or Equinox's `filter_jit` returns.

    So, too, where `jax.jit` has static arguments. The rest as it is.
    """
    if is_nnx_jit(jitted):
        return pure_step(jitted, args)
    if not hasattr(jitted, "lower") or hasattr(jitted, "abstract_state"):
        return jitted, args
    has_static = any(_array_or_none(leaf) is None and not isinstance(leaf, int | float | complex)
                     for leaf in jax.tree.leaves(args))
    return _arrays_step(jitted, args) if has_static or not hasattr(jitted, "trace") else (jitted, args)


def _arrays_step(jitted: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """(A `jax.jit` function of arrays alone that computes what `jitted` does, its arguments).

    Functions and settings among the arguments stay as they are, and None is in their place. An argument is donated
    where each of its arrays is.
    """
    arrays = jax.tree.map(_array_or_none, args)

    def step(*arrays: Any) -> Any:
        whole = jax.tree.map(lambda array, own: own if array is None else array, arrays, args,
                             is_leaf=lambda each: each is None)
        return jax.tree.map(_array_or_none, jitted(*whole))

    functools.update_wrapper(step, jitted, updated=())
    try:
        jaxpr = trace(step, *arrays).jaxpr
    except (TypeError, ValueError) as error:
        raise _not_lowered(error) from error
    donated = {atom for eqn in jaxpr.eqns for atom in donated_inputs(eqn)}
    kept = {atom for eqn in jaxpr.eqns for atom in variables(eqn.invars)} - donated
    inputs = jax.tree.unflatten(jax.tree.structure(arrays), jaxpr.invars)
    numbers = [number for number, each in enumerate(map(set, map(jax.tree.leaves, inputs)))
               if donated & each and not kept & each]
    return jax.jit(step, donate_argnums=numbers), arrays


def _array_or_none(leaf: Any) -> Any:
    return leaf if hasattr(leaf, "shape") and hasattr(leaf, "dtype") else None


def _not_lowered(error: Exception) -> UsageError:
    return UsageError(f"the step does not lower for these arguments ({_line(error)}): give the arguments of a call, as "
                      "arrays or jax.ShapeDtypeStructs with shardings.")


def _line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__


def _inputs(jitted: Any, shapes: Sequence[Any], lowered: Any) -> list[Leaf]:
    """The arrays of the arguments. A step of this library has the state as its first, which callers do not give."""
    infos = jax.tree_util.tree_flatten_with_path(lowered.args_info)[0]
    given = [leaf for leaf in jax.tree.leaves(list(shapes)) if hasattr(leaf, "shape")]
    shardings = [getattr(leaf, "sharding", None) for leaf in given] if len(given) == len(infos) else [None] * len(infos)
    names = _argument_names(jitted)
    leaves = []
    for (path, info), sharding in zip(infos, shardings, strict=True):
        number = getattr(path[1], "idx", None) if len(path) > 1 else None
        name = names[number] if number is not None and number < len(names) else f"args[{number}]"
        aval = getattr(info, "_aval", info)
        leaves.append(Leaf(name + jax.tree_util.keystr(path[2:]), tuple(aval.shape), aval.dtype, sharding,
                           bool(info.donated)))
    return leaves


def _argument_names(jitted: Any) -> list[str]:
    if hasattr(jitted, "abstract_state"):
        return ["state", "batch"]
    try:
        parameters = inspect.signature(jitted).parameters.values()
    except (TypeError, ValueError):
        return []
    return [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]


def _outputs(lowered: Any) -> list[tuple[str, tuple[int, ...], Any]]:
    return [(jax.tree_util.keystr(path), tuple(info.shape), info.dtype)
            for path, info in jax.tree_util.tree_flatten_with_path(lowered.out_info)[0]]


def _compiled(jitted: Any, shapes: Sequence[Any], lowered: Any, options: dict[str, Any]) -> Any:
    if hasattr(jitted, "compile"):  # a step of this library, which adds options of its own
        return jitted.compile(*shapes)
    first = next((next(iter(leaf.sharding.device_set)) for leaf in jax.tree.leaves(list(shapes))
                  if getattr(leaf, "sharding", None) is not None), jax.devices()[0])
    try:
        return compiled_for(lowered, first, options)
    except jax.errors.JaxRuntimeError as error:
        raise UsageError(f"the step does not compile ({_line(error)}): mend that first.") from error


def _devices_of(shardings: Sequence[Any]) -> list[Any]:
    meshes = [each.mesh for each in shardings if isinstance(each, NamedSharding) and isinstance(each.mesh, Mesh)]
    if meshes:
        largest = max(meshes, key=lambda mesh: mesh.size)
        return list(np.ravel(largest.devices))
    sets = [each.device_set for each in shardings if each is not None]
    return sorted(max(sets, key=len, default=set(jax.devices()[:1])), key=lambda device: device.id)


def _for_target(jitted: Any, shapes: Sequence[Any], leaves: Sequence[Leaf], target: Target, options: dict[str, Any]
                ) -> tuple[Any, list[Any]]:
    if not hasattr(jitted, "trace"):
        raise UsageError(f"target={target.text!r}: a step that is no jax.jit function is compiled for its own mesh: "
                         "make that of the target's devices, and leave target out.")
    devices = target_devices(target)
    sizes = {leaf.sharding.mesh.size for leaf in leaves if isinstance(leaf.sharding, NamedSharding)}
    if sizes != {len(devices)}:
        have = f"a mesh of {max(sizes)}" if sizes else "no NamedSharding"
        raise UsageError(f"target={target.text!r} has {len(devices)} devices, and the arguments have {have}: give them "
                         f"shardings over {len(devices)} devices, simulated ones too: simulate_devices({len(devices)})")
    mesh = next(leaf.sharding.mesh for leaf in leaves if isinstance(leaf.sharding, NamedSharding))
    ordered = _ordered(devices, mesh.axis_sizes, target)

    def like(other: Any) -> Mesh:
        return Mesh(ordered.reshape(other.axis_sizes), other.axis_names)

    def placed(leaf: Leaf) -> Any:
        sharding = leaf.sharding
        if isinstance(sharding, NamedSharding):
            kind = sharding.memory_kind if sharding.memory_kind in ("pinned_host", "device") else None
            sharding = NamedSharding(like(sharding.mesh), sharding.spec, memory_kind=kind)
        else:
            sharding = NamedSharding(like(mesh), jax.sharding.PartitionSpec())
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    treedef = jax.tree.structure(tuple(shapes))
    try:
        exported = jax.export.export(jitted, platforms=[target.chip.platform])(*shapes)

        def step(*flat: Any) -> Any:
            return exported.call(*jax.tree.unflatten(treedef, flat))

        donated = tuple(number for number, leaf in enumerate(leaves) if leaf.donated)
        # The mesh of `jax.set_mesh`, where there is one, is of the devices that the step was written for.
        is_set = not jax.sharding.get_abstract_mesh().empty
        with jax.set_mesh(like(mesh)) if is_set else contextlib.nullcontext():
            lowered = jax.jit(step, donate_argnums=donated).lower(*map(placed, leaves))
        return compiled_for(lowered, devices[0], options), list(ordered.flat)
    except (jax.errors.JaxRuntimeError, ValueError, NotImplementedError) as error:
        if isinstance(error, UsageError):
            raise
        fits = " It does not fit." if "RESOURCE_EXHAUSTED" in str(error) else ""
        raise UsageError(f"the step does not compile for {target.text} ({_line(error)}).{fits} Give a step that lowers "
                         "for that platform.") from error


def _ordered(devices: Sequence[Any], sizes: Sequence[int], target: Target) -> np.ndarray:
    """The devices of a target in the order of a mesh of `sizes`: as XLA numbers GPUs, by their links on a TPU."""
    if target.chip.tpu is None:
        return np.array(devices)
    from jax.experimental import mesh_utils

    return mesh_utils.create_device_mesh(tuple(sizes), devices=list(devices), allow_split_physical_axes=True)


def _kept(text: str, leaves: Sequence[Leaf]) -> tuple[int, ...]:
    """The leaf of each parameter of the program. JAX leaves out what the step does not read; names say which."""
    module = parse(text)
    entry = module.computations[module.entry]
    names = [module.metadata(entry.instructions[entry.parameters[number]])[0].replace("\\", "")
             for number in sorted(entry.parameters)]
    if len(names) == len(leaves):
        return tuple(range(len(leaves)))
    kept, number = [], 0
    for name in names:
        while number < len(leaves) and leaves[number].label != name:
            number += 1
        if number == len(leaves):
            raise UsageError(f"the program's input {name!r} is no argument: give target=, or a step that reads all "
                             "its arguments.")
        kept.append(number)
        number += 1
    return tuple(kept)


def _traced(jitted: Any, shapes: Sequence[Any]) -> float | None:
    """Products of the step as written, for the whole batch; None where a part of it is written for one device."""
    if not hasattr(jitted, "trace"):
        return None
    jaxpr = jitted.trace(*shapes).jaxpr
    has_shard_map = any(primitive_of(eqn) == SHARD_MAP for eqn in all_eqns(jaxpr.jaxpr))
    return None if has_shard_map else traced_flops(jaxpr)
