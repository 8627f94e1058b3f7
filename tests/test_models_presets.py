"""The presets are the paper's models, and its runs keep the rules that its appendix prints."""

import dataclasses
import re

import pytest

from models import gpt2, gpt2_nnx
from models.gpt2 import ERRATA, PRESETS, RUNS, Config, Run


def size_of(name: str) -> float | None:
    match = re.match(r"([\d.]+)([mbt])(-\d+x\d+)?$", name)
    return match and float(match[1]) * {"m": 1e6, "b": 1e9, "t": 1e12}[match[2]]


def fits(name: str, config: Config) -> bool:
    num_params = config.num_block_params + config.vocab_size * config.width
    return abs(num_params / size_of(name) - 1) < 0.10


SIZED = {name: config for name, config in PRESETS.items() if size_of(name)}


def test_the_door():
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


# 12 L h^2 in billions, by preset, rounded to the digits given.
PRINTED = {
    "1.5b": 1.47, "8b": 8.15, "20b": 19.7, "40b": 39.9, "60b": 59.8, "80b": 80.5, "100b": 100.7,
    "120b": 120.8, "140b": 140.9, "170b": 170.7, "40b-50x8192": 40.3, "50b": 49.9, "150b": 150.6,
    "17b": 16.95}


@pytest.mark.parametrize("name", PRINTED)
def test_sizes_by_the_papers_measure(name):
    digits = len(str(PRINTED[name]).partition(".")[2])
    assert round(PRESETS[name].num_block_params / 1e9, digits) == PRINTED[name]


def test_errata_are_facts():
    assert set(ERRATA) == {"40b", "60b", "1.38b", "17b"}
    for name in ("40b", "60b"):
        assert fits(name, PRESETS[name])
        assert not fits(name, dataclasses.replace(PRESETS[name], width=4096))
    assert round(12 * 88 * 4096**2 / 1e9, 1) == 17.7 and round(12 * 132 * 4096**2 / 1e9, 1) == 26.6
    odd = PRESETS["1.38b"]
    assert odd.num_block_params == pytest.approx(1.13e9, abs=5e6)
    assert odd.num_params == pytest.approx(1.21e9, abs=5e6)
    assert PRESETS["17b"].num_heads % 16 and not PRESETS["17b"].num_heads % 4


def breaks_rules(run: Run) -> list[str]:
    """The appendix's four rules and its definition of the total, by name, where broken."""
    config, ways = run.config, run.tensor_parallel
    rules = {
        "hidden % heads": config.width % config.num_heads, "hidden % MP": config.width % ways,
        "heads % MP": config.num_heads % ways, "GPUs % MP": run.gpus % ways,
        "total": run.total_batch - run.batch * run.gpus // ways}
    return [rule for rule, left in rules.items() if left]


def name_of(run: Run) -> str:
    return f"fig{run.figure}-{run.preset}-{run.gpus}-{run.system}"


@pytest.mark.parametrize("run", RUNS, ids=name_of)
def test_runs_keep_the_appendix_rules(run):
    assert not breaks_rules(run)


def test_the_rules_can_be_broken():
    assert breaks_rules(Run(5, "17b", 256, 16, 28, 1, 16)) == ["heads % MP"]
    assert breaks_rules(Run(5, "17b", 250, 4, 28, 1, 62)) == ["GPUs % MP"]
    assert breaks_rules(Run(2, "8b", 400, 4, 24, 64, 6401)) == ["total"]


def test_runs_of_each_figure():
    count = {figure: sum(run.figure == figure for run in RUNS) for figure in (2, 3, 4, 6, 7, 8)}
    assert count == {2: 20, 3: 4, 4: 11, 6: 5, 7: 2, 8: 6}
    assert sum(count.values()) == len(RUNS) == len(set(RUNS)) == 48
    of_figure_2 = [run for run in RUNS if run.figure == 2]
    assert [run.baseline for run in of_figure_2] == [False, True] * 10
    for zero in (run for run in of_figure_2 if not run.baseline):
        assert zero.heads == PRESETS[zero.preset].num_heads
    sizes = {run.system: run.config.num_block_params for run in RUNS if run.figure == 6}
    assert sorted(sizes, key=sizes.get) == ["C1", "C3", "C2", "C4", "C5"]
    assert [(run.system, run.batch) for run in RUNS if run.figure == 8 and run.gpus == 128] == [
        ("C1", 2), ("C2", 4), ("C3", 32), ("C4", 32), ("C5", 8)]
