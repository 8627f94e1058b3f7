"""What of the state is in the host's memory or in files, and the update that is computed there block by block.

Reading order: `offload` (what a user asks for, and a layout with it), `disk_leaves` (what a layout has in files); then
the update: `split` (the optimizer's equations by the leaves that they are of), `blocks`, and its two executors,
`host_update` and `file_update`.
"""
