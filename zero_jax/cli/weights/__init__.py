"""The commands that take weights in and out: `import`, `export` and `generate`, each a config (`file_configs`) and a command.
"""
