"""Products in tiles on the command line: what is read, what is refused before JAX starts, and that it takes effect."""

import pytest

from zero_jax.cli.config_file import as_args, config_text, read_options
from zero_jax.cli.objectives.choose import objective_of
from zero_jax.cli.planning.plan_config import PlanConfig
from zero_jax.cli.step_from_config import devices_of, step_of
from zero_jax.cli.train_config import TrainConfig
from zero_jax.errors import UsageError


@pytest.mark.parametrize("given, tiles", [
    ((), None), (("up/kernel=4", "a=b=16"), {"up/kernel": 4, "a=b": 16}), (("1.5MiB",), 3 * 2**19)])
def test_options_are_what_a_step_takes(given, tiles):
    assert TrainConfig(tiling=given).tiles == PlanConfig(tiling=given).tiles == tiles


@pytest.mark.parametrize("options, message", [
    ({"tiling": ("up",)}, "tiling=up: give PATTERN=TILES"), ({"tiling": ("up=1",)}, "at least 2 tiles"),
    ({"tiling": ("1GiB", "up=2")}, "tiling=1GiB: give PATTERN"), ({"tiling": ("0.5KiB",)}, "at least 1KiB"),
    ({"tiling": ("512",)}, "or one size, as 512MiB"), ({"tiling": ("up=2", "up=4")}, "up is given twice"),
    ({"tiling": ("(=2",)}, "is no regular expression")])
def test_what_cannot_take_effect_is_refused(options, message):
    for config in (TrainConfig, PlanConfig):
        with pytest.raises(UsageError) as error:
            config(**options)
        assert message in str(error.value)


def test_a_run_computes_in_tiles_and_its_file_says_so(tmp_path):
    (tmp_path / "text.txt").write_text("words " * 5000)
    config = TrainConfig(model="gpt2:tiny", batch_size=8, seq_len=32, data=(str(tmp_path / "text.txt"),),
                         out=tmp_path / "run", tiling=("up/kernel=4", "down/kernel=2"))
    objective = objective_of(config)
    layout = step_of(config, objective.choice, devices_of(config), loss=objective.loss).layout(objective.batch_shapes())
    assert {tiles.name: tiles.count for tiles in layout.tiles} == {"blocks/down/kernel": 2, "blocks/up/kernel": 4}
    (tmp_path / "run.toml").write_text(config_text(config))
    options = read_options(tmp_path / "run.toml", TrainConfig)
    assert options["tiling"] == ["up/kernel=4", "down/kernel=2"]
    assert ["--tiling", "up/kernel=4", "down/kernel=2"] == as_args({"tiling": options["tiling"]})
