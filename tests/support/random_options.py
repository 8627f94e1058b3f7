"""Options of a step that are drawn at random: the same seed draws the same step."""

import contextlib
import dataclasses
import functools
import random
import tempfile
from typing import Any

import jax
import numpy as np
import optax

import zero_jax
from models import gpt2
from support.flat import flat_step
from support.oracle import Trained, by_name, oracle, param_difference
from support.workloads import FLAVOURS, KEY_BIAS, token_batches
from zero_jax.errors import UsageError

ROWS, LENGTH, NUM_STEPS = 32, 16, 2
MESHES = {
    "flat": {"data": 8}, "factored": {"data": (2, 4)}, "replica": {"data": 4, "replica": 2},
    "tensor": {"data": 4, "tensor": 2}, "factored, tensor": {"data": (2, 2), "tensor": 2},
    "context": {"data": 4, "context": 2}, "one": {"data": 1}}
OPTIMIZERS = {
    "adamw": optax.adamw(1e-3, eps=1e-6), "clip": optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.5)),
    "momentum": optax.sgd(0.1, momentum=0.9), "schedule": optax.adamw(
        optax.linear_schedule(1e-3, 1e-4, 3), eps=1e-6, weight_decay=0.1)}
DISK = "disk"
"""In the place of an `Offload` with a folder, which is made when the step is."""
OPTIONS: dict[str, list[Any]] = {
    "accumulate": [2, 4], "reduce": ["once"], "gather": ["forward", "step", "auto"], "frozen": [("wpe",), ("ln_1",)],
    "guard": [zero_jax.Guard(skip=2)], "ema": [0.5], "remat": ["full", "dots", "sqrt"], "combine_bytes": [4096],
    "partition_activations": [True, "cpu"], "sequence_parallel": [True], "hpz_axes": [("data_1",)],
    "offload": ["optimizer", "parameters", "gradients", zero_jax.Offload(fraction=0.5), DISK],
    "tiling": [{"up/kernel": 2}], "communication": [
        zero_jax.Communication(weights="int8"), zero_jax.Communication(gradients="int8")]}
@dataclasses.dataclass(frozen=True)
class Drawn:
    """What a seed gave."""

    seed: int
    flavour: str
    scanned: bool
    width: int
    stage: int
    precision: str
    mesh: str
    optimizer: str
    weighted: bool
    options: tuple[tuple[str, Any], ...]

    @property
    def config(self) -> gpt2.Config:
        """Of the model: odd sizes are padded."""
        vocab_size = 67 if self.width % 8 and "tensor" not in self.mesh else 64
        return gpt2.Config(3, self.width, 4, vocab_size=vocab_size, max_length=LENGTH, scan_layers=self.scanned)

    @property
    def tolerance(self) -> tuple[float, float]:
        """Of losses, relative, and of parameters, absolute."""
        if "communication" in dict(self.options):
            return 2e-2, 2e-2
        return (1e-5, 3e-5) if self.precision == "fp32" else (4e-3, 8e-3)


def draw(seed: int) -> Drawn:
    """The step of `seed`."""
    rng = random.Random(seed)
    mesh = rng.choice([*MESHES, "flat", "factored"])
    names = rng.sample(sorted(OPTIONS), rng.randint(2, 6))
    options = tuple((name, rng.choice(OPTIONS[name])) for name in names)
    if "partition_activations" in names:  # of checkpoints
        options = tuple({"remat": "full", **dict(options)}.items())
    return Drawn(
        seed, rng.choice(sorted(FLAVOURS)), scanned=rng.random() < 0.7, width=rng.choice([32, 64, 60]),
        stage=rng.choice([0, 1, 2, 3, 3, 3]), precision=rng.choice(["fp32", "bf16"]), mesh=mesh,
        optimizer=rng.choice(sorted(OPTIMIZERS)), weighted=rng.random() < 0.3, options=options)


def batches(config: gpt2.Config, weighted: bool) -> list[dict[str, np.ndarray]]:
    """Counting upwards; where it is weighted, another number of targets counts in each row."""
    made = token_batches(NUM_STEPS, ROWS, LENGTH, config.vocab_size)
    if weighted:
        lengths = np.random.default_rng(1).integers(1, LENGTH + 1, (NUM_STEPS, ROWS, 1))
        made = [{**batch, "weights": (np.arange(LENGTH) < length).astype(np.float32)}
                for batch, length in zip(made, lengths, strict=True)]
    return made


@functools.cache
def alone(flavour: str, config: gpt2.Config, precision: str, optimizer: str, weighted: bool, frozen: tuple[str, ...]
          ) -> Trained:
    """The plain loop's run."""
    chosen = OPTIMIZERS[optimizer]
    if frozen:
        chosen = optax.multi_transform(
            {"train": chosen, "keep": optax.set_to_zero()}, lambda params: jax.tree.map_with_path(
                lambda path, _: "keep" if any(name in jax.tree_util.keystr(path) for name in frozen) else "train",
                params))
    return oracle(FLAVOURS[flavour](config), batches=batches(config, weighted), precision=precision, optimizer=chosen)


def make(drawn: Drawn, folder: str) -> Any:
    """The step; raises UsageError where it is refused."""
    options = dict(drawn.options)
    if options.get("offload") == DISK:
        options["offload"] = zero_jax.Offload(disk=folder)
    rules = {"tensor_rules": gpt2.tensor_rules(drawn.config)} if "tensor" in drawn.mesh else {}
    sizes = MESHES[drawn.mesh]
    number = int(np.prod([np.prod(size) for size in sizes.values()]))
    return flat_step(
        FLAVOURS[drawn.flavour](drawn.config), drawn.stage, optimizer=OPTIMIZERS[drawn.optimizer],
        precision=drawn.precision, mesh=zero_jax.make_mesh(**sizes, devices=jax.devices()[:number]), **rules,
        **options)


def accepted(drawn: Drawn, folder: str) -> Drawn:
    """`drawn` with those of its options, in their order, that are not refused beside the ones before."""
    taken, batch = dataclasses.replace(drawn, options=()), batches(drawn.config, drawn.weighted)[0]
    for option in drawn.options:
        more = dataclasses.replace(taken, options=(*taken.options, option))
        with contextlib.suppress(UsageError):
            make(more, folder).layout(batch)
            taken = more
    return taken


def train(drawn: Drawn, folder: str) -> Trained:
    """By the library; raises UsageError for what is refused only where the loss is traced."""
    step, run = make(drawn, folder), batches(drawn.config, drawn.weighted)
    state, losses, norms = step.init(jax.random.key(0), run[0]), [], []
    for batch in run:
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
        norms.append(metrics["grad_norm"])
    params = by_name(step.params(state))
    if isinstance(step, zero_jax.DiskTrainStep):
        step.close()
    return Trained(np.array(losses, np.float64), np.array(norms, np.float64), params, {})


def check(drawn: Drawn) -> Drawn:
    """Trains it beside the plain loop; returns what of it was accepted.

    Raises AssertionError where numbers differ.
    """
    with tempfile.TemporaryDirectory() as folder:
        drawn = accepted(drawn, f"{folder}/asked")
        try:
            many = train(drawn, f"{folder}/states")
        except UsageError:  # "sqrt" of a few layers, or layers without a loop, save no checkpoints that could be moved
            drawn = dataclasses.replace(drawn, options=tuple(
                each for each in drawn.options if each[0] != "partition_activations"))
            many = train(drawn, f"{folder}/without")
    frozen = dict(drawn.options).get("frozen", ())
    one = alone(drawn.flavour, drawn.config, drawn.precision, drawn.optimizer, drawn.weighted, frozen)
    of_losses, of_params = drawn.tolerance
    assert np.isfinite(many.losses).all(), drawn
    np.testing.assert_allclose(many.losses, one.losses, rtol=of_losses, err_msg=str(drawn))
    if not frozen:  # of which the plain loop has a gradient
        np.testing.assert_allclose(many.norms, one.norms, rtol=10 * of_losses, err_msg=f"norms of {drawn}")
    apart = param_difference(many, one, KEY_BIAS)
    assert apart < of_params, (apart, drawn)
    return drawn
