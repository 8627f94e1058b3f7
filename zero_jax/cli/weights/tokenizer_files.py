"""What is beside the weights in a folder for transformers: the run's tokenizer, and where generation ends. No JAX."""

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zero_jax.cli.options.data import is_token_file
from zero_jax.cli.options.objective import WITH_RESPONSES
from zero_jax.data.conversations import Conversation, SimpleTemplate, Template, load_template
from zero_jax.data.documents import for_transformers, is_tokenized
from zero_jax.data.tokenizer import TOKENIZERS, Tokenizer, load_tokenizer
from zero_jax.errors import UsageError
from zero_jax.files import read_regular
from zero_jax.interop.model_config import CONFIG, read_config, task_of

COPIED = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "generation_config.json")
"""Files of a tokenizer's folder, beside the tokenizer itself."""


def tokenizer_files(saved: Mapping[str, Any], given: Path | None, config: Mapping[str, Any]
                    ) -> tuple[dict[str, bytes], dict[str, Any]]:
    """(Files by name, fields of config.json); both are empty for a run on bytes, or on ids of a tokenizer not known.

    What the run's own tokenizer does not say is that of the folder that the run started from, where this has no other
    tokenizer: generation also ends where that model's did. A run on ids alone has the tokenizer of that folder.

    saved: the options of the run. given: its tokenizer, where it is not at the place that the run names. config:
    config.json of the model. Raises ValueError for a tokenizer that is not there, or has more ids than the model.
    """
    data, base = saved.get("data") or (), _base_of(saved)
    source = given or saved.get("tokenizer") or next((name for name in data if is_tokenized(name)), None)
    if source is None and base is not None and data and is_token_file(tuple(data)):
        source = base if any((base / name).is_file() for name in TOKENIZERS) else None
        if source is None:  # where it ends is known all the same
            files, ids = _read(base), _ids_of(base)
            if task_of(config) is not None:
                files["generation_config.json"] = _generation_config(files.get("generation_config.json", b"{}"), ids)
            return {name: text for name, text in files.items() if name == "generation_config.json"}, _known(ids)
    if source is None:
        return {}, {}
    source = Path(source).expanduser()
    if not source.exists():
        raise UsageError(f"tokenizer: the run's was {source}, which is not there: give its folder with --tokenizer, or "
                         "name a file, *.safetensors, to export the weights alone.")
    tokenizer, folder = load_tokenizer(source), source if source.is_dir() else source.parent
    if tokenizer.vocab_size > config.get("vocab_size", tokenizer.vocab_size):
        raise UsageError(f"tokenizer: {source} has {tokenizer.vocab_size} ids, and the model {config['vocab_size']}: "
                         "give that of the run.")
    if base is not None and any((base / name).is_file() and read_regular(base / name, 1 << 28) != text
                                for name, text in tokenizer.files.items()):
        base = None  # its ids mean other texts
    known = {"eos_token_id": []} if base is None else _ids_of(base)
    files = {**for_transformers(tokenizer), **({} if base is None else _read(base)), **_read(folder), **tokenizer.files}
    ends = [] if tokenizer.specials.eos is None else [tokenizer.specials.eos]
    if saved.get("objective") in WITH_RESPONSES:
        template, chat = load_template(source), saved.get("chat")
        if chat not in (None, template.fingerprint):
            raise UsageError(f"tokenizer: the run's messages became text by another template than {template.name}: "
                             "give the folder of its tokenizer with --tokenizer.")
        ends += _ends_of_turn(tokenizer, template)
        if chat == SimpleTemplate.fingerprint:
            files["chat_template.jinja"] = SimpleTemplate.jinja.encode()
    ids = {"bos_token_id": tokenizer.specials.bos, "pad_token_id": tokenizer.specials.pad}
    ids = {name: known.get(name) if value is None else value for name, value in ids.items()}
    ids["eos_token_id"] = [*ends, *known["eos_token_id"]]
    if task_of(config) is not None:
        files["generation_config.json"] = _generation_config(files.get("generation_config.json", b"{}"), ids)
    return files, _known(ids)


def write_files(folder: Path, files: Mapping[str, bytes]) -> list[Path]:
    """Writes those that are not there, and returns their paths."""
    new = [folder / name for name in files if not (folder / name).exists()]
    for path in new:
        path.write_bytes(files[path.name])
    return new


def check_tokenizer(folder: Path, files: Mapping[str, bytes]) -> None:
    """Raises UsageError where `folder` has another tokenizer than `files`."""
    for name in TOKENIZERS:
        path = folder / name
        if name in files and path.exists() and path.read_bytes() != files[name]:
            raise UsageError(f"{path} is not the tokenizer of the run: remove it, or give another out.")


def _base_of(saved: Mapping[str, Any]) -> Path | None:
    """The folder of a model with its config.json that a run started from; None where it named none."""
    names = (saved.get("init_from"), saved.get("model"))
    return next((path for name in names if name and (path := Path(str(name)).expanduser()).is_dir()
                 and (path / CONFIG).is_file()), None)


def _read(folder: Path) -> dict[str, bytes]:
    return {name: read_regular(folder / name, 1 << 24) for name in COPIED if (folder / name).is_file()}


def _ids_of(folder: Path) -> dict[str, Any]:
    """The ids of special tokens that a folder's config.json and generation_config.json say; ends as a list."""
    configs = [read_config(folder) or {}, _object(_read(folder).get("generation_config.json", b"{}"))]
    found = {name: next((config[name] for config in configs if isinstance(config.get(name), int)), None)
             for name in ("bos_token_id", "pad_token_id")}
    return {**found, "eos_token_id": [each for config in configs for each in _ends(config)]}


def _ends(config: Mapping[str, Any]) -> list[int]:
    ends = config.get("eos_token_id")
    return [each for each in (ends if isinstance(ends, list) else [ends]) if isinstance(each, int)]


def _object(text: bytes) -> dict[str, Any]:
    """A JSON object; an empty one for what is none."""
    try:
        read = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return read if isinstance(read, dict) else {}


def _ends_of_turn(tokenizer: Tokenizer, template: Template) -> list[int]:
    """The special token that a template writes after a response; none of the simple one, which has the end of text."""
    messages, answer = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "zero"}], ""
    with contextlib.suppress(UsageError):  # of a template that takes no conversation of two messages
        answer = next(piece.text for piece in template.pieces(Conversation(messages), "") if piece.response)
    ((_, ids),) = tokenizer.encode_parts([["zero", answer.partition("zero")[2]]])
    return [i for i in ids if i in tokenizer.specials.ids][:1]


def _generation_config(text: bytes, ids: Mapping[str, Any]) -> bytes:
    """A generation_config.json that also ends at the ids of the run. text: that of the tokenizer's folder."""
    read = _object(text)
    merged = {**read, **_known({**ids, "eos_token_id": [*_ends(read), *ids["eos_token_id"]]})}
    return (json.dumps(merged, indent=2) + "\n").encode()


def _known(ids: Mapping[str, Any]) -> dict[str, Any]:
    """Those that there are; of one end the id, of several the list."""
    ends = [*dict.fromkeys(ids["eos_token_id"])]
    all_ids = {**ids, "eos_token_id": ends if len(ends) > 1 else ends[0] if ends else None}
    return {name: value for name, value in all_ids.items() if value is not None}
