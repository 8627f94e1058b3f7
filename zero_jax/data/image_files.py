"""Pictures as people have them: a folder of JPEG or PNG files for each class, or Parquet as Hugging Face writes it."""

import dataclasses
import functools
import io
import threading
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zero_jax.data import extras
from zero_jax.data.images import DIGITS, Images, digits, load_images
from zero_jax.data.remote_files import RemoteFile, is_remote, readable, remote_files
from zero_jax.data.text_sources import open_parquet
from zero_jax.errors import UsageError, few, printable

CACHE_BYTES = 4 << 30
"""Of pictures of Parquet files that are kept in the host's memory; of larger data a row group is read for each."""

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".webp")
"""Of files that are read as pictures."""


def is_images(name: str) -> bool:
    """Whether data of that name are images: "digits", arrays, a folder of pictures for each class, or Parquet of them.

    Arrays are an .npz file, or a folder with images.npy. Of Parquet in an object store the first file is looked at.
    """
    if is_remote(name):
        return picture_columns(remote_files(name)[0]) is not None
    path = Path(name).expanduser()
    return (name == DIGITS or path.suffix == ".npz" or (path / "images.npy").is_file() or bool(class_folders(path))
            or picture_columns(path) is not None)


def read_images(name: str, size: int, channels: int) -> Images:
    """The images of data of that name; pictures in files are cut to squares of `size` pixels in so many channels."""
    if is_remote(name):
        return load_parquet(remote_files(name), size, channels)
    path = Path(name).expanduser()
    if name == DIGITS:
        return digits()
    if class_folders(path):
        return load_folders(path, size, channels)
    return load_images(path) if picture_columns(path) is None else load_parquet([path], size, channels)


class PictureFiles(Images):
    """Pictures that are decoded when they are read: the largest square in the middle, resized to size x size.

    labels: integers, (number,). classes: their names, by label. channels: 3, or 1 for grey ones. cut: without it rows
    have whole pictures, uint8 of any height and width. numbers: which of pictures and labels these are; None: all.
    """

    def __init__(self, pictures: "Sequence[Path] | ParquetPictures", labels: np.ndarray,
                 classes: Sequence[str], size: int, channels: int, *, cut: bool = True,
                 numbers: np.ndarray | None = None) -> None:
        extras.check_installed("PIL", "pictures in files")
        self._pictures, self._all_labels, self.classes = pictures, labels, tuple(classes)
        self._numbers = np.arange(len(labels)) if numbers is None else numbers
        self._labels = labels[self._numbers]
        self._channels, self._cut, self.num_examples = channels, cut, len(self._numbers)
        self.shape, self.num_classes = (size, size, channels), len(classes) or int(self._labels.max()) + 1
        self.fingerprint = zlib.crc32(repr((self.shape, self.classes)).encode(), zlib.crc32(self._labels.tobytes()))
        if isinstance(pictures, ParquetPictures):
            self.fingerprint = zlib.crc32(self._numbers.astype("<i8").tobytes() + pictures.known, self.fingerprint)
        else:
            for path in (pictures[int(number)] for number in self._numbers):
                self.fingerprint = zlib.crc32(f"{path.name} {path.stat().st_size}".encode(), self.fingerprint)
        self.row(0)

    def row(self, number: int) -> dict[str, np.ndarray]:
        """Image `number` and its label; raises ValueError for a picture that cannot be decoded."""
        image, ops = extras.load("PIL.Image", "pictures in files"), extras.load("PIL.ImageOps", "pictures in files")
        source = self._pictures[int(self._numbers[number])]
        try:
            with image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as picture:
                upright = ops.exif_transpose(picture).convert("RGB" if self._channels == 3 else "L")
                square = self._cut and ops.fit(upright, self.shape[:2], image.Resampling.BICUBIC)
                pixels = np.asarray(square or upright)
        except (OSError, ValueError, SyntaxError, image.DecompressionBombError) as error:
            where = f"picture {self._numbers[number] + 1}" if isinstance(source, bytes) else str(source)
            raise UsageError(f"{where} cannot be read ({printable(str(error))}): write it again, or leave it out."
                             ) from error
        inputs = pixels.reshape(*pixels.shape[:2], self._channels)
        return {"inputs": inputs / np.float32(255) if self._cut else inputs,
                "targets": np.asarray(self._labels[number], np.int32)}

    def part(self, numbers: np.ndarray) -> "PictureFiles":
        """As `Images`."""
        return self._chosen(self._numbers[numbers], self._cut)

    def whole(self) -> "PictureFiles":
        """As `Images`."""
        return self._chosen(self._numbers, False)

    def _chosen(self, numbers: np.ndarray, cut: bool) -> "PictureFiles":
        return PictureFiles(self._pictures, self._all_labels, self.classes, *self.shape[1:], cut=cut, numbers=numbers)


def class_folders(folder: Path) -> list[Path]:
    """The folders in `folder`, by name, which are its classes; none where it has other files, or one without pictures.

    Documents have folders of pictures, too, beside their text.
    """
    found = [each for each in sorted(folder.iterdir()) if each.name[0] != "."] if folder.is_dir() else []
    return found if all(each.is_dir() and any(file.suffix.lower() in SUFFIXES for file in each.iterdir())
                        for each in found) else []


def picture_columns(path: Path | RemoteFile) -> tuple[str, str] | None:
    """(The column of pictures, that of labels) of Parquet as Hugging Face writes it; None where it has none."""
    if isinstance(path, RemoteFile):
        return _columns_of_remote(path)
    if path.suffix != ".parquet" or not path.is_file() or not path.stat().st_size:
        return None
    try:
        return _columns_of(path)
    except UsageError:
        return None  # what reads it says so


def _columns_of(file: Path | RemoteFile) -> tuple[str, str] | None:
    types, schema = extras.load("pyarrow.types", "Parquet"), open_parquet(file).schema_arrow
    images = [field.name for field in schema if types.is_struct(field.type)
              and any(field.type.field(at).name == "bytes" for at in range(field.type.num_fields))]
    labels = [field.name for field in schema if types.is_integer(field.type)]
    return (images[0], next((name for name in labels if name in ("label", "labels", "fine_label")), labels[0])
            ) if images and labels else None


_columns_of_remote = functools.lru_cache(maxsize=64)(_columns_of)  # a file on this machine may become another one


def load_folders(folder: Path, size: int, channels: int) -> PictureFiles:
    """The pictures in the folders of `folder`, of which each is a class; in alphabetical order."""
    folders = class_folders(folder)
    files = [(file, label) for label, each in enumerate(folders) for file in sorted(each.iterdir())
             if file.suffix.lower() in SUFFIXES]
    return PictureFiles([file for file, _ in files], np.array([label for _, label in files]),
                        [each.name for each in folders], size, channels)


def load_parquet(files: Sequence[Path | RemoteFile], size: int, channels: int) -> PictureFiles:
    """The pictures of Parquet files, read by row group when one is asked for; raises ValueError for rows without one.

    Labels are read at once.
    """
    groups, labels = list[RowGroup](), []
    columns: Any = picture_columns(files[0])
    for path in files:
        file = open_parquet(path)
        if missing := [name for name in columns if name not in file.schema_arrow.names]:
            raise UsageError(f"{path} lacks the columns {few(missing)}, which {files[0]} has: name files of one kind.")
        with readable(path):
            own = file.read(columns=[columns[1]])[columns[1]].to_pylist()
        if wrong := [str(number) for number, label in enumerate(own, 1) if label is None or label < 0]:
            raise UsageError(f"{path}: row {few(wrong)} lacks a class, an integer from 0 on, in {columns[1]}: leave "
                             "such rows out.")
        labels += own
        for number in range(file.num_row_groups):
            groups.append(RowGroup(path, file, number, columns[0]))
            if groups[-1].has_nulls:
                groups[-1].read()  # which says which rows
    return PictureFiles(ParquetPictures(groups), np.array(labels), (), size, channels)


@dataclasses.dataclass(frozen=True, eq=False)
class RowGroup:
    """The pictures of one row group. file: the opened Parquet file. column: that of the pictures."""

    path: Path | RemoteFile
    file: Any
    number: int
    column: str

    @property
    def about(self) -> Any:
        """What the footer says of it: rows, bytes, statistics."""
        return self.file.metadata.row_group(self.number)

    @property
    def has_nulls(self) -> bool:
        """Whether the footer says that some row lacks a picture."""
        columns = (self.about.column(number) for number in range(self.about.num_columns))
        return any(each.path_in_schema == f"{self.column}.bytes" and each.statistics is not None
                   and bool(each.statistics.null_count) for each in columns)

    def read(self) -> list[bytes]:
        """All of them. Raises ValueError for a row without one."""
        with readable(self.path):
            table = self.file.read_row_group(self.number, columns=[self.column])
        pictures = [each and each["bytes"] for each in table[self.column].to_pylist()]
        before = sum(self.file.metadata.row_group(number).num_rows for number in range(self.number))
        if lacking := [str(before + number) for number, picture in enumerate(pictures, 1) if not picture]:
            raise UsageError(f"{self.path}: row {few(lacking)} lacks a picture in {self.column}: leave such rows out.")
        return pictures


class ParquetPictures:
    """The pictures of row groups, by number. The groups that were read last are kept, up to CACHE_BYTES of pictures.

    known: of the files, from their footers: names, rows and sizes.
    """

    def __init__(self, groups: Sequence[RowGroup]) -> None:
        self._groups, self._kept, self._lock = groups, dict[int, list[bytes]](), threading.Lock()
        self._ends = np.cumsum([group.about.num_rows for group in groups])
        self.known = repr([(group.path.name, group.about.num_rows, group.about.total_byte_size) for group in groups]
                          ).encode()

    def __getitem__(self, number: int) -> bytes:
        place = int(np.searchsorted(self._ends, number, "right"))
        with self._lock:  # a thread reads ahead
            if place in self._kept:
                pictures = self._kept.pop(place)
            else:
                pictures = self._groups[place].read()
                while self._kept and sum(len(each) for kept in (pictures, *self._kept.values()) for each in kept
                                         ) > CACHE_BYTES:
                    del self._kept[next(iter(self._kept))]
            self._kept[place] = pictures  # the last one
        return pictures[number - (int(self._ends[place - 1]) if place else 0)]
