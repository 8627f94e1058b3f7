"""The command `generate`: prompts continued with the parameters of a checkpoint, with a cache of keys and values."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from zero_jax.checkpoint.checkpoint import Checkpoints
from zero_jax.cli.environment import simulates
from zero_jax.cli.model_lookup import find_model
from zero_jax.cli.options.run import WITH_RESPONSES
from zero_jax.cli.step_from_config import abstract_batch, step_of
from zero_jax.cli.weights.export_command import saved_run, saved_state
from zero_jax.cli.weights.file_configs import GenerateConfig
from zero_jax.cli.weights.generate import sample_with_cache
from zero_jax.data.conversations import Conversation, Template, load_template
from zero_jax.data.response_rows import prompt_ids, response_text
from zero_jax.data.tokenizer import ByteTokenizer, Tokenizer
from zero_jax.distributed.initialize import on_host, put_global
from zero_jax.errors import UsageError
from zero_jax.sharding.mesh import simulate_devices


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


def generate_command(config: GenerateConfig) -> list[str]:
    """What follows each prompt, as text; the parameters are sharded over all devices (of a CPU: one).

    Raises ValueError for a checkpoint that is missing, damaged or was not saved by `train`, for a model without a
    decoder, for prompts that its vocabulary lacks or that are too long with what is to follow.
    """
    given = config.check()
    checkpoints = Checkpoints(config.checkpoint, read_only=True)
    manifest = checkpoints.manifest(config.at)
    run = saved_run(config.checkpoint, config.model, manifest.config)
    choice = find_model(run.model)
    if choice.decoder is None:
        raise UsageError(f"model={run.model}: its module has no decoder(config), which generates with a cache: export "
                         "the checkpoint to a folder, and generate with transformers.")
    if config.ema and run.ema is None:
        raise UsageError("ema: the run kept no average: leave it out.")
    tokenizer, template = given or _tokenizer_of(manifest.config), _template_of(config, manifest.config)
    texts = config.prompt if template is None else [template.prompt(Conversation(
        [{"role": "user", "content": text}]), f"prompt={text!r}") for text in config.prompt]
    prompts, text_of = tokenizer.encode(texts), tokenizer.decode
    if not isinstance(tokenizer, _Ids) and (
            template is not None or manifest.config.get("objective") in WITH_RESPONSES):
        prompts = [prompt_ids(text, tokenizer) for text in texts]
        text_of = functools.partial(response_text, template=template, tokenizer=tokenizer)
    for text, ids in zip(config.prompt, prompts, strict=True):
        check_prompt(text, ids, config.tokens, choice.config)
    if simulates():
        simulate_devices(1)
    devices = jax.devices()
    if not config.ema and run.lora_rank is None:  # only parameters are read: an optimizer with little state
        run = dataclasses.replace(run, ema=None, optimizer="sgd-momentum")
    step = step_of(run, choice, devices)
    batch = abstract_batch(choice, len(devices), run.seq_len)
    state = saved_state(checkpoints, step, batch, manifest)
    length = max(map(len, prompts)) + config.tokens
    sample = step.evaluator(sample_with_cache(
        choice.decoder_for(length), num_tokens=config.tokens, temperature=config.temperature), ema=config.ema)
    found = []
    for number, ids in enumerate(prompts):
        rows = put_global({"inputs": np.tile(np.array(ids, np.int32), (len(devices), 1))}, step.batch_sharding)
        key = jax.random.fold_in(jax.random.key(config.seed), number)
        found.append(text_of(on_host(sample(state, rows, key))[0].tolist()))
    return found


def _template_of(config: GenerateConfig, saved: Any) -> Template | None:
    """What makes a text of each prompt; None where it is one. Raises ValueError where it is not the run's."""
    chat = saved.get("chat")
    if config.template == "none" or config.template == "auto" and chat is None:
        return None
    template = load_template(config.tokenizer)
    if chat not in (None, template.fingerprint):
        raise UsageError(f"the run's messages became text by another template than {template.name}: give the folder of "
                         "the run's tokenizer as tokenizer, or template=none for prompts that are texts.")
    return template


def _tokenizer_of(saved: Any) -> Tokenizer | _Ids:
    """Bytes or ids, as the run's options say. Raises ValueError for a run with a tokenizer of its own."""
    if (name := saved.get("tokenizer")) is not None:
        raise UsageError(f"the run's tokenizer was {name}: give it with tokenizer.")
    data = saved.get("data") or ["python"]
    return _Ids() if any(str(each).endswith((".bin", ".npy")) for each in data) else ByteTokenizer()


def check_prompt(text: str, ids: Any, tokens: int, sizes: Any) -> None:
    """Raises ValueError for a prompt that a model of `sizes`, its config, cannot take with `tokens` more."""
    longest, known = getattr(sizes, "max_length", None), getattr(sizes, "vocab_size", None)
    if not len(ids):
        raise UsageError(f"prompt={text!r} has no token: give a text to continue.")
    wrong = [each for each in ids if known is not None and not 0 <= each < known]
    if wrong:
        raise UsageError(f"prompt={text!r} has the id {wrong[0]}, and the model's vocab_size is {known}: give the "
                         "tokenizer of the run.")
    if longest is not None and len(ids) + tokens > longest:
        raise UsageError(f"prompt={text!r} has {len(ids)} tokens, and with tokens={tokens} that is more than "
                         f"max_length={longest} of the model: give fewer.")
