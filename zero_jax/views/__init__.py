"""The local view: the differentiated loss as one `jax.shard_map`, in which each device computes its part.

`spread` says how devices hold a value, and moves it from one way to another. `rules` is the table of primitives.
`local` walks a program by that table. `loops` reads parameters before the loops that use them in each iteration.
"""
