"""The config.json of a checkpoint of transformers: what its fields mean, by family, and which module of ours has it.

Tensors of equal names and shapes may be of models that differ in the number of heads, in rotary frequencies or in the
epsilon of a norm. A config is compared in its settled form: every field that a number of the forward pass follows from,
by one name, with transformers' default where it is absent. What `huggingface_config(config)` of a module of models
gives is settled likewise. A field that is in no table is refused unless it is null. No JAX.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any


class ConfigError(ValueError):
    """A config.json that is not understood, or not of a model that there is: one line, to follow the file's name."""


HARMLESS = frozenset("""
    architectures attn_implementation bad_words_ids begin_suppress_tokens bos_token_id cache_implementation
    chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample dtype
    early_stopping encoder_no_repeat_ngram_size eos_token_id eos_token_ids exponential_decay_length_penalty
    finetuning_task forced_bos_token_id forced_eos_token_id gradient_checkpointing id2label initializer_factor
    initializer_range is_encoder_decoder label2id length_penalty max_length max_position_embeddings min_length
    model_type n_ctx n_positions name_or_path no_repeat_ngram_size num_beam_groups num_beams num_labels
    num_return_sequences output_attentions output_hidden_states output_past output_scores pad_token_id prefix
    problem_type remove_invalid_values repetition_penalty return_dict return_dict_in_generate sep_token_id
    suppress_tokens task_specific_params temperature tf_legacy_loss tokenizer_class top_k top_p torch_dtype
    torchscript transformers_version typical_p unsloth_fixed unsloth_version use_bfloat16 use_cache
    _attn_implementation_autoset _commit_hash _name_or_path _num_labels""".split())
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

    module: of ours, which computes it. fields: those that numbers follow from, with what an absent one counts as; a
    function of the others where it is computed from them, which null stands for, too. harmless: more of `HARMLESS`.
    aliases: other names of fields. settle: functions that change a dict of all fields so that what means the same is
    the same. length: the field of the longest text, and what an absent one counts as.
    """

    module: str
    fields: Mapping[str, Any]
    harmless: tuple[str, ...] = ()
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    settle: tuple[Callable[[dict[str, Any]], None], ...] = ()
    length: tuple[str, int] = ("max_position_embeddings", 512)


_OF_ROPE = {
    "default": (), "linear": ("factor",), "dynamic": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "truncate"),
    "longrope": ("original_max_position_embeddings", "attention_factor", "short_factor", "long_factor")}
"""What each kind of rotary frequencies reads."""

_OF_ANY_ROPE = frozenset(["mscale", "mscale_all_dim"]).union(*_OF_ROPE.values())


def _settle_rope(config: dict[str, Any], theta: float = 10000.0) -> None:
    """rope_parameters of transformers 5, and rope_scaling and rope_theta of 4, as one. theta: where none is given."""
    old, new = config.pop("rope_scaling") or {}, {**(config.pop("rope_parameters") or {})}
    if "rope_local_base_freq" in config:  # layers with windows have frequencies of their own
        local = {**(new.pop("sliding_attention", None) or {})}
        full = new.pop("full_attention", None) or {}
        new |= full
        if local.pop("rope_type", "default") != "default":
            raise ConfigError("rope_parameters.sliding_attention with a rope_type: of layers with windows only plain "
                              "frequencies are supported: give a checkpoint without it.")
        config["rope_local_base_freq"] = _one(
            "rope_local_base_freq", local.pop("rope_theta", None), config["rope_local_base_freq"], default=10000.0)
        config |= {f"rope_parameters.sliding_attention.{name}": value for name, value in local.items()}
    rope = {**_one("rope_parameters", new or None, old or None, default={})}
    kind = _one("rope_type", rope.pop("rope_type", None), rope.pop("type", None), default="default")
    longest = config.pop("max_position_embeddings")
    for name, default in (("rope_theta", theta), ("partial_rotary_factor", 1.0),
                          ("original_max_position_embeddings", longest)):
        config[name] = _one(name, rope.pop(name, None), config[name], default=default)
    original = config.pop("original_max_position_embeddings")
    kind = "longrope" if kind in ("su", "yarn") and "long_factor" in rope else kind
    if kind != "default":
        rope["original_max_position_embeddings"] = longest if kind == "dynamic" else original
    if kind in ("yarn", "longrope"):
        factor = rope["factor"] = rope.get("factor") or longest / original
        scales = [rope.get(name) or 0.0 for name in ("mscale", "mscale_all_dim")]
        rope["attention_factor"] = rope.get("attention_factor") or (
            1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original)) if kind == "longrope" else
            _yarn_scale(factor, scales[0]) / _yarn_scale(factor, scales[1]) if all(scales) else
            _yarn_scale(factor, 1.0))
    if kind == "yarn":
        given = {name: value for name, value in rope.items() if value is not None}
        rope = {"truncate": True, **given, "beta_fast": rope.get("beta_fast") or 32, "beta_slow": rope.get(
            "beta_slow") or 1}
    if kind not in _OF_ROPE:
        raise ConfigError(f"rope_type={shown(kind)}: there are {', '.join(_OF_ROPE)}: give a checkpoint of one of "
                          "these.")
    config["rope_type"] = kind
    known = _OF_ROPE[kind]
    config |= {f"rope_parameters.{name}": value for name, value in rope.items()
               if value is not None and (name in known or name not in _OF_ANY_ROPE)}


def _yarn_scale(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0


def _settle_layers(config: dict[str, Any], slides: Callable[[dict[str, Any], int], bool]) -> None:
    """Which layers have a sliding window: by layer_types, or by `slides(config, layer)` where these are not given."""
    window, layers = config["sliding_window"], range(config["num_hidden_layers"])
    if not config.pop("use_sliding_window", True):
        window = None
    kinds = config.pop("layer_types", None)
    if kinds is None:
        kinds = ["sliding_attention" if window is not None and slides(config, layer) else "full_attention"
                 for layer in layers]
    if len(kinds) != len(layers) or not {*kinds} <= {"sliding_attention", "full_attention"}:
        raise ConfigError(f"layer_types={shown(kinds)}: of each of the {len(layers)} layers sliding_attention or "
                          "full_attention is known: give a checkpoint of such layers.")
    if window is None and "sliding_attention" in kinds:
        raise ConfigError("layer_types with sliding_attention, and no sliding_window: give its tokens.")
    for name in ("max_window_layers", "sliding_window_pattern", "_sliding_window_pattern"):
        config.pop(name, None)
    config["layer_types"] = [*kinds]
    config["sliding_window"] = window if "sliding_attention" in kinds else None


def _settle_positions(config: dict[str, Any]) -> None:
    """Which layers have rotary positions."""
    every, given = config.pop("no_rope_layer_interval"), config["no_rope_layers"]
    layers = range(config["num_hidden_layers"])
    config["no_rope_layers"] = [int(bool(given[layer] if given is not None else (layer + 1) % every))
                                for layer in layers]


def _settle_gelu(config: dict[str, Any]) -> None:
    """Gemma's activation, by whichever name: its first files say gelu, and it is by tanh."""
    names = [config.pop(name, None) for name in ("hidden_activation", "hidden_act")]
    names = ["gelu_pytorch_tanh" if name == "gelu" else name for name in names]
    config["hidden_act"] = _one("hidden_act", *names, default="gelu_pytorch_tanh")
    config["use_bidirectional_attention"] = bool(config["use_bidirectional_attention"])


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


_LLAMA = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "rms_norm_eps": 1e-6, "hidden_act": "silu", "attention_bias": False,
    "tie_word_embeddings": False, "num_key_value_heads": lambda c: c["num_attention_heads"], "rope_theta": None,
    "rope_scaling": None, "rope_parameters": None, "partial_rotary_factor": None, "max_position_embeddings": 2048,
    "original_max_position_embeddings": None, "head_dim": lambda c: c["hidden_size"] // c["num_attention_heads"]}
_QWEN = _LLAMA | {"vocab_size": 151936, "intermediate_size": 22016, "max_position_embeddings": 32768,
                  "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "layer_types": None}
_GEMMA = _LLAMA | {
    "vocab_size": 256000, "head_dim": 256, "tie_word_embeddings": True, "max_position_embeddings": 8192,
    "hidden_act": None, "hidden_activation": None, "use_bidirectional_attention": False}
_GEMMA2 = _GEMMA | {
    "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
    "num_key_value_heads": 4, "query_pre_attn_scalar": 256, "sliding_window": 4096, "layer_types": None,
    "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0}
_GEMMA3 = _GEMMA2 | {
    "vocab_size": 262208, "max_position_embeddings": 131072, "final_logit_softcapping": None,
    "attn_logit_softcapping": None, "rope_local_base_freq": None, "sliding_window_pattern": None,
    "_sliding_window_pattern": None}
_ENCODER = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072,
            "hidden_act": "gelu", "layer_norm_eps": 1e-12}


def _layers(slides: Callable[[dict[str, Any], int], bool]) -> Callable[[dict[str, Any]], None]:
    return functools.partial(_settle_layers, slides=slides)


def _every(config: dict[str, Any], layer: int) -> bool:
    return True


FAMILIES = {
    "gpt2": Family(
        "gpt2",
        {"vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": lambda c: 4 * c["n_embd"],
         "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "scale_attn_weights": True,
         "scale_attn_by_inverse_layer_idx": False, "tie_word_embeddings": True},
        ("is_decoder", "n_special", "predict_special_tokens", "reorder_and_upcast_attn", "summary_activation",
         "summary_proj_to_labels", "summary_type", "summary_use_proj"),
        {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
        length=("n_positions", 1024)),
    "llama": Family("llama", _LLAMA | {"mlp_bias": False}, ("is_decoder", "pretraining_tp"), settle=(_settle_rope,)),
    "mistral": Family(
        "llama", _LLAMA | {"intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072,
                           "sliding_window": 4096}, settle=(_settle_rope, _layers(_every))),
    "qwen2": Family("llama", _QWEN | {"use_mrope": False}, ("is_decoder",), settle=(
        _settle_rope, _layers(lambda c, layer: layer >= c["max_window_layers"]))),
    "qwen3": Family("llama", _QWEN | {"head_dim": 128}, ("is_decoder",), settle=(
        _settle_rope, _layers(lambda c, layer: layer >= c["max_window_layers"]))),
    "gemma": Family(
        "llama", _GEMMA | {"hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28,
                           "num_attention_heads": 16, "num_key_value_heads": 16}, settle=(_settle_gelu, _settle_rope)),
    "gemma2": Family("llama", _GEMMA2, settle=(
        _settle_gelu, _settle_rope, _layers(lambda c, layer: layer % 2 == 0))),
    "gemma3_text": Family("llama", _GEMMA3, settle=(
        _settle_gelu, functools.partial(_settle_rope, theta=1e6), _layers(lambda c, layer: (layer + 1) % (
            c["sliding_window_pattern"] or c["_sliding_window_pattern"] or 6) != 0))),
    "phi3": Family(
        "llama", _LLAMA | {"vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192, "rms_norm_eps": 1e-5,
                           "max_position_embeddings": 4096, "original_max_position_embeddings": 4096,
                           "sliding_window": None}, ("auto_map",), settle=(_settle_rope, _layers(_every))),
    "olmo2": Family("llama", _LLAMA | {"vocab_size": 50304, "rms_norm_eps": 1e-5}, settle=(_settle_rope,)),
    "smollm3": Family(
        "llama", _LLAMA | {"vocab_size": 128256, "hidden_size": 2048, "num_hidden_layers": 36,
                           "num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 32768,
                           "tie_word_embeddings": True, "mlp_bias": False, "use_sliding_window": False,
                           "sliding_window": None, "layer_types": None, "no_rope_layers": None,
                           "no_rope_layer_interval": 4}, ("max_window_layers", "pretraining_tp"), settle=(
            functools.partial(_settle_rope, theta=2e6), _settle_positions,
            _layers(lambda c, layer: not c["no_rope_layers"][layer]))),
    "granite": Family(
        "llama", _LLAMA | {"mlp_bias": False, "embedding_multiplier": 1.0, "logits_scaling": 1.0,
                           "residual_multiplier": 1.0, "attention_multiplier": 1.0}, settle=(_settle_rope,)),
    "bert": Family(
        "bert",
        _ENCODER | {"vocab_size": 30522, "type_vocab_size": 2, "position_embedding_type": "absolute",
                    "is_decoder": False, "tie_word_embeddings": True},
        ("directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers",
         "pooler_size_per_head", "pooler_type")),
    "roberta": Family(
        "bert",
        _ENCODER | {"vocab_size": 50265, "type_vocab_size": 2, "position_embedding_type": "absolute",
                    "is_decoder": False, "tie_word_embeddings": True, "pad_token_id": 1}),
    "distilbert": Family(
        "bert",
        {"vocab_size": 30522, "dim": 768, "n_layers": 6, "n_heads": 12, "hidden_dim": 3072, "activation": "gelu",
         "tie_word_embeddings": True}, ("sinusoidal_pos_embds", "tie_weights_"),
        {"hidden_size": "dim", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads"}),
    "t5": Family(
        "t5",
        {"vocab_size": 32128, "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8,
         "num_decoder_layers": lambda c: c["num_layers"], "relative_attention_num_buckets": 32,
         "relative_attention_max_distance": 128, "layer_norm_epsilon": 1e-6, "feed_forward_proj": "relu",
         "dense_act_fn": None, "is_gated_act": None, "scale_decoder_outputs": None, "tie_word_embeddings": True,
         "is_decoder": False, "is_encoder_decoder": True},
        aliases={"hidden_size": "d_model", "num_hidden_layers": "num_layers", "num_attention_heads": "num_heads",
                 "head_dim": "d_kv"}, settle=(_settle_t5,)),
    "vit": Family(
        "vit",
        _ENCODER | {"image_size": 224, "patch_size": 16, "num_channels": 3, "qkv_bias": True},
        ("encoder_stride", "is_decoder", "pooler_act", "pooler_output_size", "tie_word_embeddings"),
        settle=(_settle_vit,)),
    "resnet": Family(
        "resnet",
        {"num_channels": 3, "embedding_size": 64, "hidden_sizes": [256, 512, 1024, 2048], "depths": [3, 4, 6, 3],
         "layer_type": "bottleneck", "hidden_act": "relu", "downsample_in_first_stage": False,
         "downsample_in_bottleneck": False},
        ("is_decoder", "out_features", "out_indices", "stage_names", "tie_word_embeddings")),
}


def settled(config: Mapping[str, Any], expected: Mapping[str, Any]) -> dict[str, Any]:
    """All fields that numbers follow from, as the family of `expected` settles them, or those of `expected` alone.

    Raises ConfigError for a field that nothing is known of, and for values that cannot be understood.
    """
    kind = expected.get("model_type")
    family = FAMILIES.get(str(kind)) or Family("", {})
    fields = {**dict.fromkeys(name for name in expected if not _is_harmless(name, family)), **_EVERY, **family.fields}
    given: dict[str, Any] = {}
    try:
        for name, value in config.items():
            known_as = family.aliases.get(name, name)
            if known_as in fields:
                given[known_as] = _one(name, value, given.get(known_as))
            elif value is not None and not _is_harmless(name, family):
                raise ConfigError(
                    f"{name}={shown(value)}: nothing is known of this field in a model of type {kind!r}: give a "
                    "checkpoint without it, or take it out of config.json where you know that no number of the model "
                    "follows from it.")
        found = {name: given.get(name, value) for name, value in fields.items()}
        for name, value in fields.items():
            if callable(value) and given.get(name) is None:
                found[name] = value(found)
        for settle in family.settle:
            settle(found)
    except ConfigError:
        raise
    except (TypeError, ValueError, AttributeError, KeyError, IndexError, ArithmeticError) as error:
        raise ConfigError(f"what cannot be understood: its fields are not a model's ({error}).") from error
    return found


def difference(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """(Name, value, our value) of the first field that differs in two settled configs."""
    return next(((name, theirs.get(name), ours.get(name)) for name in {**theirs, **ours}
                 if not _same(theirs.get(name), ours.get(name))), None)


def model_config(config: Mapping[str, Any], modules: Callable[[str], Any]) -> tuple[Any, Any]:
    """(The module of ours that computes the model of a config.json, its config).

    modules: imports a module of ours by its short name. Raises ConfigError for a model that there is not.
    """
    kind = config.get("model_type")
    if (family := FAMILIES.get(kind if isinstance(kind, str) else "")) is None:
        others = {"gemma3": "Its text model alone is: save the language_model as Gemma3ForCausalLM."}
        raise ConfigError(f"model_type={shown(kind)}, of which there is no model: there are {', '.join(FAMILIES)}. "
                          + others.get(str(kind), "Give a checkpoint of one of these."))
    fields, module = settled(config, {"model_type": kind}), modules(family.module)
    for name, value in config.items():
        like = family.fields.get(name)
        kinds = bool if isinstance(like, bool) else (int, float) if isinstance(like, (int, float)) else object
        if value is not None and (not isinstance(value, kinds) or kinds is not bool and isinstance(value, bool) and (
                kinds is not object)):
            raise ConfigError(f"{name}={shown(value)}, which is not as {like!r}: give a value of that kind.")
    if (length := config.get(family.length[0])) is None:
        length = family.fields.get(*family.length)
    try:
        ours = module.Config(**module.huggingface_fields(kind, {**fields, "max_length": length, "labels": len(
            config.get("id2label") or ()) or config.get("num_labels") or 2}))
        again = settled(module.huggingface_config(ours), {"model_type": kind})
    except ConfigError:
        raise
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
        raise ConfigError(f"what is no model of ours: {error}") from error
    if (wrong := difference(fields, again)) is not None:
        name, value, own = wrong
        raise ConfigError(f"{name}={shown(value)}, which a model of type {kind!r} has not here: it has {shown(own)}: "
                          "give a checkpoint of such a model.")
    return module, ours


def _is_harmless(name: str, family: Family) -> bool:
    if name in family.fields:
        return False
    return name in HARMLESS or name in family.harmless or any(part in name for part in DROPOUT)


def _one(name: str, *values: Any, default: Any = None) -> Any:
    """The value that is given, or is given several times; raises ConfigError for several values."""
    given = [value for value in values if value is not None]
    if any(not _same(value, given[0]) for value in given):
        raise ConfigError(f"{name} twice, as {' and '.join(map(shown, given))}: leave one of them out.")
    return given[0] if given else default


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


def shown(value: Any) -> str:
    """`value` for a message, on one line and cut."""
    try:
        text = " ".join(repr(value)[:2000].split())
    except Exception:
        return f"<{type(value).__name__}>"
    return text if len(text) <= 200 else f"{text[:130]} ... {text[-40:]}"
