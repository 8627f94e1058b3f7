"""The configurations of `export`, `import` and `generate`. Nothing here imports JAX: bad input is refused at once."""

import dataclasses
import functools
import importlib.util
from pathlib import Path
from typing import Annotated, Literal

from zero_jax.checkpoint.object_store import check_scheme, is_remote, numbers_in
from zero_jax.cli.environment import check_folder, checkpoints_of
from zero_jax.cli.model_lookup import ModelChoice, find_model
from zero_jax.cli.options.choices import Count, Within, settle
from zero_jax.data.text_sources import check_file, files_of, format_of, json_rows
from zero_jax.data.tokenizer import load_tokenizer
from zero_jax.errors import UsageError
from zero_jax.files import read_regular
from zero_jax.interop.safetensors_file import check_target, find_tensors


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedModelConfig:
    """Which model of a run is used."""

    checkpoint: str = dataclasses.field(kw_only=False)
    """Folder of the run, or of its checkpoints, as runs/train or gs://bucket/folder."""

    at: Annotated[int | None, Within(0)] = None
    """The checkpoint's number. None: the latest."""

    ema: bool = False
    """The moving average in place of the parameters."""

    tokenizer: Path | None = None
    """The run's tokenizer, as for train. None: where the run names it; bytes, or ids, for a run that names none."""

    model: str | None = None
    """MODULE:PRESET of the run. None: as the checkpoint says, if that is one of ours: importing a module runs it, and a
    checkpoint may come from anywhere."""

    def __post_init__(self) -> None:
        check_scheme(self.checkpoint)
        object.__setattr__(self, "checkpoint", checkpoints_of(self.checkpoint))
        settle(self)

    def check(self) -> None:
        """Raises ValueError for what is wrong and can be known before JAX is imported."""
        self._check_checkpoint()
        if self.tokenizer is not None:
            load_tokenizer(self.tokenizer)

    def _check_checkpoint(self) -> None:
        if is_remote(self.checkpoint):
            numbers_in(self.checkpoint)
        elif not Path(self.checkpoint).expanduser().is_dir():
            raise UsageError(f"checkpoint={self.checkpoint}: no such folder.")


@dataclasses.dataclass(frozen=True)
class ExportConfig(SavedModelConfig):
    """Write the parameters of a checkpoint for inference or for another library, with programs that use them.

    Of a run with adapters (--lora-rank): the adapters alone, as a folder of PEFT, or with --merge the whole model.
    """

    out: Path
    """The file, *.safetensors; above --max-file-bytes several files and an index. Or, with --names huggingface, a
    folder that transformers loads: model.safetensors, and what it has not of config.json, generation_config.json and
    the files of the run's tokenizer. Of the other formats: a folder that does not exist, or is empty."""

    format: Literal["safetensors", "programs", "orbax"] = "safetensors"
    """safetensors: the parameters. programs: a folder with the forward pass and, where the model has one, the decode
    step as StableHLO (jax.export), the weights and a loader, all of which need only JAX. orbax: the parameters as an
    Orbax checkpoint that StandardCheckpointer restores."""

    dtype: Literal["fp32", "bf16", "stored"] = "fp32"
    """Dtype of floating tensors; stored: as the checkpoint has them."""

    names: Literal["own", "huggingface"] = "own"
    """Names of the tensors: ours, as blocks/qkv/kernel, or Hugging Face's, where the model's module defines them."""

    merge: bool = False
    """Of a run with adapters: write the model with the adapters added, and not the adapters alone."""

    max_file_bytes: Annotated[int, Within(1)] = 5 << 30
    """Largest size of the tensors in one file, in bytes."""

    platforms: tuple[Literal["cpu", "cuda", "rocm", "tpu"], ...] = ("cpu", "cuda", "tpu")
    """Of programs: where they can run."""

    weights: Literal["beside", "inside"] = "beside"
    """Of programs: in safetensors files beside them, or inside of each as constants, up to 1 GiB."""

    batch_size: Count | None = None
    """Of programs: rows of the inputs. None: any number."""

    seq_len: Count | None = None
    """Of programs: tokens of a row; decode then takes one at a time. None: any number, up to the model's max_length."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "out", Path(self.out).expanduser())
        self._check_format()
        if self.tokenizer is not None and not self.to_folder:
            raise UsageError(f"tokenizer={self.tokenizer}: only a folder that transformers loads has one: leave it "
                             "out, or give names=huggingface and a folder as out.")

    def check(self) -> None:
        """Raises ValueError for a checkpoint that is not there, and an `out` that cannot be written."""
        self._check_checkpoint()
        if self.may_be_adapter:
            check_folder("out", self.out)
        else:
            self._check_out()

    def check_adapter(self) -> None:
        """Raises UsageError for what cannot take effect where adapters alone are written."""
        if not self.may_be_adapter:
            raise UsageError(f"out={self.out}: this run trained adapters, which are written to a folder (PEFT's): name "
                             "one, or give --merge to write the whole model.")
        if self.format != "safetensors":
            raise UsageError(f"format={self.format}: this run trained adapters: give --merge to write the whole model.")
        for name in ("dtype", "max_file_bytes"):
            if getattr(self, name) != getattr(ExportConfig, name):
                raise UsageError(f"{name}={getattr(self, name)}: adapters are one file of float32: leave it out, or "
                                 "give --merge to write the whole model.")
        if self.out.is_dir():
            check_target(self.out / "adapter_model.safetensors", new=True)

    def check_whole(self, lora_rank: int | None) -> None:
        """Raises UsageError for what cannot take effect where a whole model is written. lora_rank: of the run."""
        if self.merge and lora_rank is None:
            raise UsageError("merge: this run trained the model and no adapters: leave it out.")
        self._check_out()

    def _check_format(self) -> None:
        """Raises ValueError for options that the format does not use, rather than to ignore them."""
        unused = {"safetensors": (), "programs": ("names",), "orbax": ("names", "max_file_bytes")}[self.format]
        programs = ("platforms", "weights", "batch_size", "seq_len")
        for name in (*unused, *(() if self.format == "programs" else programs)):
            if getattr(self, name) != getattr(ExportConfig, name):
                raise UsageError(f"{name}={getattr(self, name)}: format={self.format} does not use it: leave it out"
                                 + (", or give format=programs." if name in programs else "."))
        if not self.platforms or len(set(self.platforms)) < len(self.platforms):
            raise UsageError(f"platforms={self.platforms}: give at least one, and each once.")

    def _check_out(self) -> None:
        if self.format != "safetensors":
            check_folder("out", self.out)
            if self.out.is_dir() and any(self.out.iterdir()):
                raise UsageError(f"out={self.out} is not an empty folder: give another.")
            if self.format == "programs" and importlib.util.find_spec("flatbuffers") is None:
                raise UsageError("format=programs needs the package flatbuffers: pip install 'zero-jax[serve]'.")
        elif self.to_folder and not self.out.is_dir():
            check_folder("out", self.out)
        else:
            check_target(self.file, new=True)

    @property
    def may_be_adapter(self) -> bool:
        """Whether `out` can be a folder for adapters, as far as is known without the checkpoint."""
        return self.format == "safetensors" and not self.merge and (self.out.is_dir() or not self.out.suffix)

    @property
    def to_folder(self) -> bool:
        """Whether `out` is a folder for transformers, rather than a file."""
        huggingface = self.format == "safetensors" and self.names == "huggingface"
        return huggingface and (self.out.is_dir() or not self.out.suffix)

    @property
    def file(self) -> Path:
        """The file of the tensors, also where an index is written beside it."""
        return self.out / "model.safetensors" if self.to_folder else self.out


@dataclasses.dataclass(frozen=True)
class ImportConfig:
    """Write the weights of a Hugging Face checkpoint under our names, for --init-from of many runs."""

    model: str
    """MODULE:PRESET that the checkpoint is of, as llama:3.2-1b; or the folder with its config.json."""

    weights: Path
    """A folder with model.safetensors or an index of such files, and config.json, which must agree with the preset; or
    such a file or index."""

    out: Path
    """The file, *.safetensors; above --max-file-bytes several files and an index."""

    dtype: Literal["fp32", "bf16", "stored"] = "stored"
    """Dtype of floating tensors; stored: as the checkpoint has them."""

    max_file_bytes: Annotated[int, Within(1)] = 5 << 30
    """Largest size of the tensors in one file, in bytes."""

    def __post_init__(self) -> None:
        settle(self)
        object.__setattr__(self, "weights", Path(self.weights).expanduser())
        object.__setattr__(self, "out", Path(self.out).expanduser())

    def check(self) -> ModelChoice:
        """The model; raises ValueError for what is wrong and can be known before JAX is imported."""
        tensors = find_tensors(self.weights)
        check_target(self.out, new=True)
        choice = find_model(self.model)
        if choice.names is None:
            raise UsageError(f"model={self.model}: its module has no function huggingface(config), which defines the "
                             "names of its published checkpoints.")
        choice.check_weights(self.weights, tensors)
        return choice


@dataclasses.dataclass(frozen=True)
class EvaluateConfig(SavedModelConfig):
    """Measure how well the model of a run predicts texts: nats per token, perplexity and bits per byte of all of them.

    Each text is cut into windows, the last of which may be short. Each token but the first of a text counts once.
    """

    text: tuple[str, ...] = ()
    """Files, folders and globs of text, .jsonl, .parquet or .array_record; each file, line or row is a text."""

    text_field: str = "text"
    """The field of JSON lines, or column of Parquet, that has the text."""

    seq_len: Count | None = None
    """Tokens of a window. None: those of the run's sequences."""

    stride: Count | None = None
    """Tokens between the starts of two windows: with fewer than seq_len each token is predicted from at least
    seq_len - stride before it, but for the first window's, and more is computed. None: seq_len."""

    batch_size: Count = 8
    """Windows at a time."""

    json: bool = False
    """Print JSON."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.text or "" in self.text:
            raise UsageError("text is empty: name files of text.")
        if self.seq_len is not None:
            self.check_stride(self.seq_len)

    def check_stride(self, seq_len: int) -> None:
        """Raises UsageError where windows of so many tokens would leave some out."""
        if self.stride is not None and self.stride > seq_len:
            raise UsageError(f"stride={self.stride} is more than seq_len={seq_len}, and would leave tokens out: give "
                             "at most that.")

    def check(self) -> None:
        """As `SavedModelConfig`, and the files of text."""
        for name in self.text:
            for file in files_of(name):
                check_file(file, field=self.text_field)
        super().check()


@dataclasses.dataclass(frozen=True)
class SamplingConfig(SavedModelConfig):
    """Which model generates, and how its tokens are drawn."""

    template: Literal["auto", "chat", "none"] = "auto"
    """How a prompt is read. chat: as a user's message, in the run's chat template; none: as a text; auto: chat for a
    run that was trained on messages."""

    tokens: Annotated[int, Within(1, 1 << 20)] = 100
    """Tokens to generate, at most; with the prompt at most the model's max_length. What comes after the end of text, or
    after what ends a response in the template, is left out."""

    temperature: Annotated[float, Within(0, 100)] = 0.7
    """Divides the logits; 0 takes the most likely token each time."""

    top_k: Annotated[int | None, Within(1, 1 << 20)] = None
    """Draw from so many of the likeliest tokens alone. None: from all."""

    top_p: Annotated[float | None, Within(1e-6, 1)] = None
    """Draw from the likeliest tokens alone whose probabilities come to at least this. None: from all."""

    stop: tuple[str, ...] = ()
    """Texts that end what is generated; they are left out."""

    seed: Annotated[int, Within(0, 2**32 - 1)] = 0
    """Of the draws."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if "" in self.stop:
            raise UsageError("stop has an empty text, which begins everywhere: leave it out.")


@dataclasses.dataclass(frozen=True)
class GenerateConfig(SamplingConfig):
    """Continue prompts with the model of a checkpoint, whose module has a decoder(config), as gpt2 and llama have."""

    prompt: tuple[str, ...] = ()
    """Texts to continue; of a run on files of tokens without a tokenizer, ids with spaces between them."""

    prompt_file: Path | None = None
    """Further prompts: the lines of a text, or the field `prompt` of each line of a .jsonl file."""

    out: Path | None = None
    """Write a line of JSON for each prompt, {"prompt": ..., "text": ...}, into this new file, and print none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.prompt and self.prompt_file is None or "" in self.prompt:
            raise UsageError("prompt is empty: give a text to continue, or a prompt_file.")

    def check(self) -> None:
        """As `SamplingConfig`, and a file to write that is new."""
        if self.out is not None:
            check_folder("out", self.out.absolute().parent)
            if self.out.exists():
                raise UsageError(f"out={self.out} exists, and is not replaced: remove it, or name another file.")
        _ = self.prompts
        super().check()

    @functools.cached_property
    def prompts(self) -> tuple[str, ...]:
        """All of them. Raises UsageError for a file that has none, or cannot be read."""
        if (path := self.prompt_file) is None:
            return self.prompt
        try:
            lines = list(filter(None, read_regular(path, 1 << 28).decode().splitlines()))
            rows = [row.get("prompt") for _, row in json_rows(path)] if format_of(path) == "jsonl" else lines
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"prompt_file={path} cannot be read as text ({error}): give lines in UTF-8.") from error
        if not rows or not all(isinstance(row, str) and row for row in rows):
            raise UsageError(f"prompt_file={path}: give one prompt a line, or in .jsonl a text in each field prompt.")
        return (*self.prompt, *map(str, rows))


@dataclasses.dataclass(frozen=True)
class ChatConfig(SamplingConfig):
    """Talk with the model of a run that was trained on messages: zero-jax chat RUN. /new forgets what was said."""
