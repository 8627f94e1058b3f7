"""Text, tokens and images as global batches.

From text to tokens: `corpus`, `text_sources`, `tokenizer`, `tokenizer_training`, `documents`; tokens on disk:
`token_file`, `tokenized`. From tokens to rows: `packing`, `objectives`; images: `images`. From rows to batches:
`mixture`, `batches`, `example_batches`, over `positions`; ahead of the step: `prefetch`. Packages of the extra `data`
are imported by `extras` alone.
"""
