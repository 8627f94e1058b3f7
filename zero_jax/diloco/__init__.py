"""Low-communication training between slices (DiLoCo, arXiv 2311.08105; streaming, arXiv 2501.18512).

Each slice along the mesh axis `replica` trains by itself; every so many steps the slices average how far they moved.
Reading order: `options` (what may be asked for), `fragments` (what is sent when), `outer` (the arithmetic), `functions`
(what is stacked over slices, and what is compiled), `step` (the programs, what each may send, and which runs when).
"""
