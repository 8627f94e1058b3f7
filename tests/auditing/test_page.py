"""The audit's page: the timeline of the predicted step, memory at the peak by purpose, and what is found."""

import functools
import re

import pytest
from support.audited_steps import HIDDEN, LAYERS, WIDTH, scanned
from support.targets import target_devices

import zero_jax

PARAMS = LAYERS * 2 * WIDTH * HIDDEN


@functools.cache
def audited(**fault):
    step = scanned(**fault)
    if step.options["target"]:
        target_devices(step.options["target"])  # skips where its compiler is not installed
    return zero_jax.audit(step.jitted, *step.shapes, **step.options)


def test_the_page_has_the_findings_and_needs_no_other_file(tmp_path):
    report = audited(target=None, donate=())
    page = report.to_html(tmp_path / "audit.html")
    assert (tmp_path / "audit.html").read_text() == page
    assert "not_donated" in page and "donate_argnums" in page and "<svg" in page and "http" not in page
    assert "waits" not in page  # on a CPU no time is predicted
    clean = audited().to_html()
    assert "not_donated" not in clean and "compute" in clean


def test_the_timeline_has_the_predicted_step():
    """Control: a step of few tokens waits for more of its time, and the page has it in red."""
    clean, short = audited(), audited(tokens=8 * 512)
    for report in (clean, short):
        program, timing = report.program, report.program.timing
        length = {lane: sum(span.end - span.start for span in program.spans if span.lane == lane)
                  for lane in ("compute", "waiting", "nvlink")}
        assert length["compute"] == pytest.approx(timing.spent["compute"] + timing.spent["memory"], rel=0.02)
        assert length["waiting"] == pytest.approx(sum(timing.exposed_seconds.values()), rel=0.02)
        assert length["nvlink"] == pytest.approx(timing.communication_seconds["nvlink"], rel=0.02)
        assert sum(seconds for seconds, _ in program.waits()) == pytest.approx(length["waiting"])
    share = [sum(timing.exposed_seconds.values()) / timing.seconds
             for timing in (clean.program.timing, short.program.timing)]
    assert share[1] > 10 * share[0]

    def red(report):
        return sum(map(float, re.findall(r'width="([\d.]+)"[^>]*fill="#e45756"', report.to_html())))

    assert red(short) > 3 * red(clean) > 0
    assert "params[&#x27;up&#x27;]" in short.to_html()


def test_memory_at_the_peak_is_by_purpose_and_sums_to_what_is_allocated():
    """Control: without `jax.checkpoint` all gathered weights are held at the peak."""
    clean, kept = audited(), audited(tokens=8 * 512, remat=False)
    for report in (clean, kept):
        peak, program = report.to_json()["peak"], report.program
        whole = sum(leaf.device_bytes for leaf in program.leaves) + program.memory.temp_size_in_bytes
        assert sum(peak.values()) == pytest.approx(whole, rel=0.01)
        assert peak["params"] == 4 * PARAMS // 8
    assert clean.program.peak()["gathered weights"] < 2 * PARAMS / 2 < 2 * PARAMS <= (
        kept.program.peak()["gathered weights"])
    assert "gathered weights" in kept.to_html()
