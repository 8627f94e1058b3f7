"""The commands that take weights in and out: `import`, `export` and `generate`, each a config and a command.

`serving_programs` are those that `export` writes beside the weights.
"""
