"""Optimizers on sharded states: which can run, optimizers of whole matrices, presets by name; updates in blocks.

Reading order of these: `split` (the trace of an update as units), `blocks` (how arrays are cut), and who computes them:
`host_update` (one program, arrays in host memory) and `file_update` (a program for each block, arrays in files).
"""
