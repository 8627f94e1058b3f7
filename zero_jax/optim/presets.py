"""The optimizers that the command line offers, with the bytes of state of each, and its schedules."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from zero_jax.optim.narrow_moments import narrow_moments
from zero_jax.optim.whole_matrices import whole_matrices
from zero_jax.tree import map_named


def _adafactor(learning_rate: Any, weight_decay: Any) -> optax.GradientTransformation:
    # Its own decay does not follow the schedule; AdamW's does, and so does this one.
    return optax.chain(
        optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0), optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(learning_rate))


def _sgd(learning_rate: Any, weight_decay: Any) -> optax.GradientTransformation:
    return optax.chain(optax.add_decayed_weights(weight_decay), optax.sgd(learning_rate, momentum=0.9))


OPTIMIZERS: Mapping[str, Callable[..., optax.GradientTransformation]] = {
    "adamw": optax.adamw,  # 8 bytes for each parameter, at fp32
    "adamw-bf16-momentum": functools.partial(optax.adamw, mu_dtype=jnp.bfloat16),  # 6
    "adafactor": _adafactor,  # a row and a column of each matrix; 4 where a matrix is small
    "lion": optax.lion,  # 4
    "lion-bf16-momentum": functools.partial(optax.lion, mu_dtype=jnp.bfloat16),  # 2
    "sgd-momentum": _sgd,  # 4
    "lamb": optax.lamb,  # 8
    "schedule-free": optax.contrib.schedule_free_adamw,  # 8: squares, and parameters that are averaged
}
"""By name, each a function of `learning_rate` and `weight_decay`; "muon" of `make_optimizer` needs a mesh, too."""

NAMES = (*OPTIMIZERS, "muon")
"""Of `make_optimizer`."""


def make_optimizer(name: str, mesh: Mesh, *, learning_rate: Any, weight_decay: float = 0.0,
                   bits: Literal[8, 16] | None = None, betas: Sequence[float] = (), eps: float | None = None
                   ) -> optax.GradientTransformation:
    """The optimizer of a name for a step on `mesh`.

    Args:
      name: one of NAMES.
      mesh: that of the train step.
      learning_rate: a number or a schedule.
      weight_decay: decoupled, per unit of learning rate.
      bits: of each number of its moments, by `narrow_moments`; None: as the optimizer stores them.
      betas: the two decays of Adam's averages; empty: the optimizer's own.
      eps: what is added to what Adam divides by; None: the optimizer's own.
    """
    options: dict[str, Any] = dict(zip(("b1", "b2"), betas, strict=False)) | ({} if eps is None else {"eps": eps})
    make = _muon if name == "muon" else OPTIMIZERS[name]
    optimizer = make(learning_rate=learning_rate, weight_decay=weight_decay,
                     **options, **({"mesh": mesh} if name == "muon" else {}))
    return optimizer if bits is None else narrow_moments(optimizer, bits)


def _muon(learning_rate: Any, weight_decay: Any, mesh: Mesh, **adam: Any) -> optax.GradientTransformation:
    """Muon for kernels, 4 bytes of state for each parameter, and AdamW for the rest, 8.

    Its updates have AdamW's size (a root mean square of 0.2, arXiv 2502.16982), so that one rate and decay serve both.
    """
    direction = optax.contrib.muon(-1.0, consistent_rms=0.2)  # a step of 1 upwards: the rate's sign is put on below
    matrices = optax.chain(whole_matrices(direction, mesh), optax.add_decayed_weights(weight_decay),
                           optax.scale_by_learning_rate(learning_rate))
    rest = optax.adamw(learning_rate, weight_decay=weight_decay, **adam)
    return optax.partition({"matrix": matrices, "rest": rest}, lambda params: map_named(_kind, params))


def _kind(name: str, leaf: Any) -> str:
    """"matrix" for kernels within a network, (D, F) or (layers, D, F); "rest" for others, embeddings and heads."""
    *modules, own = name.split("/")
    inner = not any("embed" in module or "head" in module for module in modules)
    return "matrix" if own == "kernel" and leaf.ndim in (2, 3) and inner else "rest"


Shape = Callable[[float, float, int, int], optax.Schedule]
"""Of (peak, final rate, steps after the warmup, steps of the decay at the end) after the warmup."""


def _wsd(peak: float, final: float, steps: int, decay: int) -> optax.Schedule:
    return optax.join_schedules([optax.constant_schedule(peak), optax.linear_schedule(peak, final, decay)],
                                [steps - decay])


SCHEDULES: Mapping[str, Shape] = {
    "cosine": lambda peak, final, steps, decay: optax.cosine_decay_schedule(peak, steps, final / peak if peak else 0.0),
    "linear": lambda peak, final, steps, decay: optax.linear_schedule(peak, final, steps),
    "wsd": _wsd,  # warmup, stable, decay: arXiv 2404.06395, section 4
    "constant": lambda peak, final, steps, decay: optax.constant_schedule(peak),
}
"""By name."""


def make_schedule(name: str, *, peak: float, final: float, steps: int, warmup: int, decay: int) -> optax.Schedule:
    """The learning rate by the number of updates before a step: that of the first step is `schedule(0)`.

    It rises from 0 in `warmup` steps to `peak`, which step number warmup + 1 has, and would reach `final` (cosine,
    linear, wsd) in the step after the last.

    Args:
      name: one of SCHEDULES.
      peak: the largest rate.
      final: the rate at the end.
      steps: of the run.
      warmup: of them, fewer than `steps`.
      decay: steps at the end in which wsd falls; at most `steps - warmup`.
    """
    after = SCHEDULES[name](peak, final, steps - warmup, decay)
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), after], [warmup]) if warmup else after
