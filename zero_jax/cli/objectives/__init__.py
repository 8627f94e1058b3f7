"""What a run trains its model to do: an objective is one object, from data to batches, loss, measures and samples.

Reading order: `objective` (what all have), `choose` (which one a run has), `text` (the next token), then `denoising`,
`responses` and `classify`. A new one is a class, and a line in `choose` and in `options.run`.
"""
