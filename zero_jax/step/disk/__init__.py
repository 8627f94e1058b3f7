"""Steps whose states are in files: `step` (what is called), `plan` (the update in blocks), `walk` (block after block).

`states` are the files of one step, through `zero_jax.disk`, and `state_records` what lies where in them; `access`,
`init` and `leaf` are what else touches them. Where parameters and gradients are in files, too, `layer_files` and
`layer_gradients` have them layer by layer, for a program in pieces (`step.pieces`), and what is written first is made
leaf by leaf and layer by layer (`initial_state`, of `initial_values`, by `part_programs`).
"""
