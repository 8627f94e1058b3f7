"""The names and the config.json of Hugging Face's LLaMA and its kin for `models.llama` and `models.llama_nnx`."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from .layers.huggingface import settled
from .layers.rotary import RopeScaling

FIXED: dict[str, dict[str, Any]] = {
    "llama": {}, "mistral": {}, "qwen2": {"qkv_bias": True}, "qwen3": {"qk_norm": True},
    "gemma": {"norm_offset": 1.0, "activation": "gelu"},
    "gemma2": {"norm_offset": 1.0, "activation": "gelu", "norms": "both"},
    "gemma3_text": {"norm_offset": 1.0, "activation": "gelu", "norms": "both", "qk_norm": True},
    "phi3": {"fused": True}, "olmo2": {"norms": "post", "qk_norm": "all"}, "smollm3": {}, "granite": {}}
"""What of a model its `model_type` alone says."""

CLASSES = {"gemma3_text": "Gemma3", "smollm3": "SmolLM3"}
"""Of transformers, without ForCausalLM, where the name is not that of the type."""

FIELDS = {
    "num_layers": "num_hidden_layers", "width": "hidden_size", "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads", "hidden": "intermediate_size", "head_dim": "head_dim",
    "vocab_size": "vocab_size", "max_length": "max_length", "rope_theta": "rope_theta", "tied": "tie_word_embeddings",
    "epsilon": "rms_norm_eps", "rotary_share": "partial_rotary_factor", "local_rope_theta": "rope_local_base_freq",
    "window": "sliding_window", "attention_softcap": "attn_logit_softcapping", "mlp_bias": "mlp_bias",
    "logits_softcap": "final_logit_softcapping", "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier", "logits_divisor": "logits_scaling",
    "attention_scale": "attention_multiplier"}
"""Fields of `Config`, and of a settled config.json (`layers.huggingface`)."""

SCALING = {
    "factor": "factor", "low_factor": "low_freq_factor", "high_factor": "high_freq_factor",
    "original_max_length": "original_max_position_embeddings", "attention_factor": "attention_factor",
    "beta_fast": "beta_fast", "beta_slow": "beta_slow", "truncate": "truncate", "short_factors": "short_factor",
    "long_factors": "long_factor"}
"""Fields of `RopeScaling`, and of rope_scaling."""

WRITTEN = {
    "linear": ("factor",), "dynamic": ("factor",),
    "llama3": ("factor", "low_factor", "high_factor", "original_max_length"),
    "yarn": ("factor", "original_max_length", "attention_factor", "beta_fast", "beta_slow", "truncate"),
    "longrope": ("original_max_length", "attention_factor", "short_factors", "long_factors")}
"""Of `SCALING`, what each kind has in a written config.json."""


def huggingface(config: Any) -> dict[str, Any]:
    """Fields of `zero_jax.Names`: rules are (our name, theirs, columns, transposed).

    PyTorch's Linear stores (out, in). Phi-3's fused rows are (q | k | v, head, head dim) and (gate | up, unit), and our
    columns are (key-value head, its q | k | v, head dim) and (unit, gate | up).
    """
    block, layer = r"blocks(?:[_/](?P<layer>\d+))?/", "model.layers.{layer}."
    second = "pre_feedforward" if config.norms == "both" else "post_attention"
    norms = {"ln_1": "input", "ln_1_post": "post_attention", "ln_2": second, "ln_2_post": "post_feedforward"}
    rules: list[tuple[Any, ...]] = [
        ("wte/embedding", "model.embed_tokens.weight"), ("lm_head/embedding", "lm_head.weight"),
        ("ln_f/scale", "model.norm.weight"),
        *((f"{block}{ours}/scale", f"{layer}{theirs}_layernorm.weight") for ours, theirs in norms.items()),
        (f"{block}attn/(?P<of>[qk])_norm/scale", f"{layer}self_attn.{{of}}_norm.weight")]
    for leaf, name, transposed in (("kernel", "weight", True), ("bias", "bias", False)):
        rules += [(f"{block}attn/proj/{leaf}", f"{layer}self_attn.o_proj.{name}", None, transposed),
                  (f"{block}attn/(?P<of>[qkv])/{leaf}", f"{layer}self_attn.{{of}}_proj.{name}", None, transposed),
                  (f"{block}mlp/(?P<of>gate|up|down)/{leaf}", f"{layer}mlp.{{of}}_proj.{name}", None, transposed)]
        if config.fused:
            rules += [(f"{block}attn/qkv/{leaf}", f"{layer}self_attn.qkv_proj.{name}", _qkv_columns(config),
                       transposed),
                      (f"{block}mlp/gate_up/{leaf}", f"{layer}mlp.gate_up_proj.{name}",
                       tuple(np.arange(2 * config.hidden).reshape(2, -1).T.reshape(-1).tolist()), transposed)]
    return {"rules": rules, "config": huggingface_config(config),
            "tied": {"lm_head.weight": "model.embed_tokens.weight"} if config.tied else {},
            "ignored": (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)}


def _qkv_columns(config: Any) -> tuple[int, ...]:
    heads, kv = config.num_heads, config.num_kv_heads
    q = np.arange(heads).reshape(kv, -1)
    k, v = heads + np.arange(kv)[:, None], heads + kv + np.arange(kv)[:, None]
    order = np.concatenate([q, k, v], 1).reshape(-1, 1) * config.head_dim + np.arange(config.head_dim)[None]
    return tuple(order.reshape(-1).tolist())


def huggingface_fields(kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `Config` of a settled config.json (`layers.huggingface`) of this `model_type`."""
    found = {ours: fields[theirs] for ours, theirs in FIELDS.items() if fields.get(theirs) is not None}
    found |= {"family": kind, **FIXED[kind], "remat": fields["hidden_size"] >= 1024}  # as the presets
    if kind != "phi3":
        del found["rotary_share"]  # which the others do not have
    if fields["attention_bias"] and kind not in ("mistral", "qwen2", "phi3"):  # which do not read it
        found |= {"qkv_bias": True, "proj_bias": True}
    if kind.startswith("gemma"):
        found["embedding_scale"] = math.sqrt(fields["hidden_size"])
    if (scalar := fields.get("query_pre_attn_scalar")) is not None:
        found["attention_scale"] = scalar ** -0.5
    if fields.get("sliding_window") is not None:
        layers = tuple(each == "sliding_attention" for each in fields["layer_types"])
        found["window_layers"] = None if all(layers) else layers
    if not all(layers := tuple(map(bool, fields.get("no_rope_layers", ())))):
        found["rope_layers"] = layers
    if (rope := fields["rope_type"]) != "default":
        given: dict[str, Any] = {ours: fields.get(f"rope_parameters.{theirs}") for ours, theirs in SCALING.items()}
        given |= {ours: tuple(value) for ours, value in given.items() if isinstance(value, list)}
        scaling = RopeScaling(kind=rope, **{ours: value for ours, value in given.items() if value is not None})
        found["rope_scaling"] = scaling
        if rope == "dynamic":
            found["max_length"] = int(scaling.factor * scaling.original_max_length)
    return found


def huggingface_config(config: Any) -> dict[str, Any]:
    """The config.json of a checkpoint of this model, as transformers 4 and 5 read it.

    Raises ValueError for a config of which no config.json of its family is.
    """
    found = _written(config)
    kind, fields = found["model_type"], settled(found, found)
    theirs = {field.name: field.default for field in dataclasses.fields(config)} | huggingface_fields(
        kind, {**fields, "max_length": config.max_length})
    for name, value in _numbers(vars(config)).items():
        if (other := _numbers(theirs)[name]) != value and not (
                isinstance(value, float) and isinstance(other, float) and math.isclose(value, other, rel_tol=1e-6)):
            raise ValueError(f"{name}={value}: a model of family {kind!r} has {other}: give the family= of which it "
                             f"is: {', '.join(FIXED)}.")
    return found


def _numbers(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config that numbers follow from, each in one form."""
    c, num_layers = config, config["num_layers"]
    every = (True,) * num_layers
    others = ("dtype", "attention", "scan_layers", "remat", "family", "max_length")
    return {name: value for name, value in c.items() if name not in others} | {
        "attention_scale": float(c["attention_scale"] or c["head_dim"] ** -0.5),
        "local_rope_theta": float(c["rope_theta"] if None in (c["local_rope_theta"], c["window"]) else c[
            "local_rope_theta"]),
        "rope_layers": c["rope_layers"] or every,
        "window_layers": every if c["window"] is None else c["window_layers"] or every}


def _written(config: Any) -> dict[str, Any]:
    scaling, layers = config.rope_scaling, range(config.num_layers)
    kind = config.family or ("qwen3" if config.qk_norm is True else "llama")
    if kind not in FIXED:
        raise ValueError(f"family={kind!r} is none of {', '.join(FIXED)}.")
    is_gemma, sliding = kind.startswith("gemma"), config.window_layers or (True,) * config.num_layers
    longest = config.max_length
    found = {
        "architectures": [f"{CLASSES.get(kind, kind.capitalize())}ForCausalLM"], "model_type": kind,
        "hidden_size": config.width, "intermediate_size": config.hidden, "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim, "vocab_size": config.vocab_size,
        "rms_norm_eps": config.epsilon, "rope_theta": config.rope_theta, "tie_word_embeddings": config.tied,
        "hidden_activation" if is_gemma and kind != "gemma" else "hidden_act":
            "gelu_pytorch_tanh" if config.activation == "gelu" else config.activation,
        "attention_bias": config.proj_bias, "bos_token_id": None, "eos_token_id": None, "rope_scaling": None}
    if scaling is not None:
        found["rope_scaling"] = {"rope_type": scaling.kind, **{
            SCALING[name]: [*value] if isinstance(value := getattr(scaling, name), tuple) else value
            for name in WRITTEN[scaling.kind]}}
    if kind in ("llama", "granite", "smollm3"):
        found["mlp_bias"] = config.mlp_bias
    if kind == "granite":
        scale = 1 / math.sqrt(config.head_dim) if config.attention_scale is None else config.attention_scale
        found |= {"attention_multiplier": scale, "embedding_multiplier": config.embedding_scale,
                  "residual_multiplier": config.residual_scale, "logits_scaling": config.logits_divisor}
    if kind in ("gemma2", "gemma3_text"):
        scalar = config.head_dim if config.attention_scale is None else config.attention_scale ** -2
        found |= {"query_pre_attn_scalar": round(scalar) if math.isclose(scalar, round(scalar)) else scalar,
                  "final_logit_softcapping": config.logits_softcap, "attn_logit_softcapping": config.attention_softcap}
    if kind == "gemma3_text":
        found["rope_local_base_freq"] = config.local_rope_theta or config.rope_theta
    if kind in ("gemma2", "gemma3_text", "qwen2", "qwen3", "smollm3") and config.window is not None:
        found["layer_types"] = ["sliding_attention" if sliding[layer] else "full_attention" for layer in layers]
    if kind in ("qwen2", "qwen3", "smollm3") and config.window is not None:
        found |= {"use_sliding_window": True, "max_window_layers": 0}
    if kind not in ("llama", "gemma", "olmo2", "granite"):
        found["sliding_window"] = config.window
    if kind in ("gemma2", "gemma3_text") and config.window is None:
        found["layer_types"] = ["full_attention" for _ in layers]
    if kind == "smollm3":
        found["no_rope_layers"] = [int(each) for each in config.rope_layers or (True,) * config.num_layers]
    if scaling is not None and scaling.kind == "dynamic":
        longest = scaling.original_max_length
    if kind == "phi3":
        found["partial_rotary_factor"] = config.rotary_share
        found["original_max_position_embeddings"] = longest if scaling is None else scaling.original_max_length
        if scaling is not None and scaling.kind == "longrope":  # transformers 4 takes three fields alone
            rope = found["rope_scaling"]
            found["rope_scaling"] = {"type": "longrope", "short_factor": rope["short_factor"],
                                     "long_factor": rope["long_factor"]}
    return found | {"max_position_embeddings": longest}
