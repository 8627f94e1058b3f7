"""Files that survive a crash: what checkpoints and states on disk are made of. No step and no sharding is known here.

Reading order: `durable_files` and `run_lock` (of checkpoints, too), then states on disk: `record_file` (what is where
in a file, direct reads and writes), `generations` (two of them, and the commit that makes one valid), `streaming`
(reads ahead of what computes and writes after it).
"""
