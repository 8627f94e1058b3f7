"""Steps whose states are in files: `step` (what is called), `plan` (the update in blocks), `walk` (block after block).

`states` are the files of one step, through `zero_jax.disk`; `access`, `init` and `leaf` are what else touches them.
Where activations are in files, too, `piecewise` runs forward and backward layer by layer, `saved_rounds` is the file,
and `compiled_pieces` the programs as data.
"""
