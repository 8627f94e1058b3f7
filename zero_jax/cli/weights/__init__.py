"""The commands that take weights in and out: `import`, `export` and `generate`.

Their configs are in `file_configs`, without JAX.
"""
