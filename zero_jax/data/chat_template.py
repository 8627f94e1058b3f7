"""How messages become text: the chat template of a tokenizer, by Jinja2, or a simple one. Nothing here imports JAX."""

import json
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


class SimpleTemplate:
    r"""A line `<|role|>`, the text, the end of text after a response, and a line break, for each message.

    >>> [piece.text for piece in SimpleTemplate().pieces([
    ...     {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}], "line 1")]
    ['<|user|>\n2 + 2?\n<|assistant|>\n', '4', '\n']
    """

    name = "<|role|>, then the text"

    def pieces(self, messages: Messages, where: str) -> list[Piece]:
        """The pieces of a conversation; each message of the assistant is a response."""
        pieces, prompt = [], ""
        for message in messages:
            prompt += f"<|{message['role']}|>\n"
            if message["role"] == "assistant":
                pieces += [Piece(prompt, False), Piece(message["content"], True, ends=True)]
                prompt = "\n"
            else:
                prompt += f"{message['content']}\n"
        return [*pieces, Piece(prompt, False)]


class ChatTemplate:
    """The `chat_template` of a tokenizer_config.json, rendered in Jinja2's immutable sandbox as transformers does."""

    def __init__(self, source: str, tokens: Mapping[str, str], name: str):
        """tokens: bos_token, eos_token and so on. name: of the file."""
        sandbox = extras.load("jinja2.sandbox", f"the chat_template of {name}")
        environment = sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _refuse
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
        self.name, self._tokens = f"the chat_template of {name}", tokens
        try:
            self._template = environment.from_string(source)
        except Exception as error:  # jinja2.TemplateError, RecursionError
            raise UsageError(f"{self.name} is no template of Jinja2: {printable(str(error))}.") from error

    def pieces(self, messages: Messages, where: str) -> list[Piece]:
        """The pieces of a conversation: each message of the assistant, with what ends it, is a response.

        Raises ValueError where what is rendered of some messages is not how what is rendered of more begins.
        """
        pieces, done = [], ""
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = self._rendered(messages[:number], where, add_generation_prompt=True)
            whole = self._rendered(messages[:number + 1], where, add_generation_prompt=False)
            if not prompt.startswith(done) or not whole.startswith(prompt):
                raise UsageError(f"{where}: {self.name} writes earlier messages otherwise once others follow, so that "
                                 "its responses have no place: give a conversation for each response.")
            pieces += [Piece(prompt[len(done):], False), Piece(whole[len(prompt):], True)]
            done = whole
        return pieces

    def _rendered(self, messages: Messages, where: str, *, add_generation_prompt: bool) -> str:
        try:
            return self._template.render(messages=list(messages), tools=None, documents=None,
                                         add_generation_prompt=add_generation_prompt, **self._tokens)
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


def _refuse(message: str) -> None:
    raise UsageError(message)
