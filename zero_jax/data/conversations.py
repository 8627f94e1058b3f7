"""Examples with responses from JSON lines and Parquet: instructions and preferences. Nothing here imports JAX.

A line, or row, of instructions has `prompt` and `completion`, or `messages` with `role` and `content`; one of
preferences has `prompt`, `chosen` and `rejected`, each a text, or messages. Rows of messages may have `tools` and
`chat_template_kwargs`, for the template; a message of the assistant with `weight` 0 is read and not learned.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from zero_jax.data.chat_template import ROLES, Conversation, Messages, Piece, Template, is_given
from zero_jax.data.text_sources import files_of, format_of, json_rows, parquet_rows, unseen
from zero_jax.errors import UsageError, few, named

Row = Mapping[str, Any]

FOR_TEMPLATE = ("tools", "chat_template_kwargs")
_PAIR = ("prompt", "chosen", "rejected", *FOR_TEMPLATE)
_OURS = ("messages", "tools", "documents", "add_generation_prompt")
REFUSED = ("weight", "weights", "loss_mask", "documents", "functions", "images", "videos", "audio", "system",
           "instruction", "input", "history", "context")
"""Fields of a row that would change what is learned, and that nothing here takes."""
MESSAGE_FIELDS = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking", "images", "audio",
                  "train", "prefix", "loss", "loss_mask")
"""Fields of a message that change what is rendered or learned: refused where the template does not read them."""


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
        conversation = _conversation(row, row["messages"], "messages", template, where)
        pieces = template.pieces(conversation, where)
        if not any(message["role"] == "assistant" and message.get("weight", 1) and _says(message)
                   for message in conversation.messages):
            raise UsageError(f"{where}: no message of the assistant has a text (and a weight that is not 0): there is "
                             "no response to learn.")
        return pieces
    if not {"prompt", "completion"} <= row.keys():
        raise UsageError(f"{where}: it has the fields {few(list(row))}: give prompt and completion, or messages.")
    return _plain(row, "completion", ("prompt", "completion"), template, where)


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
        return _plain(row, field, _PAIR, template, where)
    before = row.get("prompt") or []
    answer = [{"role": "assistant", "content": row[field]}] if isinstance(row[field], str) else row[field]
    before = [{"role": "user", "content": before}] if isinstance(before, str) else before
    if not isinstance(before, list) or not isinstance(answer, list):
        raise UsageError(f"{where}: prompt and {field}: give two texts, or two lists of messages.")
    conversation = _conversation(row, [*before, *answer], field, template, where)
    last = conversation.messages[-1]
    if last["role"] != "assistant" or not _says(last):
        raise UsageError(f"{where}: {field} does not end with a text of the assistant: there is no response.")
    if any("weight" in message for message in conversation.messages):
        raise UsageError(f"{where}: {field}: a message has a weight, and of preferences the last response alone is "
                         "compared: leave it out.")
    pieces = template.pieces(conversation, where)
    last = max(number for number, piece in enumerate(pieces) if piece.response)
    return [piece if number == last else piece._replace(response=False) for number, piece in enumerate(pieces)]


def _plain(row: Row, field: str, read: Iterable[str], template: Template, where: str) -> list[Piece]:
    """Texts as they are: the prompt, the response and the end of text."""
    for name in FOR_TEMPLATE:
        if is_given(row.get(name)):
            raise UsageError(f"{where}: {name} is for a chat template, and texts are taken as they are: give messages, "
                             "or leave it out.")
    _check_fields(row, read, template, where)
    for name in ("prompt", field):
        if not isinstance(row[name], str):
            raise UsageError(f"{where}: {name} is {type(row[name]).__name__} and no text; messages have a field of "
                             "that name.")
    if not row[field]:
        raise UsageError(f"{where}: {field} is empty: there is no response to learn: leave it out.")
    return [Piece(_utf8(row["prompt"]), False), Piece(_utf8(row[field]), True, ends=True)]


def _check_fields(row: Row, read: Iterable[str], template: Template, where: str) -> None:
    """Raises ValueError for fields that would change what is learned; others that are not `read` are noted."""
    unread = {name for name, value in row.items() if name not in read and is_given(value)}
    if wrong := sorted(unread.intersection(REFUSED)):
        raise UsageError(f"{where}: {few(wrong)} would change what is learned, and is not read: leave it out.")
    template.unread.update(unread)


def _says(message: Mapping[str, Any]) -> bool:
    return bool(message.get("content") or message.get("tool_calls"))


def _conversation(row: Row, messages: Any, field: str, template: Template, where: str) -> Conversation:
    """The messages of a row with its tools and options, all of which `template` reads."""
    _check_fields(row, ("messages", *FOR_TEMPLATE) if field == "messages" else _PAIR, template, where)
    tools, options = (_parsed(row.get(name), name, kind, where) for name, kind in zip(
        FOR_TEMPLATE, (list, dict), strict=True))
    unread = [name for name in (*(["tools"] if tools else []), *options) if name not in template.variables]
    if unread := unread + [name for name in options if name in _OURS]:
        raise UsageError(f"{where}: {few(unread)}: {template.name} does not take it from a row: leave it out, or give "
                         "a tokenizer whose chat_template does.")
    conversation = Conversation(_messages(messages, field, where), tools or None, options)
    unread = template.unread_by(conversation, where)
    if wrong := sorted(unread.intersection(MESSAGE_FIELDS)):
        raise UsageError(f"{where}: {field}: {few(wrong)} of a message: {template.name} does not read it: leave it "
                         "out, or give a tokenizer whose chat_template does.")
    template.unread.update(f"{field}.{name}" for name in unread)
    template.used = True
    return conversation


def _parsed(value: Any, name: str, kind: type, where: str) -> Any:
    """`value`, or what it says as JSON, as columns of Parquet have it. Raises ValueError where that is no `kind`."""
    if isinstance(value, str) and value:
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            pass
    if value and not isinstance(value, kind):
        what = "a list" if kind is list else "an object"
        raise UsageError(f"{where}: {name} is {type(value).__name__}: give {what}, or its JSON.")
    return value or kind()


def _messages(value: Any, field: str, where: str) -> Messages:
    if not isinstance(value, list) or not value:
        raise UsageError(f"{where}: {field} is no list of messages, as [{{\"role\": \"user\", \"content\": \"...\"}}].")
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str) and not (
                message.get("content") is None and message.get("tool_calls")):
            raise UsageError(f"{where}: {field}: each message is an object with a role and a content that is text.")
        if message.get("role") not in ROLES:
            raise UsageError(f"{where}: {field}: the role {named(str(message.get('role')))} is none of "
                             f"{', '.join(ROLES)}.")
        weight = message.get("weight")
        if weight is not None and (weight not in (0, 1) or weight and message["role"] != "assistant"):
            raise UsageError(f"{where}: {field}: weight {named(weight)} of the {message['role']}: give 0 or 1, and 1 "
                             "to messages of the assistant alone: others are read and never learned.")
    return [{name: _utf8(part) if name == "content" and isinstance(part, str) else part
             for name, part in message.items() if name != "weight" or part is not None} for message in value]


def _utf8(text: str) -> str:
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
