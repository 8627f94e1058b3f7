"""Files that survive a crash: what checkpoints and states on disk are made of. No step and no sharding is known here.

Reading order: `durable_files` and `run_lock` (of checkpoints, too), then states on disk: `records` (what lies where in
a file), `aligned_file` (direct reads and writes), `commits` (what makes a generation valid), `generations` (two of
them), `streaming` (reads ahead of what computes and writes behind it).
"""
