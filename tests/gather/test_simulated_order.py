"""Simulated devices meet their collectives in one order, in programs from JAX's persistent cache, too."""

import os
import re
import subprocess
import sys

import pytest
from support.pages import ROOT

pytestmark = pytest.mark.slow

# An untied head: its gather waits for nothing, as the loop over the layers does. The second step is loaded.
PROGRAM = """
import sys
import jax
import numpy as np
import zero_jax
from models import llama

zero_jax.simulate_devices(8)
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
batch = {"inputs": np.zeros((8, 16), np.int32), "targets": np.zeros((8, 16), np.int32)}
for _ in range(2):
    step = zero_jax.make_zero_train_step(llama.build(llama.PRESETS["tiny"]), 3)
    print("a program", file=sys.stderr, flush=True)
    step.lower(batch).compile()
    jax.clear_caches()
"""


def unordered(log):
    """Pairs of loops and collectives of the largest program in XLA's log of thunks that do not wait for each other.

    Its lines: ` thunk #00092: op_name=while.107, kind=while, dependencies=[copy.25, all-gather.46], source=false, ...`.
    """
    kinds, before = {}, {}
    programs = [re.findall(r"^ thunk #\d+: op_name=([^,]+), kind=([a-z-]+), dependencies=\[(.*?)\]", part, re.MULTILINE)
                for part in log.split("ThunkExecutor execution graph:")]
    entry = max((program for program in programs if any(kind == "while" for _, kind, _ in program)), key=len)
    for name, kind, dependencies in entry:
        direct = [one for one in dependencies.split(", ") if one]
        kinds[name], before[name] = kind, set(direct).union(*(before[one] for one in direct))
    meet = [name for name, kind in kinds.items() if kind in ("while", "collective")]
    assert {kinds[name] for name in meet} == {"while", "collective"}, meet
    return [(first, second) for at, second in enumerate(meet) for first in meet[:at] if first not in before[second]]


def test_loops_and_collectives_of_a_loaded_program_are_ordered(tmp_path):
    """XLA's own order of a step's is one, too, since its collectives are written where they run (jax 0.10.2)."""
    name = "--xla_cpu_enable_concurrency_optimized_scheduler"
    flags = [one for one in os.environ["XLA_FLAGS"].split() if not one.startswith(name)]
    env = os.environ | {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "thunk_executor=6",
                        "XLA_FLAGS": " ".join(flags)}
    run = subprocess.run([sys.executable, "-c", PROGRAM, tmp_path], env=env, capture_output=True, text=True, check=True)
    _, compiled, loaded = run.stderr.split("a program\n")
    assert unordered(compiled) == [] == unordered(loaded)


def test_what_is_not_ordered_is_found():
    lines = [" thunk #0: op_name=copy.1, kind=copy, dependencies=[]",
             " thunk #1: op_name=while.2, kind=while, dependencies=[copy.1]",
             " thunk #2: op_name=all-gather.3, kind=collective, dependencies=[copy.1]"]
    assert unordered("\n".join(["ThunkExecutor execution graph:", *lines])) == [("while.2", "all-gather.3")]
