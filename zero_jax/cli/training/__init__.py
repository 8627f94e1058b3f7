"""The command `train`: a run from its configuration to its report.

Reading order: `train` (the run), `run_head` (what it says first), `run_programs` (the compiled steps), `loop` (step
after step), `evaluation` (what is measured and generated), `profile`, `progress`, `metrics_log` (what is written of
them), `resume` (where a run goes on from).
"""
