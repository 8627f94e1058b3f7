"""Steps whose states are in files: `step` (what is called), `plan` (the update in blocks), `walk` (block after block).

`states` are the files of one step, through `zero_jax.disk`; `access`, `init` and `leaf` are what else touches them.
"""
