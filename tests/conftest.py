"""Policy of all tests: eight simulated devices, no accelerator, no silent rank promotion.

Warnings are errors (pyproject.toml). A test that needs another number of devices starts its own process. What one real
GPU is enough for runs there with `make test-gpu`, which sets ZERO_JAX_TEST_GPU.
"""

import gc
import importlib.metadata
import os
import shutil
import signal
import tempfile

# Before JAX is imported, and for processes that tests start.
os.environ["JAX_PLATFORMS"] = "cuda,cpu" if "ZERO_JAX_TEST_GPU" in os.environ else "cpu"
# Compiling is most of the time of the tests. Of code generation for CPUs LLVM's optimizations are half, and the MLIR
# emitters two thirds of the rest: 4.1 CPU seconds for a small GPT-2 step become 1.3. One module of LLVM's instead of 32
# is another tenth of the tests' time. What crosses between devices stays the same; without the emitters scatters become
# loops, which support/programs.py does not want. XLA aborts on a flag that it does not know: jaxlib 0.12 the third.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") if "ZERO_JAX_TEST_GPU" in os.environ else " ".join([
    "--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1",
    *["--xla_cpu_use_fusion_emitters=false"] * importlib.metadata.version("jaxlib").startswith("0.10."),
    os.environ.get("XLA_FLAGS", "")])

import jax
from hypothesis.internal.conjecture import providers
from support import once

from zero_jax.sharding.mesh import simulate_local

ON_GPU = "ZERO_JAX_TEST_GPU" in os.environ
if not ON_GPU:
    simulate_local(8)
jax.config.update("jax_numpy_rank_promotion", "raise")

pytest_plugins = ["support.short_random", "support.slow_turn", *["support.worker_memory"] * (not ON_GPU)]

if hasattr(providers, "_get_local_constants"):
    # Hypothesis draws constants out of the source of all local modules that are imported by then: what it draws would
    # depend on which tests a worker ran before.
    providers._get_local_constants = lambda: providers._local_constants

# A shell starts what runs in the background, and nohup its command, with these ignored, and processes inherit that.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)


def pytest_configure(config):
    """A folder for what is compiled once per run: workers inherit its name.

    Programs for targets are kept as text (support/programs.py), those for CPUs by JAX: two thirds of what tests of one
    folder compile was compiled before, by another test or worker. JAX knows a program again whatever its names and
    scopes are, which tests read: of other sources it is another folder.
    """
    if "ZERO_JAX_TEST_PROGRAMS" not in os.environ:
        os.environ["ZERO_JAX_TEST_PROGRAMS"] = folder = tempfile.mkdtemp()
        config.add_cleanup(lambda: (shutil.rmtree(folder), os.environ.pop("ZERO_JAX_TEST_PROGRAMS")))
    jax.config.update("jax_compilation_cache_dir", os.path.join(
        os.environ["ZERO_JAX_TEST_PROGRAMS"], f"cpu-{once.fingerprint()[:16]}"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def pytest_collection_finish(session):
    """What is imported by now lives to the end: the collector need not look at it again (14 % of the CPU time)."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
