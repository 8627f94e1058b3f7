"""Linen and NNX modules as pure functions: the only code that knows Flax.

Reading order: `model_functions` (the interface), `linen`, `nnx`, `trace_access` (how parameters are read, by tracing),
`param_flow` (one gather for each array and trace), `nnx_hooks`.
"""
