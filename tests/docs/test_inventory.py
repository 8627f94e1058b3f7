"""docs/inventory.md is what the code has: its targets, models and options."""

import dataclasses

import pytest

from scripts.tables import inventory


def test_the_page_is_current():
    assert inventory.PAGE.read_text() == inventory.page(), "run python scripts/tables/inventory.py"


def test_every_option_target_and_model_has_a_row(monkeypatch):
    text = inventory.page()
    missing = [name for name in inventory.TrainConfig.__dataclass_fields__
               if f"| `--{name.replace('_', '-')}` |" not in text]
    assert missing == [] and "`h100:16x8`" in text and "| `resnet` | `tiny`, `digits`, `resnet50` |" in text

    # Negative control: an option more in the code is a row more, so that the page is out of date.
    @dataclasses.dataclass(frozen=True)
    class More(inventory.TrainConfig):
        """More."""

        more: int = 1
        """One more. Not two."""

    monkeypatch.setattr(inventory, "TrainConfig", More)
    assert "| `--more` | int | `1` | One more. |" in inventory.page() != text


@pytest.mark.parametrize("text, first", [("One. Two.", "One."), ("No\nend", "No end")])
def test_the_first_sentence(text, first):
    assert inventory.first_sentence(text) == first
