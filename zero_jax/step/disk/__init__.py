"""Steps whose states are in files: `step` (what is called) and `update` (its update, traced and split into blocks).

`states` are the files of one step, through `zero_jax.disk`, and how an update goes through them; `records` is what of
which leaf is where in them.
"""
