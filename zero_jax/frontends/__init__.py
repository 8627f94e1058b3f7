"""Linen and NNX modules, and functions of parameters, as pure functions: the only code that knows Flax.

Reading order: `model_functions` (the interface), `linen`, `nnx`, `functional`, `trace_access` (how parameters are read,
by tracing), `param_flow` (one gather for each array and trace), `composition` and `lora` (parameters made of several).
"""
