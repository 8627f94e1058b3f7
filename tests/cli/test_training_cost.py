"""`plan --tokens`: days, cost and a deadline at the predicted speed, and a file of prices."""

import json
import types

import pytest
from support.command_line import refused, run
from support.targets import target_devices

from zero_jax.cli.planning.plan_config import PlanConfig
from zero_jax.cli.planning.prices import price_of
from zero_jax.cli.planning.training_cost import TrainingCost
from zero_jax.errors import UsageError
from zero_jax.xla.targets import target_of

PLAN = ("plan", "--target", "h100:8", "--model", "gpt2:tiny", "--seq-len", "64")
COST = TrainingCost(tokens=10**12, speed=1e6, num_devices=8, price=2.5, deadline=11.0)


def test_days_and_cost_by_hand():
    """10^12 tokens at 10^6 a second are 10^6 s, and 8 devices take 8e6 / 3600 hours. Control: one more token."""
    assert COST.days == pytest.approx(1e6 / 86400) and COST.dollars == pytest.approx(2.5 * 8e6 / 3600)
    assert COST.late == ("The deadline is not met: 1,000,000,000,000 tokens take 11.6 days at 1,000,000 tokens/s, and "
                         "--deadline is 11: at least 9 devices as fast as these 8 meet it.")
    assert TrainingCost(86400 * 10**6, 1e6, 8, deadline=1.0).late == ""
    assert TrainingCost(86400 * 10**6 + 1, 1e6, 8, deadline=1.0).late != ""
    assert TrainingCost(10**12, 1e6, 8).late == "" and TrainingCost(10**12, 1e6, 8).dollars is None


def test_there_is_no_cost_of_what_does_not_fit():
    """Control: the same plan where it fits; and no tokens that are asked for."""
    def cost(fits, **options):
        fake = types.SimpleNamespace(fits=fits, target=target_of("h100:8"), num_devices=8,
                                     timing=types.SimpleNamespace(
                                         tokens_per_second=1e6, band=target_of("h100:8").chip.rates.band))
        return TrainingCost.of(PlanConfig(**options), fake)

    assert cost(True, tokens=10**12).days == COST.days
    assert cost(False, tokens=10**12) is None and cost(True) is None


@pytest.mark.parametrize(("target", "price"), [("h100:8", 2.5), ("8xH100", 2.5), ("p5.48xlarge", 4), ("v5p:4x4x4", 3)])
def test_a_price_is_that_of_the_target_as_typed_or_of_its_chip(tmp_path, target, price):
    (tmp_path / "prices.toml").write_text('[prices]\nh100 = 2.5\n"p5.48xlarge" = 4\nv5p = 3.0\n')
    assert price_of(tmp_path / "prices.toml", target, target_of(target)) == price
    with pytest.raises(UsageError, match="has no price of 'a100-80gb': add a line"):  # control: a chip without one
        price_of(tmp_path / "prices.toml", "a100:8", target_of("a100:8"))


@pytest.mark.parametrize(("text", "expected"), [
    (None, "cannot be read (No such file or directory)"),
    ("[prices]\nh100 = ", "is not TOML: "),
    ("[prices]\nh100 = 1\nh100 = 2", "is not TOML: "),
    (b"[prices]\nh100 = 1 # \xff", "is not TOML: "),
    ("h100 = 2.5", "write a table [prices], and nothing else"),
    ("prices = 2.5", "write a table [prices], and nothing else"),
    ("[prices]\nh100 = 2.5\n[price]\nh200 = 3", "write a table [prices], and nothing else"),
    ("[prices]", "has no price of 'h100': add a line h100 = DOLLARS, per device-hour, to [prices], which has none."),
    ("[prices]\na100-80gb = 1", "which has 'a100-80gb'."),
    *((f"[prices]\nh200 = 3\nh100 = {value}", f"'h100' = {shown} is no positive number: give dollars") for value, shown
      in (("0", 0), ("-1.5", -1.5), ("nan", "nan"), ("inf", "inf"), ("true", True), ('"2.5"', "'2.5'"), ("[2]", [2]))),
    ("[prices]\nh100 = 2.5\nh200 = -3", "'h200' = -3 is no positive number")])
def test_a_bad_file_of_prices_is_refused_in_a_line(tmp_path, text, expected):
    if text is not None:
        (tmp_path / "prices.toml").write_bytes(text if isinstance(text, bytes) else text.encode())
    said = refused(*PLAN, "--tokens", "1e12", "--prices", str(tmp_path / "prices.toml"))
    assert f"--prices {tmp_path / 'prices.toml'}" in said and expected in said


@pytest.mark.parametrize(("options", "expected"), [
    (("--prices", "prices.toml"), "--prices prices.toml without tokens: give --tokens 1e12, say"),
    (("--deadline", "3"), "--deadline 3.0 without tokens: give --tokens 1e12, say"),
    (("--tokens", "0"), "--tokens 0: give at least 1"), (("--tokens", "1.5"), "--tokens 1.5: give a whole number"),
    (("--tokens", "1e12", "--deadline", "0"), "--deadline 0.0: give a number above 0"),
    (("--tokens", "1e12", "--deadline", "nan"), "--deadline nan: give a number above 0")])
def test_bad_tokens_and_deadlines(options, expected):
    assert expected in refused(*PLAN, *options)


@pytest.fixture
def asked(tmp_path):
    """A plan of 10^12 tokens, with a price."""
    target_devices("h100:8")
    (tmp_path / "prices.toml").write_text("[prices]\nh100 = 2.5\n")
    return (*PLAN, "--tokens", "1e12", "--prices", str(tmp_path / "prices.toml"))


@pytest.mark.slow
def test_a_plan_with_days_and_cost_as_json(asked):
    """Of a deadline that is not met."""
    done = run(*asked, "--json", "--deadline", "1")
    found = json.loads(done.stdout)
    cost, rate = found["cost"], found["plan"]["timing"]["tokens_per_second"]
    assert cost["days"] == pytest.approx(1e12 / rate / 86400) and cost["dollars"] == pytest.approx(
        2.5 * 24 * 8 * cost["days"])
    assert done.returncode == 3 and not cost["meets_deadline"]
    assert done.stderr.startswith("The deadline is not met: ") and done.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_plan_with_days_and_cost_as_printed(asked):
    """Of a deadline that is met; what no tokens print is in test_plan_remedies.py."""
    done = run(*asked, "--deadline", "1e6")
    rows = [line.split() for line in done.stdout.splitlines()]
    assert done.returncode == 0 and done.stderr == ""
    days = next(row for row in rows if row[:1] == ["days"])
    dollars = next(row for row in rows if row[:5] == ["dollars,", "at", "2.5", "per", "device-hour"])
    assert days[3] == "to" and float(dollars[5].replace(",", "")) == pytest.approx(
        2.5 * 24 * 8 * float(days[1].replace(",", "")), rel=0.05)
