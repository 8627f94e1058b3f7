"""What a run trains its model to do: an objective is one object, from data to batches, loss, measures and samples.

Reading order: `objective` (what all have), `choose` (which one a run has), `causal`, and the others beside it, a file
each. A new one is a file, and a line in `choose` and in `options.objective`.
"""
