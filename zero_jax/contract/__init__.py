"""What a compiled step may send and hold, and what it must: the promises of a stage, held against its program.

Reading order: `verify` (the contract of a step, and whether a program keeps it), `report` (both as text), `params`
(what is promised of each parameter), `purpose` (what a collective is for), `violations` (too much), `minimum` (too
little), `memory`, `host`; `codes` of programs that send codes and compute in tiles.
"""
