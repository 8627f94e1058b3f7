"""One table of what does not go together: options of a step, and of what is run with it. No JAX.

The constructor of a step, the command line before JAX starts, `docs/combinations.md` and the tests read the same rows.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

from zero_jax.arguments import shown
from zero_jax.errors import UsageError

Values = Mapping[str, Any]
"""Option or fact -> its value. Options are named as the arguments that take them, with a dot before a field, as
`offload.disk`. A row with a name that is not here is left out: where that is known it is checked."""

DEFAULTS: dict[str, Any] = {
    "accumulate": 1, "reduce": "every", "gather": "use", "overlap": "auto", "offload.parameters": "device",
    "offload.fraction": 1, "tensor": 1, "context": 1, "replica": 1, "shards": 1}
"""The values that leave an option out, other than None, False, the integer 0 and what is empty."""

AXES = ("tensor", "context", "replica")
"""Names of the mesh's axes, whose values are their sizes."""

OWNERS = {"Precision": "Precision", "offload": "Offload", "communication": "Communication",
          "diloco": "make_diloco_step", "attention": "attention"}
"""Who takes what is named with a dot."""

FIELDS = {**dict.fromkeys(("gather", "reduce", "hpz_axes", "overlap", "prefetch"), "Communication"),
          **dict.fromkeys(("tensor_rules", "sequence_parallel"), "Parallelism")}
"""Who takes what is named without."""

FACTS = {"stage": "at stage {}", "platform": "on platform {}", "shards": "where ZeRO shards over one device",
         "one_hop": "where gradients are sent in one hop", "copy": "where the model reads the master weights"}
"""What is no option of its own, or reads better so."""


@dataclasses.dataclass(frozen=True)
class Term:
    """Whether one of the options `names` is given; is one of `values`; or, `negated`, whether none of them is."""

    names: tuple[str, ...]
    values: tuple[Any, ...] = ()
    negated: bool = False

    def holds(self, values: Values) -> bool:
        """Whether that is so of `values`."""
        return (self.found(values) is None) == self.negated

    def found(self, values: Values) -> str | None:
        """The first of the names that is given, or one of its values."""
        return next((name for name in self.names if (
            values[name] in self.values if self.values else is_given(name, values[name]))), None)


def is_given(name: str, value: Any) -> bool:
    """Whether `value` is another than that which leaves the option out."""
    return (bool(value) or isinstance(value, float)) and value != DEFAULTS.get(name)


def given(*names: str) -> Term:
    """One of these options is given."""
    return Term(names)


def left(name: str) -> Term:
    """The option is left out."""
    return Term((name,), negated=True)


def among(name: str, *values: Any) -> Term:
    """The option is one of `values`."""
    return Term((name,), values)


def other(name: str, *values: Any) -> Term:
    """The option is none of `values`."""
    return Term((name,), values, negated=True)


@dataclasses.dataclass(frozen=True)
class Row:
    """What does not go together: all of `terms`; why; and what to do. In texts {name} and {name=value} are options."""

    terms: tuple[Term, ...]
    reason: str
    remedy: str = "leave one of them out"

    @property
    def names(self) -> set[str]:
        """Of the options."""
        return {name for term in self.terms for name in term.names}

    def refuses(self, values: Values) -> bool:
        """Whether `values` are known and have all of it."""
        return self.names <= values.keys() and all(term.holds(values) for term in self.terms)


class Arguments:
    """How the library names options; the command line has its own way (`zero_jax.cli.options.combinations`)."""

    facts: Mapping[str, str] = {**FACTS, "lora": "with adapters"}
    fields: Mapping[str, str] = {"float16": "precision", "fp8": "Precision.fp8"}

    def option(self, name: str, value: str = "") -> str:
        """An option, with a value as it is written there."""
        owner, _, field = self.fields.get(name, name).rpartition(".")
        text = f"{field}={value}" if value else field
        if name in AXES:
            return f"make_mesh({text})" if value else f"a mesh axis {name!r}"
        owner = OWNERS.get(owner) or FIELDS.get(name)
        return f"{owner}({text})" if owner and value else text

    def value(self, value: Any) -> str:
        """A value as it is written there."""
        if isinstance(value, str):
            return f"\"{value}\""
        return shown(value) if isinstance(value, (int, float, tuple, dict)) else "..."

    def shown(self, name: str, values: Values) -> str:
        """An option that is given, with its value in `values`."""
        return self.option(name, "" if name in AXES else self.value(values[name]))


def message(row: Row, values: Values, names: Arguments) -> str:
    """What is said of `values` that `row` refuses: what, with what, why, and what to do."""
    parts = list[str]()
    for term in row.terms:
        found, name = term.found(values), term.names[0]
        if (found or name) in names.facts:
            parts.append(names.facts[found or name].format(values[found or name]))
        elif found is not None:
            parts.append("with " * bool(parts) + names.shown(found, values))
        else:
            parts.append("without " + names.option(name, *map(names.value, term.values[:1])))
    mesh = f" in the mesh {values['sizes']}" if "sizes" in values and row.names & {*AXES, "shards", "one_hop"} else ""
    return f"{' '.join(filter(None, parts))}{mesh}: {told(row.reason, names)}: {told(row.remedy, names)}."


def told(text: str, names: Arguments) -> str:
    """`text` with its options named."""
    return re.sub(r"\{([\w.]+)(?:=([^}]*))?\}", lambda found: names.option(
        found[1], "" if found[2] is None else found[2] if found[2].isdecimal() else names.value(found[2])), text)


def check(values: Values, names: Arguments | None = None, rows: Iterable[Row] | None = None) -> None:
    """Raises UsageError for the first of `rows` (default: `TABLE`) that refuses `values`, in the words of `names`."""
    for row in TABLE if rows is None else rows:
        if row.refuses(values):
            raise UsageError(message(row, values, names or Arguments()))


GPUS, HOSTS = ("gpu", "cuda"), ("cpu", "gpu", "cuda", "rocm", "tpu")
"""JAX's platforms of GPUs, and those on which XLA moves arrays to the host's memory and back."""

_WHOLE = "parameters are whole on every device all the time"
_STAGE_3 = "take stage 3, or leave it out"
_PLACED = Term(("offload.gradients", "offload.parameters"), ("host",))
_ON_DEVICE = "leave one of them out, or give {offload=optimizer}"
_CODES = given("communication.weights", "communication.gradients")

STEP = (
    # How often parameters are gathered, and gradients reduced.
    Row((given("gather"), among("stage", 0, 1, 2)), _WHOLE,
        "leave {gather} out, or take stage 3, which with {gather=forward} sends as little as stages 1 and 2"),
    Row((among("gather", "step"), left("accumulate")),
        "a step of one batch gathers parameters where it reads them",
        "give {accumulate=4}, say, or {gather=forward}, or leave {gather} out"),
    Row((among("gather", "forward", "step"), left("shards")), "there is nothing to gather", "leave {gather} out"),
    Row((among("gather", "forward"), given("hpz_axes")), "backward gathers nothing, inside of a node or outside"),
    Row((given("gather"), given("hpz_axes"), given("communication.weights", "fp8")),
        "the copy of a step would be decoded, and gathered inside of a node as it is"),
    Row((given("hpz_axes"), among("stage", 0, 1, 2)), _WHOLE, _STAGE_3),
    Row((given("prefetch"), among("stage", 0, 1, 2)), "no layer gathers its parameters, which are whole", _STAGE_3),
    Row((given("prefetch"), among("gather", "step"), left("hpz_axes")),
        "no layer gathers its parameters, which are whole"),
    Row((given("prefetch"), among("overlap", False)), "its gathers would block, in whichever iteration they are"),
    Row((among("reduce", "once"), left("accumulate")), "the gradient of one batch is reduced once already",
        "leave {reduce} out, or give {accumulate=4}, say"),
    Row((among("reduce", "once"), given("context")),
        "its devices have a part of every example, and no batch of their own", "give {reduce=every}"),
    # What `tensor` splits.
    Row((given("tensor_rules"), left("tensor")), "there is nothing to split over",
        "give {tensor=2}, say, or leave {tensor_rules} out"),
    Row((Term(("sequence_parallel", "partition_activations"), (True,)), left("tensor")),
        "it splits activations over the devices of that axis", "give {tensor=2}, say, or leave it out"),
    Row((among("partition_activations", "cpu"), other("platform", *HOSTS)),
        "XLA moves no arrays to the host's memory there", "give True, which splits them over {tensor}"),
    # Quantised communication.
    Row((_CODES, among("stage", 0)), "each device has all weights, and gradients are all-reduced",
        "give stage 1, 2 or 3, or leave it out"),
    Row((_CODES, left("shards")), "one device has all shards, and nothing is sent",
        "give more devices, or leave it out"),
    Row((given("communication.gradients"), given("one_hop")), "there is no node to be inside of",
        "give one format, or a mesh of several hosts, as {replica=2}"),
    Row((given("communication.weights"), among("stage", 1, 2), left("copy")),
        "in what is gathered there rounding would add up",
        "give {precision=bf16}, or stage 3, or quantise gradients alone"),
    # Products in tiles.
    Row((given("tiling"), among("stage", 0, 1, 2)), _WHOLE, _STAGE_3),
    Row((given("tiling"), given("gather")), "a copy of all parameters would be gathered on the devices"),
    Row((given("tiling"), among("reduce", "once")), "a whole gradient would be on every device",
        "give {reduce=every}, or leave {tiling} out"),
    Row((given("tiling"), given("communication.gradients")), "the gradient of a tile is sent as it is",
        "quantise weights alone, or leave {tiling} out"),
    Row((given("tiling"), given("hpz_axes"), given("communication.weights")),
        "the copy inside of a node would be codes of whole shards"),
    Row((given("tiling"), given("sequence_parallel")), "products with split weights gather the sequence themselves"),
    Row((given("fp8"), given("lora")), "a kernel with an adapter is used by two products"),
    Row((given("tiling"), given("fp8")), "the product of a tile would have a scale of its own"),
    Row((given("tiling"), left("shards"), other("offload.parameters", "host")),
        "that device has the weights and the gradients whole",
        "give more devices, or {offload=parameters}, with which tiles come up from host memory, or leave it out"),
    Row((given("tiling"), given("lora")), "a kernel with an adapter is used by two products"),
    Row((given("tiling"), given("diloco.every")), "slices that train by themselves have no tiles"),
    # Where the state is.
    Row((_PLACED, among("stage", 0, 1, 2)), _WHOLE, "take stage 3, or give {offload=optimizer}"),
    Row((_PLACED, given("gather")), "a copy of all parameters would be gathered on the devices", _ON_DEVICE),
    Row((_PLACED, among("reduce", "once")), "a whole gradient would be on every device", _ON_DEVICE),
    Row((_PLACED, given("hpz_axes")), "what forward keeps for backward would be on the devices", _ON_DEVICE),
    Row((_PLACED, given("communication.weights", "communication.gradients", "fp8")),
        "what is encoded before the loop over layers would be on the devices", _ON_DEVICE),
    Row((among("offload.gradients", "host"), given("tiling")),
        "the gradient of a weight in tiles is made tile by tile on the device"),
    Row((among("offload.gradients", "host"), among("partition_activations", "cpu")),
        "what backward reads and writes in host memory is not counted apart", "give {remat=full} alone"),
    Row((among("offload.parameters", "host"), among("offload.master", "device")),
        "the model would read a copy in host memory of what is in the device's"),
    Row((given("offload.fraction"), among("offload.parameters", "host")),
        "a share is of what is in host memory beside parameters on the device"),
    Row((given("offload.fraction"), given("offload.disk")), "a share is of what is in host memory"),
    Row((given("offload.disk"), among("offload.parameters", "host")),
        "with files what the model reads is on the device"),
    Row((among("offload.gradients", "host"), given("offload.disk")),
        "with files the update reads gradients on the device"),
    Row((among("offload.gradients", "host"), given("offload.fraction")),
        "the update reads gradients in blocks beside states in host memory, and a part of these would be on the "
        "device"),
    Row((among("offload.gradients", "host"), among("offload.optimizer", "device")),
        "the update reads gradients in blocks beside states in host memory"),
    Row((among("offload.optimizer", "device"), among("offload.master", "device")), "nothing is offloaded",
        "leave {offload} out"),
    # Devices.
    Row((given("float16"), among("platform", "tpu")),
        "a TPU has no float16, and would all-reduce gradients in it instead of scattering them",
        "give {precision=bf16}"),
    Row((among("attention.kernel", "cudnn"), other("platform", *GPUS)), "it is a kernel of NVIDIA GPUs",
        "leave it out, or give {attention.kernel=xla}"),
    Row((among("attention.kernel", "splash"), other("platform", "tpu")), "it is a kernel of TPUs",
        "leave it out, or give {attention.kernel=xla}"),
)
"""Options of a step."""

SLICES = (
    Row((given("diloco.every"), left("replica")), "there is one slice, and no other to average with",
        "give {replica=2} or more"),
    Row((given("guard"), given("diloco.every")), "a slice cannot skip a step while the others take it",
        "leave {guard} out"),
    Row((given("ema"), given("diloco.every")),
        "each slice would average parameters of its own, and the outer ones are an average already",
        "leave {ema} out"),
    Row((_CODES, given("diloco.every")), "that is not known to be right in slices yet",
        "leave it out; {diloco.dtype} can halve what slices send to each other"),
    Row((given("fp8"), given("diloco.every")), "a scale would be of all slices, which train by themselves",
        "give {precision=bf16}"),
    Row((given("offload"), given("diloco.every")), "states of slices are in device memory", "leave {offload} out"),
    Row((given("diloco.mix"), left("diloco.overlap")),
        "the average arrives at once, and no slice has gone on", "leave {diloco.mix} out"),
)
"""Slices that train by themselves, and the options of their step."""

TABLE = (*STEP, *SLICES)
