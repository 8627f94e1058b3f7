"""Where the time of a traced step goes, by what the compiled program says of its operations."""

import pytest

from zero_jax.cli.training.profile import KERNELS, OTHER, PRODUCTS, summarize
from zero_jax.xla.collective import Collective
from zero_jax.xla.events import Loop, Start, Work

SCHEDULE = (
    Work("fusion.1", "fusion", "jit(_step)/add", {}, 8.0),
    Loop(2, True, (Work("fusion.2", "fusion", "jit(_step)/dot_general", {"f32": 64.0}, 8.0),)),
    Work("custom-call.3", "custom-call", "", {}, 8.0, opaque="my_kernel"))
EVENTS = [("fusion.1", 1.0), ("while.7", 9.0), ("fusion.2", 2.0), ("fusion.2", 2.0), ("custom-call.3", 0.5),
          ("all-gather.4", 3.0), ("all-gather-start.5", 0.25), ("reduce-scatter.1", 1.0), ("copy.9", 0.25)]


def test_each_operation_counts_as_what_it_is_and_a_loop_as_what_is_inside():
    summary = summarize(EVENTS, SCHEDULE)
    assert summary.kinds == {OTHER: 1.25, PRODUCTS: 4.0, KERNELS: 0.5, "all-gather": 3.25, "reduce-scatter": 1.0}
    text = summary.text(steps=2, devices=5)
    assert text.startswith("In 2 steps operations took 1,000.0 ms a step on each of 5 devices")
    assert "matrix products 40%, all-gather 32%" in text
    assert "   40.0%     400.000 ms  fusion.2 (jit(_step)/dot_general)" in text and "while" not in text
    # Negative control: without the program a product is not known as one.
    assert PRODUCTS not in summarize(EVENTS, ()).kinds


def test_a_collective_is_known_by_the_program_whatever_its_name():
    """In a `shard_map` instructions have the names of JAX's functions."""
    sent = Collective("all-reduce", (), 8, (0, 1), 1, True, False, False, "", "psum.7", "", "")
    assert summarize([("psum.7", 1.0)], [Start(sent)]).kinds == {"all-reduce": 1.0}
    assert summarize([("psum.7", 1.0)], ()).kinds == {OTHER: 1.0}  # negative control


def test_a_trace_without_names_is_said_to_be_one():
    assert "no operation of the step by name" in summarize([], SCHEDULE).text(steps=1, devices=1)


@pytest.mark.parametrize("name", ["while.1", "conditional", "call.2"])
def test_what_only_contains_others_is_not_counted(name):
    assert summarize([(name, 1.0)], ()).kinds == {}
