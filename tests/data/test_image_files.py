"""Pictures in folders and in Parquet: what a model gets of them, and a run that trains on them."""

import io
import re

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from PIL import Image
from support.command_line import run

from zero_jax import make_mesh
from zero_jax.cli.objectives.choose import objective_of
from zero_jax.cli.train_config import TrainConfig
from zero_jax.data.image_files import PictureFiles, is_images, read_images
from zero_jax.data.images import augmented, random_crop, resized
from zero_jax.data.objectives import random_words
from zero_jax.errors import UsageError

COLOURS = {"blue": (10, 20, 250), "green": (10, 240, 30), "red": (250, 10, 20)}


def picture(colour, kind, size=(24, 16)):
    """A file of a picture whose middle square is of one colour, and the rest white."""
    wide = Image.new("RGB", size, (255, 255, 255))
    wide.paste(colour, ((size[0] - size[1]) // 2, 0, (size[0] + size[1]) // 2, size[1]))
    file = io.BytesIO()
    wide.save(file, kind)
    return file.getvalue()


def folders(path, number=8):
    for name, colour in COLOURS.items():
        (path / name).mkdir(parents=True)
        for each in range(number):
            kind = "JPEG" if each % 2 else "PNG"
            (path / name / f"{each}.{kind.lower()}").write_bytes(picture(colour, kind))
    return path


def parquet(path, number=8):
    rows = [({"bytes": picture(colour, "PNG"), "path": None}, label)
            for label, colour in enumerate(COLOURS.values()) for _ in range(number)]
    pyarrow.parquet.write_table(pa.table({"image": [row[0] for row in rows], "label": [row[1] for row in rows]}), path)
    return path


@pytest.mark.parametrize("write", [folders, parquet])
def test_pictures_are_squares_of_the_size_of_the_model_with_their_class(write, tmp_path):
    path = write(tmp_path / ("data" if write is folders else "data.parquet"))
    assert is_images(str(path))
    images = read_images(str(path), 8, 3)
    assert (len(images), images.shape, images.num_classes) == (24, (8, 8, 3), 3)
    for number in range(24):
        row = images.row(number)
        found = row["inputs"].mean((0, 1)) * 255
        distances = [np.abs(found - colour).max() for colour in COLOURS.values()]
        assert np.argmin(distances) == row["targets"] and min(distances) < 12  # the white is cut off
    train, held_out = images.split(0.25)
    assert (len(train), len(held_out)) == (18, 6) and train.num_classes == 3
    assert read_images(str(path), 8, 3).fingerprint == images.fingerprint != read_images(str(path), 16, 3).fingerprint
    grey = read_images(str(path), 8, 1).row(0)["inputs"]
    assert grey.shape == (8, 8, 1) and 0.1 < grey.mean() < 0.3


def test_pictures_lie_as_their_camera_says(tmp_path):
    half = Image.new("RGB", (16, 16))
    half.paste((255, 255, 255), (0, 0, 16, 8))
    turned, plain = tmp_path / "turned.jpg", tmp_path / "plain.jpg"
    exif = Image.Exif()
    exif[0x0112] = 3  # by half a turn
    half.save(turned, "JPEG", exif=exif)
    half.save(plain, "JPEG")
    up, down = (PictureFiles([file], np.array([0]), (), 16, 1).row(0)["inputs"] for file in (plain, turned))
    assert up[:4].mean() > 0.9 > 0.1 > up[-4:].mean() and np.abs(up[::-1] - down).max() < 0.1


def test_random_crops_have_the_areas_and_ratios_that_are_asked_for():
    """Every place is as likely as another; the control asks for another share."""
    words = [random_words((0, number), 40).reshape(10, 4) for number in range(2000)]
    for least in (0.08, 0.5):
        boxes = np.array([random_crop((60, 90), each, least) for each in words])
        top, left, tall, wide = boxes.T
        assert (top >= 0).all() and (left >= 0).all() and (top + tall <= 60).all() and (left + wide <= 90).all()
        shares, ratios = tall * wide / 5400, wide / tall
        assert shares.min() >= least - 0.02 and shares.min() < least + 0.05 and shares.max() > 0.8
        assert ratios.min() > 0.72 and ratios.max() < 1.39
        assert least > 0.1 or abs(np.median(np.log(ratios[shares < 0.45]))) < 0.03  # of which each ratio fits
        for place, room in ((top, 60 - tall), (left, 90 - wide)):
            assert abs((place[room > 5] / room[room > 5]).mean() - 0.5) < 0.05
    assert (boxes != [random_crop((60, 90), each, 0.08) for each in words]).any()
    # What never fits is the largest rectangle in the middle whose ratio is allowed.
    assert random_crop((10, 300), np.full((10, 4), 2**64 - 1, np.uint64), 1.0) == (0, 143, 10, 13)


def test_crops_are_resized_as_averages():
    """A crop of all of an image is that image; of a coarser one each pixel is an average, in the dtype's scale."""
    image = np.asarray(np.random.default_rng(0).random((8, 8, 2)), np.float32)
    np.testing.assert_array_equal(resized(image, (8, 8)), image)
    np.testing.assert_allclose(resized(image, (1, 1))[0, 0], image.mean((0, 1)), atol=0.05)
    np.testing.assert_allclose(resized(np.full((6, 4, 3), 51, np.uint8), (3, 5)), np.full((3, 5, 3), 0.2), rtol=1e-6)
    drawn = [augmented(image, (0, k), crop=0.3, size=(4, 4)) for k in range(40)]
    assert {each.shape for each in drawn} == {(4, 4, 2)} and len({each.tobytes() for each in drawn}) > 20
    assert (augmented(image, (0, 7), crop=0.3, size=(4, 4)) == drawn[7]).all()


def test_a_run_crops_training_pictures_alone_and_alike_on_any_devices(tmp_path):
    """Of whole pictures, whose white margins the middle square has not; by seed and place, on one or eight devices."""
    data, found = folders(tmp_path / "data", 16), {}
    for crop, seed, devices in ((None, 0, 8), (0.3, 0, 8), (0.3, 0, 1), (0.3, 1, 8)):
        config = TrainConfig(model="vit:tiny", data=(str(data),), batch_size=8, devices=devices, image_crop=crop,
                             seed=seed, out=tmp_path / "run")
        objective = objective_of(config)
        loaded = objective.load_data()
        mesh = make_mesh(devices=jax.devices()[:devices])
        train, held_out = loaded.batches(jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data")))
        found[crop, seed, devices] = [np.asarray(batch["inputs"]) for batch in (train[0], train[1], held_out[0])]
        assert train[0]["inputs"].shape == objective.batch_shapes()["inputs"].shape
        assert ("cropped to 30 % of its area" in objective.describe()) == (crop is not None)
    plain, cropped, alone, other = found.values()
    assert all((one == two).all() for one, two in zip(cropped, alone, strict=True))
    assert (plain[2] == cropped[2]).all() and (plain[0] != cropped[0]).any() and (cropped[0] != other[0]).any()
    white = [(batch.min(-1) > 0.9).mean() for batch in (plain[0], cropped[0])]
    assert white[0] < 0.01 < 0.1 < white[1]


def test_what_is_no_picture_is_named(tmp_path):
    path = folders(tmp_path / "data")
    assert not is_images(str(tmp_path)) and not is_images(str(path / "red"))
    (path / "notes.txt").write_text("Text with folders of pictures beside it is text.")
    assert not is_images(str(path))
    (path / "notes.txt").unlink()
    (path / "red" / "0.png").write_bytes(b"no picture")
    images = read_images(str(path), 8, 3)
    with pytest.raises(UsageError, match=r"red.0\.png cannot be read"):
        [images.row(number) for number in range(24)]
    rows = pa.table({"image": [{"bytes": None, "path": "x"}], "label": [0]}, pa.schema({
        "image": pa.struct({"bytes": pa.binary(), "path": pa.string()}), "label": pa.int64()}))
    pyarrow.parquet.write_table(rows, tmp_path / "none.parquet")
    with pytest.raises(UsageError, match="row 1 lacks a picture"):
        read_images(str(tmp_path / "none.parquet"), 8, 3)


def test_a_run_learns_the_classes_of_a_folder(tmp_path):
    """And negative controls: an evaluation set of other classes, and a model for other images."""
    data = folders(tmp_path / "data", 24)
    done = run("train", "--model", "vit:tiny", "--data", str(data), "--steps", "20", "--batch-size", "16",
               "--learning-rate", "4e-3", "--samples", "2", "--image-flip", "--no-html")
    assert done.returncode == 0, done.stderr
    accuracy = [float(found) for found in re.findall(r"accuracy ([0-9.]+) %", done.stdout)]
    assert "the class of an image" in done.stdout and accuracy[-1] > 90, done.stdout
    other = tmp_path / "other"
    folders(other, 8)
    (other / "red").rename(other / "rose")
    done = run("train", "--model", "vit:tiny", "--data", str(data), "--eval-data", str(other), "--steps", "1")
    assert done.returncode == 2 and "its classes are blue, green, rose" in done.stderr
    done = run("train", "--model", "gpt2:bytes", "--data", str(data), "--steps", "1")
    assert done.returncode == 2, done.stdout
