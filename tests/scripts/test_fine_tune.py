"""The fine-tuning that the documents show: its pairs, and the options of its runs."""

import argparse
import itertools
import json
from pathlib import Path

import fine_tune

from zero_jax.data.conversations import SimpleTemplate, instructions

SOURCE = '''
def add(a: int, *, b=1):
    """The sum of a and b.

    More.
    """

class Box:
    def value(self):
        """x"""

    def size(self) -> int:
        """How many there are."""

def nothing():
    return 1
'''


def test_pairs_are_signatures_and_first_lines():
    found = list(fine_tune.functions(SOURCE))
    assert found == [
        {"prompt": 'def add(a: int, *, b=1):\n    """', "completion": 'The sum of a and b."""\n'},
        {"prompt": 'def size(self):\n    """', "completion": 'How many there are."""\n'}]
    assert all(instructions(row, SimpleTemplate(), "") for row in found)
    assert len(list(itertools.islice(fine_tune.pairs(), 50))) == 50, "the packages have docstrings"


def test_no_response_is_in_both_sets(tmp_path, monkeypatch):
    rows = [{"prompt": f"{k}", "completion": f"text {k // 2}"} for k in range(200)]  # each response twice
    monkeypatch.setattr(fine_tune, "pairs", lambda: iter(rows))
    train, held_out = ({json.loads(line)["completion"] for line in path.read_text().splitlines()}
                       for path in fine_tune.write_pairs(tmp_path))
    assert len(train) + len(held_out) == 100 and not train & held_out and 2 < len(held_out) < 30


def test_runs_are_options_of_train(tmp_path):
    args = argparse.Namespace(base=Path("base"), out=tmp_path, model="llama:11m", steps=3, devices=2)
    flags = [fine_tune.flags_of(fine_tune.config_of(args, name, options)) for name, options in fine_tune.RUNS.items()]
    assert "--lora-rank=16" in flags[0] and "--lora-base=nf4" in flags[1]
    assert not any("lora" in flag for flag in flags[2][:-1] if "out" not in flag)
