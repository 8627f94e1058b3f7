"""Arrays over a mesh: the roles of its axes, and a spec, padding and memory for any shape. Knows no state of a step.

Reading order: `mesh` and `mesh_axes` (axes and their roles), `auto_axes` (meshes as users give them), `stored_shape`
(padding and merging), `partition` (a spec for each leaf), `param_access` and `tiling` (how a model reads it),
`tensor_rules`, `shard_reader` (a leaf that is read in shards), `host_arrays` (moves to and from the host's memory),
`batch`.
"""
