"""The options of `train` and `plan` for what divides a model beside ZeRO. No JAX."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class ParallelOptions:
    """Over which groups of devices a model, its sequences and its activations are split."""

    replica: int = 1
    """Hybrid sharding: the number of device groups, each of which stores a complete set of shards."""

    tensor: int = 1
    """Devices over which the model's tensor_rules split it (tensor parallelism); they share their sequences."""

    context: int = 1
    """Devices over which each sequence is split."""

    sequence_parallel: bool = False
    """Split activations between tensor-parallel products along the sequence."""

    partition_activations: Literal["no", "yes", "cpu"] = "no"
    """Split checkpointed activations over the tensor axis (P_a); cpu: also offload them to host memory."""
