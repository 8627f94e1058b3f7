"""How every array of a train step is stored, and how a stored parameter becomes a used one and its gradient comes back.

Reading order: `mesh` and `mesh_axes` (axes and their roles), `stored_shape` (padding and merging), `partition` and
`partition_state` (a spec for each leaf), `layout` (all of it as data), `make_layout`, `gather` (gather at use and its
transpose), `compute_params` (the weights of stages 1 and 2), `stored_optimizer` and `stored_update` (an optimizer on
padded arrays), `shard_reader` (a leaf that is read in shards), `reduce_scatter`, `batch`, `tensor_rules`. `quantized/`
is quantised communication, `memory/` which memory a leaf is stored in.
"""
