"""The measurements of third_party.py: a model's losses, communication and times beside a plain Flax and Optax loop."""

import functools
import gc
import importlib.metadata
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from third_party_models import CASES

NUM_STEPS, NUM_TRACES = 3, 3
LARGE = 4096
"""Elements from which on a parameter that stays replicated is counted."""


def measure(name: str, stages: list[int], targets: list[str], precision: str | None, *,
            traces_only: bool = False) -> dict[str, Any]:
    """All figures of one model, in this process."""
    import zero_jax

    zero_jax.simulate_devices(8)
    case = CASES[name]
    model, loss, batch = case.make()
    plain = plain_loop(model, loss, batch)

    def make(stage: int, devices: Any = None, **options: Any) -> Any:
        return zero_jax.make_zero_train_step(
            model, stage, loss=loss, optimizer=make_optimizer(), mesh=zero_jax.make_mesh(devices=devices), **options)

    row: dict[str, Any] = {
        "model": name, "package": f"{case.package} {importlib.metadata.version(case.package)}", "note": case.note,
        "targets": {}, **traces(plain, batch, {stage: functools.partial(make, stage) for stage in stages})}
    if not traces_only:
        row |= losses(plain, batch, make, stages)
        row["targets"] = {target: sent(plain, batch, make, stages, target, precision) for target in targets}
    return row


def traces(plain: "Plain", batch: Any, makers: dict[int, Callable[[], Any]]) -> dict[str, Any]:
    """CPU seconds to trace and lower the plain loop, and a step of each stage."""
    import jax

    state, batch = abstract((plain.start, batch))

    def trace_plain() -> None:
        jax.jit(lambda *args: plain.init(*args)).lower(batch)
        jax.jit(lambda *args: plain.step(*args)).lower(state, batch)

    def trace(make: Callable[[], Any]) -> None:
        step = make()
        step.lower_init(batch)
        step.lower(batch)

    runs = {"plain": trace_plain, **{stage: functools.partial(trace, make) for stage, make in makers.items()}}
    times: dict[Any, list[float]] = {}
    for repeat in range(1 + NUM_TRACES):  # the first time is for imports and for JAX's own caches
        gc.freeze()
        for stage, run in runs.items():
            seconds = timed(run)[1]
            times.setdefault(stage, []).extend([seconds] * (repeat > 0))
    best = {stage: min(each) for stage, each in times.items()}
    return {"plain_trace_s": best.pop("plain"), "traces_s": best, "trace_s": max(best.values())}


def losses(plain: "Plain", batch: Any, make: Callable[..., Any], stages: list[int]) -> dict[str, Any]:
    """How far steps on simulated devices are off the plain loop, what stays whole at stage 3, and times to compile."""
    import jax
    import numpy as np

    state, like = plain.start, abstract((plain.start, batch))
    compiled, seconds = timed(jax.jit(plain.step).lower(*like).compile)
    row: dict[str, Any] = {"worst_loss": 0.0, "worst_norm": 0.0, "compile_s": 0.0, "plain_compile_s": seconds}
    expected = []
    for _ in range(NUM_STEPS):
        state, (value, norm) = compiled(state, batch)
        expected.append((float(value), float(norm)))

    for stage in stages:
        step = make(stage)
        step.lower(like[1])
        state, found = step.init(jax.random.key(0), batch), []
        for number in range(NUM_STEPS):
            (state, metrics), seconds = timed(lambda: jax.block_until_ready(step(state, batch)))  # noqa: B023
            found.append((float(metrics["loss"]), float(metrics["grad_norm"])))
            if not number:  # traced before
                row["compile_s"] = max(row["compile_s"], seconds)
        off = np.max(np.abs(np.array(found) - expected) / np.abs(expected), axis=0)
        row["worst_loss"], row["worst_norm"] = map(float, np.maximum(off, (row["worst_loss"], row["worst_norm"])))
        row["params"] = step.layout().num_params
        if stage == 3:
            params = step.contract(like[1]).params
            row["replicated"] = [each.name for each in params if each.size >= LARGE and not each.gathered]
            row["up_front"] = [each.name for each in params if each.up_front]
    return row


def sent(plain: "Plain", batch: Any, make: Callable[..., Any], stages: list[int], target: str, precision: str | None
         ) -> dict[int, Any]:
    """By stage, the bytes that a step compiled for `target` sends over the paper's, and its violations."""
    from zero_jax.xla import devices as xla_devices

    devices, results = xla_devices.target_devices(target), {}
    state, batch = abstract((plain.start, batch))
    for stage in stages:
        if stage == 1 and 2 in stages:
            continue  # one program (zero_jax/stages.py says why)
        step = make(stage, devices, precision=precision)
        compiled_step, seconds = timed(lambda: step.compiled_step(batch))  # noqa: B023
        report, size = compiled_step.report, 2 if precision == "bf16" else 4
        ideal = step.stage.communication * step.layout().num_params * size * (len(devices) - 1) / len(devices)
        results[stage] = {"ratio": report.communication_bytes / ideal, "violations": list(report.violations),
                          "report": str(report), "compile_s": seconds}
        if stage == 0:  # which XLA alone reduces; a tied embedding twice
            of_jit = data_parallel_bytes(plain.step, state, batch, step.mesh)
            if report.communication_bytes > 1.01 * of_jit + LARGE:
                results[stage]["violations"].append(f"jit alone sends {of_jit:,.0f} bytes")
    return results


class Plain(NamedTuple):
    """A train loop of Flax and Optax alone: `init(batch)` is the state `start`, but for the values."""

    init: Callable[..., Any]
    step: Callable[..., Any]
    start: Any


def plain_loop(model: Any, loss: Any, batch: Any) -> Plain:
    """The loop of a model as third_party_models.py has it."""
    import flax.linen as nn
    import jax
    import optax
    from flax import nnx
    from flax.core import unfreeze

    optimizer = make_optimizer()
    if not isinstance(model, nn.Module) and not hasattr(model, "module"):
        return plain_nnx_loop(nnx.split(model, nnx.Param, ...), loss, optimizer)
    module = getattr(model, "module", model)

    def init(batch):
        variables = unfreeze(nn.init(loss, module)(jax.random.key(0), batch))
        return variables, optimizer.init(variables["params"])

    def step(state, batch):
        variables, opt_state = state
        params, others = variables["params"], {name: tree for name, tree in variables.items() if name != "params"}

        def loss_of(params):
            return nn.apply(loss, module, mutable=list(others))({"params": params, **others}, batch)

        (value, new), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return ({"params": optax.apply_updates(params, updates), **new}, opt_state), (value, optax.tree.norm(grads))

    own = unfreeze(model.params) if hasattr(model, "params") else init(batch)[0]
    variables = own if "params" in own else {"params": own}
    start = variables, optimizer.init(variables["params"])
    return Plain(init, step, start)


def plain_nnx_loop(split: Any, loss: Any, optimizer: Any) -> Plain:
    """The same of an NNX module that is made already."""
    import jax
    import optax
    from flax import nnx

    graphdef, params, others = split

    def init(batch):
        return params, optimizer.init(params)

    def step(state, batch):
        params, opt_state = state
        value, grads = jax.value_and_grad(lambda params: loss(nnx.merge(graphdef, params, others), batch))(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), (value, optax.tree.norm(grads))

    return Plain(init, step, (params, optimizer.init(params)))


def make_optimizer():
    import optax

    return optax.adamw(3e-4, eps=1e-6)  # 1e-8 amplifies rounding where a gradient passes through zero


def timed(fun: Callable[[], Any]) -> tuple[Any, float]:
    """What `fun` returns, and the CPU seconds that it took: others may use the machine."""
    gc.collect()
    started = time.process_time()
    return fun(), time.process_time() - started


def abstract(tree: Any) -> Any:
    import jax

    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def data_parallel_bytes(plain_step: Any, state: Any, batch: Any, mesh: Any) -> float:
    """What each device sends in a step of the plain loop, jitted with its batch over all devices of `mesh`."""
    import jax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from zero_jax.xla import hlo
    from zero_jax.xla.devices import compiled_for

    def on(tree: Any, spec: P) -> Any:
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec if leaf.ndim else P())), tree)

    lowered = jax.jit(plain_step, out_shardings=NamedSharding(mesh, P())).lower(
        on(state, P()), on(batch, P(mesh.axis_names)))
    return hlo.communication_bytes(compiled_for(lowered, mesh.devices.flat[0], {}).as_text() or "")
