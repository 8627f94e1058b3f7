"""Training on one device by Flax and Optax alone: the oracle of every comparison. It imports nothing of zero_jax.

A run starts from the key of the seed, split in two: one half makes the model, the other is folded with each step's
number into the key of that step; a Linen module's streams fold in their number. The library documents the same.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx

SOWN = ("intermediates", "losses")
"""Collections of Linen modules that every step starts anew, since `sow` would append to them for ever."""

OVERWRITTEN = ("_overwrite_with_gradient",)
"""Collections whose gradient is their next value, such as Flax's scales of float8."""


class Run(NamedTuple):
    """Losses and gradient norms of each step; parameters before and after, and the model's other variables."""

    losses: list[jax.Array]
    norms: list[jax.Array]
    start: Any
    params: Any
    variables: Any


def plain_training(model: Any, optimizer: Any, loss: Callable[..., Any], batches: Sequence[Any], *, seed: int = 0,
                   start: tuple[Any, Any] | None = None, compute: Any = None,
                   rng_streams: Sequence[str] = ("dropout",)) -> Run:
    """Trains for one step on each of `batches`; `loss(model, batch)` is the mean, or a tuple that begins with it.

    model: a Linen module, or a function of `rngs` that makes an NNX module. start: parameters and variables, in place
    of those of the seed. compute: the dtype in which floating parameters and batches are used; they are stored as the
    model made them.
    """
    linen = isinstance(model, nn.Module)
    init, apply = linen_functions(model, loss, rng_streams) if linen else nnx_functions(model, loss)
    update = update_of(optimizer)
    make_key, step_key = jax.random.split(jax.random.key(seed))

    def cast(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.astype(compute) if compute is not None and jnp.issubdtype(
            leaf.dtype, jnp.floating) else leaf, tree)

    @jax.jit
    def step(number: Any, params: Any, variables: Any, opt_state: Any, batch: Any) -> Any:
        def loss_of(params: Any, overwritten: Any) -> Any:
            out, *new = apply(cast(params), {**variables, **overwritten}, jax.random.fold_in(step_key, number),
                              cast(batch))
            return (out[0] if isinstance(out, tuple) else out), new

        overwritten = {name: variables[name] for name in OVERWRITTEN if name in variables}
        (value, (variables, written)), (grads, overwritten) = jax.value_and_grad(
            loss_of, argnums=(0, 1), has_aux=True)(params, overwritten)
        variables = {**variables, **overwritten}
        params = params if compute is not None else written
        updates, opt_state = update(grads, opt_state, params, value)
        return optax.apply_updates(params, updates), variables, opt_state, value, optax.tree.norm(grads)

    start, variables = start or jax.jit(init)(make_key, cast(batches[0]))
    params, opt_state, losses, norms = start, jax.jit(optimizer.init)(start), [], []
    for number, batch in enumerate(batches):
        params, variables, opt_state, value, norm = step(number, params, variables, opt_state, batch)
        losses.append(value)
        norms.append(norm)
    return Run(losses, norms, start, params, variables)


def update_of(optimizer: Any) -> Callable[..., Any]:
    """`update(grads, state, params, value)`; the optimizer gets the value of the loss where it takes it.

    By its signature: contrib.sam is one of those that take extra arguments, and does not.
    """
    known = inspect.signature(optimizer.update).parameters.values()
    takes = any(each.kind is each.VAR_KEYWORD or each.name == "value" for each in known)
    return lambda grads, state, params, value: optimizer.update(
        grads, state, params, **({"value": value} if takes else {}))


def linen_functions(module: nn.Module, loss: Callable[..., Any], rng_streams: Sequence[str]) -> tuple[Any, Any]:
    """(init(key, batch) -> (params, variables), apply(params, variables, key, batch) -> (loss, variables, params))."""
    def keys(key: Any) -> dict[str, Any]:
        return {name: jax.random.fold_in(key, number) for number, name in enumerate(rng_streams)}

    def init(key: Any, batch: Any) -> tuple[Any, Any]:
        first, other = (jax.random.fold_in(key, number) for number in range(2))
        collections = nn.unbox(nn.init(loss, module)({"params": first, **keys(other)}, batch))
        params = collections.pop("params")
        return params, {name: tree for name, tree in collections.items() if name not in SOWN}

    def apply(params: Any, variables: Any, key: Any, batch: Any) -> tuple[Any, Any]:
        out, new = nn.apply(loss, module, mutable=[*variables, *SOWN])(
            {"params": params, **variables}, batch, rngs=keys(key))
        return out, {name: new[name] for name in variables}, params

    return init, apply


def nnx_functions(make: Callable[..., nnx.Module], loss: Callable[..., Any]) -> tuple[Any, Any]:
    """As `linen_functions`; the module has its own random streams, which count its calls."""
    graphdef, *kinds = nnx.split(nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0))), nnx.Param, ...)

    def pure(params: Any, variables: Any) -> tuple[Any, Any]:
        return nnx.to_pure_dict(params), nnx.to_pure_dict(variables)

    def init(key: Any, batch: Any) -> tuple[Any, Any]:
        return pure(*nnx.split(make(rngs=nnx.Rngs(key)), nnx.Param, ...)[1:])

    def apply(params: Any, variables: Any, key: Any, batch: Any) -> tuple[Any, Any]:
        states = jax.tree.map(lambda leaf: leaf, kinds)
        for state, values in zip(states, (params, variables), strict=True):
            nnx.replace_by_pure_dict(state, values)
        module = nnx.merge(graphdef, *states)
        out = loss(module, batch)
        params, variables = pure(*nnx.split(module, nnx.Param, ...)[1:])
        return out, variables, params  # which the module may have overwritten, as nnx.SpectralNorm does

    return init, apply
