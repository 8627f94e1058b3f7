"""The options of what a model is trained to predict. Nothing here imports JAX."""

import dataclasses
from typing import Annotated, Literal

from zero_jax.cli.options.choices import FRACTION, Within
from zero_jax.data.objectives import MASKED, NOISE, SPAN
from zero_jax.errors import UsageError

ObjectiveName = Literal["causal", "masked", "span", "classify", "instruct", "preferences"]

USED_BY = {"mask_fraction": "masked", "noise_fraction": "span", "span_length": "span", "image_shift": "classify",
           "image_flip": "classify", "image_warp": "classify", "dpo_beta": "preferences"}
"""Which objective an option belongs to."""

WITH_RESPONSES = ("instruct", "preferences")
"""The objectives whose data are JSON lines or Parquet with responses."""


@dataclasses.dataclass(frozen=True)
class ObjectiveOptions:
    """What the model is trained to predict."""

    objective: ObjectiveName | None = None
    """causal: the next token; masked: tokens that are hidden from the model (BERT); span: spans that are cut out (T5);
    classify: the class of an image; instruct: responses to prompts, of .jsonl or .parquet; preferences: which of two
    responses is better (DPO). None: what the model is made for."""

    mask_fraction: Annotated[float, FRACTION] = MASKED
    """masked: the fraction of the tokens that is predicted. Of these 80 % are masked, 10 % another token, 10 % stay."""

    noise_fraction: Annotated[float, FRACTION] = NOISE
    """span: the fraction of the tokens that is cut out."""

    span_length: Annotated[float, Within(1, 1000)] = SPAN
    """span: tokens that are cut out in one place, on average."""

    image_shift: Annotated[int, Within(0, 1000)] = 0
    """classify: the most pixels by which a training image is moved, up or down and to a side, at random each time."""

    image_flip: bool = False
    """classify: half of the training images are mirrored, others each time."""

    image_warp: Annotated[float, Within(0, 0.5)] = 0.0
    """classify: training images are turned, scaled, sheared and moved at random, others each time: in coordinates from
    -1 to 1 by an affine map whose six numbers are within so much of those of no change. 0.15 is little."""

    dpo_beta: Annotated[float, Within(1e-4, 100)] = 0.1
    """preferences: how strongly the model is held to the one that the run starts from."""

    def check_objective_options(self) -> None:
        """Raises ValueError for options of another objective than that given."""
        if self.objective is not None:
            self.check_used(self.objective)

    def check_used(self, objective: str) -> None:
        """Raises ValueError for an option that `objective` does not use."""
        defaults = {field.name: field.default for field in dataclasses.fields(ObjectiveOptions)}
        for name, owner in USED_BY.items():
            if owner != objective and getattr(self, name) != defaults[name]:
                raise UsageError(f"{name}={getattr(self, name)}: it is of objective={owner}, and this run has "
                                 f"objective={objective}: leave it out.")
