"""Optimizers on sharded states: which can run, optimizers of whole matrices, presets by name, narrow moments."""
