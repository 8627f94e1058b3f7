"""The commands `export` and `import`: parameters as safetensors, adapters, programs to serve with; published weights.

A folder for transformers also has the run's tokenizer, and where generation ends.
"""

import contextlib
import dataclasses
import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import export

from zero_jax.checkpoint.plain_params import export_orbax
from zero_jax.cli.environment import simulates
from zero_jax.cli.model_lookup import ModelChoice
from zero_jax.cli.options.data import is_token_file
from zero_jax.cli.options.run import WITH_RESPONSES
from zero_jax.cli.step_from_config import abstract_batch
from zero_jax.cli.weights.file_configs import ExportConfig, ImportConfig
from zero_jax.cli.weights.saved_model import SavedModel
from zero_jax.data.conversations import Conversation, SimpleTemplate, Template, load_template
from zero_jax.data.documents import for_transformers
from zero_jax.data.tokenizer import TOKENIZERS, Tokenizer, load_tokenizer
from zero_jax.distributed.initialize import on_host
from zero_jax.errors import UsageError
from zero_jax.files import read_regular
from zero_jax.frontends.model_functions import to_model_functions
from zero_jax.interop.lora_files import export_lora, export_merged, merge_lora
from zero_jax.interop.model_config import CONFIG, read_config, task_of, write_config
from zero_jax.interop.naming import Names
from zero_jax.interop.params_io import VARIABLES, convert_tensors, export_params, export_tree, model_leaves
from zero_jax.interop.programs import export_programs
from zero_jax.sharding.mesh import make_mesh
from zero_jax.step.make import make_zero_train_step
from zero_jax.tree import cast_floating, merge, split_named

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "stored": None}


def export_command(config: ExportConfig, *, devices: Sequence[jax.Device] | None = None) -> list[Path]:
    """Writes the files and returns their paths; the state is restored on `devices` (default: all, or one CPU).

    Raises ValueError for a checkpoint that is missing, damaged or was not saved by `train`, for a model that does not
    fit it, for files that cannot be written, and for options that cannot take effect.
    """
    saved = SavedModel(config)
    choice, lora_rank = saved.choice, saved.run.lora_rank
    adapters = lora_rank is not None and not config.merge
    config.check_adapter() if adapters else config.check_whole(lora_rank)
    if config.seq_len is not None:
        choice.check(seq_len=config.seq_len, vocab_size=None)
    names = _names("huggingface" if adapters else config.names, choice)
    file_config, files, ids = {}, {}, {}
    if to_folder := config.to_folder and not adapters:
        if choice.file_config is None:
            raise UsageError(f"out={config.out}: the module of {choice.name} has no function "
                             "huggingface_config(config), which a folder for transformers needs: name a file, "
                             "*.safetensors.")
        file_config = choice.file_config(choice.config)
        files, ids = tokenizer_files(saved.options, saved.source, file_config)
        check_tokenizer(config.out, files)
        config.out.mkdir(parents=True, exist_ok=True)
        choice.check_weights(config.out, {})
    step, batch = saved.step_on(devices)
    state = saved.state(step, batch) if saved.needs_state else None
    if config.ema and state is not None:
        state = dataclasses.replace(state, params=state.ema)
    if adapters:
        assert state is not None
        return export_lora(config.out, step, state, names=names, base=saved.options.get("init_from"))
    dtype = DTYPES[config.dtype]
    if config.format != "safetensors":
        if state is None:
            params, variables = saved.params(step, batch)
        else:
            params = merge_lora(step, state, dtype="float32") if config.merge else step.params(state)
            variables = state.variables
        return export_for_serving(config, choice, params, variables, saved.at)
    options: dict[str, Any] = {"names": names, "dtype": dtype, "max_file_bytes": config.max_file_bytes}
    if state is None:
        written = export_tree(config.file, *saved.params(step, batch), **options)
    elif config.merge:
        written = export_merged(config.file, step, state, **options)
    else:
        written = export_params(config.file, state, step.layout(batch), **options)
    if to_folder:  # master weights are stored in float32, but for bf16-stochastic
        file = write_config(config.out, {**file_config, **ids}, dtype or "float32")
        written += [*([] if file is None else [file]), *write_files(config.out, files)]
    return written


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
                           names=names, dtype=DTYPES[config.dtype], max_file_bytes=config.max_file_bytes)


_VARIABLES = VARIABLES.rstrip("/")


def weights_of(params: Any, variables: Any) -> Any:
    """One tree of both, with the names of an exported file; PRNG keys are no weights."""
    others, _ = split_named(variables or {}, _is_no_key)
    return {**params, _VARIABLES: others} if others else params


def model_programs(choice: ModelChoice, params: Any, variables: Any, *, batch: int | None, length: int | None,
                   dtype: Any = None) -> dict[str, tuple[Callable[..., Any], Sequence[Any]]]:
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

    forward = functools.partial(run, call), inputs
    if choice.decoder is None:
        return {"forward": forward}
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

    return {"forward": forward, "decode": (decode, (jax.tree.leaves(cache), tokens))}


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


GENERATION = "generation_config.json"
COPIED = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", GENERATION)
"""Files of a tokenizer's folder, beside the tokenizer itself."""


def tokenizer_files(saved: Mapping[str, Any], source: Path | None, config: Mapping[str, Any]
                    ) -> tuple[dict[str, bytes], dict[str, Any]]:
    """(Files by name, fields of config.json); both are empty for a run on bytes, or on ids of a tokenizer not known.

    What the run's own tokenizer does not say is that of the folder that the run started from, where this has no other
    tokenizer: generation also ends where that model's did. A run on ids alone has the tokenizer of that folder.

    saved: the options of the run. source: its tokenizer, where that is known. config: config.json of the model. Raises
    ValueError for a tokenizer that is not there, or has more ids than the model.
    """
    def with_ends(files: dict[str, bytes], ids: dict[str, Any]) -> tuple[dict[str, bytes], dict[str, Any]]:
        if task_of(config) is not None:
            files[GENERATION] = _generation_config(files.get(GENERATION, b"{}"), ids)
        return files, _known(ids)

    data, base = saved.get("data"), _base_of(saved)
    if source is None and base is not None and data and is_token_file(data[0]):
        if not any((base / name).is_file() for name in TOKENIZERS):  # where it ends is known all the same
            return with_ends({name: text for name, text in _read(base).items() if name == GENERATION}, _ids_of(base))
        source = base
    if source is None:
        return {}, {}
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
    return with_ends(files, ids | {"eos_token_id": [*ends, *known["eos_token_id"]]})


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
    configs = [read_config(folder) or {}, _object(_read(folder).get(GENERATION, b"{}"))]
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
        answer = next(span.text for span in template.examples(Conversation(messages), "")[0] if span.response)
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
