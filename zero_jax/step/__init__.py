"""The train step in the order of the paper.

Reading order: `make` (arguments), `options`, `step` (the class), `trace_layout`, `gradients`, `accumulate`, `update`;
then `compiled` (a compiled step as data), `contract` (what it may send and must), `contract_report` (both as text),
`contract_params`, `contract_purpose`, `contract_violations` (too much), `contract_minimum` (too little),
`contract_state`, `contract_memory`.
"""
