"""Seconds and bytes of a step by formula, for each way to divide it over devices: what a search ranks before compiling.

Plain numbers in, plain numbers out, and nothing is compiled. The formula knows a decoder by its sizes: products at the
rates of the chip's file, the traffic of activations and of the update, collectives by `collective_seconds`. It leaves
out what only the compiler knows: what XLA fuses, pads, keeps alive and overlaps. `EXPOSED` and `TRAFFIC` are fitted to
the programs for GPUs of `scripts/tables/published.json`, so that its error on those, 5 % in the median, says little of
others. Of 16 published runs on TPUs, which fitted nothing, it is 2 % off in the median and 13 % at most; of compiled
programs for v6e and v4 4 % (`scripts/tables/published.py --formula`).
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from zero_jax.stages import stage_of
from zero_jax.xla.chip import Chip

EXPOSED = {"ampere": 0.6, "hopper": 0.05, "tpu": 0.25}
"""The share of the time of ZeRO's collectives in loops over layers that compute does not hide, by what is compiled for:
compiled programs for A100 have 0.25 to 1.1, for H100 0 to 0.14 where they take less than a third of the time of compute
(medians 0.6 and 0.04, scripts/tables/published.json); V100, which is compiled as Ampere, 0.67 of 100B on 400."""
TRAFFIC = 9
"""How often an activation passes the memory, forward and backward; 3 times less where blocks are computed again."""
KERNELS = 40
"""Kernels of a layer, forward and backward."""
CODES = {"no": 1.0, "int8": 0.52, "fp8": 0.52, "int4": 0.27, "fp4": 0.27}
"""Bytes of a message in codes with their scales, over those in bf16."""
SUM_BYTES = 16
"""Of a gradient, added to a sum in fp32 that is in memory: measured of compiled programs, 15."""
DISTINCT_STAGES = (3, 2, 0)
"""A step at stage 1 is that of stage 2 (`zero_jax.stages.Stage`)."""
LARGEST_CONTEXT = 8
OPTIMIZER_BYTES = 12
"""Of a parameter in host memory with `offload="optimizer"`: master weights and two moments in fp32."""

Collective = Callable[[str, str], tuple[float, float]]
"""Kind of a collective, and an axis -> seconds of latency, and the bytes/s at which each device sends."""


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A transformer as the formula knows it.

    num_params: all of them. layers, width, heads: of its blocks; kv_heads: of keys and values. hidden: elements that a
    token's feed-forward makes in a block. vocab: of the logits. flops: of a token's products by parameters, forward and
    backward, nothing recomputed. moments: bytes of a parameter in the optimizer's state. scores: elements of
    attention's scores that a token has in memory; 0 with a kernel that keeps none.
    """

    num_params: float
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocab: int
    flops: float
    moments: float = 8.0
    scores: int = 0

    def saved(self, remat: str) -> tuple[float, float]:
        """Elements of a token that a block keeps for backward: (all devices of `tensor` have, they share)."""
        if remat == "full":
            return self.width, 0.0
        if remat == "dots":
            return 2.0 * self.width, 4.0 * self.width + 0.7 * self.hidden
        return 3.0 * self.width, 6.0 * self.width + self.hidden + self.scores


@dataclasses.dataclass(frozen=True)
class Division:
    """How a step is divided: the fields of a `PlanConfig` that a search varies, by its names. data: the rest."""

    stage: int = 3
    data: int = 1
    replica: int = 1
    tensor: int = 1
    context: int = 1
    hpz: int = 1
    remat: str = "no"
    accumulate: int = 1
    gather: str = "use"
    reduce: str = "every"
    quantize_weights: str = "no"
    quantize_gradients: tuple[str, ...] = ()
    offload: str = "no"
    sequence_parallel: bool = False
    loss_chunks: int = 1

    @property
    def preferred(self) -> float:
        """By which a time is multiplied where divisions are compared, since the formula does not tell less apart.

        A percent for each option that is asked for, and three where numbers are rounded to codes.
        """
        options = (self.replica > 1, self.tensor > 1, self.context > 1, self.hpz > 1, self.gather != "use",
                   self.reduce != "every", self.offload != "no", self.loss_chunks > 1,
                   *[self.quantize_weights != "no"] * 3, *[bool(self.quantize_gradients)] * 3)
        return 1.01 ** sum(options)

    @property
    def kind(self) -> tuple[int, ...]:
        """What makes a division another one to a reader, of which the fastest variant is listed.

        How many replicas is none: on thousands of devices the formula has ten within a percent.
        """
        return self.stage, self.replica > 1, self.tensor, self.context


@dataclasses.dataclass(frozen=True)
class Estimate:
    """By formula, of one device: seconds of a step, seconds of them in which it only communicates, bytes it needs."""

    seconds: float
    exposed: float
    device_bytes: float
    host_bytes: float = 0.0


def exposed_share(chip: Chip) -> float:
    """Of `EXPOSED` that of a chip."""
    capability = chip.gpu and float((chip.gpu.compile_as or chip.gpu.capability).rstrip("af"))
    return EXPOSED["tpu" if capability is None else "ampere" if capability < 9 else "hopper"]


def estimate(model: Decoder, division: Division, *, batch: int, length: int, chip: Chip, collective: Collective,
             compute_bytes: int = 2, room: float = math.inf) -> Estimate | None:
    """The estimate of a step of `batch` sequences of `length` tokens; None where it needs more than `room` bytes.

    collective: of the mesh of `division`, whose axes are "data" (ZeRO's, with those of `context`), "hpz" (of these the
    devices that share a copy for backward), "replica", "tensor" and "context".
    compute_bytes: of a number that is computed with and sent, 2 of bf16.
    """
    d, stage, shards = division, stage_of(division.stage), division.data * division.context
    params, micro = model.num_params / d.tensor, d.accumulate
    tokens = batch / (d.data * d.replica) * length / d.context  # of a group of `tensor` devices, in a step
    needed, host = _memory(model, d, params, shards, tokens / micro, compute_bytes)
    if needed > room:
        return None
    dtype = "bf16" if compute_bytes == 2 else "f32"
    again = {"full": 1.0, "dots": 0.0}.get(d.remat, 0.0)  # forward passes of the blocks, beside their own
    logits = 6.0 * model.vocab * model.width
    blocks = (model.flops - logits) * (1 + again / 3) + logits * (4 / 3 if d.loss_chunks > 1 else 1.0)
    attention = 2.0 * model.layers * model.heads * model.head_dim * length  # forward, of a token, the mask's half
    passes = {"forward": 1 + (d.remat != "no"), "backward": 2}
    compute = tokens / d.tensor / chip.peak_flops[dtype] * (blocks / chip.rates.of_peak(dtype) + sum(
        count * attention / chip.rates.of_peak(dtype, f"{model.head_dim} {way}", length)
        for way, count in passes.items()))
    whole, split = model.saved("no")
    activations = model.layers * (whole / (d.tensor if d.sequence_parallel else 1) + split / d.tensor) * compute_bytes
    updated = params / (shards if stage.shards_optimizer else 1)
    sums = params if d.reduce == "once" else params / (shards if stage.number else 1)
    traffic = (tokens * activations * (TRAFFIC - 3 * again) + tokens * 24.0 * model.vocab / d.tensor
               + updated * (8 + 2 * model.moments) + micro * (6.0 * params + SUM_BYTES * sums * (micro > 1)))
    compute += micro * model.layers * KERNELS * (1 + again / 3) * chip.rates.launch
    compute += traffic / (chip.memory_bandwidth * chip.rates.hbm)
    hidden, blocking = _communication(model, d, params, shards, tokens, compute_bytes, collective)
    exposed = blocking + max(exposed_share(chip) * hidden, hidden - compute)
    if d.offload != "no" and chip.host_link_bandwidth:
        moved = OPTIMIZER_BYTES * updated + (4.0 * micro * params if d.offload == "parameters" else 0.0)
        exposed += moved / chip.host_link_bandwidth
    return Estimate(compute + exposed, exposed, needed, host)


def _memory(model: Decoder, d: Division, params: float, shards: int, tokens: float, compute_bytes: int
            ) -> tuple[float, float]:
    """(bytes of a device, of its host's memory); tokens: of a microbatch."""
    stage, low = stage_of(d.stage), compute_bytes == 2
    updated = params / (shards if stage.shards_optimizer else 1)
    moments = model.moments * updated
    state = stage.state_bytes(params, shards, low_precision=low) + moments - 8.0 * updated  # which that counts
    gradients = 4.0 * params / (shards if d.stage else 1) * (1 + (d.accumulate > 1))
    if d.reduce == "once":
        gradients = (4.0 + compute_bytes) * params
    host = 0.0
    if d.offload != "no":
        host = moments + 4.0 * updated
        kept = (2.0 * params / (shards if stage.shards_params else 1)) * (d.offload == "optimizer")
        state, host = kept, host + (2.0 * params / shards - kept if d.offload == "parameters" else 0.0)
    layer = (params - 2 * model.vocab * model.width / d.tensor) / model.layers
    head = model.vocab * model.width / d.tensor
    gathered = compute_bytes * (3 * max(layer, 0.0) + 2 * head) if stage.shards_params else 0.0
    if stage.shards_params and (d.hpz > 1 or d.gather in ("forward", "step")):
        gathered += compute_bytes * params / d.hpz
    whole, split = model.saved(d.remat)
    all_whole, all_split = model.saved("no")
    sequence = d.tensor if d.sequence_parallel else 1
    elements = model.layers * (whole / sequence + split / d.tensor) + all_whole / sequence + all_split / d.tensor
    logits = 10.0 * model.vocab / d.tensor / d.loss_chunks
    return state + gradients + gathered + tokens * (elements * compute_bytes + logits), host


def _communication(model: Decoder, d: Division, params: float, shards: int, tokens: float, compute_bytes: int,
                   collective: Collective) -> tuple[float, float]:
    """Seconds of collectives alone: (ZeRO's in loops over layers, which compute can hide; those that block)."""
    stage, micro, sent = stage_of(d.stage), d.accumulate, compute_bytes * params
    reductions = 1 if d.reduce == "once" else micro
    hidden = blocking = 0.0

    def seconds(kind: str, axis: str, size: float, count: float) -> float:
        latency, rate = collective(kind, axis)
        return count * latency + size / rate

    if shards > 1:
        share = (shards - 1) / shards
        codes = max((CODES[each] for each in d.quantize_gradients), default=1.0) if d.quantize_gradients else 1.0
        reduced = sent * share * reductions * codes
        gathered = sent * share * CODES[d.quantize_weights]
        if not d.stage:
            blocking += seconds("all-reduce", "data", 2 * reduced, reductions)
        else:
            hidden += seconds("reduce-scatter", "data", reduced, reductions * model.layers)
        if stage.shards_params:
            times = {"use": 2 * micro, "forward": micro, "step": 1}[d.gather]
            if d.hpz > 1:  # of two gathers one, or with a copy of the step both, among those that share the copy
                inside = 2 * micro if d.gather == "step" else micro
                part = sent * (d.hpz - 1) / d.hpz * CODES[d.quantize_weights]
                hidden += seconds("all-gather", "hpz", part * inside, inside * model.layers)
                gathered, times = (gathered - part, 1) if d.gather == "step" else (gathered, micro)
            if d.gather == "step":
                blocking += seconds("all-gather", "data", gathered, 1)
            else:
                hidden += seconds("all-gather", "data", gathered * times, times * model.layers)
        elif d.stage:
            blocking += seconds("all-gather", "data", gathered, 1)
    if d.replica > 1:
        part = sent / (shards if d.stage else 1)
        hidden += seconds("all-reduce", "replica", 2 * part * reductions * (d.replica - 1) / d.replica,
                          reductions * model.layers)
    message = tokens * model.width * compute_bytes
    again = d.remat == "full"
    if d.tensor > 1:
        count = model.layers * (6 if again else 4)
        share = 2 * (d.tensor - 1) / d.tensor
        blocking += seconds("all-reduce", "tensor", count * share * message, count * micro)
    if d.context > 1:
        count = model.layers * (12 if again else 8)
        blocking += seconds("all-to-all", "context", count * message / d.tensor * (d.context - 1) / d.context,
                            count * micro)
    return hidden, blocking


def divisions(model: Decoder, devices: int, *, batch: int, length: int, largest_tensor: int, fixed: Mapping[str, Any]
              ) -> Iterator[Division]:
    """All ways to divide a step of `batch` sequences, but for what `fixed` holds by the name of a field.

    Sizes of axes are those that divide what they split: heads, the vocabulary, tokens, and the batch over what is left.
    largest_tensor: devices of a host. Those of one that are left by `tensor` and `context` may share a copy (`hpz`).
    """
    def choices(name: str, values: Iterable[Any]) -> list[Any]:
        return [fixed[name]] if name in fixed else list(values)

    sizes = [size for size in range(1, devices + 1) if devices % size == 0]
    tensors = [size for size in sizes if size <= largest_tensor and not (
        model.heads % size or model.kv_heads % size or model.vocab % size)]
    contexts = [size for size in sizes if size <= LARGEST_CONTEXT and not length % size]
    for tensor, context, replica, shared in itertools.product(
            choices("tensor", tensors), choices("context", contexts), choices("replica", sizes), (False, True)):
        groups = devices // (tensor * context)
        if devices % (tensor * context) or groups % replica or batch % groups or model.heads % (tensor * context):
            continue
        data, hpz = groups // replica, fixed.get("hpz", largest_tensor // (tensor * context) if shared else 1)
        if shared and ("hpz" in fixed or hpz < 2) or data % hpz or data == hpz > 1:
            continue
        axes = {"data": data, "replica": replica, "tensor": tensor, "context": context, "hpz": hpz}
        counts = [size for size in sizes_of_two(batch // groups)]
        for stage, micro in itertools.product(choices("stage", DISTINCT_STAGES), choices("accumulate", counts)):
            several = micro > 1
            if hpz > 1 and stage < 3:
                continue
            options = {
                "gather": ["use", *["forward"] * (hpz == 1), *["step"] * several] if stage == 3 else ["use"],
                "reduce": ["every", *["once"] * (several and context == 1)],
                "remat": ["no", "dots", "full"], "loss_chunks": [1, 16],
                "sequence_parallel": [tensor > 1 and context == 1],
                "quantize_weights": ["no", *["int8"] * (stage > 0)],
                "quantize_gradients": [(), *[("int8",)] * (stage > 0)],
                "offload": ["no", "optimizer", *["parameters"] * (stage == 3 and hpz == 1)]}
            for values in itertools.product(*(choices(name, known) for name, known in options.items())):
                yield Division(stage=stage, accumulate=micro, **axes, **dict(zip(options, values, strict=True)))


def sizes_of_two(number: int) -> list[int]:
    """The powers of two that divide `number`.

    >>> sizes_of_two(12)
    [1, 2, 4]
    """
    return [2**power for power in range(number.bit_length()) if number % 2**power == 0]
