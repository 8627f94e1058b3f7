"""Quantised communication (ZeRO++): weights and gradients that are sent as codes of a few bits with scales.

Reading order: `policy` (what a user asks for), `messages` (arrays as codes and back), `leaves` (which parameters),
`gather`, `reduce`. Frozen weights that are stored as codes, too (QLoRA) are in `frontends.lora`.
"""
