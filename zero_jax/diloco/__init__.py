"""Low-communication training between slices (DiLoCo, arXiv 2311.08105; streaming, arXiv 2501.18512).

Each slice along the mesh axis `replica` trains by itself; every so many steps the slices average how far they moved.
Reading order: `options` (what may be asked for), `state_layout` (what is stacked over slices), `fragments` (what is
sent when), `outer` (the arithmetic), `functions` (what is compiled), `step` (the programs, what each may
send, and which of them runs when).
"""
