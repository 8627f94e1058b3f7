"""Generated text as a terminal may show it. No JAX."""


def shown_text(text: str) -> str:
    r"""`text` without control characters, which a terminal would interpret and an untrained model generates.

    >>> shown_text("a\tb\n") == "a\tb\n", len(shown_text("\x1b[2J"))
    (True, 4)
    """
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
