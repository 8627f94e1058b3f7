"""The options of `train` and `plan` for microbatches. No JAX."""

import dataclasses

from zero_jax.cli.options.choices import Gather, Reduce


@dataclasses.dataclass(frozen=True)
class MicrobatchOptions:
    """Into how many parts a batch is cut, and how often each device sends for them."""

    accumulate: int = 1
    """Microbatches of a step, one after another: only one's activations are in memory at a time."""

    reduce: Reduce = "every"
    """Reduce-scatter every microbatch's gradient and sum the shards, or sum on each device and reduce once."""

    gather: Gather = "use"
    """At stage 3: gather parameters at each use, in forward alone, which keeps them for backward, or once a step into a
    copy that all microbatches read; auto: once a step where that takes at most half of a device's memory."""
