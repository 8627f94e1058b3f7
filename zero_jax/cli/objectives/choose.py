"""Which objective a run has: the one that is asked for, or the one that its model is made for."""

from typing import Any

import jax.numpy as jnp

from zero_jax.cli.model_lookup import ModelChoice
from zero_jax.cli.objectives.classify import Classify
from zero_jax.cli.objectives.denoising import Masked, Span
from zero_jax.cli.objectives.objective import Objective
from zero_jax.cli.objectives.responses import Instruct, Preferences
from zero_jax.cli.objectives.text import Causal
from zero_jax.cli.train_config import TrainConfig
from zero_jax.errors import UsageError

OBJECTIVES: dict[str, type[Objective]] = {each.name: each for each in (
    Causal, Masked, Span, Classify, Instruct, Preferences)}
DEFAULTS = {"next token": "causal", "masked tokens": "masked", "two texts": "span", "images": "classify"}
"""The objective of each kind of model where none is asked for."""


def objective_of(config: TrainConfig) -> Objective:
    """The objective of a run, checked; raises ValueError for one that does not fit, before devices are used."""
    choice = config.check()
    kind = kind_of(choice)
    objective = OBJECTIVES[config.objective or DEFAULTS[kind]]
    if objective.model_kind != kind:
        raise UsageError(f"objective={config.objective}: it is for models of {objective.model_kind}, and "
                         f"{choice.name} is a model of {kind}: give objective={DEFAULTS[kind]}, or leave it out.")
    config.check_used(objective.name)
    chosen = objective(config, choice)
    chosen.check()
    return chosen


def kind_of(choice: ModelChoice) -> str:
    """A key of DEFAULTS, from the batches that a model's loss takes, by its `batch_shapes`.

    A model without a loss of its own predicts the next token. Raises ValueError where `train` makes no such batches.
    """
    if choice.loss is None:
        return "next token"
    module, _, _ = choice.name.partition(":")
    if choice.batch_shapes is None:
        raise UsageError(f"model={choice.name}: {module} has a loss of its own, and no batch_shapes(config, rows, "
                         "length), which says what that takes: write it, or train it from Python with "
                         "make_zero_train_step(model, stage, loss=...).")
    shapes: Any = choice.batch_shapes(choice.config, 2, 8)
    arrays = {name: (len(leaf.shape), bool(jnp.issubdtype(leaf.dtype, jnp.integer))) for name, leaf in shapes.items()
              } if isinstance(shapes, dict) else {}
    tokens = (2, True)
    for kind, wanted in {
            "two texts": {"inputs": tokens, "decoder_inputs": tokens, "targets": tokens},
            "masked tokens": {"inputs": tokens, "targets": tokens, "weights": (2, False)},
            "images": {"inputs": (4, False), "targets": (1, True)},
            "next token": {"inputs": tokens, "targets": tokens}}.items():
        if arrays == wanted:
            return kind
    raise UsageError(f"model={choice.name}: the loss of {module} takes batches of {', '.join(arrays) or 'no dict'}, "
                     "which train does not make: train it from Python with make_zero_train_step(model, stage, "
                     "loss=...); plan knows it.")
