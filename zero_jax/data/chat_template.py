"""How messages become text: the chat template of a tokenizer, by Jinja2, or a simple one. Nothing here imports JAX."""

import contextlib
import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from zero_jax.data import extras
from zero_jax.errors import UsageError, printable
from zero_jax.files import read_regular

ROLES = ("system", "user", "assistant", "tool")
MAX_BYTES = 1 << 20
"""Of a template."""

Messages = Sequence[Mapping[str, Any]]


class Piece(NamedTuple):
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

    >>> [piece.text for piece in SimpleTemplate().pieces(Conversation([
    ...     {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]), "line 1")]
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
        return "".join(piece.text for piece in self.pieces(conversation, where)) + "<|assistant|>\n"

    def pieces(self, conversation: Conversation, where: str) -> list[Piece]:
        """The pieces of a conversation; each message of the assistant is a response, but for those of weight 0."""
        pieces, prompt = [], ""
        for message in conversation.messages:
            prompt += f"<|{message['role']}|>\n"
            if message["role"] == "assistant":
                pieces += [Piece(prompt, False), Piece(message["content"], _is_learned(message), ends=True)]
                prompt = "\n"
            else:
                prompt += f"{message['content']}\n"
        return [*pieces, Piece(prompt, False)]


class ChatTemplate:
    """The `chat_template` of a tokenizer_config.json, rendered in Jinja2's immutable sandbox as transformers does.

    variables: that it reads of what it is rendered with. fingerprint: of its source. unread: fields of rows that were
    not read so far. used: whether a row had messages.
    """

    def __init__(self, source: str, tokens: Mapping[str, str], name: str):
        """tokens: bos_token, eos_token and so on. name: of the file."""
        sandbox = extras.load("jinja2.sandbox", f"the chat_template of {name}")
        environment = sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _refuse
        environment.filters["tojson"] = _json
        self.name, self._tokens = f"the chat_template of {name}", tokens
        try:
            self._template, nodes = environment.from_string(source), environment.parse(source)
        except Exception as error:  # jinja2.TemplateError, RecursionError
            raise UsageError(f"{self.name} is no template of Jinja2: {printable(str(error))}.") from error
        self.variables = frozenset(extras.load("jinja2.meta", self.name).find_undeclared_variables(nodes))
        self.unread, self.used, self.fingerprint = set[str](), False, f"{zlib.crc32(source.encode()):08x}"

    def unread_by(self, conversation: Conversation, where: str) -> set[str]:
        """The fields of messages that make no difference to the text: it is rendered without each."""
        messages, unread = list(conversation.messages), set()
        whole = self._rendered(conversation, where, add_generation_prompt=False) if any(map(_further, messages)) else ""
        for number, message in enumerate(messages):
            for name in _further(message):
                less = {key: value for key, value in message.items() if key != name}
                others = conversation._replace(messages=[*messages[:number], less, *messages[number + 1:]])
                with contextlib.suppress(UsageError):  # where it cannot be rendered without
                    if self._rendered(others, where, add_generation_prompt=False) == whole:
                        unread.add(name)
        return unread

    def prompt(self, conversation: Conversation, where: str) -> str:
        """The text after which a response begins."""
        return self._rendered(conversation, where, add_generation_prompt=True)

    def pieces(self, conversation: Conversation, where: str) -> list[Piece]:
        """The pieces of a conversation: each message of the assistant, with what ends it, is a response.

        Those of weight 0 are none. Raises ValueError where what is rendered of some messages is not how what is
        rendered of more begins.
        """
        pieces, done, messages = [], "", conversation.messages
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, after = (conversation._replace(messages=messages[:end]) for end in (number, number + 1))
            prompt = self._rendered(before, where, add_generation_prompt=True)
            whole = self._rendered(after, where, add_generation_prompt=False)
            if not prompt.startswith(done) or not whole.startswith(prompt):
                raise UsageError(f"{where}: {self.name} writes earlier messages otherwise once others follow, so that "
                                 "its responses have no place: give a conversation for each response.")
            pieces += [Piece(prompt[len(done):], False), Piece(whole[len(prompt):], _is_learned(message))]
            done = whole
        return pieces

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
