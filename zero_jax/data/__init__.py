"""Text and tokens as global batches: `corpus` (text), `token_file` (tokens on disk), `batches`."""
