"""The command line: train, plan, inspect, export, launch. The only imports of tyro and rich.

Reading order: `main`, the configs (`train_config`, `plan_config`, `export_config`: no JAX, so that bad input is refused
at once), then `train` and `loop`, `plan_command` and `plan_report`, `export_command`.
"""
