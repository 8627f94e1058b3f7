"""Examples with responses from JSON lines and Parquet: instructions and preferences. Nothing here imports JAX.

A line, or row, of instructions has `prompt` and `completion`, or `messages` with `role` and `content`; one of
preferences has `prompt`, `chosen` and `rejected`, each a text, or messages.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from zero_jax.data.chat_template import ROLES, Messages, Piece, Template
from zero_jax.data.text_sources import files_of, format_of, json_rows, parquet_rows, unseen
from zero_jax.errors import UsageError, few, named

Row = Mapping[str, Any]


def read_rows(names: str | Iterable[str]) -> Iterator[tuple[str, Row]]:
    """(where it is, the object) of each line of .jsonl files and row of .parquet, of files, folders and globs.

    A file that several names stand for is read once.
    """
    readers, seen = {"jsonl": json_rows, "parquet": parquet_rows}, set[Path]()
    for path in unseen((path for name in ([names] if isinstance(names, str) else names) for path in files_of(name)),
                       seen):
        if format_of(path) not in readers:
            raise UsageError(f"data: {path}: examples with responses are lines of JSON or rows of Parquet: name .jsonl "
                             "or .parquet files.")
        yield from readers[format_of(path)](path)


def instruction(row: Row, template: Template, where: str) -> list[Piece]:
    """The pieces of an example of instructions. Raises ValueError for one without a response."""
    if "messages" in row:
        messages = _messages(row["messages"], "messages", where)
        pieces = template.pieces(messages, where)
        if not any(message["role"] == "assistant" and message["content"] for message in messages):
            raise UsageError(f"{where}: no message of the assistant has a text: there is no response to learn.")
        return pieces
    if not {"prompt", "completion"} <= row.keys():
        raise UsageError(f"{where}: it has the fields {few(list(row))}: give prompt and completion, or messages.")
    return _plain(row, "completion", where)


def preference(row: Row, template: Template, where: str) -> tuple[list[Piece], list[Piece]]:
    """The pieces of the chosen and of the rejected response, each with its prompt."""
    if not {"chosen", "rejected"} <= row.keys():
        raise UsageError(f"{where}: it has the fields {few(list(row))}: give prompt, chosen and rejected.")
    if row["chosen"] == row["rejected"]:
        raise UsageError(f"{where}: chosen and rejected are the same: there is nothing to prefer: leave it out.")
    chosen, rejected = (_answer(row, field, template, where) for field in ("chosen", "rejected"))
    return chosen, rejected


def _answer(row: Row, field: str, template: Template, where: str) -> list[Piece]:
    if isinstance(row[field], str) and isinstance(row.get("prompt"), str):
        return _plain(row, field, where)
    before = row.get("prompt") or []
    answer = [{"role": "assistant", "content": row[field]}] if isinstance(row[field], str) else row[field]
    before = [{"role": "user", "content": before}] if isinstance(before, str) else before
    if not isinstance(before, list) or not isinstance(answer, list):
        raise UsageError(f"{where}: prompt and {field}: give two texts, or two lists of messages.")
    messages = _messages([*before, *answer], field, where)
    if messages[-1]["role"] != "assistant" or not messages[-1]["content"]:
        raise UsageError(f"{where}: {field} does not end with a text of the assistant: there is no response.")
    pieces = template.pieces(messages, where)
    last = max(number for number, piece in enumerate(pieces) if piece.response)
    return [piece if number == last else piece._replace(response=False) for number, piece in enumerate(pieces)]


def _plain(row: Row, field: str, where: str) -> list[Piece]:
    """Texts as they are: the prompt, the response and the end of text."""
    for name in ("prompt", field):
        if not isinstance(row[name], str):
            raise UsageError(f"{where}: {name} is {type(row[name]).__name__} and no text; messages have a field of "
                             "that name.")
    if not row[field]:
        raise UsageError(f"{where}: {field} is empty: there is no response to learn: leave it out.")
    return [Piece(_utf8(row["prompt"]), False), Piece(_utf8(row[field]), True, ends=True)]


def _messages(value: Any, field: str, where: str) -> Messages:
    if not isinstance(value, list) or not value:
        raise UsageError(f"{where}: {field} is no list of messages, as [{{\"role\": \"user\", \"content\": \"...\"}}].")
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise UsageError(f"{where}: {field}: each message is an object with a role and a content that is text.")
        if message.get("role") not in ROLES:
            raise UsageError(f"{where}: {field}: the role {named(str(message.get('role')))} is none of "
                             f"{', '.join(ROLES)}.")
    return [{**message, "content": _utf8(message["content"])} for message in value]


def _utf8(text: str) -> str:
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
