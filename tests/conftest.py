"""Policy of all tests: eight simulated devices, no accelerator, no silent rank promotion.

Warnings are errors (pyproject.toml). A test that needs another number of devices starts its own process.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"  # before JAX is imported, and for processes that tests start
# Compiling is most of the time of the tests, and LLVM's part of it halves; XLA's own passes are the same.
os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0 " + os.environ.get("XLA_FLAGS", "")

import jax

from zero_jax.mesh import simulate_local

simulate_local(8)
jax.config.update("jax_numpy_rank_promotion", "raise")
