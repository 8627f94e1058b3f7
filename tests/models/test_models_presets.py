"""The presets are GPT-2's released models and the paper's."""

import re

from models import gpt2, gpt2_nnx
from models.gpt2 import PRESETS, Config


def size_of(name: str) -> float | None:
    match = re.match(r"([\d.]+)([mbt])(-\d+x\d+)?$", name)
    return match and float(match[1]) * {"m": 1e6, "b": 1e9, "t": 1e12}[match[2]]


def fits(name: str, config: Config) -> bool:
    num_params = 12 * config.num_layers * config.width**2 + config.vocab_size * config.width
    return abs(num_params / size_of(name) - 1) < 0.10


SIZED = {name: config for name, config in PRESETS.items() if size_of(name)}


def test_both_flavours_have_the_same_presets():
    for module in (gpt2, gpt2_nnx):
        assert module.PRESETS is PRESETS and callable(module.build)


def test_names_are_sizes():
    assert set(PRESETS) - set(SIZED) == {"tiny", "bytes"}
    assert [name for name, config in SIZED.items() if not fits(name, config)] == ["1.38b"]
    for name in SIZED:  # a shape in a name is the shape
        if match := re.search(r"-(\d+)x(\d+)$", name):
            assert (int(match[1]), int(match[2])) == (PRESETS[name].num_layers, PRESETS[name].width)
    assert 1e6 < PRESETS["bytes"].num_params < 3e6
    tiny = PRESETS["tiny"]
    assert not any(size % 8 for size in (tiny.width, tiny.vocab_size, tiny.max_length))
