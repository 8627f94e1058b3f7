"""Jaxpr passes on the traced train step, in the order in which `step.gradients` applies them.

In the program of a model with adapters, before all others: `low_rank.split_low_rank_products`.

On the loss, before differentiation:
1. `remat.checkpoint_blocks`, on the outermost jaxpr alone
2. `views.loops.read_before_loops`, `gather_again.mark_last_reads`
3. `tiled_products.tile_products`, `fp8_products.fp8_products`
4. `activation_partitioning.Activations.split_sequence`
5. `remat.isolate_inner_remat`
6. `gather_again.gather_again_in_loops`

On the differentiated loss, which `gather_again.value_and_grad` makes:
7. `gather_again.gather_again`
8. `views.loops.stack_narrow`
9. `host_gradients.order_stacked_gradients`
10. `host_gradients.wait_for_reads`, on the outermost jaxpr alone, as `host_gradients.stack_on_host` and `add_on_host`

The local view (`zero_jax.views`) then makes one `jax.shard_map` of it.

On a whole step, by `diloco` with `overlap`: `loop_iterations.run_in_iterations`.

Each says why it exists, what it costs to leave it out, and why it has its place in the order. Costs are those of the
compiled program of one device. "The 124M program" is a step of GPT-2 124M (vocabulary 50304, tied embedding, scanned
layers) at stage 3, bf16, on 4 x 1024 tokens for each of 8 H100 (`h100:8`, jax 0.10.2), and sends 5.24 bytes per
parameter with 6673 MiB of temporaries.
"""
