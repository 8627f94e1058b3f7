"""Exports to a full disk, or by one of several processes alone: told in one line, on every process."""

import resource
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from support.two_processes import GPT2_BATCH, two_processes

import zero_jax
from zero_jax.checkpoint.plain_params import export_orbax
from zero_jax.errors import UnwrittenCheckpointError
from zero_jax.interop import programs

PARAMS = {"kernel": jax.random.normal(jax.random.key(0), (64, 64))}


@pytest.fixture
def full_disk():
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, limits[1]))  # as a disk that is full
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_orbax_on_a_full_disk(tmp_path, full_disk):
    with pytest.raises(UnwrittenCheckpointError, match="params cannot be written .*: free space"):
        export_orbax(tmp_path / "params", PARAMS)
    assert not list(tmp_path.iterdir()), "what was written of it"


def test_orbax_to_a_folder_that_cannot_be_made_is_told_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    started = time.perf_counter()
    with pytest.raises(UnwrittenCheckpointError, match="params cannot be written .*: free space"):
        export_orbax(tmp_path / "file" / "params", PARAMS)
    assert time.perf_counter() - started < 30, "Orbax waits 300 seconds for the folder"


@pytest.mark.parametrize("what", ["program", "manifest"])
def test_programs_on_a_full_disk(tmp_path, monkeypatch, what):
    pytest.importorskip("flatbuffers")
    before = Path.write_bytes, Path.write_text

    def write(number):
        def written(path, data, *args, **options):
            if path.name == {"program": "double.jax_export", "manifest": "manifest.json"}[what]:
                raise OSError(28, "No space left on device")
            return before[number](path, data, *args, **options)
        return written

    monkeypatch.setattr(Path, "write_bytes", write(0))
    monkeypatch.setattr(Path, "write_text", write(1))
    with pytest.raises(zero_jax.UsageError, match=r"served cannot be written \(No space left on device\): free space"):
        programs.export_programs(tmp_path / "served", {"double": (
            lambda params, x: x @ params["kernel"], [jnp.zeros((2, 64))])}, PARAMS, platforms=["cpu"])
    assert not list(tmp_path.iterdir())


PROGRAM = GPT2_BATCH + """
import os, resource
from zero_jax.checkpoint.plain_params import export_orbax

def attempt(call):
    try:
        print("DONE", len(call()))
    except (ValueError, RuntimeError) as error:
        print("TOLD", str(error).replace(folder, ""))

step = zero_jax.make_zero_train_step(
    gpt2.build(gpt2.Config(2, 32, 4, vocab_size=96, max_length=16)), 3, mesh=mesh)
state = step.init(jax.random.key(0), batch)
export = lambda **options: zero_jax.export_params(folder + "/x.safetensors", state, step.layout(batch), **options)
limits = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))  # as a disk that is full
attempt(export)
attempt(lambda: export(max_file_bytes=20_000))
resource.setrlimit(resource.RLIMIT_FSIZE, limits)
attempt(export)
os.makedirs(folder + f"/own1/used", exist_ok=True)
params = step.params(state)
attempt(lambda: [export_orbax(folder + f"/own{number}", params)])
os.makedirs(folder + "/empty", exist_ok=True)
attempt(lambda: [export_orbax(folder + "/empty", params)])
print("LOSS", float(step(state, batch)[1]["loss"]) > 0)
"""


@pytest.mark.slow
def test_an_export_that_fails_on_one_process_fails_on_both(tmp_path):
    with two_processes(PROGRAM, str(tmp_path)) as processes:
        ended = [process.communicate(timeout=240) for process in processes]
        assert [process.returncode for process in processes] == [0, 0], [(out, err[-2000:]) for out, err in ended]
    first, second = [[line for line in output.splitlines() if line.startswith(("DONE", "TOLD", "LOSS"))]
                     for output, _ in ended]
    assert "x.safetensors cannot be written (File too large)" in first[0], first
    assert "x-00002-of-" in first[1] and "cannot be written (File too large)" in first[1], first
    nonempty = "/own1 is not an empty folder: give another."
    assert first[2:] == ["DONE 1", f"TOLD Process 1 failed: {nonempty}", "DONE 1", "LOSS True"]
    assert second == [line.replace("TOLD ", "TOLD Process 0 failed: ") for line in first[:2]] + [
        "DONE 0", f"TOLD {nonempty}", "DONE 1", "LOSS True"]
