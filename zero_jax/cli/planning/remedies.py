"""What makes a plan fit that does not: options that are tried, each compiled, and the flags of `train`."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from zero_jax.cli.planning.plan_config import PlanConfig
from zero_jax.cli.reports.report import size_text
from zero_jax.cli.train_config import TrainConfig
from zero_jax.errors import UsageError
from zero_jax.planning.plan import Plan

SECONDS = 120
"""After which no other remedy is tried."""
CHUNKS = 16
"""Of the loss, at most."""


@dataclasses.dataclass(frozen=True)
class Remedy:
    """Options with which a step fits: `changes` by the fields of a `PlanConfig`, and its plan."""

    changes: Mapping[str, Any]
    plan: Plan

    def __str__(self) -> str:
        timing = self.plan.timing
        rate = f", {timing.tokens_per_second:,.0f} tokens/s" if timing else ""
        return (f"{flags(self.changes)}: fits, {size_text(self.plan.needed_bytes)} of "
                f"{size_text(self.plan.memory_bytes or 0)}{rate}")


def remedies(config: PlanConfig, plan: Plan, sizes: Any, plan_of: Callable[[PlanConfig], Plan],
             on_plan: Callable[[str, Plan], None] = lambda name, plan: None) -> list[Remedy]:
    """The changes that suffice: each alone, and where none does, the first of them together.

    Those that leave the work as it is come first, then those of another batch, length or optimizer; the fastest first.

    sizes: the model's config. plan_of: of another config; on_plan: called with the flags and the plan of each trial.
    """
    began, found, together = time.perf_counter(), list[Remedy](), dict[str, Any]()
    single = list(candidates(config, plan, sizes))

    def trial(changes: dict[str, Any]) -> None:
        if time.perf_counter() - began > SECONDS:
            return
        try:
            tried = plan_of(dataclasses.replace(config, **changes))
        except UsageError:  # does not go together with the other options
            return
        on_plan(flags(changes), tried)
        if tried.fits:
            found.append(Remedy(changes, tried))

    for changes in single:
        trial(changes)
    for changes in single:
        if found:
            break
        if together | changes != changes:
            trial(together | changes)
        together |= changes
    return sorted(found, key=lambda each: (
        "moments" in each.changes or (each.plan.batch_size, each.plan.length) != (plan.batch_size, plan.length),
        -each.plan.timing.tokens_per_second if each.plan.timing else 0.0))


def candidates(config: PlanConfig, plan: Plan, sizes: Any) -> Iterator[dict[str, Any]]:
    """What may make `plan`, of `config`, fit, about by what it costs; where the state is too large what lowers that."""
    if config.stage < 3:
        yield {"stage": 3}
    tokens = (plan.length or 1) * config.sequences // config.accumulate
    if plan.layout.device_bytes <= (plan.memory_bytes or math.inf):
        if config.loss_chunks == 1 and plan.length and hasattr(sizes, "vocab_size"):
            yield {"loss_chunks": math.gcd(tokens, CHUNKS)}
        if config.sequences > config.accumulate:
            yield {"accumulate": config.sequences}
        if config.remat in ("model", "no") and not (getattr(sizes, "remat", False) and config.remat == "model"):
            yield {"remat": "dots"}
            yield {"remat": "full"}
        if plan.length and config.context == 1:
            yield from ({"context": parts} for parts in (2, 4, 8) if plan.num_devices % parts == 0)
        if plan.length and (length := shorter(plan)):
            yield {"seq_len": length}
    if plan.lacking_bytes > plan.layout.device_bytes:
        return  # no placement of the state suffices
    if config.optimizer == "adamw" and config.moments is None:
        yield from ({"moments": bits} for bits in (16, 8))
    if config.offload == "no":
        yield {"offload": "optimizer"}
        if config.stage == 3:
            yield {"offload": "parameters"}


def shorter(plan: Plan) -> int:
    """The power of two of tokens that should fit, by temporaries that grow with it; 0 where that is less than 128."""
    state = plan.layout.device_bytes
    fitting = (plan.length or 0) * ((plan.memory_bytes or 0) - state) / max(1, plan.needed_bytes - state)
    return 2 ** math.floor(math.log2(fitting)) if fitting >= 128 else 0


def flags(changes: Mapping[str, Any]) -> str:
    """`changes` as they are typed."""
    return " ".join(f"--{'no-' * (value is False)}{name.replace('_', '-')}" + (
        "" if isinstance(value, bool) else f" {' '.join(map(str, value)) if isinstance(value, tuple) else value}")
        for name, value in changes.items())


def train_lines(config: PlanConfig, plan: Plan) -> list[str]:
    """The command that trains what was planned, and what of the plan `train` has no option for.

    What is as `train` has it by itself is left out.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(TrainConfig)}
    given = {field.name: getattr(config, field.name) for field in dataclasses.fields(PlanConfig)
             if field.name in defaults and field.name not in ("target", "seq_len", "batch_size")}
    given |= {"batch_size": plan.batch_size} | ({"seq_len": plan.length} if plan.length else {})
    given |= {"schedule": "constant"} if config.optimizer == "schedule-free" else {}
    lines = ["To train it: zero-jax train " + flags(
        {name: value for name, value in given.items() if value != defaults[name]})]
    if config.mesh:
        lines.append("Not in that command: --mesh, since train factors its devices by itself.")
    if config.vocab_size is not None:
        lines.append("Not in that command: --vocab-size, since train takes that of its tokenizer.")
    return lines


def remedy_lines(config: PlanConfig, plan: Plan, found: list[Remedy]) -> list[str]:
    """What would help, in lines: what was tried and fits, more devices, and the command of the fastest."""
    lines = ["What would help, compiled; what leaves batch, length and optimizer first, then the fastest:"
             if found else f"Nothing that was tried fits {config.target}."]
    lines += [f"  - {remedy}" for remedy in found]
    if (devices := plan.devices_needed) and devices > plan.num_devices:
        lines.append(f"  - more devices, at least {devices:,} by the size of the state (not compiled)")
    if found:
        best = dataclasses.replace(config, **found[0].changes)
        lines += train_lines(best, found[0].plan)
    return lines
