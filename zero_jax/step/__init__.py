"""The train step in the order of the paper.

Reading order: `make` (arguments), `options`, `step` (the class, made of `functions`, which JAX traces, and
`programs`, which are compiled), `trace_layout`, `gradients`, `accumulate`, `update`; then `compiled` (a compiled step
as data, held against `zero_jax.contract`).
"""
