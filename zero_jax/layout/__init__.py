"""Where every leaf of the state is stored: a pure function of shapes and options, and the weights that follow from it.

Reading order: `layout` (all of it as data), `make_layout`, `batch_layout`, `stored_optimizer` (an optimizer on padded
arrays), `compute_params` (the weights of stages 1 and 2), `step_weights` (those of a step of stage 3), `slices` (a
leading dim of slices).
"""
