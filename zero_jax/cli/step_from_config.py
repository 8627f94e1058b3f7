"""The devices, the attention kernel and the train step that a configuration names."""

import functools
import inspect
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from zero_jax.cli.environment import simulates
from zero_jax.cli.model_lookup import ModelChoice
from zero_jax.cli.options.of_step import SharedOptions
from zero_jax.cli.train_config import SIMULATED_DEVICES, TrainConfig
from zero_jax.distributed.initialize import choose_devices
from zero_jax.errors import UsageError
from zero_jax.offload.offload import Offload
from zero_jax.optim.presets import make_optimizer, make_schedule
from zero_jax.sharding.mesh import make_mesh, simulate_devices
from zero_jax.step.attention import Attention, attention
from zero_jax.step.chunked_loss import chunked_next_token_loss
from zero_jax.step.guard import Guard
from zero_jax.step.make import make_zero_train_step
from zero_jax.step.options import Communication, Parallelism
from zero_jax.step.step import ZeroTrainStep
from zero_jax.transforms.remat import Remat
from zero_jax.typing import Loss


def devices_of(config: TrainConfig) -> list[jax.Device]:
    """The devices of the run, over all processes; simulated where there is no accelerator."""
    if simulates() and not jax.distributed.is_initialized():
        simulate_devices(config.devices or SIMULATED_DEVICES)
    try:
        devices = jax.devices()
    except RuntimeError as error:
        raise UsageError(f"JAX finds no devices ({error}): JAX_PLATFORMS=cpu simulates them.") from error
    number = config.devices or len(devices)
    if number > len(devices):
        raise UsageError(
            f"devices={number}, but there are {len(devices)} of kind {devices[0].platform}: give fewer, or set "
            "JAX_PLATFORMS=cpu to simulate them.")
    config.check_devices(number)
    return choose_devices(number)


def step_of(config: TrainConfig, choice: ModelChoice, devices: list[jax.Device], *, loss: Loss | None = None
            ) -> ZeroTrainStep:
    """The train step of `config`: its optimizer with clipping and a schedule, on a mesh of `devices`.

    loss: None: the model's own where it has one, else that of the next token. Where slices train by themselves it is
    what they take together, without a guard, which slices cannot have.
    """
    schedule = make_schedule(config.schedule, **config.schedule_arguments(config.steps))
    # The injected rate is part of the state, so that the step's metrics report it.
    mesh = make_mesh(config.data_sizes(len(devices)), replica=config.replica, tensor=config.tensor,
                     context=config.context, devices=devices)
    make = functools.partial(optimizer_of, config, mesh, weight_decay=config.weight_decay)
    injected = optax.inject_hyperparams(lambda learning_rate: make(learning_rate=learning_rate))(learning_rate=schedule)
    optimizer = optax.chain(optax.clip_by_global_norm(config.grad_clip_norm), injected)
    choice = with_attention(choice, mesh, config.attention, slices=config.diloco_every is not None)
    return make_zero_train_step(
        config.adapted(choice.build(choice.config)), config.stage,
        loss=loss_of(config, choice, mesh, loss or choice.loss), optimizer=optimizer,
        mesh=mesh,
        precision=config.precision, accumulate=config.accumulate, ema=config.ema,
        guard=None if config.diloco_every else Guard(skip=config.max_bad_steps),
        **residual_options(config, choice))


def optimizer_of(config: SharedOptions, mesh: Mesh, *, learning_rate: Any, weight_decay: float
                 ) -> optax.GradientTransformation:
    """The optimizer of a configuration, without clipping."""
    return make_optimizer(config.optimizer, mesh, learning_rate=learning_rate, weight_decay=weight_decay,
                          bits=config.moments, betas=config.betas, eps=config.eps)


def evaluator_of(config: TrainConfig, step: ZeroTrainStep, fun: Loss) -> Callable[..., Any]:
    """`step.evaluator(fun)` of what a run is evaluated with: an average of the parameters, where it keeps one."""
    evaluate = step.evaluator(fun, ema=config.ema is not None)
    if config.optimizer != "schedule-free":
        return evaluate
    return lambda state, *args: evaluate(step.evaluation_state(state), *args)


def loss_of(config: SharedOptions, choice: ModelChoice, mesh: Mesh, loss: Loss | None) -> Loss | None:
    """The loss of a step on `mesh`; None: of the next token, from whole logits.

    Raises UsageError for chunks of another loss, and of a model without the factors of its logits.
    """
    if config.loss_chunks == 1:
        return loss
    model: Any = choice.build(choice.config)  # of NNX a function that makes it
    takes = inspect.signature(type(model).__call__).parameters if hasattr(model, "init") else {"logits"}
    if loss is not None or "logits" not in takes:
        reason = "has no argument logits=False, which gives their factors" if loss is None else "has a loss of its own"
        raise UsageError(f"loss_chunks={config.loss_chunks}: {choice.name} {reason}: leave it out.")
    return chunked_next_token_loss(mesh, config.loss_chunks)


def with_attention(choice: ModelChoice, mesh: Mesh, kernel: str, *, slices: bool = False) -> ModelChoice:
    """`choice` with the attention kernel of the devices of `mesh`, where its config takes one; XLA's caps scores.

    slices: along `replica` they train by themselves.
    """
    if not hasattr(choice.config, "attention") or getattr(choice.config, "attention_softcap", None) is not None:
        return choice
    built = attention(mesh, kernel=None if kernel == "auto" else kernel)  # pyright: ignore[reportArgumentType]
    return choice.with_change("attention", built.of_slices() if slices else built)


def abstract_batch(choice: ModelChoice, rows: int, length: int | None) -> dict[str, jax.ShapeDtypeStruct]:
    """A batch that the loss of a model takes, with texts of `length` tokens where it takes text; None: any."""
    if choice.batch_shapes is not None:
        return choice.batch_shapes(choice.config, rows, length)
    return {name: jax.ShapeDtypeStruct((rows, length or 8), jnp.int32) for name in ("inputs", "targets")}


def attention_text(choice: ModelChoice, *, batch: int, length: int | None, precision: str) -> str:
    """The kernel that computes a model's attention, and why not the one of its devices; "" where that is not known.

    batch, length: of the global batch.
    """
    sizes: Any = choice.config
    kernel = getattr(sizes, "attention", None)
    if getattr(sizes, "attention_softcap", None) is not None:
        return "Attention: xla (scores are capped)"
    if not isinstance(kernel, Attention) or length is None or not hasattr(sizes, "num_heads"):
        return ""
    dtype = {"bf16": jnp.bfloat16, "fp16": jnp.float16}.get(precision.partition("-")[0], jnp.float32)
    head_dim = getattr(sizes, "head_dim", None) or sizes.width // sizes.num_heads
    q, k = (jax.ShapeDtypeStruct((batch, length, heads or sizes.num_heads, head_dim), dtype)
            for heads in (sizes.num_heads, getattr(sizes, "num_kv_heads", None)))
    name, reason = kernel.kernel_for(q, k)
    if (window := getattr(sizes, "window", None)) is not None and window < length and name != "xla":
        name, reason = "xla", f"a window of {window} tokens"
    return f"Attention: {name}" + (f" ({reason})" if reason else "")


def residual_options(config: SharedOptions, choice: ModelChoice) -> dict[str, Any]:
    """Parallelism, communication and memory of a configuration, as arguments of `make_zero_train_step`."""
    settled = config.with_microbatches()  # what "auto" stands for is chosen before
    formats: Any = config.quantize_gradients or None
    return {
        "parallelism": Parallelism(tensor_rules=choice.tensor_rules(config.tensor),
                                   sequence_parallel=config.sequence_parallel),
        "communication": Communication(
            gather=settled.gather, reduce=settled.reduce, hpz_axes=("data_1",) if config.hpz > 1 else (),
            gradients=formats,
            weights=None if config.quantize_weights == "no" else config.quantize_weights,
            overlap={"yes": True, "no": False}.get(config.overlap, config.overlap), prefetch=config.prefetch_weights),
        "offload": offload_argument(config),
        "tiling": config.tiles,
        "remat": {"full": "full", "dots": "dots", "sqrt": Remat(every="sqrt")}.get(config.remat),
        "partition_activations": {"no": False, "yes": True}.get(
            config.partition_activations, config.partition_activations)}


def offload_argument(config: SharedOptions) -> Any:
    """What `make_zero_train_step(offload=...)` takes; a plan has no folder, and opens no files."""
    if config.offload == "disk":
        return Offload(disk=getattr(config, "offload_disk", None) or tempfile.gettempdir())
    if config.offload_fraction < 1:
        return Offload(fraction=config.offload_fraction)
    return None if config.offload == "no" else config.offload
