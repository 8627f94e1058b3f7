"""The recipes of docs/recipes: each is accepted at its real size, and compiles for H100s with a small model."""

import json
import tomllib

import pytest
from support.command_line import ROOT, message, run

from zero_jax.cli.config_file import read_options
from zero_jax.cli.objectives.choose import objective_of
from zero_jax.cli.train_config import TrainConfig
from zero_jax.xla import devices

RECIPES = sorted((ROOT / "docs" / "recipes").glob("*.toml"))
ROW = {"prompt": "a", "completion": "b", "chosen": "b", "rejected": "c"}
TARGET = "h100:8"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_accepted_at_its_size(recipe, tmp_path):
    """With bytes in place of the tokenizer, and random weights: all else, adapters and devices too, is checked."""
    (tmp_path / "x.jsonl").write_text(json.dumps(ROW))
    options = read_options(recipe, TrainConfig)
    config = TrainConfig(**options | {"data": (str(tmp_path / "x.jsonl"),), "init_from": None, "tokenizer": None,
                                      "dry_run": True, "target": TARGET})
    objective = objective_of(config)
    assert objective.name == options["objective"] and (config.lora_rank is not None) == ("lora_rank" in options)
    # Negative control: a key that is no option is refused.
    (tmp_path / "bad.toml").write_text(recipe.read_text().replace("learning-rate", "learning-rates"))
    with pytest.raises(ValueError, match="there is no option 'learning-rates'. Did you mean 'learning_rate'"):
        read_options(tmp_path / "bad.toml", TrainConfig)


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize("recipe", [path for path in RECIPES if path.stem in ("qlora", "dpo")],
                         ids=lambda path: path.stem)
def test_a_recipe_compiles_with_a_small_model(recipe, tmp_path):
    if extra := devices.missing_compiler(TARGET):
        pytest.skip(f"needs {extra}")
    (tmp_path / "x.jsonl").write_text(json.dumps(ROW))
    done = run("train", "--config", str(recipe), "--model", "llama:tiny", "--seq-len", "64", "--data",
               str(tmp_path / "x.jsonl"), "--init-from", "None", "--tokenizer", "None", "--dry-run", "--target", TARGET)
    assert done.returncode == 0, message(done)
    assert "Fits: " in done.stdout


def test_comments_name_the_commands_of_a_recipe():
    for recipe in RECIPES:
        text = recipe.read_text()
        assert f"--config docs/recipes/{recipe.name}" in text and tomllib.loads(text)
    assert {"full", "lora", "qlora", "dpo"} == {recipe.stem for recipe in RECIPES}
