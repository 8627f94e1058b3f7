"""Which memory a leaf is stored in: the device's, the host's or files.

Reading order: `offload` (what a user asks for, and a layout with it), `host_arrays` (moves, and arrays that are made
there without ever being whole on a device), `host_leaves` and `disk_leaves` (what a layout has there).
"""
