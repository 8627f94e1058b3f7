"""A small byte-level BPE tokenizer, trained on the user's text by the package `tokenizers`."""

from collections.abc import Iterable

from zero_jax.arguments import whole
from zero_jax.data import extras
from zero_jax.data.tokenizer import EOS, MASK, PAD, HuggingFaceTokenizer
from zero_jax.errors import UsageError

SPECIAL_TOKENS = (EOS[0], PAD[0], MASK[0])
"""The first ids of each tokenizer that is trained here."""


def train_bpe(texts: Iterable[str], *, vocab_size: int, sentinels: int = 0) -> HuggingFaceTokenizer:
    """A byte-level BPE as GPT-2's, trained on `texts`: any text is encoded, and decoded to itself.

    Ids 0 to 2 are `<|endoftext|>`, `<|pad|>` and `<|mask|>`; then come `sentinels` tokens `<extra_id_0>` and so on, for
    span corruption, and the 256 bytes. Where the texts have fewer pairs to merge, its `vocab_size` is smaller than that
    asked for. The same texts give the same tokenizer. Raises ValueError for no text, and a vocabulary smaller than the
    bytes and special tokens.
    """
    special = [*SPECIAL_TOKENS, *(f"<extra_id_{i}>" for i in range(whole("sentinels", sentinels, 0)))]
    least = 256 + len(special)
    if whole("vocab_size", vocab_size, 1) < least:
        raise UsageError(f"vocab_size={vocab_size}: 256 bytes and {len(special)} special tokens take {least}: give at "
                         "least that, as 8192.")
    tokenizers = extras.load("tokenizers", "training a tokenizer")
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = byte_level, tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=special, show_progress=False,
                                             initial_alphabet=byte_level.alphabet())
    seen = False

    def texts_seen() -> Iterable[str]:
        nonlocal seen
        for text in texts:
            seen = seen or bool(text)
            yield text

    tokenizer.train_from_iterator(texts_seen(), trainer)
    if not seen:
        raise UsageError("There is no text to train a tokenizer on: name files that have some.")
    return HuggingFaceTokenizer(tokenizer.to_str(pretty=True).encode())
