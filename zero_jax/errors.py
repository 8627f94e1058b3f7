"""The error of what a user gave: a short line that a terminal can show, whatever names come from files."""

from collections.abc import Iterable

MAX_MESSAGE, MAX_NAME = 2000, 200
"""Characters of a message, and of a name in it that comes from a file."""


class UsageError(ValueError):
    """Something that was given is not as described: the message says what, why, and how to mend it.

    Control characters are shown as their codes, and what is longer than 2,000 characters is cut in its middle. The
    command line ends with status 2 for this error alone: another ValueError may be of JAX or of the user's own code.
    """

    def __init__(self, message: object = ""):
        """As the error of a message, of which `str` gives the text."""
        super().__init__(printable(str(message), MAX_MESSAGE))


class CheckpointError(UsageError):
    """A checkpoint, or a state in files, cannot be saved or restored: the message says which, why, and what to do."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint is not as it was saved. `restore(..., fallback=True)` restores the last intact one."""


class UnwrittenCheckpointError(CheckpointError):
    """A checkpoint cannot be written, as to a full disk; those before it are unchanged. Commands end with status 1."""


class ReplicaError(RuntimeError):
    """Copies of a state that must be the same bits on several devices are not: the message names the devices."""


def printable(text: str, limit: int = MAX_NAME) -> str:
    """`text` with the codes of its control characters in place of them, and at most `limit` characters of it.

    Newlines stay. Both ends are kept: an advice is at the end of a message.
    """
    if len(text) > limit:
        text = cut(text, limit)  # first, so that the time does not depend on its length
    if not text.isprintable():
        text = "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)
    return cut(text, limit)


def cut(text: str, limit: int = MAX_NAME) -> str:
    """`text`, or its beginning and end where it has more than `limit` characters."""
    if len(text) <= limit:
        return text
    left_out = f" ... {len(text) - limit:,} characters ... "
    kept = limit - len(left_out)
    return text[: kept - kept // 3] + left_out + text[len(text) - kept // 3:]


def named(name: object) -> str:
    """A name from a file, quoted, without control characters and cut."""
    return repr(printable(name)) if isinstance(name, str) else printable(repr(name))


def few(names: Iterable[object], many: int = 5) -> str:
    """The first of `names`, each cut, and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - many:,} more" if len(listed) > many else ""
    return ", ".join(printable(str(name)) for name in listed[:many]) + more
