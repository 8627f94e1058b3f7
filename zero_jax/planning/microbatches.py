"""How often a step of several microbatches gathers parameters and reduces gradients: the predicted fastest that fits.

Least often is not always fastest. GPT-2 1.5B on h100:8, 8 microbatches of 2 sequences, compiled and predicted:

    gather, reduce   bytes a parameter sent   links exposed   memory-bound   step      device memory
    use, every       42.0                     27 ms           415 ms         786 ms     4.9 GiB
    step, every      15.8                      9 ms           438 ms         785 ms     7.3 GiB
    use, once        29.7                     10 ms           480 ms         832 ms    15.9 GiB
    step, once        3.5                      7 ms           498 ms         841 ms    15.9 GiB

Sums of whole gradients pass the memory in every microbatch; within a host that costs more than the links save.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence

from zero_jax.layout.layout import Layout
from zero_jax.layout.step_weights import held_bytes
from zero_jax.planning.division import SUM_BYTES, exposed_share
from zero_jax.sharding.batch import Accumulation
from zero_jax.xla.devices import coords
from zero_jax.xla.targets import Target
from zero_jax.xla.timing import collective_seconds

AUTO_SHARE = 0.5
"""The share of a device's memory that state, copy and sums of gradients may take: the rest is for activations."""
COPY_BYTES = 6
"""A parameter of the copy that a step gathers, taken out of it and read by a microbatch."""
GAIN = 0.1
"""By which share of its seconds another choice has to be faster than the last one, which needs the least memory."""


@dataclasses.dataclass(frozen=True)
class MicrobatchChoice:
    """How often a step gathers and reduces; sent: bytes a parameter that each device sends.

    seconds: of a step that this takes, by formula; held: bytes of state, copy and sums.
    """

    gather: str
    reduce: str
    sent: float
    seconds: float
    held: int

    def __str__(self) -> str:
        gathered = {"use": "at each use", "forward": "in forward", "step": "once a step"}[self.gather]
        return (f"gather={self.gather} ({gathered}), reduce={self.reduce}: {self.sent:.3g} bytes a parameter sent, "
                f"{1e3 * self.seconds:.3g} ms")


def choose_microbatches(
    layout: Layout, microbatches: int, target: Target | None, *, gathers: Sequence[str] = ("step", "use"),
    reduces: Sequence[str] = ("once", "every"), allowed: Callable[[str, str], bool] = lambda gather, reduce: True
) -> tuple[MicrobatchChoice | None, str]:
    """(Of `gathers` x `reduces` the fastest by formula that is allowed and leaves half of the memory free, why).

    layout: of the step that gathers at each use and reduces every microbatch. target: the topology of its devices.
    None where that is not known: then the last of `gathers` and `reduces`, which need the least memory, are right.
    """
    if target is None:
        return None, f"Of {microbatches} microbatches: nothing is known of these devices; what needs least is taken."
    if layout.num_shards == 1:
        return None, ""
    gathers = gathers if layout.stage.shards_params else gathers[-1:]
    group = layout.mesh.devices[tuple(slice(None) if name in layout.axes.zero else 0
                                      for name in layout.mesh.axis_names)]
    _, rate = collective_seconds(target, [coords(device) for device in group.flat], "all-gather")
    tried = [_choice(layout, microbatches, target, rate, *each) for each in itertools.product(gathers, reduces)]
    last, room = tried[-1], AUTO_SHARE * target.chip.memory_bytes
    fitting = [each for each in tried[:-1] if each.held <= room and allowed(each.gather, each.reduce)]
    best = min([last, *fitting], key=lambda each: each.seconds * (1 if each is last else 1 + GAIN))
    others = [f"{each} {'' if each is last or each in fitting else 'does not fit or go together'}".rstrip()
              for each in tried if each is not best]
    return best, f"Of {microbatches} microbatches: {best}; " + "; ".join(others) + " (by formula)."


def _choice(layout: Layout, microbatches: int, target: Target, rate: float, gather: str, reduce: str
            ) -> MicrobatchChoice:
    params, chip = layout.num_params / layout.tensor_size, target.chip
    sums = params / (1 if reduce == "once" or not layout.stage.number else layout.num_shards)
    moved = microbatches * (SUM_BYTES * sums + COPY_BYTES * params * (gather == "step"))
    sent = sent_bytes(layout, microbatches, gather, reduce)
    seconds = exposed_share(chip) * sent * params / rate + moved / (chip.memory_bandwidth * chip.rates.hbm)
    return MicrobatchChoice(gather, reduce, sent, seconds,
                            held_bytes(layout, Accumulation(microbatches, reduce, gather)))


def sent_bytes(layout: Layout, microbatches: int, gather: str, reduce: str) -> float:
    """Bytes a parameter that each device sends in a step, by formula, in the dtype in which the model reads it."""
    share = (layout.num_shards - 1) / layout.num_shards
    gathers = {"use": 2 * microbatches, "forward": microbatches, "step": 1}[gather]
    if not layout.stage.shards_params:
        gathers = min(layout.stage.number, 1)
    reductions = (1 if reduce == "once" else microbatches) * (1 if layout.stage.number else 2)
    return layout.read_itemsize * share * (gathers + reductions)
