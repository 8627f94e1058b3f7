"""Steps whose states are in files: `step` (what is called), `plan` (the update in blocks), `walk` (block after block).

`states` are the files of one step, through `zero_jax.disk`, and `state_records` what lies where in them; `leaf` is how
one leaf lies there, and `init` makes the first optimizer state leaf by leaf.
"""
