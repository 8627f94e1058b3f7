"""The audit: what a compiled step of any JAX program sends, holds and waits for that it need not.

Reading order: `program` (any jitted step, compiled for live devices or a target topology), `roles` (which inputs are
parameters, optimizer state and batch), `findings` (the table of checks), `audit` (the report).
"""
