"""Which memory a leaf is stored in: the device's, the host's or files.

Reading order: `kinds` (what a user asks for, as a layout), `host_arrays` (moves), `host_leaves` and `disk_leaves` (what
a layout has there), `in_groups` (initialised there without ever being whole on a device).
"""
