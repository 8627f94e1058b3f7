"""What rates one GPU reaches: bf16 products by size, cuDNN's attention by head dim, length and direction, HBM by size.

    python scripts/bench/rates.py rates.json     # on the GPU

Each figure is the median of runs of one program that does the work CHAIN times, each on what the last one gave.
"""

import json
import statistics
import sys
import time

import jax
import jax.numpy as jnp

CHAIN = 16


def seconds(function, *args):
    """Seconds of one of the CHAIN links of `function(*args)`."""
    compiled = jax.jit(function).lower(*args).compile()
    found = []
    for _ in range(8):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*args))
        found.append(time.perf_counter() - start)
    return statistics.median(found[2:]) / CHAIN


def normal(*shape, dtype=jnp.bfloat16):
    return jax.random.normal(jax.random.key(0), shape, dtype)


def product(rows, inner, outer, dtype):
    """TFLOP/s of (rows, inner) x (inner, outer) and back again."""
    def chain(x, up, down):
        for _ in range(CHAIN // 2):
            x = (x @ up) @ down
        return x

    up, down = normal(inner, outer, dtype=dtype) / inner**0.5, normal(outer, inner, dtype=dtype) / outer**0.5
    return 2 * rows * inner * outer / seconds(chain, normal(rows, inner, dtype=dtype), up, down) / 1e12


def attention(batch, length, heads, dim, backward):
    """TFLOP/s of causal attention by cuDNN, of the half of the products that the mask leaves."""
    def forward(q, k, v):
        for _ in range(CHAIN):
            q = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
        return q

    args = [normal(batch, length, heads, dim) for _ in range(3)]
    once = 2 * batch * length**2 * heads * dim
    alone = seconds(forward, *args)
    if not backward:
        return once / alone / 1e12
    both = seconds(jax.grad(lambda *args: forward(*args).astype(jnp.float32).sum(), argnums=(0, 1, 2)), *args)
    return 2.5 * once / (both - alone) / 1e12


def memory(size):
    """GB/s of x * a + b of `size` bytes in place, both directions counted."""
    def chain(x):
        return jax.lax.fori_loop(0, CHAIN, lambda _, x: x * 1.0001 + 0.5, x)

    return 2 * size / seconds(chain, normal(size // 4, dtype=jnp.float32)) / 1e9


def main():
    found = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "products": [], "attention": [], "hbm": []}
    for dtype in ("bfloat16", "float32"):
        for rows in (1024, 4096, 16384):
            for inner, outer in ((768, 3072), (1600, 1600), (1600, 6400), (2048, 2048), (2048, 8192), (4096, 4096),
                                 (4096, 14336), (4096, 16384), (8192, 28672), (2048, 50304)):
                if rows * outer <= 16384 * 28672:
                    found["products"].append([dtype, rows, inner, outer, product(rows, inner, outer, dtype)])
                    print(found["products"][-1], flush=True)
    for dim, heads in ((64, 16), (128, 16)):
        for batch, length in ((16, 1024), (8, 2048), (4, 4096), (2, 8192)):
            for backward in (False, True):
                try:
                    rate = attention(batch, length, heads, dim, backward)
                except Exception as error:
                    print(str(error)[:200], flush=True)
                    continue
                found["attention"].append([batch, length, heads, dim, backward, rate])
                print(found["attention"][-1], flush=True)
    for power in range(20, 32):
        found["hbm"].append([2**power, memory(2**power)])
        print(found["hbm"][-1], flush=True)
    with open(sys.argv[1], "w") as file:
        json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
