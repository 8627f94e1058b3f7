"""Images and labels from .npz files, folders of .npy arrays, or scikit-learn, as a source of examples."""

import abc
import zipfile
import zlib
from pathlib import Path
from typing import Self

import numpy as np

from zero_jax.data import extras
from zero_jax.data.objectives import Key, random_order, random_words
from zero_jax.errors import UsageError, few, printable

DIGITS = "digits"
"""The name of the images of scikit-learn, as data of a run."""


class Images(abc.ABC):
    """Images with a class each, as examples {"inputs": float32 (height, width, channels), "targets": int32 ()}.

    Attributes:
        num_examples: the number of images. shape: (height, width, channels) of each. classes: the names of classes, by
        label; empty where they have none. num_classes: the number of these names, else the largest label + 1.
        fingerprint: of all that they hold.
    """

    num_examples: int
    shape: tuple[int, int, int]
    num_classes: int
    classes: tuple[str, ...] = ()
    fingerprint: int

    def __len__(self) -> int:
        return self.num_examples

    @abc.abstractmethod
    def row(self, number: int) -> dict[str, np.ndarray]:
        """Image `number` and its label."""

    @abc.abstractmethod
    def part(self, numbers: np.ndarray) -> Self:
        """Those of these numbers."""

    def whole(self) -> Self:
        """The same whose rows are whole images, where rows are cut to a shape."""
        return self

    def split(self, fraction: float, *, seed: int = 0) -> tuple[Self, Self]:
        """(training part, held-out part): at random, and no image is in both."""
        held_out = round(fraction * self.num_examples)
        if not 0 < held_out < self.num_examples:
            raise UsageError(f"fraction={fraction} of {self.num_examples} images: one part would be empty.")
        order = random_order((seed,), self.num_examples)
        return self.part(order[held_out:]), self.part(order[:held_out])


class LabeledImages(Images):
    """Images in arrays.

    images: (number, height, width) or (number, height, width, channels); uint8 is divided by 255, other numbers
    are taken as they are, but for int8, which is refused. labels: integers, (number,). Raises ValueError for other
    shapes and dtypes, and for values that are not finite.

    >>> images = LabeledImages(np.zeros((5, 8, 8), np.uint8), np.arange(5))
    >>> images.num_examples, images.row(2)["inputs"].shape, int(images.row(2)["targets"])
    (5, (8, 8, 1), 2)
    """

    def __init__(self, images: np.ndarray, labels: np.ndarray) -> None:
        if images.ndim not in (3, 4) or images.dtype.kind not in "iuf" or not images.size:
            raise UsageError(f"images: {images.dtype} {images.shape} is no (number, height, width) or (number, height, "
                             "width, channels) of numbers.")
        if images.dtype == np.int8:
            raise UsageError("images: int8 has no pixels above 127: give uint8, which is divided by 255, or float32, "
                             "which is taken as it is.")
        if labels.shape != images.shape[:1] or labels.dtype.kind not in "iu" or labels.min() < 0:
            raise UsageError(f"labels: {labels.dtype} {labels.shape} is not a class, an integer from 0 on, for each of "
                             f"{len(images)} images.")
        if images.dtype.kind == "f" and not np.isfinite(images).all():
            raise UsageError("images: some values are not finite.")
        self._images = images if images.ndim == 4 else images[..., None]
        self._labels, self.num_examples = labels, len(images)
        self.shape, self.num_classes = self._images.shape[1:], int(labels.max()) + 1
        self._scale = np.float32(1 / 255 if images.dtype == np.uint8 else 1)
        self.fingerprint = zlib.crc32(labels.tobytes(), zlib.crc32(images.tobytes()))

    def row(self, number: int) -> dict[str, np.ndarray]:
        """Image `number` and its label."""
        return {"inputs": self._images[number].astype(np.float32) * self._scale,
                "targets": np.asarray(self._labels[number], np.int32)}

    def part(self, numbers: np.ndarray) -> "LabeledImages":
        """As `Images`."""
        return LabeledImages(self._images[numbers], self._labels[numbers])


ASPECTS, TRIES = (3 / 4, 4 / 3), 10
"""Width over height of a random crop, and how many are drawn before the largest of all is taken, as in torchvision."""


def augmented(image: np.ndarray, key: Key, *, shift: int = 0, flip: bool = False, warp: float = 0.0,
              crop: float | None = None, size: tuple[int, int] | None = None) -> np.ndarray:
    """`image`, (height, width, channels), cropped, moved by up to `shift` pixels over 0, `warped`, and mirrored.

    All moves are equally likely, and all amounts of a warp from -warp to warp; with `flip` half of the keys mirror.
    crop: the least share of the area of the image in a `random_crop`, which is resized to `size`, (height, width). A
    pure function of (image, key).

    >>> augmented(np.arange(4.0).reshape(2, 2, 1), (0, 7), shift=1)[..., 0].tolist()
    [[2.0, 3.0], [0.0, 0.0]]
    """
    down, right, mirrored, *others = random_words(key, 9 + 4 * TRIES)
    if crop is not None:
        top, left, height, width = random_crop(image.shape[:2], np.array(others[6:]).reshape(TRIES, 4), crop)
        image = resized(image[top:top + height, left:left + width], size or image.shape[:2])
    height, width, _ = image.shape
    if shift:
        wide = np.pad(image, ((shift, shift), (shift, shift), (0, 0)))
        top, left = int(down) % (2 * shift + 1), int(right) % (2 * shift + 1)
        image = wide[top:top + height, left:left + width]
    if warp:
        image = warped(image, warp * (np.array(others[:6]) / 2.0**63 - 1))
    return image[:, ::-1] if flip and mirrored % 2 else image


def random_crop(shape: tuple[int, ...], words: np.ndarray, least: float) -> tuple[int, int, int, int]:
    """(Top, left, height, width) of a random rectangle in an image of `shape`, (height, width).

    Its share of the area is drawn from `least` to 1, and the logarithm of its aspect ratio between those of ASPECTS, as
    in the training of Inception (arXiv 1409.4842, section 6). words: uint64 (tries, 4); the first that fits is taken,
    else the largest rectangle in the middle of such a ratio.

    >>> random_crop((40, 40), np.array([[0, 2**63, 0, 0]], np.uint64), 0.25)
    (0, 0, 20, 20)
    """
    height, width = shape
    logs = np.log(ASPECTS)
    for area, aspect, down, right in words:
        share = least + (1 - least) * (area / 2.0**64)
        ratio = np.exp(logs[0] + (logs[1] - logs[0]) * (aspect / 2.0**64))
        tall, wide = (int(round(float(np.sqrt(share * height * width * each)))) for each in (1 / ratio, ratio))
        if 0 < tall <= height and 0 < wide <= width:
            return int(down) % (height - tall + 1), int(right) % (width - wide + 1), tall, wide
    wide, tall = min(width, round(height * ASPECTS[1])), min(height, round(width / ASPECTS[0]))
    return (height - tall) // 2, (width - wide) // 2, tall, wide


def resized(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """`image`, (height, width, channels), in `size`, (height, width): float32, triangles as wide as what they average.

    uint8 is divided by 255.
    """
    pil = extras.load("PIL.Image", "image_crop")
    planes = [pil.fromarray(np.ascontiguousarray(image[..., channel], np.float32)).resize(
        size[::-1], pil.Resampling.BILINEAR) for channel in range(image.shape[2])]
    return np.stack([np.asarray(plane) for plane in planes], -1) * np.float32(1 / 255 if image.dtype == np.uint8 else 1)


def warped(image: np.ndarray, amounts: np.ndarray) -> np.ndarray:
    """`image`, (height, width, channels), turned, scaled and sheared about its centre, and moved.

    amounts: float (6,). The pixel at x, (down, right) from -1 to 1 across the image, is that of `image` at x + M x + t,
    linearly interpolated and 0 beyond the border: M is (2, 2), of the first four, and t the last two.

    >>> warped(np.arange(4.0).reshape(2, 2, 1), np.array([0, 0, 0, 0, 0, 0.5]))[..., 0].tolist()
    [[0.5, 0.5], [2.5, 1.5]]
    """
    ndimage = extras.load("scipy.ndimage", "image_warp")
    half = np.array([*image.shape[:2], 2]) / 2
    matrix = np.eye(3)
    matrix[:2, :2] += amounts[:4].reshape(2, 2) * half[:2, None] / half[None, :2]
    centre = half - 0.5
    moved = np.array([*amounts[4:] * half[:2], 0])
    return ndimage.affine_transform(image, matrix, centre - matrix @ centre + moved, order=1, mode="grid-constant")


def load_images(path: str | Path) -> LabeledImages:
    """The arrays `images` and `labels` of an .npz file, or of images.npy and labels.npy in a folder (mapped).

    Raises ValueError where one is missing, damaged, or of another shape.
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise UsageError(f"{path}: no such file or folder: give an .npz with images and labels, or a folder of both.")
    try:
        if path.is_dir():
            files = [path / f"{name}.npy" for name in ("images", "labels")]
            arrays = {file.stem: np.load(file, mmap_mode="r", allow_pickle=False) for file in files if file.exists()}
        else:
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files if name in ("images", "labels")}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, AttributeError, TypeError) as error:
        raise UsageError(f"{path} cannot be read ({printable(str(error))}): write it with np.savez(path, images=..., "
                         "labels=...).") from error
    missing = [name for name in ("images", "labels") if name not in arrays]
    if missing:
        raise UsageError(f"{path} lacks {few(missing)}: it needs arrays of the names images and labels.")
    return LabeledImages(arrays["images"], arrays["labels"])


def digits() -> LabeledImages:
    """The 1,797 handwritten digits of scikit-learn, float32 (8, 8, 1) from 0 to 1: no download."""
    read = extras.load("sklearn.datasets", "the images of digits").load_digits()
    return LabeledImages(read.images.astype(np.float32) / 16, read.target.astype(np.int32))
