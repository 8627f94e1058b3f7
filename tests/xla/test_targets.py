"""Targets as data: their files, how they are written and refused, what links their devices. No JAX."""

import dataclasses
import math
import subprocess
import sys
from pathlib import Path

import pytest

import zero_jax
from zero_jax.xla.chip import read_chip
from zero_jax.xla.targets import Link, known_targets, target_of

FILES = sorted((Path(zero_jax.__file__).parent / "xla" / "chips").iterdir())
H100 = (Path(zero_jax.__file__).parent / "xla" / "chips" / "h100.toml").read_text()
GB = 10**9


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "mychip.toml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_files(file):
    """Each is a chip with examples of its own, a source for its figures, and figures of the right size."""
    chip = read_chip(str(file))
    assert chip.examples and all(target_of(text).chip == chip for text in chip.examples)
    assert "# Source" in file.read_text()
    assert 15 * GB < chip.memory_bytes < 200 * GB and 40 * GB < chip.host_memory_bytes < 300 * GB
    assert 0.8e12 < chip.memory_bandwidth < 9e12
    assert 1e14 < chip.peak_flops["bf16"] < 1e16 and chip.peak_flops["f32"] <= chip.peak_flops["bf16"]
    assert chip.network_bandwidth < chip.link_bandwidth
    if chip.tpu:
        assert len(chip.tpu.host) in (2, 3)


def test_known_targets():
    assert {text.split(":")[0] for text in known_targets()} == {file.stem for file in FILES}
    assert {"h100:8", "h100:16x8", "v5e:2x4", "v5p:4x4x8", "v100-32gb:25x16"} <= set(known_targets())


@pytest.mark.parametrize(
    "text, devices, hosts",
    [
        ("h100:8", 8, 1),
        ("h100:16x8", 128, 16),
        ("v100-32gb:25x16", 400, 25),
        ("gb200:18x4", 72, 18),
        ("v5e:1x1", 1, 1),
        ("v5e:2x4", 8, 2),
        ("v5e:8x16", 128, 32),
        ("v6e:16x16", 256, 64),
        ("v4:4x4x4", 64, 16),
        ("v5p:2x2x1", 4, 1),
        ("v5p:8x8x16", 1024, 256),
        ("v5p:16x16x24", 6144, 1536),
        ("tpu7x:2x2x1", 8, 1),
        ("tpu7x:4x4x8", 256, 32),
    ],
)
def test_sizes(text, devices, hosts):
    target = target_of(text)
    assert (target.num_devices, target.num_hosts) == (devices, hosts)
    assert target.num_devices % target.num_hosts == 0
    assert target.text == text


@pytest.mark.parametrize(
    "text, wrap",
    [
        ("h100:8", ()),
        ("v5e:8x16", (False, True)),
        ("v6e:16x16", (True, True)),
        ("v5p:4x4x8", (True, True, True)),
        ("v5p:2x4x4", (False, False, False)),  # within one cube of 4x4x4
    ],
)
def test_wrap(text, wrap):
    assert target_of(text).wrap == wrap


@pytest.mark.parametrize(("text", "meant"), [
    ("8xH100", "h100:8"), ("8 x H100", "h100:8"), ("H100x8", "h100:8"), ("H100:8", "h100:8"), ("h100", "h100:8"),
    ("gb200", "gb200:4"), ("64xH100", "h100:8x8"), ("16x8xH100", "h100:16x8"), ("h100:16x8", "h100:16x8"),
    ("a100:8", "a100-80gb:8"), ("A100-40:4", "a100-40gb:4"), ("v100:2x8", "v100-32gb:2x8"),
    ("a3-megagpu-8g", "h100:8"), ("16xa3-megagpu-8g", "h100:16x8"), ("a3-highgpu-4g", "h100:4"),
    ("a2-ultragpu-2g:3", "a100-80gb:3x2"), ("p5.48xlarge", "h100:8"), ("p5en.48xlarge:2", "h200:2x8"),
    ("Standard_ND96isr_H100_v5", "h100:8"),
    ("v5p-8", "v5p:2x2x1"), ("v5p-16", "v5p:2x2x2"), ("v5p-128", "v5p:4x4x4"), ("v5p-256", "v5p:4x4x8"),
    ("v4-64", "v4:2x4x4"), ("v5litepod-16", "v5e:4x4"), ("v5e-8", "v5e:2x4"), ("v6e-256", "v6e:16x16"),
    ("trillium:2x4", "v6e:2x4"), ("ironwood:2x2x1", "tpu7x:2x2x1")])
def test_other_ways_to_write_a_target(text, meant):
    assert target_of(text) == target_of(meant) and target_of(text).text == meant


@pytest.mark.parametrize("text", ["v5p-12", "v6e-3", "v5p", "9xH100", "8xH10", "p5.24xlarge", "a3-megagpu-4g", "x8"])
def test_what_is_no_target_in_any_of_these_ways_is_refused(text):
    with pytest.raises(zero_jax.UsageError):
        target_of(text)


@pytest.mark.parametrize(
    "text, nearest",
    [
        ("h10:8", "h100:8"),
        ("tpu7:2x2x1", "tpu7x:2x2x1"),
        ("h100:8x8x8", "h100:8"),
        ("h100:0", "h100:8"),
        ("h100:16x", "h100:16x8"),
        ("v5p:2x2", "v5p:2x2x2"),
        ("v5e:-2x4", "v5e:2x4"),
        ("v5e:2x4x1", "v5e:2x4"),
    ],
)
def test_unknown_targets_name_the_nearest(text, nearest):
    with pytest.raises(ValueError) as error:
        target_of(text)
    assert repr(text) in str(error.value) and f"nearest is {nearest!r}" in str(error.value)
    assert all(known in str(error.value) for known in known_targets())


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "unknown target"),
        (":8", "unknown target"),
        ("h100:8x8x8", "h100:GPUS or h100:HOSTSxGPUS_PER_HOST"),
        ("v5p:8", "v5p:XxYxZ"),
        ("v5e:8", "v5e:XxY"),
        ("h100:64", "at most 8 GPUs; write it as h100:HOSTSxGPUS_PER_HOST"),
        ("gb200:9x8", "at most 4 GPUs"),
        ("h100:100000x8", "at most 131072 GPUs"),
        ("v6e:32x32", "at most 256 chips"),
        ("v5e:3x5", "2x2 chips"),
        ("v5p:4x3x4", "2x2x1 chips"),
    ],
)
def test_dims_that_cannot_be_are_explained(text, message):
    with pytest.raises(ValueError) as error:
        target_of(text)
    assert message in str(error.value) and repr(text) in str(error.value)


def test_a_users_own_file(tmp_path):
    path = written(tmp_path, H100.replace("memory_bytes = 84_942_979_072", "memory_bytes = 96_000_000_000"))
    target = target_of(f"{path}:4x8")
    assert (target.num_devices, target.num_hosts, target.chip.memory_bytes) == (32, 4, 96 * GB)
    assert target.chip != target_of("h100:4x8").chip and hash(target)
    with pytest.raises(ValueError, match="mychip.toml:HOSTSxGPUS_PER_HOST"):
        target_of(path)


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("memory_bandwidth = 3.35e12\n", "", "field 'memory_bandwidth' is missing"),
        ("memory_bandwidth", "memory_bandwith", "unknown field 'memory_bandwith', nearest is 'memory_bandwidth'"),
        ("core_count = 132\n", "", "field 'gpu.core_count' is missing"),
        ("core_count", "cores", "unknown field 'gpu.cores', nearest is 'gpu.core_count'"),
        ("core_count = 132", "core_count = 132.5", "field 'gpu.core_count' is 132.5 and should be a positive whole"),
        ("= 450e9", "= 0", "field 'link_bandwidth' is 0.0 and should be a positive number"),
        ("= 450e9", "= nan", "field 'link_bandwidth' is nan"),
        ('"9.0a"', "9.0", "field 'gpu.capability' is 9.0 and should be a text"),
        ('["h100:8", "h100:16x8"]', "8", "field 'examples' is 8 and should be a table or a list"),
        ('"h100:8"', "8", "field 'examples' is 8 and should be a text"),
        ("bf16 = 989e12\n", "", "field 'peak_flops.bf16' is missing"),
        ("bf16 = 989e12\n", "bf16 = '1'\n", "field 'peak_flops.bf16' is '1' and should be a positive number"),
        ("[peak_flops]", "[peak]", "unknown field 'peak'"),
        ("hbm = 0.87", "hbm = 1.87", "'hbm' is 1.87 of the peak"),
        ("[0.47, 750]", "[0.47]", "attention is written as [share, length]"),
        ("64 forward", "64 sideways", "attention '64 sideways' is not written as"),
        ("[gpu]", "[gpu", "is not TOML"),
        (H100[H100.index("[gpu]"):], "", "needs one of the tables [gpu] and [tpu]"),
    ],
)
def test_a_broken_file_names_field_and_file(old, new, message, tmp_path):
    assert old in H100
    path = written(tmp_path, H100.replace(old, new, 1))
    with pytest.raises(ValueError) as error:
        target_of(f"{path}:8")
    assert message in str(error.value) and path in str(error.value)


def test_rates_of_another_chip(tmp_path):
    """But for its band, which is of that chip's steps; and one of which there is no file."""
    h100, h200 = (target_of(f"{name}:8").chip.rates for name in ("h100", "h200"))
    assert h100.band and h200 == dataclasses.replace(h100, band=())
    text = next(file for file in FILES if file.stem == "h200").read_text()
    with pytest.raises(ValueError, match="'rates' is 'h101' and should be a table, or the name of a chip"):
        read_chip(written(tmp_path, text.replace('rates = "h100"', 'rates = "h101"')))


def test_a_file_that_is_not_there():
    with pytest.raises(ValueError, match=r"target file \./nothing\.toml cannot be read"):
        target_of("./nothing.toml:8")


def gpus(*numbers: int, per_host: int = 8) -> list[tuple[int, ...]]:
    return [(number // per_host, number) for number in numbers]


def box(x: int, y: int, z: int = 1, cores: int = 1) -> list[tuple[int, ...]]:
    return [(a, b, c, core) for a in range(x) for b in range(y) for c in range(z) for core in range(cores)]


@pytest.mark.parametrize(
    "text, coords, link",
    [
        ("h100:16x8", gpus(5), Link("none", math.inf)),
        ("h100:16x8", gpus(*range(8)), Link("nvlink", 450e9)),
        ("h100:16x8", gpus(*range(128)), Link("network", 400e9)),  # 8 cards at once
        ("h100:16x8", gpus(0, 8, 16, 24), Link("network", 50e9)),
        ("h100:16x8", gpus(0, 1, 8), Link("network", 50e9)),
        ("v100-32gb:25x16", gpus(*range(400), per_host=16), Link("network", 100e9)),  # the paper's 800 Gbps
        ("gb200:18x4", gpus(*range(72), per_host=4), Link("nvlink", 900e9)),
        ("gb200:36x4", gpus(*range(144), per_host=4), Link("network", 900e9)),
        ("gb200:36x4", gpus(0, 72, per_host=4), Link("network", 50e9)),
        ("v5e:2x4", box(2, 4), Link("ici", 2 * 45e9)),  # a line per axis
        ("v5e:16x16", box(16, 1), Link("ici", 2 * 45e9)),  # a ring
        ("v5e:16x16", box(16, 16), Link("ici", 4 * 45e9)),
        ("v5e:16x16", box(4, 1), Link("ici", 45e9)),  # part of a ring
        ("v5e:16x16", box(16, 1)[::4], Link("ici", 2 * 45e9 / 4)),  # four groups share a ring
        ("v5p:4x4x8", box(4, 4, 8), Link("ici", 6 * 90e9)),
        ("v5p:2x2x2", box(2, 2, 2), Link("ici", 3 * 90e9)),
        ("tpu7x:4x4x4", box(1, 1, 1, 2), Link("die", 540e9)),
        ("tpu7x:4x4x4", box(4, 1, 1, 2), Link("ici", 2 * 90e9)),
        ("tpu7x:4x4x4", box(4, 1, 1), Link("ici", 90e9)),  # the chip's other device uses the other half
    ],
)
def test_links(text, coords, link):
    assert target_of(text).link(coords) == link


def test_jax_is_not_imported():
    code = "import sys; from zero_jax.xla.targets import target_of; target_of('h100:8'); print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
