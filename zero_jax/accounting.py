"""The paper's arithmetic: bytes, elements on the wire and FLOPs of a training step, by formula.

Plain numbers in, plain numbers out; no model and no JAX. Bytes are per device, and model states alone are a lower bound
of what a device holds: the largest models that ran had 0.82 of `max_params` (Table 2).
Source: arXiv 1910.02054, sections 3, 5, 6 and 7, unless another is named.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass

from zero_jax.stages import stage_of

# Which column of the stage table divides a component by the data-parallel degree.
SPLIT_BY = {
    "weights": "shards_params",
    "gradients": "shards_gradients",
    "accumulator": "shards_optimizer",
    "master": "shards_optimizer",
    "momentum": "shards_optimizer",
    "variance": "shards_optimizer",
}
UPDATE = ("gradients", "accumulator", "master", "momentum", "variance")  # what an update on the host takes along


@dataclass(frozen=True)
class ByteCounts:
    """Bytes per parameter of each model state under one system's mixed-precision Adam.

    accumulator: extra copies of the gradients for the update, which lie as the optimizer states do.
    absent_at_3: the component that stage 3 does not store.
    gathered: bytes that stage 3 adds for each parameter of the largest layer.
    """

    weights: float
    gradients: float
    accumulator: float
    master: float
    momentum: float
    variance: float
    absent_at_3: str = ""
    gathered: float = 0

    def coefficients(self, stage: int) -> dict[str, tuple[float, bool]]:
        """Component -> (bytes per parameter, whether they are divided by the data-parallel degree)."""
        row = stage_of(stage)
        return {name: (0 if row.shards_params and name == self.absent_at_3 else getattr(self, name),
                       getattr(row, column))
                for name, column in SPLIT_BY.items()}


PAPER = ByteCounts(2, 2, 0, 4, 4, 4)  # section 3.1: K = 12
# Its estimators: 2 + 18/N at stage 2, 18/N + 4 x largest layer at stage 3; its older documents say 4 + 16/N.
DEEPSPEED = ByteCounts(2, 2, 4, 4, 4, 4, absent_at_3="gradients", gathered=4)
# Megatron's distributed optimizer is stage 1: 4 + 16/N, 6 + 12/N (gradients in fp32) and 8 + 8/N.
MEGATRON_FP16 = ByteCounts(2, 2, 4, 4, 4, 4)
MEGATRON_BF16 = ByteCounts(2, 4, 0, 4, 4, 4)
MEGATRON_FP32 = ByteCounts(4, 4, 0, 0, 4, 4)
# What this library's state holds: gradients live inside the step, and stage 3 stores the master alone.
ZERO_JAX = ByteCounts(2, 0, 0, 4, 4, 4, absent_at_3="weights")
ZERO_JAX_FP32 = ByteCounts(4, 0, 0, 0, 4, 4)


def model_state_bytes(
    counts: ByteCounts, stage: int, num_params: float, *, data: int, model: int = 1, largest_layer: float = 0,
    host: Collection[str] = ()
) -> dict[str, float]:
    """Bytes of each model state on a device (sections 5.1 to 5.3, Table 1); their sum is the device's.

    data, model: the data- and the model-parallel degree. largest_layer: parameters of the largest layer, of a
    device's part. host: components in host memory, which take none here (DeepSpeed's offload is `UPDATE`).
    """
    _check_degrees(data=data, model=model)
    if unknown := set(host) - set(SPLIT_BY):
        raise ValueError(f"host={sorted(unknown)} are no model states: give some of {', '.join(SPLIT_BY)}.")
    found = {name: 0.0 if name in host else size * num_params / model / (data if split else 1)
             for name, (size, split) in counts.coefficients(stage).items()}
    return found | {"gathered": counts.gathered * largest_layer if stage_of(stage).shards_params else 0.0}


def max_params(counts: ByteCounts, stage: int, memory_bytes: float, *, data: int, model: int = 1) -> float:
    """The largest number of parameters whose model states fit (Table 2): an upper bound, nothing else has room."""
    return memory_bytes / sum(model_state_bytes(counts, stage, 1, data=data, model=model).values())


def wire_elements(stage: int, num_params: float) -> dict[str, float]:
    """Elements that each device sends per step, as the number of devices grows (section 7).

    A ring sends (N-1)/N of this. Stage 0's all-reduce counts as its halves: reduce-scatter, and the gather of the
    reduced gradients. Stage 3 gathers in backward again only where the forward's gathered weights are dropped.
    """
    twice = stage_of(stage).shards_params
    return {"reduce": num_params, "gather": 0 if twice else num_params,
            "gather forward": num_params if twice else 0, "gather backward": num_params if twice else 0}


def tensor_parallel_elements(layers: int, hidden: int, batch: int, length: int) -> float:
    """Elements that Megatron's tensor parallelism sends per device and step, with recomputation (section 8).

    Two all-reduces of batch x length x hidden in each of forward, recomputation and backward; each sends it twice.
    """
    return 12 * batch * length * hidden * layers


def partitioned_gather_elements(layers: int, hidden: int, batch: int, length: int) -> float:
    """Elements that P_a adds to those: a gather of each block's checkpoint before its recomputation (section 8)."""
    return batch * length * hidden * layers


def activation_elements(layers: int, hidden: int, batch: int, length: int) -> float:
    """All activations of a transformer, in elements (section 3.2, footnotes)."""
    return 12 * hidden * batch * length * layers


def checkpoint_elements(layers: int, hidden: int, batch: int, length: int, *, model: int = 1) -> float:
    """One checkpoint per layer, in elements per device; P_a divides it by the model-parallel degree (section 6.1)."""
    _check_degrees(model=model)
    return hidden * batch * length * layers / model


def sqrt_checkpoint_elements(layers: int, hidden: int, batch: int, length: int) -> float:
    """A checkpoint at every sqrt(layers) layers and the activations of as many, recomputed at once; in elements."""
    depth = math.sqrt(layers)
    return depth * (checkpoint_elements(1, hidden, batch, length) + activation_elements(1, hidden, batch, length))


def activation_bytes_exact(
    layers: int, hidden: int, heads: int, batch: int, length: int, *, model: int = 1, split_sequence: bool = False
) -> float:
    """Bytes per device of all fp16 activations, attention scores among them, nothing recomputed.

    `split_sequence`: sequence parallelism splits what `model` ways of tensor parallelism leave whole.
    Source: Korthikanti et al. 2022 (arXiv 2205.05198), equations 1, 2 and 4.
    """
    _check_degrees(model=model)
    scores = 5 * heads * length / hidden
    whole = 10 / model if split_sequence else 10
    return length * batch * hidden * layers * (whole + (24 + scores) / model)


def backward_peak_bytes(
    *, state: float, gradients: float, stacked: float, other: float, largest: float, block: float, every: int = 1,
    weights: float = 0, waiting: float = 0
) -> dict[str, float]:
    """Bytes per device at the two moments of a step at stage 3 when most is held: behind the loss, and in a block.

    state: model states. gradients: a device's shards as the optimizer takes them, all of them from the beginning of
    backward. stacked: what the policy keeps of all blocks. other: kept outside of blocks, `largest` of that in one
    array, the logits, which have a gradient as large. block: all that the backward pass of one block needs: what is at
    work, and again for each of `every` blocks that are one checkpoint and computed again together. weights: one
    block's, gathered; waiting: gradients that are whole until the end (a tied embedding).

    Where every block is a checkpoint of `hidden` elements, `stacked` is `checkpoint_elements`: this is section 6.1's
    accounting with what is recomputed, gathered and reduced beside it.
    """
    held = state + gradients + stacked
    together = every * block if every > 1 else 0
    return {"loss": held + other + largest, "block": held + together + block + every * weights + waiting}


def fused_buffer_bytes(num_params: float, *, limit: float = math.inf) -> float:
    """An fp32 buffer of all gradients (section 3.2); C_B's does not grow beyond `limit` bytes (section 6.2)."""
    return min(4 * num_params, limit)


def arithmetic_intensity(hidden: int) -> float:
    """FLOPs per byte of fp16 checkpoints that leave the device and return, one per layer, with recomputation.

    A block does 96 hidden^2 FLOPs for a token and moves 4 hidden bytes. Source: section 4.2.2 for the claim,
    ZeRO-Infinity (arXiv 2104.07857), section 4.1, for the formula.
    """
    return 24 * hidden


def train_flops_per_token(num_params: float, layers: int, hidden: int, length: int, *, recompute: bool) -> float:
    """FLOPs of forward and backward for a token: 6 per non-embedding parameter, and attention's scores.

    recompute: the forward pass once more, 4/3 of it. Source: Kaplan et al. 2020 (arXiv 2001.08361), section 2.1, with
    scores and mixing counted in full, though half of them are masked.
    """
    return (6 * num_params + 12 * layers * hidden * length) * (4 / 3 if recompute else 1)


def megatron_step_flops(layers: int, hidden: int, batch: int, length: int, vocab_size: int) -> float:
    """FLOPs of a step with every block recomputed, output layer included.

    Source: Narayanan et al. 2021 (arXiv 2104.04473), equation 3; the paper reports TFlops by such a count.
    """
    ratio = 1 + length / (6 * hidden) + vocab_size / (16 * layers * hidden)
    return 96 * batch * length * layers * hidden**2 * ratio


def _check_degrees(**degrees: int) -> None:
    for name, degree in degrees.items():
        if degree < 1:
            raise ValueError(f"{name}={degree} is no number of devices: give 1 or more.")
