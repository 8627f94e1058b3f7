"""A step's program in pieces, between which files are read and written.

`program` runs them, a round of a loop over layers at a time; `compile` makes each a program of its own, `saved_rounds`
is the file of activations, and `compiled` the pieces as data. What `Offload` puts in files is in `step.disk`.
"""
