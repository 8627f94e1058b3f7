"""The paper's runs keep the rules that its appendix prints, and its errata are facts."""

import dataclasses

import pytest
from runs import ERRATA, RUNS, Run, block_params

from models.gpt2 import PRESETS, Config


def fits(config: Config, size: float) -> bool:
    return abs((block_params(config) + config.vocab_size * config.width) / size - 1) < 0.10


# 12 L h^2 in billions, by preset, rounded to the digits given.
PRINTED = {
    "1.5b": 1.47, "8b": 8.15, "20b": 19.7, "40b": 39.9, "60b": 59.8, "80b": 80.5, "100b": 100.7,
    "120b": 120.8, "140b": 140.9, "170b": 170.7, "40b-50x8192": 40.3, "50b": 49.9, "150b": 150.6,
    "17b": 16.95}


@pytest.mark.parametrize("name", PRINTED)
def test_sizes_by_the_papers_measure(name):
    digits = len(str(PRINTED[name]).partition(".")[2])
    assert round(block_params(PRESETS[name]) / 1e9, digits) == PRINTED[name]


def test_errata_are_facts():
    assert set(ERRATA) == {"40b", "60b", "1.38b", "17b"}
    for name, size in (("40b", 40e9), ("60b", 60e9)):
        assert fits(PRESETS[name], size)
        assert not fits(dataclasses.replace(PRESETS[name], width=4096), size)
    assert round(12 * 88 * 4096**2 / 1e9, 1) == 17.7 and round(12 * 132 * 4096**2 / 1e9, 1) == 26.6
    odd = PRESETS["1.38b"]
    assert block_params(odd) == pytest.approx(1.13e9, abs=5e6)
    assert odd.num_params == pytest.approx(1.21e9, abs=5e6)
    assert PRESETS["17b"].num_heads % 16 and not PRESETS["17b"].num_heads % 4


def breaks_rules(run: Run) -> list[str]:
    """The appendix's four rules and its definition of the total, by name, where broken."""
    config, tensor = run.config, run.tensor_parallel
    rules = {
        "hidden % heads": config.width % config.num_heads, "hidden % MP": config.width % tensor,
        "heads % MP": config.num_heads % tensor, "GPUs % MP": run.gpus % tensor,
        "total": run.total_batch - run.batch * run.gpus // tensor}
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
    sizes = {run.system: block_params(run.config) for run in RUNS if run.figure == 6}
    assert sorted(sizes, key=sizes.get) == ["C1", "C3", "C2", "C4", "C5"]
    assert [(run.system, run.batch) for run in RUNS if run.figure == 8 and run.gpus == 128] == [
        ("C1", 2), ("C2", 4), ("C3", 32), ("C4", 32), ("C5", 8)]
