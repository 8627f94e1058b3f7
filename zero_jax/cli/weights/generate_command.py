"""The commands `generate` and `chat`: prompts continued with the parameters of a checkpoint, by a cache."""

import functools
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from zero_jax.cli.environment import shown_text
from zero_jax.cli.options.run import WITH_RESPONSES
from zero_jax.cli.weights.file_configs import ChatConfig, GenerateConfig, SamplingConfig
from zero_jax.cli.weights.generate import sample_with_cache
from zero_jax.cli.weights.saved_model import SavedModel
from zero_jax.data.conversations import Conversation, Messages, Template, load_template
from zero_jax.data.response_rows import prompt_ids, response_text
from zero_jax.distributed.initialize import on_host, put_global
from zero_jax.errors import UsageError


class _Ids:
    """Ids as text: what stands for a tokenizer that is not known."""

    def encode(self, texts: Any) -> list[list[int]]:
        try:
            return [[int(word) for word in text.split()] for text in texts]
        except ValueError as error:
            raise UsageError("prompt: the run read files of tokens, and its tokenizer is not known: give it with "
                             "tokenizer, or ids with spaces between them.") from error

    def decode(self, ids: Any) -> str:
        return " ".join(map(str, ids))


class Generator:
    """The model of a checkpoint, which continues prompts; its parameters are read when the first one is.

    Raises ValueError for a checkpoint that is missing, damaged or was not saved by `train`, for a model without a
    decoder, and for prompts that its vocabulary lacks or that are too long with what is to follow.
    """

    def __init__(self, config: SamplingConfig):
        self._config, self._model = config, SavedModel(config)
        saved, self._choice = self._model.options, self._model.choice
        if self._choice.decoder is None:
            raise UsageError(f"model={self._model.run.model}: its module has no decoder(config), which generates with "
                             "a cache: export the checkpoint to a folder, and generate with transformers.")
        self._tokenizer = self._model.tokenizer or _Ids()
        self.template = _template_of(config, saved, self._model.source)
        self._in_parts = self.template is not None or saved.get("objective") in WITH_RESPONSES

    def ids(self, prompt: str | Messages) -> Sequence[int]:
        """The ids of a prompt, a text or messages; a text is a user's message where there is a template."""
        what = f"prompt={prompt if isinstance(prompt, str) else prompt[-1]['content']!r}"
        if self.template is not None:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            prompt = self.template.prompt(Conversation(messages), what)
        assert isinstance(prompt, str)
        tokenizer = self._tokenizer
        ids = prompt_ids(prompt, tokenizer) if self._in_parts and not isinstance(tokenizer, _Ids) else (
            tokenizer.encode([prompt])[0])
        check_prompt(what, ids, self._config.tokens, self._choice.config)
        return ids

    def answer(self, ids: Sequence[int], number: int, length: int | None = None) -> str:
        """What follows `ids`, up to its end. number: of the draws. length: of the cache; None: what this takes."""
        config, (step, state, devices) = self._config, self._model.loaded
        sample = self._sampler(length or len(ids) + config.tokens)
        rows = put_global({"inputs": np.tile(np.array(ids, np.int32), (devices, 1))}, step.batch_sharding)
        key = jax.random.fold_in(jax.random.key(config.seed), number)
        found = on_host(sample(state, rows, key))[0].tolist()
        text = self._tokenizer.decode(found) if isinstance(self._tokenizer, _Ids) else response_text(
            found, self.template, self._tokenizer)
        return text[:min((text.find(stop) for stop in config.stop if stop in text), default=len(text))]

    @functools.cache  # noqa: B019 (there is one of these in a process)
    def _sampler(self, length: int) -> Any:
        config = self._config
        return self._model.loaded[0].evaluator(sample_with_cache(
            self._choice.decoder_for(length), num_tokens=config.tokens, temperature=config.temperature,
            top_k=config.top_k, top_p=config.top_p), ema=config.ema)


def generate_command(config: GenerateConfig) -> list[str]:
    """What follows each prompt, as text; written to `config.out` where that is given."""
    generator = Generator(config)
    prompts = [generator.ids(text) for text in config.prompts]
    length = max(map(len, prompts)) + config.tokens
    found = [generator.answer(ids, number, length) for number, ids in enumerate(prompts)]
    if config.out is not None:
        rows = ({"prompt": prompt, "text": text} for prompt, text in zip(config.prompts, found, strict=True))
        config.out.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return found


def chat_command(config: ChatConfig, read: Callable[[str], str] = input, write: Callable[[str], Any] = print) -> None:
    """Answers what `read` returns, message after message, until it raises EOFError; `/new` forgets what was said.

    The oldest messages are forgotten where all of them are longer than the model takes.
    """
    generator, messages = Generator(config), []
    if generator.template is None:
        raise UsageError(f"{config.checkpoint}: the run was not trained on messages: zero-jax generate continues "
                         "texts, or give template=chat.")
    for number in itertools.count():
        try:
            text = read("> ")
        except EOFError:
            return
        if text.strip() in ("", "/new"):
            messages = [] if text.strip() else messages
            continue
        messages = [*messages, {"role": "user", "content": text}]
        while True:
            try:
                ids = generator.ids(messages)
                break
            except UsageError as error:
                messages = messages[2:]
                if not messages:
                    write(str(error))
                    break
        if messages:
            said = generator.answer(ids, number)
            write(shown_text(said))
            messages = [*messages, {"role": "assistant", "content": said}]


def _template_of(config: SamplingConfig, saved: Any, source: Path | None) -> Template | None:
    """What makes a text of each prompt; None where it is one. Raises ValueError where it is not the run's."""
    chat = saved.get("chat")
    if config.template == "none" or config.template == "auto" and chat is None:
        return None
    template = load_template(source)
    if chat not in (None, template.fingerprint):
        raise UsageError(f"the run's messages became text by another template than {template.name}: give the folder of "
                         "the run's tokenizer as tokenizer, or template=none for prompts that are texts.")
    return template


def check_prompt(what: str, ids: Any, tokens: int, sizes: Any) -> None:
    """Raises ValueError for a prompt that a model of `sizes`, its config, cannot take with `tokens` more."""
    longest, known = getattr(sizes, "max_length", None), getattr(sizes, "vocab_size", None)
    if not len(ids):
        raise UsageError(f"{what} has no token: give a text to continue.")
    wrong = [each for each in ids if known is not None and not 0 <= each < known]
    if wrong:
        raise UsageError(f"{what} has the id {wrong[0]}, and the model's vocab_size is {known}: give the "
                         "tokenizer of the run.")
    if longest is not None and len(ids) + tokens > longest:
        raise UsageError(f"{what} has {len(ids)} tokens, and with tokens={tokens} that is more than "
                         f"max_length={longest} of the model: give fewer.")
