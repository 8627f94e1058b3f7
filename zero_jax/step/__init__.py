"""The train step in the order of the paper.

Reading order: `make` (arguments), `options`, `step` (the class), `trace_layout`, `gradients`, `accumulate`, `update`;
then `compiled` (a compiled step as data, held against `zero_jax.contract`).
"""
