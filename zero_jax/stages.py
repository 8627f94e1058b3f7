"""The ZeRO stages: one table, and nothing else decides what a stage shards.

Source: arXiv 1910.02054, sections 5.1 to 5.3 (memory) and 7.2 (communication).
"""

from dataclasses import dataclass

from zero_jax.errors import UsageError


@dataclass(frozen=True)
class Stage:
    """A row of the table: which of a train step's trees are sharded over the ZeRO axes.

    `communication` is the volume that each device sends per step, in elements per parameter, as the number of devices
    grows. From stage 1 on a gradient is reduce-scattered as soon as backward computes it: a compiled loop cannot carry
    an unreduced sum, and an all-reduce would raise the volume to 3. A step of one reduction therefore has the memory of
    stage 2 already at stage 1, and `shards_gradients` says only what the stage guarantees.
    """

    number: int
    name: str
    shards_optimizer: bool
    shards_gradients: bool
    shards_params: bool
    communication: int

    def state_bytes(self, num_params: float, num_shards: int, *, low_precision: bool) -> float:
        """Bytes of persistent state per device under Adam, scalars aside, if every leaf divides evenly.

        `low_precision`: 2-byte weights with a 4-byte master copy and two 4-byte moments; otherwise
        4-byte parameters and moments. Gradients are temporaries of the step and not counted. Stage 3
        stores no 2-byte copy: it casts the master weights on the shard before each gather.
        """
        copy = 2 if low_precision and not self.shards_params else 0
        master = 4 / (num_shards if self.shards_params or (low_precision and self.shards_optimizer) else 1)
        moments = 8 / (num_shards if self.shards_optimizer else 1)
        return num_params * (copy + master + moments)


STAGES = (
    # number, name, optimizer, gradients, params, communication
    Stage(0, "data parallel", False, False, False, 2),
    Stage(1, "P_os", True, False, False, 2),
    Stage(2, "P_os+g", True, True, False, 2),
    Stage(3, "P_os+g+p", True, True, True, 3),
)


def stage_of(number: int) -> Stage:
    """The row of stage `number`. Raises ValueError for anything but the integers 0 to 3."""
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < len(STAGES):
        raise UsageError(
            f"stage={number!r} is not a ZeRO stage: give the integer 0 (data parallel), 1 (optimizer states sharded), "
            "2 (and gradients) or 3 (and parameters).")
    return STAGES[number]
