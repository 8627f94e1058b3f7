"""Which model MODULE:PRESET names: one of ours by its short name, or one of the user's own modules. No JAX.

Or a folder with a config.json of Hugging Face's, of a family that `models/` covers.
"""

import contextlib
import dataclasses
import difflib
import importlib
import importlib.util
import inspect
import os
import pkgutil
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from zero_jax.errors import UsageError, cut
from zero_jax.interop.model_config import OURS, check_config, folder_of_ours, import_ours, model_of
from zero_jax.interop.naming import Names
from zero_jax.interop.safetensors_file import Tensor


@dataclasses.dataclass(frozen=True)
class ModelChoice:
    """A preset of a module of models: `build(config)` makes the Flax model.

    names: the module's `huggingface`, which gives the fields of `Names` for a config; None where it has none.
    rules: `tensor_rules(config)` of the module, how tensor parallelism splits its parameters; None if it has none.
    loss, batch_shapes: `loss(model, batch)` of the module and `batch_shapes(config, rows, length)`, its batches; None
    for a model of text that predicts the next token. file_config: `huggingface_config(config)` of the module, the
    config.json of its checkpoints. decoder: `decoder(config)` of the module, the Linen model that generates with keys
    and values in the collection `cache`, or `decoder(config, length)` for so many tokens; None where there is none.
    """

    name: str
    config: Any
    build: Callable[[Any], Any]
    names: Callable[[Any], Mapping[str, Any]] | None = None
    rules: Callable[[Any], Any] | None = None
    loss: Callable[..., Any] | None = None
    batch_shapes: Callable[[Any, int, int | None], Any] | None = None
    file_config: Callable[[Any], Mapping[str, Any]] | None = None
    decoder: Callable[..., Any] | None = None

    def decoder_for(self, length: int) -> Any:
        """What generates with a cache for `length` tokens, of prompt and continuation."""
        assert self.decoder is not None
        takes_length = len(inspect.signature(self.decoder).parameters) > 1
        return self.decoder(self.config, length) if takes_length else self.decoder(self.config)

    def tensor_rules(self, tensor: int) -> tuple[Any, ...]:
        """The rules for an axis of size `tensor`; none for 1. Raises ValueError where the module has none."""
        if tensor == 1:
            return ()
        if self.rules is None:
            raise UsageError(f"tensor={tensor}: {self.name.partition(':')[0]} has no tensor_rules(config), which say "
                             "how parameters are split: write them, or leave tensor out.")
        return tuple(self.rules(self.config))

    def tensor_names(self) -> Names | None:
        """The names of published checkpoints of this model; None where its module gives none."""
        return None if self.names is None else Names(**{"config": self.own_names.config, **self.names(self.config)})

    @property
    def own_names(self) -> Names:
        """Our names, with the config.json of this model where its module gives one."""
        return Names(config=None if self.file_config is None else self.file_config(self.config))

    def check_weights(self, weights: Path, tensors: Mapping[str, Tensor]) -> None:
        """Raises ValueError where what is beside `weights`, or in the files of `tensors`, is of another model."""
        files = (tensor.file for tensor in tensors.values())
        check_config(weights.expanduser(), self.own_names.config, self.name, files)

    def check_field(self, field: str) -> None:
        """Raises ValueError where the config lacks a field that an option changes."""
        if not hasattr(self.config, field):
            raise UsageError(f"{self.name} has no field {field!r} in its config, which this option changes.")

    def with_change(self, field: str, value: Any) -> "ModelChoice":
        """With another value in its config. Raises ValueError where the config lacks that field."""
        self.check_field(field)
        return dataclasses.replace(self, config=dataclasses.replace(self.config, **{field: value}))

    def check(self, *, seq_len: int, vocab_size: int | None) -> None:
        """Raises ValueError for sequences or token ids beyond the limits of the model's config."""
        longest, known = getattr(self.config, "max_length", None), getattr(self.config, "vocab_size", None)
        if longest is not None and seq_len > longest:
            raise UsageError(f"seq_len={seq_len} is longer than max_length={longest} of {self.name}: give at most "
                             f"{longest}.")
        if known is not None and vocab_size is not None and vocab_size > known:
            raise UsageError(f"The data's vocabulary of {vocab_size} is larger than vocab_size={known} of {self.name}.")


def with_remat(choice: ModelChoice, remat: str) -> ModelChoice:
    """`choice` with its own remat switched by `yes` or `no`; any other value is for `make_zero_train_step`."""
    return choice.with_change("remat", remat == "yes") if remat in ("yes", "no") else choice


def find_model(name: str) -> ModelChoice:
    """The model that MODULE:PRESET names, or that of a folder's config.json.

    A short name (gpt2:124m) is always ours. Any other module is resolved by Python, the current folder included;
    it needs `PRESETS` (configs by name) and `build(config)`. Raises ValueError where there is no such module or preset,
    with the nearest that there is; an error inside the module is raised as it is.
    """
    if is_folder(name):
        module, config = model_of(Path(name).expanduser())
        return _choice(name, module, config)
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    name = published_name(name) or name
    module_name, _, preset = name.partition(":")
    if not all(part.isidentifier() for part in module_name.split(".")):
        raise UsageError(f"model={name!r} names no module: write MODULE:PRESET, as gpt2:124m, or a folder that has a "
                         "config.json. A module's name has no slashes: change to its folder, or add that to "
                         "PYTHONPATH.")
    if (short := short_name(module_name)) is not None:
        module_name, module = short, import_ours(short)
    else:
        with errors_as_usage(name):  # also of the packages that a module is in, which are imported to find it
            module = importlib.import_module(module_name) if _exists(module_name) else None
        if module is None:
            raise UsageError(f"model={name!r}: there is no module {module_name!r}" + nearest(
                module_name, [*our_models(), *_modules_beside(module_name)]))
    presets, build = getattr(module, "PRESETS", None), getattr(module, "build", None)
    if not isinstance(presets, Mapping) or not callable(build):
        raise UsageError(f"model={name!r}: {module_name} lacks PRESETS (configs by name) or build(config) (a Flax "
                         "model)" + nearest(module_name, _modules_beside(module_name)))
    if not preset or preset not in presets:
        wrong = f"{module_name} has no preset {preset!r}" if preset else f"name a preset, as in {module_name}:PRESET"
        raise UsageError(f"model={name!r}: {wrong}" + nearest(preset, list(presets)))
    return _choice(f"{module_name}:{preset}", module, presets[preset], None if short is not None else name)


_SIZES = {"gpt2medium": "gpt2:355m", "gpt2large": "gpt2:774m", "gpt2xl": "gpt2:1.5b"}
"""Published names that say no number of parameters."""


def published_name(name: str) -> str | None:
    """MODULE:PRESET of ours for a model as its publishers and others write it; None for a name that is none.

    llama3-8b, Llama-3.1-8B, meta-llama/Llama-3.2-1B-Instruct, Qwen/Qwen3-0.6B, gpt2-xl, google-bert/bert-base-uncased.
    """
    if ":" in name or name.isidentifier():
        return None
    key = _letters(re.sub(r"-(instruct|hf|uncased)$", "", name.rpartition("/")[2].lower())).removeprefix("meta")
    modules = [each for each in our_models() if not each.endswith("_nnx") and (
        key.startswith(each) or each == "llama" and key.startswith("qwen"))]
    known = {_letters(text): f"{module}:{preset}" for module in modules
             for preset in getattr(import_ours(module), "PRESETS", {}) for text in (module + preset, preset)}
    return _SIZES.get(key) or known.get(key)


def _letters(name: str) -> str:
    """`name` without what separates its parts; dots stay, so that 1.5b is not 15b."""
    return re.sub(r"[-_ ]", "", name)


def models_text() -> str:
    """Our models and their presets, a line for each module."""
    return "\n".join(f"{name}: {', '.join(presets)}" for name in our_models()
                     if (presets := getattr(import_ours(name), "PRESETS", None)))


def is_folder(name: str) -> bool:
    """Whether a model is named by a folder with its config.json."""
    folder = Path(name).expanduser()
    return (folder / "config.json").is_file() or os.sep in name and folder.is_dir()


def _choice(name: str, module: ModuleType, config: Any, users: str | None = None) -> ModelChoice:
    """users: the name of a module of the user, whose errors are shown as such."""
    functions = [getattr(module, field, None) for field in (
        "build", "huggingface", "tensor_rules", "loss", "batch_shapes", "huggingface_config",
        "decoder")]
    if users is not None:
        functions = [None if function is None else errors_as_usage(users)(function) for function in functions]
    return ModelChoice(name, config, *functions)  # pyright: ignore[reportArgumentType]


class UsersModuleError(UsageError):
    """What a module of the user's raises, which names nothing of ours."""


@contextlib.contextmanager
def errors_as_usage(model: str) -> Iterator[None]:
    """Around code of the user's module: what it raises, and that it exits, becomes a UsageError with its line."""
    try:
        yield
    except (Exception, SystemExit) as error:
        if isinstance(error, UsageError):
            raise
        frames = traceback.extract_tb(error.__traceback__)
        where = users_line(error) or (_shown(frames[-1]) if frames else "its module")
        if isinstance(error, SyntaxError) and error.filename is not None:
            where = f"{error.filename}, line {error.lineno}: {(error.text or '').strip()}"
        raise UsersModuleError(f"--model {model}: {raised_text(error, where)}") from error


def users_line(error: BaseException) -> str | None:
    """The innermost line of the user's own code that `error` passed; None where it passed none."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_installed(frame.filename)]
    return _shown(own[-1]) if own else None


def raised_text(error: BaseException, where: str) -> str:
    """What a module of the user raises, in a line."""
    what = "ends the process" if isinstance(error, SystemExit) else "raises"
    return (f"the module {what} in {where}: {type(error).__name__}: {error}. ZERO_JAX_TRACEBACK=1 in the environment "
            "shows the traceback.")


def _shown(frame: traceback.FrameSummary) -> str:
    return f"{frame.filename}, line {frame.lineno}: {frame.line}"


def _is_installed(file: str) -> bool:
    """Whether a source file is of Python, of an installed package or of zero_jax, and so none of the user's."""
    folders = [sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    ours = [str(folder) for folder in (Path(__file__).resolve().parents[1], folder_of_ours()) if folder]
    return file.startswith("<") or any(file.startswith(folder + os.sep) for folder in [*folders, *ours])


def our_models() -> list[str]:
    """The short names of our modules of models, in order; nothing of them is imported."""
    folder = folder_of_ours()
    names = [] if folder is None else [
        module.name for module in pkgutil.iter_modules([str(folder)]) if not module.ispkg]
    return [name for name in names if not name.endswith("_names")]


def short_name(module: str) -> str | None:
    """The short name of a module of ours that is written as gpt2 or zero_jax.models.gpt2; None for any other."""
    name = module.removeprefix(f"{OURS}.")
    return name if name in our_models() else None


def _exists(module: str) -> bool:
    try:
        return bool(module) and importlib.util.find_spec(module) is not None
    except (ModuleNotFoundError, ValueError):  # its package is not there; a name such as "a..b"
        return False


def _modules_beside(module: str) -> list[str]:
    """Names of modules in the same package; none where there is no such package."""
    package = module.rpartition(".")[0]
    spec = importlib.util.find_spec(package) if _exists(package) else None
    folders = spec.submodule_search_locations if spec else None
    return [f"{package}.{beside.name}" for beside in pkgutil.iter_modules(folders)] if folders else []


def nearest(word: str, known: list[str]) -> str:
    """The end of a message about `word`, which is none of `known`: the one that it may have meant, and all."""
    close = difflib.get_close_matches(cut(str(word)), known, n=1, cutoff=0.4)
    hint = f". Did you mean {close[0]!r}?" if close else "."
    return hint + (f" There are: {', '.join(known)}." if known else "")
