"""The commands `export` and `import`: parameters as safetensors, adapters, programs to serve with; published weights.

A folder for transformers also has the run's tokenizer, and where generation ends.
"""

import contextlib
import dataclasses
import functools
import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import export

from zero_jax.checkpoint.checkpoint import Checkpoints
from zero_jax.checkpoint.manifest import Manifest
from zero_jax.checkpoint.outer_params import slices_in
from zero_jax.checkpoint.plain_params import export_orbax
from zero_jax.cli.environment import simulates
from zero_jax.cli.model_lookup import ModelChoice, is_folder, short_name
from zero_jax.cli.options.data import is_token_file
from zero_jax.cli.options.run import WITH_RESPONSES
from zero_jax.cli.step_from_config import abstract_batch, step_of
from zero_jax.cli.train_config import TrainConfig
from zero_jax.cli.training.resume import LORA
from zero_jax.cli.weights.file_configs import ExportConfig, ImportConfig
from zero_jax.data.conversations import Conversation, SimpleTemplate, Template, load_template
from zero_jax.data.documents import for_transformers, is_tokenized
from zero_jax.data.tokenizer import TOKENIZERS, Tokenizer, load_tokenizer
from zero_jax.distributed.initialize import on_host
from zero_jax.errors import CheckpointError, UsageError
from zero_jax.files import read_regular
from zero_jax.frontends.model_functions import to_model_functions
from zero_jax.interop.lora_files import export_lora, export_merged, merge_lora
from zero_jax.interop.model_config import CONFIG, read_config, task_of, write_config
from zero_jax.interop.naming import Names
from zero_jax.interop.params_io import VARIABLES, convert_tensors, export_params, export_tree, model_leaves
from zero_jax.interop.programs import export_programs
from zero_jax.sharding.mesh import make_mesh, simulate_devices
from zero_jax.state import ZeroState
from zero_jax.step.make import make_zero_train_step
from zero_jax.step.step import ZeroTrainStep
from zero_jax.tree import cast_floating, merge, named_leaves, split_named

NEEDED = ("precision", "optimizer", "ema", "seq_len", "weight_decay", "grad_clip_norm")
"""The options of a run, beside its model, that say how its state is stored. Runs of version 0.1 have them, too."""

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "stored": None}


def export_command(config: ExportConfig, *, devices: Sequence[jax.Device] | None = None) -> list[Path]:
    """Writes the files and returns their paths; the state is restored on `devices` (default: all, or one CPU).

    Raises ValueError for a checkpoint that is missing, damaged or was not saved by `train`, for a model that does not
    fit it, for files that cannot be written, and for options that cannot take effect.
    """
    config.check()
    checkpoints = Checkpoints(config.checkpoint, read_only=True)
    manifest = checkpoints.manifest(config.at)
    number = manifest.step
    run = saved_run(config.checkpoint, config.model, manifest.config)
    if config.ema and run.ema is None:
        raise UsageError("ema: the run kept no average: leave it out.")
    choice = run.find_model()
    adapters = run.lora_rank is not None and not config.merge
    config.check_adapter() if adapters else config.check_whole(run.lora_rank)
    if config.seq_len is not None:
        choice.check(seq_len=config.seq_len, vocab_size=None)
    names = _names("huggingface" if adapters else config.names, choice)
    if devices is None and simulates():
        simulate_devices(1)
    devices = list(devices or jax.devices())
    step = step_of(run, choice, devices)
    batch = abstract_batch(choice, len(devices) * run.accumulate, run.seq_len)
    if adapters:
        state = restored(checkpoints, step, batch, at=number, ema=config.ema)
        source = manifest.config.get("init_from") if isinstance(manifest.config, dict) else None
        return export_lora(config.out, step, state, names=names, base=source)
    if config.format != "safetensors":
        trees = whole_model(checkpoints, step, batch, at=number, ema=config.ema, merge=config.merge,
                            average=keeps_average(run))
        return export_for_serving(config, choice, *trees, number)
    files, ids = {}, {}
    options: dict[str, Any] = {
        "names": names, "dtype": DTYPES[config.dtype], "max_file_bytes": config.max_file_bytes}
    if config.to_folder:
        if choice.file_config is None:
            raise UsageError(f"out={config.out}: the module of {choice.name} has no function "
                             "huggingface_config(config), which a folder for transformers needs: name a file, "
                             "*.safetensors.")
        assert isinstance(manifest.config, dict)
        files, ids = tokenizer_files(manifest.config, config.tokenizer, choice.file_config(choice.config))
        check_tokenizer(config.out, files)
        config.out.mkdir(parents=True, exist_ok=True)
        choice.check_weights(config.out, {})
    if run.lora_rank is not None:
        state = restored(checkpoints, step, batch, at=number, ema=config.ema)
        written = export_merged(config.file, step, state, **options)
    elif config.ema or keeps_average(run):
        state = restored(checkpoints, step, batch, at=number, ema=config.ema)
        written = export_params(config.file, state, step.layout(batch), **options)
    else:
        params, variables = checkpoints.load_params(step, batch, at=number)
        written = export_tree(config.file, params, variables, **options)
    if config.to_folder and choice.file_config is not None:
        dtype = DTYPES[config.dtype] or "float32"  # master weights are stored in float32, but for bf16-stochastic
        file = write_config(config.out, {**choice.file_config(choice.config), **ids}, dtype)
        written += [*([] if file is None else [file]), *write_files(config.out, files)]
    return written


def restored(checkpoints: Checkpoints, step: ZeroTrainStep, batch: Any, *, at: int, ema: bool) -> ZeroState:
    """The state of a checkpoint; ema: with the moving average as its parameters, else with what evaluation takes."""
    state = checkpoints.restore(step, batch, at=at).state
    return dataclasses.replace(state, params=state.ema) if ema else step.evaluation_state(state)


def keeps_average(run: TrainConfig) -> bool:
    """Whether the optimizer's state is needed for the parameters that a run is evaluated with."""
    return run.optimizer == "schedule-free"


def saved_state(checkpoints: Checkpoints, step: ZeroTrainStep, batch: Any, manifest: Manifest, *, average: bool = False
                ) -> ZeroState:
    """A new state with the parameters and variables of a checkpoint, of slices the outer ones; nothing else is read.

    Where `step` has adapters or keeps an average, it is the state that was saved, with what evaluation takes.
    average: whether its optimizer keeps one.
    """
    lora = getattr(step, "lora", None)
    if slices_in(manifest) is None and (average or step.options.ema is not None or lora is not None):
        return step.evaluation_state(checkpoints.restore(step, batch, at=manifest.step).state)
    params, variables = checkpoints.load_params(step, batch, at=manifest.step)
    return step.init(jax.random.key(0), batch, params={**dict(named_leaves(params)), **dict(named_leaves(variables))})


def whole_model(checkpoints: Checkpoints, step: ZeroTrainStep, batch: Any, *, at: int, ema: bool, merge: bool,
                average: bool = False) -> tuple[Any, Any]:
    """(parameters, variables) of a checkpoint in logical shapes; ema: their average; merge: with its adapters added.

    average: of an optimizer that keeps one of its own, which is taken.
    """
    if not (ema or merge or average):
        return checkpoints.load_params(step, batch, at=at)
    state = restored(checkpoints, step, batch, at=at, ema=ema)
    return merge_lora(step, state, dtype="float32") if merge else step.params(state), state.variables


def export_for_serving(config: ExportConfig, choice: ModelChoice, params: Any, variables: Any, number: int
                       ) -> list[Path]:
    """Writes `config.format`, which is no safetensors, of the checkpoint `number`."""
    dtype, weights = DTYPES[config.dtype], weights_of(params, variables)
    if config.format == "orbax":
        return [export_orbax(config.out, weights, dtype=dtype)]
    limits = {name: getattr(choice.config, name, None) for name in ("vocab_size", "max_length")}
    about = {"name": choice.name, "checkpoint": number, **{name: size for name, size in limits.items() if size}}
    programs = model_programs(choice, params, variables, batch=config.batch_size, length=config.seq_len, dtype=dtype)
    return export_programs(config.out, programs, weights, platforms=config.platforms, dtype=dtype,
                           weights=config.weights, model=about, max_file_bytes=config.max_file_bytes)


def saved_run(checkpoint: str, given: str | None, saved: Any) -> TrainConfig:
    """The options of the run that saved, at stage 3, where a device stores the least; given: its model, if said.

    Raises ValueError for what `train` did not save, and for a model that is not ours and was not given.
    """
    saved = saved if isinstance(saved, dict) else {}
    if not saved.keys() >= {"model", *NEEDED}:
        raise CheckpointError(f"{checkpoint} was not saved by the command train: it lacks the options of a "
                              "run. Export it from Python with zero_jax.export_params.")
    model = given or str(saved["model"])
    if given is None and os.sep in model and not is_folder(model):
        raise UsageError(f"model: {checkpoint} names the folder {model!r}, which is not there: give --model and the "
                         "folder that has its config.json.")
    if given is None and not is_folder(model) and short_name(model.partition(":")[0]) is None:
        raise UsageError(f"model: {checkpoint} names the model {model!r}, whose module would run when it is "
                         f"imported: give --model {model} if you trust it.")
    options = {name: saved[name] for name in NEEDED}
    options["grad_clip_norm"] = float(options["grad_clip_norm"])
    options |= {name: tuple(saved[name]) if isinstance(saved[name], list) else saved[name]
                for name in (*LORA, "moments", "schedule", "num_classes") if name in saved}
    return TrainConfig(model=model, stage=3, **options)


def _names(names: str, choice: ModelChoice) -> Names:
    if names == "own":
        return choice.own_names
    if (found := choice.tensor_names()) is None:
        raise UsageError(f"names=huggingface: the module of {choice.name} has no function huggingface(config), which "
                         "defines them. Give names=own (and --merge for a run of adapters).")
    return found


def import_command(config: ImportConfig) -> list[Path]:
    """Writes the files and returns their paths.

    Raises ValueError for weights that are not of this model, and files that cannot be written.
    """
    choice = config.check()
    names = choice.tensor_names()
    assert names is not None
    if simulates():
        jax.config.update("jax_platforms", "cpu")  # one device is enough: it only says which parameters there are
    step = make_zero_train_step(choice.build(choice.config), 0, loss=choice.loss,
                                mesh=make_mesh(devices=jax.devices()[:1]))
    batch = abstract_batch(choice, 1, None)
    return convert_tensors(config.weights, config.out, dict(model_leaves(step.layout(batch).state)),
                           names=names, dtype=DTYPES[config.dtype],
                           max_file_bytes=config.max_file_bytes)


Programs = Mapping[str, tuple[Callable[..., Any], Sequence[Any]]]

_VARIABLES = VARIABLES.rstrip("/")


def weights_of(params: Any, variables: Any) -> Any:
    """One tree of both, with the names of an exported file; PRNG keys are no weights."""
    others, _ = split_named(variables or {}, _is_no_key)
    return {**params, _VARIABLES: others} if others else params


def model_programs(choice: ModelChoice, params: Any, variables: Any, *, batch: int | None, length: int | None,
                   dtype: Any = None) -> Programs:
    """`forward` and, where the model has a decoder, `decode`, of `weights_of`, as `export_programs` takes them.

    params, variables: of the trained state. batch, length: of the inputs; None: any, up to the model's max_length. With
    a `length` `decode` takes one token of each row.
    dtype: of floating weights; None: as they are. Keys and values of the cache have the dtype that follows from it.
    """
    inputs = _inputs(choice, batch, length)
    functions = to_model_functions(choice.build(choice.config), ())
    _, keys = split_named(variables or {}, _is_no_key)
    words = jax.tree.map(lambda key: (on_host(jax.random.key_data(key)), jax.random.key_impl(key)), keys)

    def run(fun: Callable[..., Any], weights: Any, *args: Any) -> Any:
        """`fun(model, args)` of a model with these weights and with the variables that are no weights."""
        own = jax.tree.map(lambda key: jax.random.wrap_key_data(key[0], impl=key[1]), words,
                           is_leaf=lambda leaf: isinstance(leaf, tuple))
        own_params = {name: leaf for name, leaf in weights.items() if name != _VARIABLES}
        others = merge(weights.get(_VARIABLES, {}), own)
        return functions.run(fun, own_params, others, None, args, None, train=False)[0]

    def call(model: Any, inputs: Sequence[jax.Array]) -> jax.Array:
        options = {"train": False} if "train" in inspect.signature(model).parameters else {}
        return model(*inputs, **options).astype(jnp.float32)

    programs: dict[str, tuple[Callable[..., Any], Sequence[Any]]] = {
        "forward": (functools.partial(run, call), inputs)}
    if choice.decoder is None:
        return programs
    decoder, tokens = choice.decoder(choice.config), inputs[0]
    if length is not None:  # what is generated comes a token at a time
        tokens = jax.ShapeDtypeStruct((tokens.shape[0], 1), tokens.dtype)

    def step(model: Any, args: Any) -> tuple[jax.Array, Any]:
        bound = {"params": model.variables["params"] if hasattr(model, "variables") else model}
        logits, new = decoder.apply(bound | args[1], args[0], mutable=["cache"])
        return logits.astype(jnp.float32), new["cache"]

    abstract = jax.eval_shape(lambda: cast_floating(weights_of(params, variables), dtype))
    _, cache = jax.eval_shape(functools.partial(run, step), abstract, tokens, {})

    def decode(weights: Any, leaves: Sequence[jax.Array], tokens: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        logits, new = run(step, weights, tokens, {"cache": jax.tree.unflatten(jax.tree.structure(cache), leaves)})
        return logits, jax.tree.leaves(new)

    return programs | {"decode": (decode, (jax.tree.leaves(cache), tokens))}


def _inputs(choice: ModelChoice, batch: int | None, length: int | None) -> list[jax.ShapeDtypeStruct]:
    """What the model is called with: the inputs of a batch, whose sizes are symbolic where they are free."""
    shapes = abstract_batch(choice, 1, 1)
    longest = getattr(choice.config, "max_length", None)
    scope, inputs = export.SymbolicScope([f"length <= {longest}"] if longest and length is None else []), []
    for name, size in (("inputs", "length"), ("decoder_inputs", "decoder_length")):
        if (leaf := shapes.get(name)) is None:
            continue
        if leaf.ndim == 2 and jnp.issubdtype(leaf.dtype, jnp.integer):
            sizes = [size if length is None else length]
        elif hasattr(choice.config, "image_size"):
            sizes = leaf.shape[1:]
        else:  # images of any size
            sizes = ["height", "width", *leaf.shape[3:]]
        text = ", ".join(str(each) for each in ("batch" if batch is None else batch, *sizes))
        inputs.append(jax.ShapeDtypeStruct(export.symbolic_shape(text, scope=scope), leaf.dtype))
    return inputs


def _is_no_key(name: str, leaf: Any) -> bool:
    return not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


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
        answer = next(piece.text for piece in template.examples(Conversation(messages), "")[0] if piece.response)
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
