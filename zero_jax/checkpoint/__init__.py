"""Checkpoints of a run: save at any step, restore on any device count and stage. The only Orbax imports.

Reading order: `checkpoint` (the public class), `logical_state` (a state by name and logical shape),
`manifest` and `integrity` (detecting damage), `history` and `retention` (which is the latest, which stay),
`orbax_store`, `orbax_files` (leaves of states in files), `object_store` (gs://),
`local_copies` (on a disk of each host).
"""
