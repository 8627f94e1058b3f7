"""The class of an image."""

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zero_jax.cli.model_lookup import is_folder
from zero_jax.cli.objectives.objective import Objective, RunData, batches_of
from zero_jax.cli.objectives.text import counts_text
from zero_jax.cli.options.of_step import SIMULATED_LENGTH
from zero_jax.cli.reports.measures import Measure, Measures
from zero_jax.cli.step_from_config import evaluator_of
from zero_jax.cli.training.evaluation import label_sums
from zero_jax.data import extras
from zero_jax.data.image_files import read_images
from zero_jax.data.images import DIGITS, Images, augmented
from zero_jax.data.objectives import Key
from zero_jax.distributed.initialize import on_host, put_global
from zero_jax.errors import UsageError
from zero_jax.step.step import ZeroTrainStep


class Classify(Objective):
    """The class of each image. An evaluation counts each image once, in the batches that it takes."""

    name, model_kind = "classify", "images"
    measures = Measures("images", "nats per image", (Measure("accuracy", "accuracy", percent=True),))

    def check(self) -> None:
        """As `Objective`: options of text, the size and channels of the images, and labels beyond the classes."""
        config = self.config
        if not config.reads_images:
            raise UsageError(f"data={config.data[0]} is text, and {self.choice.name} classifies images: give --data "
                             f"{DIGITS}, a folder of pictures for each class, Parquet of them, or arrays in an .npz.")
        for name, default in (("seq_len", SIMULATED_LENGTH), ("context", 1)):
            if getattr(config, name) != default:
                raise UsageError(f"{name}={getattr(config, name)}: images have no tokens: leave it out.")
        if config.image_crop is not None:
            extras.check_installed("PIL", "image_crop")
        named = len(self._parts[0].classes)
        if config.num_classes is None and is_folder(config.model) and named not in (0, self._classes):
            object.__setattr__(config, "num_classes", named)  # as checkpoints and config.toml of the run then have it
            self.choice = self.choice.with_change("num_classes", named)
        classes, size = self._classes, getattr(self.choice.config, "image_size", None)
        for option, part in zip(("data", "eval_data" if config.eval_data else "data"), self._parts, strict=True):
            height, width, channels = part.shape
            if size is not None and (height, width) != (size, size):
                raise UsageError(f"{option}: its images have {height} x {width} pixels, and {self.choice.name} takes "
                                 f"{size} x {size}: resize them, or give a model of that size.")
            if channels not in (1, self._channels):
                raise UsageError(f"{option}: its images have {channels} channels, and {self.choice.name} takes "
                                 f"{self._channels}: convert them.")
            if classes is not None and part.num_classes > classes:
                raise UsageError(f"{option}: labels go up to {part.num_classes - 1}, and {self.choice.name} has the "
                                 f"classes 0 to {classes - 1} (num_classes={classes}): give --num-classes "
                                 f"{part.num_classes}, or a model with more.")
            if config.image_shift >= min(height, width):
                raise UsageError(f"image_shift={config.image_shift} moves images of {height} x {width} pixels out of "
                                 "sight: give less.")
        if self._parts[0].classes != self._parts[1].classes:
            raise UsageError(f"eval_data: its classes are {', '.join(self._parts[1].classes) or 'numbers'}, and those "
                             f"of data {', '.join(self._parts[0].classes) or 'numbers'}: give the same folders.")
        if self._parts[0].shape[:2] != self._parts[1].shape[:2]:
            raise UsageError(f"eval_data: its images have the shape {self._parts[1].shape}, and those of data "
                             f"{self._parts[0].shape}: give images of one size.")
        if len(self._parts[0]) < config.batch_size:
            raise UsageError(f"data: {len(self._parts[0])} images to train on are fewer than batch_size="
                             f"{config.batch_size}: give more, or a smaller batch.")

    def describe(self) -> str:
        """As `Objective`."""
        config = self.config
        changes = ", ".join([f"cropped to {100 * (config.image_crop or 0):g} % of its area or more and resized"
                             ] * (config.image_crop is not None)
                            + [f"moved by up to {config.image_shift} pixels"] * bool(config.image_shift)
                            + [f"warped by up to {config.image_warp:g}"] * bool(config.image_warp)
                            + ["mirrored"] * config.image_flip)
        grey = f"; grey images, as {self._channels} channels" if self._parts[0].shape[2] != self._channels else ""
        return "the class of an image" + (f", {changes} at random" if changes else "") + grey

    @property
    def items_per_step(self) -> int:
        """Images."""
        return self.config.batch_size

    @property
    def batch_text(self) -> str:
        """As `Objective`."""
        height, width, _ = self._parts[0].shape
        channels = "1 channel" if self._channels == 1 else f"{self._channels} channels"
        return f"images of {height} x {width} pixels in {channels}"

    @property
    def length(self) -> int | None:
        """Tokens that an image is cut into, where the model says."""
        return getattr(self.choice.config, "num_tokens", None)

    def batch_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """`inputs`, float32 (batch, height, width, channels), and `targets`, int32 (batch,)."""
        rows, (height, width, _) = self.config.batch_size, self._parts[0].shape
        return {"inputs": jax.ShapeDtypeStruct((rows, height, width, self._channels), jnp.float32),
                "targets": jax.ShapeDtypeStruct((rows,), jnp.int32)}

    def sums(self, model: Any, batch: Any) -> dict[str, jax.Array]:
        """Of `loss` and `accuracy` over the images; running statistics where the model has some."""
        return label_sums(_in_evaluation(model)(batch["inputs"]), batch)

    def load_data(self) -> RunData:
        """All images; those of an evaluation are never changed, and each counts once."""
        config, (train, held_out) = self.config, self._parts
        change = f"classify {config.image_shift} {config.image_flip} {self._channels}"
        change += f" {config.image_warp}" * bool(config.image_warp)  # without it the name is that of older checkpoints
        change += f" crop {config.image_crop}" * (config.image_crop is not None)
        train = train if config.image_crop is None else train.whole()

        batches = batches_of(config, [train], [held_out], name=change, make=self._changed,
                             eval_make=self._with_channels)
        return RunData(batches, counts_text(len(train), len(held_out), "images"), held_out)

    def samples(self, step: ZeroTrainStep, state: Any, data: RunData) -> tuple[str, ...]:
        """The likeliest class of held-out images beside their own."""
        number = min(self.config.samples, len(data.held_out))
        if not number:
            return ()
        devices = step.batch_sharding.num_devices
        rows = [self._with_channels(data.held_out.row(k % len(data.held_out)), (0,))
                for k in range(-(-number // devices) * devices)]
        evaluate = evaluator_of(self.config, step, _likeliest)
        images = put_global({"inputs": np.stack([row["inputs"] for row in rows])}, step.batch_sharding)
        classes, chances = (on_host(each) for each in evaluate(state, images))
        return tuple(f"--- held-out image {k} of class {int(rows[k]['targets'])}: the model says {classes[k]} "
                     f"({100 * chances[k]:.1f} %)" for k in range(number))

    @functools.cached_property
    def _parts(self) -> tuple[Images, Images]:
        """(To train on, held out); which ones are held out does not depend on the seed of a run."""
        data, config = self._read(self.config.data[0]), self.config
        return (data, self._read(config.eval_data[0])) if config.eval_data else data.split(config.eval_fraction)

    @property
    def _classes(self) -> int | None:
        return getattr(self.choice.config, "num_classes", None)

    def _read(self, name: str) -> Images:
        return read_images(name, self._taken[1], self._channels)

    @property
    def _taken(self) -> tuple[int, ...]:
        """The shape of the images that the model takes, as one."""
        assert self.choice.batch_shapes is not None
        return self.choice.batch_shapes(self.choice.config, 1, None)["inputs"].shape

    @property
    def _channels(self) -> int:
        return self._taken[-1]

    def _with_channels(self, row: dict[str, np.ndarray], _: Key) -> dict[str, np.ndarray]:
        """Grey images, in as many equal channels as the model takes."""
        image = row["inputs"]
        return {**row, "inputs": np.broadcast_to(image, (*image.shape[:2], self._channels))}

    def _changed(self, row: dict[str, np.ndarray], key: Key) -> dict[str, np.ndarray]:
        config = self.config
        moved = augmented(row["inputs"], key, shift=config.image_shift, flip=config.image_flip, warp=config.image_warp,
                          crop=config.image_crop, size=self._parts[0].shape[:2])
        return self._with_channels({**row, "inputs": moved}, key)


def _in_evaluation(model: Any) -> Any:
    """`model` with `train=False`, where its call has that: running statistics in place of those of the batch."""
    return functools.partial(model, train=False) if "train" in inspect.signature(model).parameters else model


def _likeliest(model: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    """The likeliest class of each image, and its probability."""
    chances = jax.nn.softmax(_in_evaluation(model)(batch["inputs"]).astype(jnp.float32))
    return chances.argmax(-1), chances.max(-1)
