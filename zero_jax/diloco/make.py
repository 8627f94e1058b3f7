"""`make_diloco_step`: the public constructor, whose arguments become `OuterOptions`."""

from typing import Any

from zero_jax.arguments import shown
from zero_jax.diloco.options import OuterOptions
from zero_jax.diloco.step import DiLoCoStep
from zero_jax.errors import UsageError
from zero_jax.step.step import ZeroTrainStep


def make_diloco_step(
    step: ZeroTrainStep, *, every: int, learning_rate: float = 0.7, momentum: float = 0.9, nesterov: bool = True,
    fragments: int = 1, overlap: bool = False, mix: float | None = None, dtype: Any = "float32",
) -> DiLoCoStep:
    """`step`, taken by each slice of the mesh axis `replica` by itself; the slices are averaged once in `every` steps.

    DiLoCo (arXiv 2311.08105), and with `fragments` and `overlap` its streaming form (arXiv 2501.18512). Between slices
    nothing is sent in a step, but the outer gradients of one fragment where one is due: 2 (R - 1) / R of its bytes on
    each device for R slices, over the number of devices of a slice.

    Args:
      step: of `make_zero_train_step` at any stage, on a mesh with an axis `replica` of the slices.
      every: H, the steps between two averages of a parameter.
      learning_rate: of the outer optimizer, SGD. With 1, and no momentum, the slices take the mean of their parameters
        (local SGD, federated averaging).
      momentum: of the outer optimizer.
      nesterov: whether that is Nesterov's.
      fragments: in how many parts the parameters are averaged, each after a step of its own: the traffic is spread
        evenly over the steps. At most `every`, and as many as there are parameters; stacked ones are cut by layer.
      overlap: a fragment is sent while the slices compute the next step, and arrives at its end: in parts, one in each
        round of loops over layers; in one where the model has none, or all-reduces block (`DiLoCoStep.num_parts`).
      mix: with `overlap`, what remains of a slice's own parameters where the outer ones arrive; default 0.5.
      dtype: in which outer gradients are sent: "float32" or "bfloat16". Parameters and momentum stay in float32.

    Raises ValueError for what cannot take effect: no axis `replica`, a guard, a moving average, more fragments than
    parts.
    """
    if not isinstance(step, ZeroTrainStep):
        raise UsageError(f"step={shown(step)} is a {type(step).__name__}: give the step that "
                         "zero_jax.make_zero_train_step returned.")
    return DiLoCoStep(step, OuterOptions(every, learning_rate, momentum, nesterov, fragments, overlap, mix, dtype))
