"""What a step may send at its stage and what it must, and whether a compiled program keeps to it.

A stage fixes which collectives a step runs, over which mesh axes and with how many bytes (arXiv 1910.02054, section 7).
XLA decides what is emitted, and a model can make it emit more; only the compiled text shows it. A step can also send
too little: what is stored whole need not be gathered, and half the bits are half the bytes.
"""

from collections.abc import Sequence
from typing import Any

import jax

from zero_jax.contract.codes import code_violations, tile_violations
from zero_jax.contract.host import HostUse, host_budget, host_violations
from zero_jax.contract.memory import memory_violations, state_budget, state_violations
from zero_jax.contract.minimum import detours, shortfalls
from zero_jax.contract.params import min_itemsize, param_buffers, param_traffic
from zero_jax.contract.purpose import purpose_of, sorted_dims, split_by_purpose
from zero_jax.contract.report import Contract, Report, TrafficBudget, TrafficResult
from zero_jax.contract.violations import (
    SMALL_LEAF,
    TOLERANCE,
    excess,
    gather_notes,
    reduce_notes,
    row_violations,
    slice_violations,
    slices_notes,
    violations,
)
from zero_jax.layout.layout import Layout
from zero_jax.layout.step_weights import microbatch_layout, step_weights_bytes
from zero_jax.optim.whole_matrices import moved
from zero_jax.sharding.batch import Accumulation
from zero_jax.xla.hlo import Collective, collectives
from zero_jax.xla.host_slices import HostSlice


class ContractError(ValueError):
    """A compiled program sends what its stage does not promise, or does not do what it does."""


def contract_of(layout: Layout, accumulation: Accumulation | None = None, optimizer: Any = None,
                activation_bytes: float = 0.0, host_activations: bool = False) -> Contract:
    """What a step of this layout may send; exact for every leaf, padding included.

    With microbatches, stage 3 gathers in each of them or once a step, and gradients are reduced in each or once. Of
    `optimizer` only what `whole_matrices` moves may be sent. activation_bytes: what a step's activations may send over
    `tensor` and `context` (`Activations.communication_bytes`). host_activations: whether checkpoints are kept in
    host memory.

    For simulated devices the contract is what XLA:CPU can keep: it sends bfloat16 as float32.
    """
    mesh, stage, platform, names = layout.axes.sizes, layout.stage, layout.axes.platform, layout.axes.step_names

    # First, parameters and gradients, and how often microbatches send them.
    num_microbatches = 1 if accumulation is None else accumulation.microbatches
    params, buffers = param_traffic(layout, num_microbatches), param_buffers(layout)
    gathered, reduced = sum(each.gathered_bytes for each in params), sum(each.reduced_bytes for each in params)
    num_reductions = 1 if accumulation is None or accumulation.once else num_microbatches
    reduced *= num_reductions
    gathered_codes = sum(each.gathered_bytes for each in params if each.gathers_codes)
    reduced_codes = sum(each.reduced_bytes for each in params if each.reduces_codes) * num_reductions

    # Second, what is small. A batch norm sums two statistics forward, again where it is recomputed, two backward.
    statistics = 3 * sum(leaf.size * 4 for leaf in jax.tree.leaves(layout.state.variables))
    small = max(0.01 * (gathered + reduced), 2.0 * num_microbatches * statistics, 4096.0 * num_microbatches)
    tiles = max(mesh.values()) if platform == "tpu" else 1
    slack = TOLERANCE * (gathered + reduced) + len(jax.tree.leaves(layout.state.params)) * SMALL_LEAF * tiles

    zero_axes = layout.axes.zero if stage.shards_optimizer else ()
    how = "the forward and once more for the backward pass" if stage.shards_params else "all devices after the update"
    how = "the forward pass, and kept for backward" if layout.kept_bytes else how
    copies = microbatch_layout(layout)
    if layout.step_weights is not None:
        how = "all microbatches of a step" + ", and in each of them over the hpZ axes" * copies.gathers_at_use
    budgets = [
        TrafficBudget(f"parameters gathered for {how}" if zero_axes else "no parameter gathered", ("all-gather",),
                      zero_axes, gathered, buffers, "gather", gathered_codes),
        TrafficBudget("gradients summed" + (" and scattered" if zero_axes else ""),
                      ("reduce-scatter", "all-reduce") if zero_axes else ("all-reduce",), names, reduced, buffers,
                      "reduce", reduced_codes),
        TrafficBudget("metrics, statistics of the batch and other small sums",
                      ("all-reduce", "all-gather", "reduce-scatter", "collective-permute"), names, small,
                      key="rest")]
    if optimizer is not None and zero_axes and (matrices := moved(layout, optimizer)):
        budgets.append(TrafficBudget(
            "matrices made whole for the optimizer, and their updates returned", ("all-to-all", "all-gather"),
            zero_axes,
            sum(value.size * max(value.dtype.itemsize, min_itemsize(platform)) * share for value, share in matrices),
            {sorted_dims(value.shape): str(value) for value, _ in matrices}, "matrices"))
    axes = layout.axes
    if model_axes := tuple(name for name in (axes.tensor, axes.context) if mesh.get(name, 1) > 1):
        budgets.append(TrafficBudget(
            "activations summed, gathered and scattered", ("all-reduce", "all-gather", "reduce-scatter", "all-to-all"),
            model_axes, activation_bytes * num_microbatches * (2 if platform == "cpu" else 1), key="activations"))
    if axes.slices:
        budgets += [
            TrafficBudget("outer gradients summed between slices", ("all-reduce",), (axes.slices,), 0.0, key="slices"),
            TrafficBudget("outer parameters gathered in each slice", ("all-gather",), axes.zero, 0.0, key="outer")]
    return Contract(stage.number, mesh, platform, slack, tuple(budgets), zero_axes, params,
                    state_budget(layout), num_microbatches if copies.gathers_at_use else 1, num_reductions,
                    axes.context, step_weights_bytes(layout),
                    host_budget(layout, activations=host_activations, num_gathers=num_microbatches), axes.slices)


def check(program: str | Sequence[Collective], contract: Contract, gathered_bytes: int = 0,
          slices: Sequence[HostSlice] = (), host: HostUse | None = None) -> Report:
    """How a compiled program, its text or its collectives, keeps `contract`; it does if there are no violations.

    gathered_bytes: the most that gathered parameters take on a device at one time (`contract.memory.gathered_at_once`);
    0 where that is not known. slices: of host memory, in the program's loops. host: what it keeps there.
    """
    by_purpose: dict[str, list[Collective]] = {budget.key: [] for budget in contract.budgets}
    for combined in collectives(program) if isinstance(program, str) else program:
        for collective in split_by_purpose(combined, contract):
            if collective.communication_bytes:
                by_purpose[purpose_of(collective, contract)].append(collective)
    notes = {"gather": gather_notes(by_purpose["gather"], contract),
             "reduce": reduce_notes(by_purpose["reduce"], contract),
             "slices": slices_notes(by_purpose.get("slices", ()))}
    results = {budget.key: TrafficResult(budget, tuple(by_purpose[budget.key]), notes.get(budget.key, ()))
               for budget in contract.budgets}
    broken = (*excess(results, contract), *detours(results, contract), *violations(results, contract),
              *row_violations(results, contract), *shortfalls(results, contract),
              *state_violations(contract), *code_violations(results, contract), *tile_violations(results, contract),
              *memory_violations(results, contract, gathered_bytes),
              *slice_violations(slices), *host_violations(contract.host, host))
    return Report(contract, tuple(results.values()), broken, host)


def verify(program: str | Sequence[Collective], contract: Contract, gathered_bytes: int = 0) -> Report:
    """As `check`, but raises ContractError with each offending operation, its bytes, its source and what to do."""
    return kept(check(program, contract, gathered_bytes))


def kept(report: Report) -> Report:
    """`report`; raises ContractError where something breaks the contract."""
    if report.violations:
        raise ContractError(f"The compiled step breaks its contract.\n{report}")
    return report
