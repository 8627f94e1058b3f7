"""Plain Flax models that know nothing of sharding; each has `PRESETS` and `build(config)`.

`from_huggingface` finds the module and the config of a checkpoint's folder.
"""

import importlib
import json
from pathlib import Path
from typing import Any

from .layers.huggingface import model_config


def from_huggingface(folder: str | Path) -> tuple[Any, Any]:
    """(The module, its config) of the model of a folder with a config.json of transformers 4 or 5, of any size.

    `module.build(config)` is the model, and `zero_jax.Names(**module.huggingface(config))` names its tensors. Models of
    a width of 1024 and more recompute their layers in backward (`remat`), as the presets do.

    Raises ValueError for a model_type or a field that no module has, by its name.
    """
    path = Path(folder).expanduser() / "config.json"
    try:
        return model_config(json.loads(path.read_text()), lambda name: importlib.import_module(f".{name}", __name__))
    except ValueError as error:
        raise ValueError(f"{path} says {error}") from error
