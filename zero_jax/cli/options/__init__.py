"""The options of the commands by subject, as dataclasses that the configs of the commands inherit; no JAX.

A new option is a field here and its use in one place; what several commands take stands here once.
"""
