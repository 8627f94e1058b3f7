"""The config.json of a checkpoint of transformers: what its fields mean, and whether they are of a model. No JAX.

Tensors of equal names and shapes may be of models that differ in the number of heads, in rotary frequencies or in the
epsilon of a norm. A config is compared in its settled form: every field that a number of the forward pass follows from,
by one name, with transformers' default where it is absent. What `huggingface_config(config)` of a module of models
gives is settled likewise. A field that is in no table is refused unless it is null.
"""

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from zero_jax.arguments import shown
from zero_jax.errors import UsageError
from zero_jax.files import read_regular
from zero_jax.interop.safetensors_file import file_metadata

CONFIG, IN_FILE = "config.json", "zero_jax_config"
"""The file beside weights; the field of a safetensors file's metadata that holds the same text."""

MAX_BYTES = 10_000_000
"""Of a config.json: larger is something else."""

HARMLESS = frozenset("""
    architectures attn_implementation bad_words_ids begin_suppress_tokens bos_token_id chunk_size_feed_forward
    cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample dtype early_stopping
    encoder_no_repeat_ngram_size eos_token_id eos_token_ids exponential_decay_length_penalty finetuning_task
    forced_bos_token_id forced_eos_token_id gradient_checkpointing id2label initializer_factor initializer_range
    is_encoder_decoder label2id length_penalty max_length max_position_embeddings min_length model_type n_ctx
    n_positions name_or_path no_repeat_ngram_size num_beam_groups num_beams num_labels num_return_sequences
    output_attentions output_hidden_states output_past output_scores pad_token_id prefix problem_type
    remove_invalid_values repetition_penalty return_dict return_dict_in_generate sep_token_id suppress_tokens
    task_specific_params temperature tf_legacy_loss tokenizer_class top_k top_p torch_dtype torchscript
    transformers_version typical_p unsloth_fixed unsloth_version use_bfloat16 use_cache _attn_implementation_autoset
    _commit_hash _name_or_path _num_labels""".split())
"""Fields of any model that no number of the forward pass follows from, or that shapes of tensors show, too."""

DROPOUT = ("dropout", "pdrop")
"""Parts of names of fields of training alone."""

WORDS = {"swish": "silu", **dict.fromkeys(("gelu_pytorch_tanh", "gelu_python_tanh", "gelu_fast"), "gelu_new"),
         "gelu_python": "gelu"}
"""Names of the same function."""

_EVERY = {"add_cross_attention": False, "pruned_heads": {}, "quantization_config": None, "tie_encoder_decoder": False}


@dataclasses.dataclass(frozen=True)
class Family:
    """The fields of config.json of one `model_type`.

    fields: those that numbers follow from, with what an absent one counts as; a function of the others where it is
    computed from them, which null stands for, too. harmless: more of `HARMLESS`. aliases: other names of fields.
    settle: changes a dict of all fields so that what means the same is the same.
    """

    fields: Mapping[str, Any]
    harmless: tuple[str, ...] = ()
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    settle: Callable[[dict[str, Any]], None] | None = None


def _settle_rope(config: dict[str, Any]) -> None:
    """rope_parameters of transformers 5, and rope_scaling and rope_theta of 4, as one."""
    old, new = config.pop("rope_scaling") or {}, config.pop("rope_parameters") or {}
    rope = {**_one("rope_parameters", new or None, old or None, default={})}
    kind = _one("rope_type", rope.pop("rope_type", None), rope.pop("type", None), default="default")
    for name, default in (("rope_theta", 10000.0), ("partial_rotary_factor", 1.0),
                          ("original_max_position_embeddings", config["max_position_embeddings"])):
        config[name] = _one(name, rope.pop(name, None), config[name], default=default)
    original = config.pop("original_max_position_embeddings")
    del config["max_position_embeddings"]
    if kind == "default":
        rope = {name: value for name, value in rope.items() if name not in _OF_SCALING}
    else:
        rope["original_max_position_embeddings"] = original
    config["rope_type"] = kind
    config |= {f"rope_parameters.{name}": value for name, value in rope.items() if value is not None}


def _settle_windows(config: dict[str, Any]) -> None:
    """Whether any layer has a sliding window, by layer_types, or by the older fields where these are not given."""
    _settle_rope(config)
    window, first = config.pop("sliding_window"), config.pop("max_window_layers")
    config["use_sliding_window"] = bool(
        config["use_sliding_window"] and window is not None and config["layer_types"] is None
        and first < config["num_hidden_layers"])
    config["layer_types"] = sorted({*(config["layer_types"] or ["full_attention"])})


def _settle_t5(config: dict[str, Any]) -> None:
    """The parts of feed_forward_proj, and whether decoder outputs are scaled, of which transformers 4 says tying."""
    proj, tied = config.pop("feed_forward_proj"), config.pop("tie_word_embeddings")
    gated, _, act = proj.rpartition("-")
    meant = {"is_gated_act": gated == "gated", "dense_act_fn": "gelu_new" if proj == "gated-gelu" else act,
             "scale_decoder_outputs": tied is not False}
    config |= {name: value for name, value in meant.items() if config[name] is None}


def _settle_vit(config: dict[str, Any]) -> None:
    """Sides of a square, each given once."""
    for name in ("image_size", "patch_size"):
        if isinstance(config[name], (list, tuple)) and len({*config[name]}) == 1:
            config[name] = config[name][0]


_OF_SCALING = ("factor", "low_freq_factor", "high_freq_factor", "attention_factor", "beta_fast", "beta_slow", "mscale",
               "mscale_all_dim", "truncate", "short_factor", "long_factor")
"""What scaled frequencies have, and unscaled ones do not read."""

_LLAMA = {
    "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "attention_bias": False, "tie_word_embeddings": False, "num_key_value_heads": lambda c: c["num_attention_heads"],
    "rope_theta": None, "rope_scaling": None, "rope_parameters": None, "partial_rotary_factor": None,
    "original_max_position_embeddings": None}
_ENCODER = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072,
            "hidden_act": "gelu", "layer_norm_eps": 1e-12}

FAMILIES = {
    "gpt2": Family(
        {"vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": lambda c: 4 * c["n_embd"],
         "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "scale_attn_weights": True,
         "scale_attn_by_inverse_layer_idx": False, "tie_word_embeddings": True},
        ("is_decoder", "n_special", "predict_special_tokens", "reorder_and_upcast_attn", "summary_activation",
         "summary_proj_to_labels", "summary_type", "summary_use_proj"),
        {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}),
    "llama": Family(
        _LLAMA | {"vocab_size": 32000, "intermediate_size": 11008, "mlp_bias": False, "max_position_embeddings": 2048,
                  "head_dim": lambda c: c["hidden_size"] // c["num_attention_heads"]},
        ("is_decoder", "pretraining_tp"), settle=_settle_rope),
    "qwen3": Family(
        _LLAMA | {"vocab_size": 151936, "intermediate_size": 22016, "head_dim": 128, "max_position_embeddings": 32768,
                  "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "layer_types": None},
        ("is_decoder",), settle=_settle_windows),
    "bert": Family(
        _ENCODER | {"vocab_size": 30522, "type_vocab_size": 2, "position_embedding_type": "absolute",
                    "is_decoder": False, "tie_word_embeddings": True},
        ("directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers",
         "pooler_size_per_head", "pooler_type")),
    "t5": Family(
        {"vocab_size": 32128, "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8,
         "num_decoder_layers": lambda c: c["num_layers"], "relative_attention_num_buckets": 32,
         "relative_attention_max_distance": 128, "layer_norm_epsilon": 1e-6, "feed_forward_proj": "relu",
         "dense_act_fn": None, "is_gated_act": None, "scale_decoder_outputs": None, "tie_word_embeddings": True,
         "is_decoder": False, "is_encoder_decoder": True},
        aliases={"hidden_size": "d_model", "num_hidden_layers": "num_layers", "num_attention_heads": "num_heads",
                 "head_dim": "d_kv"}, settle=_settle_t5),
    "vit": Family(
        _ENCODER | {"image_size": 224, "patch_size": 16, "num_channels": 3, "qkv_bias": True},
        ("encoder_stride", "is_decoder", "pooler_act", "pooler_output_size", "tie_word_embeddings"),
        settle=_settle_vit),
    "resnet": Family(
        {"num_channels": 3, "embedding_size": 64, "hidden_sizes": [256, 512, 1024, 2048], "depths": [3, 4, 6, 3],
         "layer_type": "bottleneck", "hidden_act": "relu", "downsample_in_first_stage": False,
         "downsample_in_bottleneck": False},
        ("is_decoder", "out_features", "out_indices", "stage_names", "tie_word_embeddings")),
}


def check_config(weights: Path, expected: Mapping[str, Any] | None, model: str, files: Iterable[Path] = ()) -> None:
    """Raises ValueError unless what is known of the model of `weights` describes `model`.

    That is the config.json beside them, and the one that their files hold.

    weights: the file, the index or the folder. expected: config.json of the model; None: not known. model: its name.
    files: those of the tensors.
    """
    files = sorted({*files})
    found = [(file, _parsed(file, text)) for file in files if (text := file_metadata(file).get(IN_FILE)) is not None]
    if expected is None:
        if found:
            raise UsageError(f"{weights} says of which model it is, and of {model} that is not known: give names="
                             "zero_jax.Names(config=llama.huggingface_config(config)), say, or the module of the model "
                             "a function huggingface_config(config).")
        return
    folder = weights if weights.is_dir() else weights.parent
    if (beside := read_config(folder)) is not None:
        found.append((folder / CONFIG, beside))
    if files and not found and weights.is_dir():
        raise UsageError(f"{weights} has no {CONFIG}, and tensors do not show the number of heads, say: put it there, "
                         "or name the file where you know that it is of this model.")
    for path, config in found:
        _compare(path, config, expected, model)


def _compare(path: Path, found: Mapping[str, Any], expected: Mapping[str, Any], model: str) -> None:
    kind = expected.get("model_type")
    if found.get("model_type", kind) != kind:
        raise UsageError(f"{path} is of a model of type {shown(found['model_type'])}, and {model} is of type {kind!r}: "
                         "give the checkpoint of such a model.")
    theirs, ours = (_settled(path, config, expected) for config in (found, expected))
    for name in {**theirs, **ours}:
        if not _same(theirs.get(name), ours.get(name)):
            verb = "says" if name in found else "means"
            raise UsageError(f"{path} {verb} {name}={shown(theirs.get(name))}, and {model} has "
                             f"{shown(ours.get(name))}: give a checkpoint of this model, or a preset that is the "
                             "checkpoint's.")


def _settled(path: Path, config: Mapping[str, Any], expected: Mapping[str, Any]) -> dict[str, Any]:
    """All fields that numbers follow from, as the family of `expected` settles them, or those of `expected` alone."""
    kind = expected.get("model_type")
    family = FAMILIES.get(str(kind)) or Family({})
    fields = {**dict.fromkeys(name for name in expected if not _is_harmless(name, family)), **_EVERY, **family.fields}
    given: dict[str, Any] = {}
    try:
        for name, value in config.items():
            known_as = family.aliases.get(name, name)
            if known_as in fields:
                given[known_as] = _one(name, value, given.get(known_as))
            elif value is not None and not _is_harmless(name, family):
                raise UsageError(
                    f"{name}={shown(value)}: nothing is known of this field in a model of type {kind!r}: give a "
                    f"checkpoint without it, or take it out of {CONFIG} where you know that no number of the model "
                    "follows from it.")
        found = {name: given.get(name, value) for name, value in fields.items()}
        for name, value in fields.items():
            if callable(value) and given.get(name) is None:
                found[name] = value(found)
        if family.settle is not None:
            family.settle(found)
    except UsageError as error:
        raise UsageError(f"{path} says {error}") from None
    except (TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise UsageError(f"{path} is not a model's config: its fields cannot be understood ({error}).") from error
    return found


def _is_harmless(name: str, family: Family) -> bool:
    if name in family.fields:
        return False
    return name in HARMLESS or name in family.harmless or any(part in name for part in DROPOUT)


def _one(name: str, *values: Any, default: Any = None) -> Any:
    """The value that is given, or is given several times; raises UsageError for several values."""
    given = [value for value in values if value is not None]
    if any(not _same(value, given[0]) for value in given):
        raise UsageError(f"{name} twice, as {' and '.join(map(shown, given))}: leave one of them out.")
    return given[0] if given else default


def task_of(config: Mapping[str, Any]) -> str | None:
    """What the model of a config.json generates, as PEFT calls it; None for a model that does not generate."""
    tasks = {"ForCausalLM": "CAUSAL_LM", "LMHeadModel": "CAUSAL_LM", "ForConditionalGeneration": "SEQ_2_SEQ_LM"}
    kinds = config.get("architectures") or ()
    return next((task for kind in kinds for end, task in tasks.items() if str(kind).endswith(end)), None)


def read_config(folder: Path) -> dict[str, Any] | None:
    """The config.json of a folder; None where there is none. Raises ValueError for one that is no JSON object."""
    path = folder / CONFIG
    if not path.is_file():
        return None
    try:
        return _parsed(path, read_regular(path, MAX_BYTES))
    except OSError as error:
        raise UsageError(f"{path} is not a model's config: it cannot be read ({error}).") from error


def _parsed(path: Path, text: str | bytes) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
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
    """Numbers by value, but for what float32 rounds, and names of functions by what they compute."""
    if isinstance(ours, (int, float)) and isinstance(theirs, (int, float)):
        try:
            return math.isclose(ours, theirs, rel_tol=1e-6)
        except OverflowError:
            return False
    if isinstance(ours, str) and isinstance(theirs, str):
        return WORDS.get(ours, ours) == WORDS.get(theirs, theirs)
    return theirs == ours
