"""The runs of images and of large batches that the documents show: what is held out, what is tried, and the verdict."""

import sys

import digits
import large_batch
import numpy as np
import pytest


def test_no_image_is_trained_on_and_held_out(tmp_path):
    assert digits.data_of(0, tmp_path) == {"data": ("digits",), "eval_fraction": 0.2}
    parts = []
    for run in (1, 2):
        given = digits.data_of(run, tmp_path)
        train, held_out = (np.load(given[name][0]) for name in ("data", "eval_data"))
        seen, new = ({image.tobytes() for image in part["images"]} for part in (train, held_out))
        assert len(seen) == 1438 and len(new) == 359 and not seen & new
        assert seen | new == {image.tobytes() for image in digits.load_digits().images.astype(np.float32) / 16}
        parts.append(new)
    assert len(parts[0] & parts[1]) < 120  # a fifth of a fifth is in both


@pytest.mark.parametrize(("worst", "status"), [(0.981, 0), (0.979, 1)])
def test_digits_fails_below_98_percent_after_the_last_step(worst, status, monkeypatch, tmp_path, capsys):
    runs = iter([{100: 0.5, 1500: 0.99}, {100: 0.99, 1500: worst}, {100: 0.5, 1500: 1.0}])
    monkeypatch.setattr(digits, "evaluations", lambda config: {
        step: {"validation_accuracy": value, "validation_loss": 0.0} for step, value in next(runs).items()})
    monkeypatch.setattr(digits, "PICTURE", tmp_path / "digits.svg")
    monkeypatch.setattr(sys, "argv", ["digits.py", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        digits.main()
    assert int(ended.value.code or 0) == status and (tmp_path / "digits.svg").exists()
    assert f"| 1 | {100 * worst:.2f} % | {round(359 * (1 - worst))} |" in capsys.readouterr().out


@pytest.mark.parametrize("best", [0, 3, -2])
def test_both_optimizers_go_on_until_the_best_rate_is_between_worse_ones(best, monkeypatch, tmp_path):
    tried = []

    def evaluation_of(config):
        exponent = round(np.log2(config.learning_rate / large_batch.MIDDLE / 4))  # 4: sqrt(16)
        tried.append(exponent)
        return {"validation_loss": abs(exponent - best)}

    monkeypatch.setattr(large_batch, "evaluation_of", evaluation_of)
    found = large_batch.searched("lamb", 16, tmp_path)
    assert large_batch.best_of(found) == best and {best - 1, best, best + 1} <= {*found} and len(tried) == len(found)


def test_a_large_batch_sees_as_many_tokens(tmp_path):
    small, large = (large_batch.config_of("adamw", times, 0, tmp_path) for times in (1, 16))
    assert small.batch_size * small.steps == large.batch_size * large.steps
    assert small.batch_size * small.eval_batches == large.batch_size * large.eval_batches
    assert large.learning_rate == 4 * small.learning_rate and large.warmup == 16 * small.warmup
