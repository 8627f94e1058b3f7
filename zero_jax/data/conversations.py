"""Examples with responses from JSON lines and Parquet, and the chat template that makes text of messages. No JAX.

A line, or row, of instructions has `prompt` and `completion`, or `messages` with `role` and `content`; one of
preferences has `prompt`, `chosen` and `rejected`, each a text, or messages. Rows of messages may have `tools` and
`chat_template_kwargs`, for the template; a message of the assistant with `weight` 0 is read and not learned.
"""

import contextlib
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from zero_jax.data import extras
from zero_jax.data.text_sources import files_of, format_of, json_rows, parquet_rows, unseen, utf8
from zero_jax.errors import UsageError, few, named, printable
from zero_jax.files import read_regular

ROLES = ("system", "user", "assistant", "tool")
MAX_BYTES = 1 << 20
"""Of a template."""
_BEGINS, _ENDS = "\ufdd0", "\ufdd1"
"""Noncharacters of Unicode that stand, within what is rendered, where a block {% generation %} begins and ends."""

Messages = Sequence[Mapping[str, Any]]


class Span(NamedTuple):
    """A part of an example. response: the model is to predict it. ends: the end of text comes after it."""

    text: str
    response: bool
    ends: bool = False


class Conversation(NamedTuple):
    """Messages, and what a template is rendered with beside them: `tools`, and `options` by name."""

    messages: Messages
    tools: list[Any] | None = None
    options: Mapping[str, Any] = {}


class SimpleTemplate:
    r"""A line `<|role|>`, the text, the end of text after a response, and a line break, for each message.

    >>> (example,) = SimpleTemplate().examples(Conversation([
    ...     {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]), "line 1")
    >>> [span.text for span in example]
    ['<|user|>\n2 + 2?\n<|assistant|>\n', '4', '\n']
    """

    name, variables, fingerprint = "<|role|>, then the text", frozenset(), "simple"
    jinja = ("{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' + message['content'] }}"
             "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
             "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}")
    """The same for transformers."""

    def __init__(self) -> None:
        self.unread, self.used = set[str](), False

    def unread_by(self, conversation: Conversation, where: str) -> set[str]:
        """The fields of messages that make no difference to the text."""
        return {name for message in conversation.messages for name in _further(message)}

    def prompt(self, conversation: Conversation, where: str) -> str:
        """The text after which a response begins."""
        (spans,) = self.examples(conversation, where)
        return "".join(span.text for span in spans) + "<|assistant|>\n"

    def examples(self, conversation: Conversation, where: str) -> list[list[Span]]:
        """The spans of a conversation; each message of the assistant is a response, but for those of weight 0."""
        spans, prompt = [], ""
        for message in conversation.messages:
            prompt += f"<|{message['role']}|>\n"
            if message["role"] == "assistant":
                spans += [Span(prompt, False), Span(message["content"], _is_learned(message), ends=True)]
                prompt = "\n"
            else:
                prompt += f"{message['content']}\n"
        return [[*spans, Span(prompt, False)]]


class ChatTemplate:
    """The `chat_template` of a tokenizer_config.json, rendered in Jinja2's immutable sandbox as transformers does.

    Where it has blocks {% generation %}, these are the responses, as in transformers' return_assistant_tokens_mask.
    variables: that it reads of what it is rendered with. fingerprint: of its source. unread: fields of rows that were
    not read so far. used: whether a row had messages.
    """

    def __init__(self, source: str, tokens: Mapping[str, str], name: str):
        """tokens: bos_token, eos_token and so on. name: of the file."""
        sandbox = extras.load("jinja2.sandbox", f"the chat_template of {name}")
        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_generation_tag(name), "jinja2.ext.loopcontrols"])
        environment.globals["raise_exception"] = _refuse
        environment.filters["tojson"] = _json
        self.name, self._tokens = f"the chat_template of {name}", tokens
        try:
            self._template, nodes = environment.from_string(source), environment.parse(source)
        except Exception as error:  # jinja2.TemplateError, RecursionError
            raise UsageError(f"{self.name} is no template of Jinja2: {printable(str(error))}.") from error
        extension = extras.load("jinja2.nodes", self.name).ExtensionAttribute
        self._has_blocks = nodes.find(extension) is not None
        self.variables = frozenset(extras.load("jinja2.meta", self.name).find_undeclared_variables(nodes))
        self.unread, self.used, self.fingerprint = set[str](), False, f"{zlib.crc32(source.encode()):08x}"

    def unread_by(self, conversation: Conversation, where: str) -> set[str]:
        """The fields of messages that make no difference to the text: it is rendered without each.

        Nor to the text that ends with that message: thoughts may be written of the last one alone.
        """
        messages, unread = list(conversation.messages), set()
        for number, message in enumerate(messages):
            for name in _further(message):
                less = {key: value for key, value in message.items() if key != name}
                with contextlib.suppress(UsageError):  # where it cannot be rendered without
                    if all(self._text([*messages[:number], less, *after], conversation, where) == self._text(
                            [*messages[:number + 1], *after], conversation, where)
                           for after in (messages[number + 1:], [])):
                        unread.add(name)
        return unread

    def prompt(self, conversation: Conversation, where: str) -> str:
        """The text after which a response begins."""
        text = self._rendered(conversation, where, add_generation_prompt=True)
        return text.replace(_BEGINS, "").replace(_ENDS, "")

    def examples(self, conversation: Conversation, where: str) -> list[list[Span]]:
        """The spans of a conversation, by example: each message of the assistant, with what ends it, is a response.

        Of a template that writes earlier messages otherwise once others follow (Qwen 3's leaves their thoughts out) a
        response is learned as the model is to write it, after what it will then read: another example begins with each
        response before which the text is not as it was. In a template with blocks {% generation %} these are the
        responses, and all is rendered once. Messages of weight 0 are no responses. Raises ValueError where a message is
        not written after the prompt for it.
        """
        if self._has_blocks:
            return [self._blocks(conversation, where)]
        examples, done, messages = list[list[Span]](), None, conversation.messages
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, after = (conversation._replace(messages=messages[:end]) for end in (number, number + 1))
            prompt = self._rendered(before, where, add_generation_prompt=True)
            whole = self._rendered(after, where, add_generation_prompt=False)
            if not whole.startswith(prompt):
                raise UsageError(f"{where}: {self.name} writes a message of the assistant otherwise than after the "
                                 "prompt for it, so that the response has no place: give blocks {% generation %}.")
            if done is None or not prompt.startswith(done):
                examples, done = [*examples, []], ""
            examples[-1] += [Span(prompt[len(done):], False), Span(whole[len(prompt):], _is_learned(message))]
            done = whole
        return [each for each in examples if any(span.response for span in each)] or examples[:1] or [[]]

    def _blocks(self, conversation: Conversation, where: str) -> list[Span]:
        """The spans of a conversation, whose responses are what the blocks {% generation %} wrote."""
        text = self._rendered(conversation, where, add_generation_prompt=False)
        parts = re.split(f"[{_BEGINS}{_ENDS}]", text)
        marks = "".join(mark for mark in text if mark in (_BEGINS, _ENDS))
        if not marks or marks != (_BEGINS + _ENDS) * (len(marks) // 2):
            raise UsageError(f"{where}: {self.name} writes no block {{% generation %}} for it, or one within another, "
                             "or a text has U+FDD0 or U+FDD1: there is no response to learn: leave it out.")
        learned = [_is_learned(message) for message in conversation.messages if message["role"] == "assistant"]
        if len(learned) != len(parts) // 2:
            if not all(learned):
                raise UsageError(f"{where}: {self.name} writes {len(parts) // 2} blocks {{% generation %}} for "
                                 f"{len(learned)} messages of the assistant, so that a weight of 0 has no place: leave "
                                 "it out.")
            learned = [True] * (len(parts) // 2)
        return [Span(part, number % 2 == 1 and learned[number // 2]) for number, part in enumerate(parts)]

    def _text(self, messages: Messages, conversation: Conversation, where: str) -> str:
        return self._rendered(conversation._replace(messages=messages), where, add_generation_prompt=False)

    def _rendered(self, conversation: Conversation, where: str, *, add_generation_prompt: bool) -> str:
        messages = [{name: value for name, value in message.items() if name != "weight"}
                    for message in conversation.messages]
        try:
            return self._template.render({**self._tokens, **conversation.options, "messages": messages,
                                          "tools": conversation.tools, "documents": None,
                                          "add_generation_prompt": add_generation_prompt})
        except Exception as error:  # of the template's own code
            raise UsageError(f"{where}: {self.name} does not take these messages: {printable(str(error))[:300]}."
                             ) from error


Template = SimpleTemplate | ChatTemplate


def load_template(tokenizer: Path | None) -> Template:
    """That of a tokenizer's folder (or the folder of its file), where it has one; else the simple one."""
    if tokenizer is None:
        return SimpleTemplate()
    folder = tokenizer.expanduser()
    folder = folder if folder.is_dir() else folder.parent
    path, config = folder / "tokenizer_config.json", dict[str, Any]()
    if path.is_file():
        try:
            config = json.loads(read_regular(path, 1 << 24))
        except (OSError, ValueError, RecursionError) as error:
            raise UsageError(f"{path} cannot be read: {printable(str(error))}.") from error
    source = config.get("chat_template") if isinstance(config, dict) else None
    if isinstance(source, list):  # of several by name
        source = next((each.get("template") for each in source if isinstance(each, dict)
                       and each.get("name") == "default"), None)
    if source is None and (separate := folder / "chat_template.jinja").is_file():
        path, source = separate, read_regular(separate, MAX_BYTES).decode("utf-8", "replace")
    if not isinstance(source, str):
        return SimpleTemplate()
    tokens = {key: value["content"] if isinstance(value, dict) else value for key, value in config.items()
              if key.endswith("_token") and (isinstance(value, str) or isinstance(value, dict) and "content" in value)}
    return ChatTemplate(source, tokens, str(path))


def _generation_tag(name: str) -> type:
    """The extension of Jinja2 for {% generation %}: what the block writes, between two marks."""
    nodes, extension = extras.load("jinja2.nodes", name), extras.load("jinja2.ext", name).Extension

    class Generation(extension):
        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

        def _marked(self, caller: Any) -> str:
            return _BEGINS + caller() + _ENDS

    return Generation


def _json(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None,
          sort_keys: bool = False) -> str:
    """The filter tojson of transformers."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def is_given(value: Any) -> bool:
    """Whether a field has a value: a null, an empty text, list or object is none, and 0 and false are values."""
    return value is not None and value not in ("", [], {})


def _further(message: Mapping[str, Any]) -> list[str]:
    """The fields of a message that are not in every message."""
    return [name for name, value in message.items() if name not in ("role", "content", "weight") and is_given(value)]


def _is_learned(message: Mapping[str, Any]) -> bool:
    return message.get("weight", 1) != 0


def _refuse(message: str) -> None:
    raise UsageError(message)


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


def instructions(row: Row, template: Template, where: str) -> list[list[Span]]:
    """The spans of the examples of a row, one unless its template needs more. Raises ValueError for no response."""
    if "messages" in row:
        conversation = _conversation(row, row["messages"], "messages", template, where)
        examples = template.examples(conversation, where)
        if not any(message["role"] == "assistant" and message.get("weight", 1) and _says(message)
                   for message in conversation.messages):
            raise UsageError(f"{where}: no message of the assistant has a text (and a weight that is not 0): there is "
                             "no response to learn.")
        return examples
    if not {"prompt", "completion"} <= row.keys():
        raise UsageError(f"{where}: it has the fields {few(list(row))}: give prompt and completion, or messages.")
    return [_plain(row, "completion", ("prompt", "completion"), template, where)]


def preference(row: Row, template: Template, where: str) -> tuple[list[Span], list[Span]]:
    """The spans of the chosen and of the rejected response, each with its prompt."""
    if not {"chosen", "rejected"} <= row.keys():
        raise UsageError(f"{where}: it has the fields {few(list(row))}: give prompt, chosen and rejected.")
    if row["chosen"] == row["rejected"]:
        raise UsageError(f"{where}: chosen and rejected are the same: there is nothing to prefer: leave it out.")
    chosen, rejected = (_answer(row, field, template, where) for field in ("chosen", "rejected"))
    return chosen, rejected


def _answer(row: Row, field: str, template: Template, where: str) -> list[Span]:
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
    examples = template.examples(conversation, where)
    number = sum(span.response for each in examples for span in each)
    if number != sum(message["role"] == "assistant" for message in conversation.messages):
        raise UsageError(f"{where}: {field}: {template.name} writes {number} blocks {{% generation %}}, not one for "
                         "each message of the assistant: the last response has no place: leave it out.")
    spans = examples[-1]
    last = max(number for number, span in enumerate(spans) if span.response)
    return [span if number == last else span._replace(response=False) for number, span in enumerate(spans)]


def _plain(row: Row, field: str, read: Iterable[str], template: Template, where: str) -> list[Span]:
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
    return [Span(utf8(row["prompt"]), False), Span(utf8(row[field]), True, ends=True)]


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
    return [{name: utf8(part) if name == "content" and isinstance(part, str) else part
             for name, part in message.items() if name != "weight" or part is not None} for message in value]
