"""Target topologies compiled for ahead of time, and compiled programs read as data.

Reading order: `targets` (chips and slices by name, no JAX), `devices` (their compilers; no CUDA toolkit is needed).
Then the text of a program: `shapes`, `parser`, `trip_count`; `replica_groups`, `provenance` (which parameter a
collective serves), `collective`; `cost`, `schedule` and `events` (what runs when); `hlo` (all collectives of a
program), `aliasing` (buffers updated in place), `liveness` (buffers, and when they are alive).
"""
