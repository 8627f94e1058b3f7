"""Text, tokens and images as global batches.

From text to tokens: `corpus`, `text_sources`, `tokenizer`, `documents`, `conversations`. From tokens to rows:
`packing`, `objectives`, `response_rows`; images: `images`. From rows to batches: `mixture`, `batches`; ahead of the
step: `prefetch`. Packages of the extra `data` are imported by `extras` alone.
"""
