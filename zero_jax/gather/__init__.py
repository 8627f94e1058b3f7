"""How a stored parameter becomes the one that the model reads, and how its gradient comes back.

Reading order: `gather` (gather at use, and its transpose), `reduce_scatter`; `quantized/` is quantised communication.
"""
