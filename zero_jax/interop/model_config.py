"""The config.json beside a checkpoint of Hugging Face's: written with one, and compared before one is read. No JAX."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zero_jax.arguments import shown
from zero_jax.errors import UsageError

CONFIG = "config.json"

FREE = ("architectures", "torch_dtype", "dtype", "bos_token_id", "eos_token_id", "pad_token_id",
        "decoder_start_token_id", "id2label", "max_position_embeddings", "n_positions", "is_encoder_decoder",
        "num_decoder_layers")
"""Fields that no number of the forward pass follows from, or that the shapes of the tensors tell, too."""

ABSENT_IS_NULL = ("rope_scaling",)
"""Fields that a file leaves out where they are null. Others that it lacks are not compared."""

DROPOUT = ("dropout", "pdrop")
"""Parts of names of fields of training."""

MAX_BYTES = 10_000_000
"""Of a config.json: larger is something else."""


def check_config(weights: Path, expected: Mapping[str, Any], model: str) -> None:
    """Raises ValueError unless the config.json beside `weights` describes the model; without one, nothing is known.

    Two models may have tensors of equal names and shapes and differ in the number of heads, in rotary frequencies or in
    the epsilon of a norm: the tensors cannot tell.

    weights: the file, the index or the folder. expected: config.json of the model. model: its name.
    """
    folder = weights if weights.is_dir() else weights.parent
    found = read_config(folder)
    if found is None or "model_type" not in found:
        return
    path, kind = folder / CONFIG, expected["model_type"]
    if found["model_type"] != kind:
        raise UsageError(f"{path} is of a model of type {shown(found['model_type'])}, and {model} is of type {kind!r}: "
                         "give the checkpoint of such a model.")
    for name, value in expected.items():
        if name in FREE or any(part in name for part in DROPOUT):
            continue
        theirs = found.get(name)
        if (name in found or name in ABSENT_IS_NULL) and not _same(theirs, value):
            raise UsageError(f"{path} says {name}={shown(theirs)}, and {model} has {shown(value)}: give a checkpoint "
                             "of this model, or a preset that is the checkpoint's.")


def read_config(folder: Path) -> dict[str, Any] | None:
    """The config.json of a folder; None where there is none. Raises ValueError for one that is no JSON object."""
    path = folder / CONFIG
    if not path.is_file():
        return None
    try:
        if path.stat().st_size > MAX_BYTES:
            raise UsageError(f"{path} is not a model's config: it has more than {MAX_BYTES:,} bytes.")
        value = json.loads(path.read_bytes())
    except UsageError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not a model's config: its JSON cannot be read ({error}).") from error
    if not isinstance(value, dict):
        raise UsageError(f"{path} is not a model's config: its JSON is no object.")
    return value


def write_config(folder: Path, config: Mapping[str, Any], dtype: str) -> Path | None:
    """Writes config.json into `folder` and returns its path; None where there is one, which stays as it is."""
    path = folder / CONFIG
    if path.exists():
        return None
    temporary = path.with_name(f".{CONFIG}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps({**config, "torch_dtype": dtype}, indent=2) + "\n")
    temporary.replace(path)
    return path


def _same(theirs: Any, ours: Any) -> bool:
    """Numbers by value; of an object the fields that ours has, under their older name, too."""
    if isinstance(ours, Mapping):
        return isinstance(theirs, Mapping) and all(
            _same(theirs.get(name, theirs.get("type") if name == "rope_type" else None), value)
            for name, value in ours.items())
    if isinstance(ours, (int, float)) and isinstance(theirs, (int, float)):
        return float(ours) == float(theirs)
    return theirs == ours
