"""The paper's arithmetic beyond memory: model sizes that fit, elements sent, FLOPs; no model and no JAX.

Bytes by formula are in zero_jax/planning/formulas.py, since `plan` reports them; what is here only the paper's tables
need. Source: arXiv 1910.02054, sections 5 to 8, unless another is named.
"""

from zero_jax.planning.formulas import ByteCounts, model_state_bytes
from zero_jax.stages import stage_of


def max_params(counts: ByteCounts, stage: int, memory_bytes: float, *, data: int, model: int = 1) -> float:
    """The largest number of parameters whose model states fit (Table 2): an upper bound, without activations."""
    return memory_bytes / sum(model_state_bytes(counts, stage, 1, data=data, model=model).values())


def communication_elements(stage: int, num_params: float) -> dict[str, float]:
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
