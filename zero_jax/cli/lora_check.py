"""Whether adapters fit a model, by its trace: before there are devices or data."""

from typing import Any

import jax
import jax.numpy as jnp

from zero_jax.cli.model_lookup import ModelChoice
from zero_jax.frontends.lora import LoraModel
from zero_jax.frontends.model_functions import to_model_functions
from zero_jax.step.losses import next_token_loss, with_key


def check_adapters(model: LoraModel, choice: ModelChoice) -> None:
    """Raises UsageError for targets that match no kernel of the model, with the nearest names, and a rank too large."""
    loss: Any = choice.loss or next_token_loss
    if choice.batch_shapes is not None:
        batch = choice.batch_shapes(choice.config, 1, None)
    else:
        batch = {name: jax.ShapeDtypeStruct((1, 8), jnp.int32) for name in ("inputs", "targets")}
    functions = to_model_functions(model, ("dropout",))

    def init(rng: jax.Array, given: Any, batch: Any) -> Any:
        return functions.init(with_key(loss, rng), rng, batch, given)

    jax.eval_shape(init, jax.eval_shape(lambda: jax.random.key(0)), functions.given, batch)
