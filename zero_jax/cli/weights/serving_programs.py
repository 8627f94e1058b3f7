"""A trained model as programs: its forward pass, and the decode step with a cache of keys and values."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import export

from zero_jax.cli.model_lookup import ModelChoice
from zero_jax.cli.step_from_config import abstract_batch
from zero_jax.distributed.initialize import on_host
from zero_jax.frontends.model_functions import to_model_functions
from zero_jax.interop.params_io import VARIABLES
from zero_jax.tree import cast_floating, merge, split_named

Programs = Mapping[str, tuple[Callable[..., Any], Sequence[Any]]]

_VARIABLES = VARIABLES.rstrip("/")


def weights_of(params: Any, variables: Any) -> Any:
    """One tree of both, with the names of an exported file; PRNG keys are no weights."""
    others, _ = split_named(variables or {}, _is_no_key)
    return {**params, _VARIABLES: others} if others else params


def model_programs(choice: ModelChoice, params: Any, variables: Any, *, batch: int | None, length: int | None,
                   dtype: Any = None) -> Programs:
    """`forward` and, where the model has a decoder, `decode`, of `weights_of`, as `export_programs` takes them.

    params, variables: of the trained state. batch, length: of the inputs; None: any, up to the model's max_length. With
    a `length` `decode` takes one token of each row.
    dtype: of floating weights; None: as they are. Keys and values of the cache have the dtype that follows from it.
    """
    inputs = _inputs(choice, batch, length)
    functions = to_model_functions(choice.build(choice.config), ())
    _, keys = split_named(variables or {}, _is_no_key)
    words = jax.tree.map(lambda key: (on_host(jax.random.key_data(key)), jax.random.key_impl(key)), keys)

    def run(fun: Callable[..., Any], weights: Any, *args: Any) -> Any:
        """`fun(model, args)` of a model with these weights and with the variables that are no weights."""
        own = jax.tree.map(lambda key: jax.random.wrap_key_data(key[0], impl=key[1]), words,
                           is_leaf=lambda leaf: isinstance(leaf, tuple))
        own_params = {name: leaf for name, leaf in weights.items() if name != _VARIABLES}
        others = merge(weights.get(_VARIABLES, {}), own)
        return functions.run(fun, own_params, others, None, args, None, train=False)[0]

    def call(model: Any, inputs: Sequence[jax.Array]) -> jax.Array:
        options = {"train": False} if "train" in inspect.signature(model).parameters else {}
        return model(*inputs, **options).astype(jnp.float32)

    programs: dict[str, tuple[Callable[..., Any], Sequence[Any]]] = {
        "forward": (functools.partial(run, call), inputs)}
    if choice.decoder is None:
        return programs
    decoder, tokens = choice.decoder(choice.config), inputs[0]
    if length is not None:  # what is generated comes a token at a time
        tokens = jax.ShapeDtypeStruct((tokens.shape[0], 1), tokens.dtype)

    def step(model: Any, args: Any) -> tuple[jax.Array, Any]:
        bound = {"params": model.variables["params"] if hasattr(model, "variables") else model}
        logits, new = decoder.apply(bound | args[1], args[0], mutable=["cache"])
        return logits.astype(jnp.float32), new["cache"]

    abstract = jax.eval_shape(lambda: cast_floating(weights_of(params, variables), dtype))
    _, cache = jax.eval_shape(functools.partial(run, step), abstract, tokens, {})

    def decode(weights: Any, leaves: Sequence[jax.Array], tokens: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        logits, new = run(step, weights, tokens, {"cache": jax.tree.unflatten(jax.tree.structure(cache), leaves)})
        return logits, jax.tree.leaves(new)

    return programs | {"decode": (decode, (jax.tree.leaves(cache), tokens))}


def _inputs(choice: ModelChoice, batch: int | None, length: int | None) -> list[jax.ShapeDtypeStruct]:
    """What the model is called with: the inputs of a batch, whose sizes are symbolic where they are free."""
    shapes = abstract_batch(choice, 1, 1)
    longest = getattr(choice.config, "max_length", None)
    scope, inputs = export.SymbolicScope([f"length <= {longest}"] if longest and length is None else []), []
    for name, size in (("inputs", "length"), ("decoder_inputs", "decoder_length")):
        if (leaf := shapes.get(name)) is None:
            continue
        if leaf.ndim == 2 and jnp.issubdtype(leaf.dtype, jnp.integer):
            sizes = [size if length is None else length]
        elif hasattr(choice.config, "image_size"):
            sizes = leaf.shape[1:]
        else:  # images of any size
            sizes = ["height", "width", *leaf.shape[3:]]
        text = ", ".join(str(each) for each in ("batch" if batch is None else batch, *sizes))
        inputs.append(jax.ShapeDtypeStruct(export.symbolic_shape(text, scope=scope), leaf.dtype))
    return inputs


def _is_no_key(name: str, leaf: Any) -> bool:
    return not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
