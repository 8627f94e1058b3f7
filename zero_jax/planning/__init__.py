"""Does a step fit, why, and how long does it take: by formula, and from the program compiled for a target topology.

Reading order: `formulas` (the paper's arithmetic), `temporaries` (what the buffers of a compiled program hold),
`memory` (all of it beside the formulas), `flops`, `timing`, `plan` (one configuration), `search` (over many).
"""
