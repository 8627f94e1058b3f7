"""The command `train`: a run from its configuration to its report.

Reading order: `train` (the run), `run_folder` and `run_head` (what is there before the first step), `run_programs` (the
compiled steps), `loop` (step after step), `evaluation`, `samples`, `profile`, `progress`,
`metrics_log` and `metric_writers` (what is written of them), `resume` and `states_on_disk` (where a run goes on from).
"""
