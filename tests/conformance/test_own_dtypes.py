"""Modules that compute in a dtype of their own, which is not that in which the step gives them parameters."""

import math
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from support.beside_plain_loop import compare, squares, vectors
from support.covering import weekly
from support.oracle import slow
from support.targets import mesh_of

import zero_jax


class Typed(nn.Module):
    """Modules that compute in a dtype of their own, whatever they are given."""

    hidden: int
    dtype: type

    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = nn.gelu(nn.Dense(self.hidden, dtype=self.dtype)(x))
        return nn.Dense(1, dtype=self.dtype)(x)


OWN_DTYPES = {"bf16 of fp32": (jnp.bfloat16, None), "fp32 of bf16": (jnp.float32, "bf16")}


@pytest.mark.grid
@weekly("case", OWN_DTYPES)
@pytest.mark.parametrize("stage, sizes", [
    (3, "even"), slow(3, "uneven"), slow(2, "even"), slow(2, "uneven"), slow(1, "even")])
def test_a_modules_own_dtype_keeps_the_reduce_scatter(case, stage, sizes):
    """Reduced in the dtype in which the step gives the parameter, and nothing large is all-reduced."""
    dtype, precision = OWN_DTYPES[case]
    mesh = mesh_of("h100:8")
    width = {"even": 512, "uneven": 515}[sizes]
    batch = {"x": jax.ShapeDtypeStruct((64, width), jnp.float32), "y": jax.ShapeDtypeStruct((64, 1), jnp.float32)}
    step = zero_jax.make_zero_train_step(Typed(width, dtype), stage, mesh=mesh, loss=squares, precision=precision)
    report = step.verify(batch)
    assert report.communication_bytes < 1.01 * report.contract.communication_bytes
    text = step.compile(batch).as_text()
    reduced = [math.prod(map(int, dims.split(","))) for dims in re.findall(r"\w+\[([\d,]+)\]\S* all-reduce", text)]
    assert max(reduced, default=0) < 4 * width, "only biases are all-reduced"
    assert f"{'f32' if precision is None else 'bf16'}[" in next(
        line for line in text.splitlines() if " reduce-scatter" in line and "= " in line)


@pytest.mark.grid
@weekly("case", OWN_DTYPES)
@pytest.mark.parametrize("stage", [slow(0), slow(1), slow(2), 3])
def test_a_modules_own_dtype_has_the_numbers_of_one_device(case, stage):
    dtype, precision = OWN_DTYPES[case]
    plain = {"dtype": jnp.bfloat16} if precision else {}
    compare(Typed(71, dtype), stage, vectors(67), precision=precision, tolerance=2e-2, **plain)
