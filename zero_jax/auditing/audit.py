"""`zero_jax.audit`: what any jitted step sends, holds and waits for that it need not; in words, as JSON, as a page."""

import dataclasses
import hashlib
import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zero_jax.auditing.findings import MIB, Finding, findings, ideal_bytes, stage
from zero_jax.auditing.page import page, same_text
from zero_jax.auditing.program import Program, compile_step, plain_step
from zero_jax.auditing.roles import BATCH, OPTIMIZER, PARAMS, Selector
from zero_jax.errors import UsageError, few
from zero_jax.files import write_text
from zero_jax.sharding.mesh import make_mesh
from zero_jax.stages import stage_of
from zero_jax.step.make import make_zero_train_step
from zero_jax.step.step import ZeroTrainStep
from zero_jax.versions import installed_version
from zero_jax.xla.collective import total_bytes
from zero_jax.xla.events import again, totals

_OPTIMIZERS = (optax.sgd(1e-3), optax.sgd(1e-3, momentum=0.9), optax.adamw(1e-3))
"""By how many arrays a parameter has in the optimizer's state."""

PACKAGES = ("zero-jax", "jax", "jaxlib", "jax-cuda13-plugin", "libtpu")
"""Those that decide what a program is compiled to, and what is read of it."""


def same_at_stage_3(jitted: Any, shapes: Sequence[Any], program: Program, loss: Callable[..., Any] | None
                    ) -> tuple[ZeroTrainStep, Any] | None:
    """(The step, its batch) of the same loss over the same devices; None where there is no loss, or it is at stage 3.

    The optimizer is one with as much state, and the precision "bf16" where that is what products compute in.

    Args:
        jitted: the audited step; if it is a `ZeroTrainStep`, its own loss is known.
        shapes: its arguments.
        program: the audited step, compiled.
        loss: `loss(params, batch)`, in which nothing is said of shardings; `loss(params, *batch)` of several arguments.
    """
    if isinstance(jitted, ZeroTrainStep):
        if jitted.stage.number == 3:
            return None
        return ZeroTrainStep(jitted.functions.changed(stage=stage_of(3))), shapes[0]
    if loss is None:
        return None
    params, batch = _subtrees(shapes, program, PARAMS), _subtrees(shapes, program, BATCH)
    if len(params) != 1:
        raise UsageError(f"loss: the parameters are {len(params)} arguments, and loss(params, batch) has one: name "
                         "them, as params=\"state.params\", or leave loss out.")
    sizes = [sum(leaf.size for leaf in program.of(role)) for role in (OPTIMIZER, PARAMS)]
    flops = totals(program.schedule).flops
    narrow = flops.get("bf16", 0) > 0.5 * sum(flops.values())
    is_wide = any(leaf.dtype == jnp.float32 for leaf in program.of(PARAMS))
    step = make_zero_train_step(
        params=params[0], loss=lambda params, batch: loss(params, *batch), stage=3,
        mesh=make_mesh(devices=program.devices), precision="bf16" if narrow and is_wide else None,
        optimizer=_OPTIMIZERS[min(2, round(sizes[0] / sizes[1]))])
    return step, tuple(batch)


def _subtrees(shapes: Sequence[Any], program: Program, role: str) -> list[Any]:
    """The largest subtrees of the arguments that have only leaves of `role`, as shapes without shardings."""
    leaves, structure = jax.tree.flatten(tuple(shapes))
    wanted = {number for number, leaf in enumerate(program.leaves) if leaf.role == role}

    def is_of_role(node: Any) -> bool:
        return bool(inside := jax.tree.leaves(node)) and wanted.issuperset(inside)

    found = jax.tree.leaves(jax.tree.unflatten(structure, range(len(leaves))), is_leaf=is_of_role)
    return [jax.tree.map(lambda number: jax.ShapeDtypeStruct(leaves[number].shape, leaves[number].dtype), each)
            for each in found if is_of_role(each)]


@dataclasses.dataclass(frozen=True)
class Audit:
    """The report on a step; `str` gives it in words.

    Attributes:
        program: the compiled step.
        findings: what costs, the dearest kinds first; empty for a clean step.
        stage_3: the audit of this library's step at stage 3 of the same loss, over the same devices; None where the
            loss is not known, and where this is such a step.
    """

    program: Program = dataclasses.field(repr=False)
    findings: tuple[Finding, ...]
    stage_3: "Audit | None" = dataclasses.field(default=None, repr=False)

    @property
    def sent_bytes(self) -> float:
        """Bytes that a device sends in a step."""
        return total_bytes(self.program.collectives)

    def sent_by_purpose(self) -> dict[str, float]:
        """Bytes that a device sends in a step: gathers of parameters, reductions of gradients, and the rest."""
        result: dict[str, float] = {}
        for each in self.program.collectives:
            served = self.program.served(each, PARAMS) or self.program.served(each, OPTIMIZER)
            purpose = ("gather" if each.kind == "all-gather" else "reduce") if served else "rest"
            result[purpose] = result.get(purpose, 0.0) + each.step_bytes
        return result

    def sent_by_collective(self) -> dict[str, dict[str, Any]]:
        """Bytes that a device sends in a step by kind, dtype and arrays, with the line of the largest."""
        result: dict[str, dict[str, Any]] = {}
        for each in sorted(self.program.collectives, key=lambda each: -each.step_bytes):
            leaves = self.program.served(each, PARAMS) or self.program.served(each, OPTIMIZER)
            place = few(sorted({leaf.label for leaf in leaves}), 3) or each.op_name.rpartition("/")[2]
            entry = result.setdefault(f"{each.kind} {'+'.join(sorted(set(each.dtypes)))} of {place}",
                                      {"bytes": 0.0, "source": each.source})
            entry["bytes"] += each.step_bytes
        return result

    def memory(self) -> dict[str, int]:
        """Bytes of each device: parameters, optimizer, batch, other arguments, and temporaries."""
        result = self.program.argument_bytes()
        if self.program.memory is not None:
            result["temporaries"] = self.program.memory.temp_size_in_bytes
        return result

    def to_json(self) -> dict[str, Any]:
        """The report as what `json.dumps` takes."""
        program, timing = self.program, self.program.timing
        return {
            "target": program.target.text if program.target else program.devices[0].device_kind,
            "devices": program.num_devices, "stage": stage(program), "sent_bytes": self.sent_bytes,
            "sent_by_collective": self.sent_by_collective(), "sent_by_purpose": self.sent_by_purpose(),
            "ideal_bytes": {str(key): value for key, value in ideal_bytes(program).items()},
            "memory": self.memory(), "peak": program.peak(), "device_bytes": program.device_bytes,
            "flops": sum(totals(program.schedule).flops.values()),
            "recomputed_flops": sum(totals(program.schedule, of=again).flops.values()),
            "seconds": timing and timing.seconds,
            "exposed_seconds": timing and sum(timing.exposed_seconds.values()),
            "findings": [dataclasses.asdict(each) for each in self.findings],
            "stage_3": self.stage_3 and self.stage_3.to_json(),
        }

    def __str__(self) -> str:
        """The report in words."""
        program, data = self.program, self.to_json()
        num_params = sum(leaf.size for leaf in program.of(PARAMS))
        lines = [f"{num_params / 1e6:,.1f}M parameters on {program.num_devices} devices of {data['target']}, stored as "
                 f"ZeRO stage {data['stage']}"]
        parts = ", ".join(f"{key} {value / MIB:,.1f}" for key, value in self.sent_by_purpose().items())
        ideal = ", ".join(f"{key}: {value / MIB:,.1f}" for key, value in ideal_bytes(program).items())
        lines.append(f"sent by a device: {self.sent_bytes / MIB:,.1f} MiB a step ({parts}); ZeRO {ideal}")
        lines.append("memory of a device, MiB: " + ", ".join(
            f"{key} {value / MIB:,.1f}" for key, value in self.memory().items()))
        if program.timing is not None:
            waiting = f"{1e3 * data['exposed_seconds']:.2f}"
            lines.append(f"predicted step: {1e3 * data['seconds']:.2f} ms, of which {waiting} wait for collectives")
        if self.stage_3 is not None:
            lines.append(f"the same at stage 3 here: {same_text(data['stage_3'])}")
        count = len(self.findings)
        lines.append("nothing found" if not count else f"{count} finding{'s' * (count > 1)}:")
        return "\n".join([*lines, *(f"  {each}" for each in self.findings)])

    def to_html(self, path: str | Path | None = None) -> str:
        """The report as a page that needs no other file; written to `path` if that is given."""
        text = page(self.program, self.findings, self.to_json())
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text


def audit(jitted: Any, *shapes: Any, target: str | None = None, params: Selector | None = None,
          batch: Selector | None = None, loss: Callable[..., Any] | None = None,
          compiler_options: Mapping[str, Any] | None = None) -> Audit:
    """What the step `jitted(*shapes)` sends, holds and waits for that it need not; it is compiled and never executed.

    Any jitted function will do, as `step(params, opt_state, batch) -> (params, opt_state, loss)` or
    `step(state, batch) -> (state, metrics)`: what outputs replace is state, and what is named `params`, or has the
    shapes of the rest, is parameters. For a target the meshes of `shapes`, and those within the step, are of as many
    live or simulated devices (`zero_jax.simulate_devices(8)` for `h100:8`).

    Raises UsageError for a function that is not jitted, does not lower, or has no state.

    Args:
        jitted: what `jax.jit`, `nnx.jit` or Equinox's `filter_jit` returns, or a `ZeroTrainStep` (whose one argument
            is a batch).
        shapes: arguments: arrays, or `jax.ShapeDtypeStruct`s with shardings; for `filter_jit` other values too.
        target: a topology that need not be here, as `h100:8`; None: the devices of the shardings.
        params: which inputs are parameters: the beginning of their labels (`"state.params"`), or a function of a label.
        batch: which inputs are the batch.
        loss: `loss(params, batch)`, without shardings: with it the report has "the same at stage 3 here", which is
            compiled too. `loss(params, *batch)` where the batch is several arguments. A step of this library has its
            own.
        compiler_options: XLA's, for this compilation. With a target, give again those that `jax.jit` got.
    """
    jitted, shapes = plain_step(jitted, shapes)
    program = compile_step(jitted, shapes, target=target, params=params, batch=batch, compiler_options=compiler_options)
    same = same_at_stage_3(jitted, shapes, program, loss)
    return Audit(program, tuple(findings(program)), None if same is None else audit(*same))


def cached_report(folder: Path, jitted: Any, shapes: Sequence[Any], *, target: str | None, params: str | None
                  ) -> dict[str, Any]:
    """`audit(...).to_json()`, read from `folder` where the same lowered program was audited before.

    Lines of source are those of the first audit: lines that move change no program. Without a target XLA's options of
    a plain `jax.jit` are not known, so that such a step is compiled each time.
    """
    jitted, shapes = plain_step(jitted, tuple(shapes))
    key = _key(jitted, shapes, target, params)
    path = folder / f"{key}.json"
    if key is not None and path.is_file():
        return json.loads(path.read_text(encoding="utf-8"))
    report = audit(jitted, *shapes, target=target, params=params).to_json()
    if key is None:
        return report
    folder.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(report))
    return report


def _key(jitted: Any, shapes: Sequence[Any], target: str | None, params: str | None) -> str | None:
    """A hash of all that decides a report; None where that is not known, or `audit` will say what is the matter."""
    is_own = hasattr(jitted, "abstract_state")
    if not hasattr(jitted, "lower") or not (target or is_own):
        return None
    try:
        lowered = jitted.lower(*shapes)
    except (TypeError, ValueError):
        return None
    parts = [lowered.as_text(), lowered.in_tree, inspect.signature(jitted), target, params,
             os.environ.get("XLA_FLAGS", ""), *map(installed_version, PACKAGES)]
    if is_own:  # it is compiled for its own mesh
        parts += [jitted.functions.mesh.devices.flat[0].device_kind, sorted(jitted.programs.compiler_options.items())]
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()
