"""The README: its Python runs, its output is what it says, its commands and files exist, its table is the code's."""

import json
import re

import pytest
from support.pages import ROOT, blocks, commands, is_printed, links, missing, only, run

from zero_jax.stages import STAGES

TEXT = (ROOT / "README.md").read_text()
MAX_LINES = 200


def test_blocks_run_and_print_what_is_shown():
    printed, shown = run(only("python", TEXT), "README.md"), blocks("text", TEXT)
    assert shown
    for block in shown:
        assert is_printed(block, printed), printed


def test_other_output_is_found():
    assert is_printed("a\n...\nd", "0\na\nb\nc\nd\n") and is_printed("a", "a")
    assert not is_printed("a\nc", "a\nb\nc\n") and not is_printed("a\n...\ne", "a\nb\n")
    assert not is_printed("step 10: loss 4.2", "step 10: loss 4.21")


def test_a_block_that_fails_is_found():
    with pytest.raises(AssertionError, match='README.md", line 3'):
        run(only("python", "text\n```python\nraise RuntimeError\n```\n"), "README.md")
    assert only("python", "```console\n$ make test\n```\n```python\na = 1\n```\n").split() == ["a", "=", "1"]


def test_a_stranger_reads_it_to_the_end():
    first_screen = TEXT[:TEXT.index("## What it is")]
    for word in ("ZeRO", "FSDP", "DeepSpeed", "Flax", "jax[cuda13]", "jax[tpu]"):
        assert word in first_screen, word
    assert len(re.findall(r"!\[", TEXT)) == 1
    assert len(TEXT.splitlines()) <= MAX_LINES


ROWS = ("plain-jit", "stage-0", "stage-3", "torch", "remat", "parameters-on-host")


def measured_rows(text: str) -> list[list[tuple[float, float]]]:
    """The (ms, GB) of each model in the table of what was measured on an H100."""
    lines = re.findall(r"^\| \d.*? GB \|$", text, re.MULTILINE)
    return [[(float(ms), float(gb)) for ms, gb in re.findall(r"([\d.]+) ms, ([\d.]+) GB", line)] for line in lines]


def test_the_measured_table_is_what_was_measured():
    records = json.loads((ROOT / "scripts/bench/measured/h100.json").read_text())
    measured = {(record["model"], record["row"]): record for record in records}
    expected = [[(round(measured[model, row]["ms"], 1), round(measured[model, row]["peak_bytes"] / 1e9, 1))
                 for row in ROWS] for model in ("124m:16", "1.5b:4")]
    assert measured_rows(TEXT) == expected
    assert measured_rows(TEXT.replace("52.8 ms", "25.8 ms")) != expected


def absent(text: str) -> list[str]:
    """The figures of the sentences on large models and of the table of results that docs/results.md does not have."""
    results = " ".join((ROOT / "docs" / "results.md").read_text().split())
    cited = text[text.index("With [copy engines]"):text.index("![Memory")] + text[
        text.index("| what | result |"):text.index("## Documentation")]
    figures = re.findall(r"[\d.]+ (?:GiB|kills)|\d\.\d{2,}T?|\d{3}\.\d", cited)
    return [figure for figure in figures if figure not in results]


def test_other_figures_are_on_the_page_of_results():
    assert absent(TEXT) == []
    assert absent(TEXT.replace("37.9 GiB", "36.9 GiB").replace("200 kills", "201 kills")) == ["36.9 GiB", "201 kills"]


def stage_rows(text: str) -> list[tuple[int, str, str, int]]:
    """(stage, state in fp32, state in bf16, communication) as the table of stages prints them."""
    rows = re.findall(r"^\| (\d) \| [^|]*? \| (.*?) \| (.*?) \| (\d) \| [^|]*? \|$", text, re.MULTILINE)
    return [(int(stage), fp32, bf16, int(sent)) for stage, fp32, bf16, sent in rows]


@pytest.mark.parametrize("num_shards", [1, 8, 64])
def test_the_stage_table_is_that_of_the_code(num_shards):
    rows = stage_rows(TEXT)
    assert [(number, sent) for number, _, _, sent in rows] == [(stage.number, stage.communication) for stage in STAGES]
    for stage, (_, *columns, _) in zip(STAGES, rows, strict=True):
        for formula, low_precision in zip(columns, (False, True), strict=True):
            fixed, _, divided = formula.replace(" ", "").rpartition("+") if "/N" in formula else (formula, "", "0/N")
            bytes_each = float(fixed or 0) + float(divided.removesuffix("/N")) / num_shards
            assert bytes_each == stage.state_bytes(1, num_shards, low_precision=low_precision), (stage, formula)


def test_commands_files_and_links_exist():
    assert commands(TEXT) and links(TEXT)
    assert missing(TEXT) == []
    assert [target for target in links(TEXT) if not (ROOT / target).exists()] == []


@pytest.mark.parametrize(
    "text",
    ["```console\n$ make coffee\n```", "`make coffee`", "`python -m zero_torch`", "`.[coffee]`", "`coffee.py`",
     "```console\n$ python scripts/coffee.py\n```"],
)
def test_a_name_that_does_not_exist_is_found(text):
    assert len(missing(text)) == 1


def test_public_names_are_those_of_the_library():
    """Every `zero_jax.name` in prose and code is public."""
    import zero_jax

    named = set(re.findall(r"\bzero_jax\.(\w+)", re.sub(r"zero_jax/\S+", "", TEXT))) - {"jax"}
    assert named <= {*zero_jax.__all__}, named
    assert re.search("zero_jax.make_zero_train_step", TEXT)
