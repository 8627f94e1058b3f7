"""The audit of steps that its thresholds were not chosen by.

Of four that were written to be clean it had no finding in two. MaxText's had a false one, which is mended
(`sent_in_fp32`: norms' scales in fp32 are gathered in one collective with kernels in bf16); EasyLM's
`activations_moved` is true. It named each of seven planted faults. An eighth is none: of MaxText's layers without
`nn.remat` XLA gathers the weights again.
"""

import contextlib

import jax
import pytest
from jax.sharding import PartitionSpec as P
from support.held_out_steps import conv_net, two_axes
from support.targets import target_devices

import zero_jax
from scripts.reliability.documented_steps import EASYLM_RULES, MAXTEXT_RULES, easylm, maxtext

MIB = 2**20
NO_BATCH = tuple((name, None if name == "activation_batch" else axes) for name, axes in MAXTEXT_RULES)
NO_TABLE = tuple(("embed_tokens" if rule.startswith("wte") else rule, spec) for rule, spec in EASYLM_RULES)

CLEAN = {"maxtext": maxtext, "two_axes": two_axes, "conv_net": conv_net}
PLANTED = {
    # name: (step, codes, a place of the first, MiB of the first or None)
    "a rule for activations is missing": (lambda: maxtext(rules=NO_BATCH), ("activations_moved", "extra_flops"),
                                          "linear.py", None),
    "microbatches within fsdp": (lambda: maxtext(microbatches=4), (
        "gathered_each_microbatch", "reduced_each_microbatch"), "['wi_0']", None),
    "a rule has another name than the table": (lambda: easylm(rules=NO_TABLE), (
        "params_replicated", "optimizer_replicated"), "['wte']", 4 * 16384 * 2048 * 7 / 8 / MIB),
    "gradients are summed whole": (lambda: two_axes(scatter=False), ("gradients_whole",), "params['wi']",
                                   2 * 2 * 6 * 3072 * 12288 / 2 * 3 / 4 / MIB),
    "the average is not donated": (lambda: two_axes(donate=(0, 2)), ("not_donated",), "ema['wi']",
                                   2 * 4 * 6 * 3072 * 12288 / 8 / MIB),
    "a ZeRO-1 flag does nothing": (lambda: conv_net(moments=P()), ("params_replicated", "optimizer_replicated"),
                                   "params[3]['kernel']", 83.2),
    "the batch is whole": (lambda: conv_net(batch=P()), (
        "batch_replicated", "activations_moved", "update_whole", "blocking", "exposed"), "images", None),
}


def audited(make):
    target_devices("h100:8")
    with jax.numpy_rank_promotion("allow"):  # which users' steps do
        step = make()
        jitted, shapes, options = step if isinstance(step, tuple) else (step.jitted, step.shapes, {})
        with jax.set_mesh(options["mesh"]) if options else contextlib.nullcontext():
            return zero_jax.audit(jitted, *shapes, target="h100:8")


def rows(table, fast):
    return [pytest.param(name, marks=[] if name in fast else pytest.mark.slow) for name in table]


@pytest.mark.parametrize("name", rows(CLEAN, ("maxtext",)))
def test_a_held_out_step_has_no_finding(name):
    """Control: each with a planted fault, below."""
    report = audited(CLEAN[name])
    assert report.findings == (), report
    assert report.to_json()["stage"] == (1 if name == "conv_net" else 3)


@pytest.mark.parametrize("name", rows(PLANTED, ("the average is not donated", "gradients are summed whole")))
def test_a_fault_in_a_held_out_step_is_named(name):
    """Control: the step without it has no finding, above; EasyLM's has others, below."""
    step, codes, place, mib = PLANTED[name]
    found = {each.code: each for each in audited(step).findings}
    assert set(codes) == set(found), found
    first = found[codes[0]]
    assert place in f"{first.place} {first.source}"
    if mib is not None:
        assert first.bytes / MIB == pytest.approx(mib, rel=0.01)


@pytest.mark.slow
def test_what_xla_makes_of_easylm():
    """EasyLM's table is cut by its width, and nothing constrains what is read of it: XLA:GPU moves activations.

    Control: with a table that is whole it does not, above.
    """
    report = audited(easylm)
    assert "activations_moved" in {each.code for each in report.findings}
    assert report.sent_bytes > 20 * report.to_json()["ideal_bytes"]["3"]
