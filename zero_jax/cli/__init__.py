"""The command line: train, plan, inspect, export, launch. The only imports of rich.

Reading order: `main`, the configs (`train_config` of `options/`: no JAX, so that bad input is refused at once),
`step_from_config`, then the commands: `training/`, `planning/`, `weights/`, and what they print, `reports/`.
"""
