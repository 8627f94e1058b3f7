"""Pictures as people have them: a folder of JPEG or PNG files for each class, or Parquet as Hugging Face writes it."""

import io
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zero_jax.data import extras
from zero_jax.data.images import DIGITS, Images, digits, load_images
from zero_jax.errors import UsageError, few, printable

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".webp")
"""Of files that are read as pictures."""


def is_images(name: str) -> bool:
    """Whether data of that name are images: "digits", arrays, a folder of pictures for each class, or Parquet of them.

    Arrays are an .npz file, or a folder with images.npy.
    """
    path = Path(name).expanduser()
    return (name == DIGITS or path.suffix == ".npz" or (path / "images.npy").is_file() or bool(class_folders(path))
            or picture_columns(path) is not None)


def read_images(name: str, size: int, channels: int) -> Images:
    """The images of data of that name; pictures in files are cut to squares of `size` pixels in so many channels."""
    path = Path(name).expanduser()
    if name == DIGITS:
        return digits()
    if class_folders(path):
        return load_folders(path, size, channels)
    return load_images(path) if picture_columns(path) is None else load_parquet(path, size, channels)


class PictureFiles(Images):
    """Examples {"inputs": float32 (size, size, channels) from 0 to 1, "targets": int32 ()}, decoded when they are read.

    Of a picture the largest square in its middle is taken, and resized to size x size.

    pictures: paths of files, or what such files hold. labels: integers, (number,). classes: their names, by label.
    channels: 3, or 1 for grey ones. cut: without it rows have whole pictures, uint8 of any height and width.
    """

    def __init__(self, pictures: Sequence[Path | bytes], labels: np.ndarray, classes: Sequence[str], size: int,
                 channels: int, *, cut: bool = True) -> None:
        extras.check_installed("PIL", "pictures in files")
        self._pictures, self._labels, self.classes = pictures, labels, tuple(classes)
        self._size, self._channels, self._cut, self.num_examples = size, channels, cut, len(pictures)
        self.fingerprint = zlib.crc32(repr((self.shape, self.classes)).encode(), zlib.crc32(labels.tobytes()))
        for each in pictures:
            known = each if isinstance(each, bytes) else f"{each.name} {each.stat().st_size}".encode()
            self.fingerprint = zlib.crc32(known, self.fingerprint)
        self.row(0)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Height, width and channels of an image."""
        return self._size, self._size, self._channels

    @property
    def num_classes(self) -> int:
        """Of names, or the largest label and one."""
        return len(self.classes) or int(self._labels.max()) + 1

    def row(self, number: int) -> dict[str, np.ndarray]:
        """Image `number` and its label; raises ValueError for a picture that cannot be decoded."""
        image, ops = extras.load("PIL.Image", "pictures in files"), extras.load("PIL.ImageOps", "pictures in files")
        source = self._pictures[number]
        try:
            with image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as picture:
                upright = ops.exif_transpose(picture).convert("RGB" if self._channels == 3 else "L")
                square = self._cut and ops.fit(upright, (self._size, self._size), image.Resampling.BICUBIC)
                pixels = np.asarray(square or upright)
        except (OSError, ValueError, SyntaxError, image.DecompressionBombError) as error:
            where = f"picture {number + 1}" if isinstance(source, bytes) else str(source)
            raise UsageError(f"{where} cannot be read ({printable(str(error))}): write it again, or leave it out."
                             ) from error
        inputs = pixels.reshape(*pixels.shape[:2], self._channels)
        return {"inputs": inputs / np.float32(255) if self._cut else inputs,
                "targets": np.asarray(self._labels[number], np.int32)}

    def part(self, numbers: np.ndarray) -> "PictureFiles":
        """As `Images`."""
        return PictureFiles([self._pictures[number] for number in numbers], self._labels[numbers], self.classes,
                            self._size, self._channels, cut=self._cut)

    def whole(self) -> "PictureFiles":
        """As `Images`."""
        return PictureFiles(self._pictures, self._labels, self.classes, self._size, self._channels, cut=False)


def class_folders(folder: Path) -> list[Path]:
    """The folders in `folder`, by name, which are its classes; none where it has other files, or one without pictures.

    Documents have folders of pictures, too, beside their text.
    """
    found = [each for each in sorted(folder.iterdir()) if each.name[0] != "."] if folder.is_dir() else []
    return found if all(each.is_dir() and any(file.suffix.lower() in SUFFIXES for file in each.iterdir())
                        for each in found) else []


def picture_columns(path: Path) -> tuple[str, str] | None:
    """(The column of pictures, that of labels) of Parquet as Hugging Face writes it; None where it has none."""
    if path.suffix != ".parquet" or not path.is_file() or not path.stat().st_size:
        return None
    pyarrow = extras.load("pyarrow", str(path))
    try:
        schema, types = extras.load("pyarrow.parquet", str(path)).read_schema(path), pyarrow.types
    except (pyarrow.ArrowException, OSError):
        return None  # what reads it says so
    images = [field.name for field in schema if types.is_struct(field.type)
              and any(field.type.field(at).name == "bytes" for at in range(field.type.num_fields))]
    labels = [field.name for field in schema if types.is_integer(field.type)]
    return (images[0], next((name for name in labels if name in ("label", "labels", "fine_label")), labels[0])
            ) if images and labels else None


def load_folders(folder: Path, size: int, channels: int) -> PictureFiles:
    """The pictures in the folders of `folder`, of which each is a class; in alphabetical order."""
    folders = class_folders(folder)
    files = [(file, label) for label, each in enumerate(folders) for file in sorted(each.iterdir())
             if file.suffix.lower() in SUFFIXES]
    return PictureFiles([file for file, _ in files], np.array([label for _, label in files]),
                        [each.name for each in folders], size, channels)


def load_parquet(path: Path, size: int, channels: int) -> PictureFiles:
    """The pictures of a Parquet file; raises ValueError for rows without one."""
    columns: Any = picture_columns(path)
    table = extras.load("pyarrow.parquet", str(path)).read_table(path, columns=list(columns))
    pictures = [each and each["bytes"] for each in table[columns[0]].to_pylist()]
    labels = table[columns[1]].to_pylist()
    lacking = [number for number, (picture, label) in enumerate(zip(pictures, labels, strict=True), 1)
               if not picture or label is None or label < 0]
    if lacking or not pictures:
        raise UsageError(f"{path}: row {few([str(number) for number in lacking]) or 'none'} lacks a picture in "
                         f"{columns[0]} or a class, an integer from 0 on, in {columns[1]}: leave such rows out.")
    return PictureFiles(pictures, np.array(labels), (), size, channels)
