"""Variants of config.json for the tiny models of `reference_models`: which are of these models, and which are not.

`scripts/tables/model_parity.py --configs` loads each with the library transformers and the same tensors, and writes a
few logits into `tests/interop/config_variants.json`.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from support import reference_models as ours

FILE = Path(__file__).parents[1] / "interop" / "config_variants.json"
ABSENT = "(absent)"
SAME = "~"
"""Before a field that is refused although transformers' logits are ours, or it cannot load the tensors at all."""

_V5 = {"rope_theta": ABSENT, "rope_scaling": ABSENT}
_LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 16, "rope_theta": 100.0}
_OLD = {("type" if name == "rope_type" else name): value for name, value in _LLAMA3.items() if name != "rope_theta"}


def _v5(**rope: Any) -> dict[str, Any]:
    """Fields as transformers 5 writes them."""
    return _V5 | {"rope_parameters": {name: value for name, value in rope.items() if value != ABSENT}}


def _scaled(**changes: Any) -> dict[str, Any]:
    return _v5(**_LLAMA3 | changes)


VARIANTS: dict[str, list[tuple[dict[str, Any], str | None]]] = {
    "llama": [
        ({}, None), (_scaled(), None), (_scaled(type="llama3"), None), ({"rope_scaling": _OLD}, None),
        (_scaled(rope_theta=ABSENT) | {"rope_theta": 100}, None), ({"rope_scaling": _LLAMA3}, None),
        ({"hidden_act": "swish", "pretraining_tp": 2, "use_cache": False, "initializer_range": 0.5}, None),
        ({"max_position_embeddings": 4096, "attention_dropout": 0.0, "attn_logit_softcapping": None}, None),
        (_scaled(rope_type="yarn", low_freq_factor=ABSENT, high_freq_factor=ABSENT), "rope_type"),
        (_scaled(rope_type="linear"), "rope_type"), (_scaled(rope_type="default"), "rope_type"),
        (_scaled(rope_type="dynamic"), "rope_type"), (_scaled(rope_theta=1e4), "rope_theta"),
        (_scaled(rope_theta=ABSENT), "rope_theta"), (_V5, "rope_theta"), ({"rope_theta": ABSENT}, "rope_theta"),
        (_scaled(factor=16.0), "factor"), (_scaled(low_freq_factor=2.0), "low_freq_factor"),
        (_scaled(original_max_position_embeddings=ABSENT), "original_max_position_embeddings"),
        (_scaled() | {"original_max_position_embeddings": 32}, "original_max_position_embeddings"),
        (_scaled() | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_parameters"),
        (_scaled(rope_theta=1e4) | {"rope_theta": 100.0}, "rope_theta"),
        ({"rope_scaling": None}, "rope_type"), ({"rope_scaling": ABSENT}, "rope_type"),
        (_scaled(partial_rotary_factor=0.5), "~partial_rotary_factor"),
        ({"partial_rotary_factor": 0.5}, "~partial_rotary_factor"), ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rms_norm_eps": 0.1}, "rms_norm_eps"), ({"is_causal": False}, "is_causal"),
        ({"attention_bias": True}, "~attention_bias"), ({"mlp_bias": True}, "~mlp_bias"),
        ({"head_dim": ABSENT}, "~head_dim"), ({"num_key_value_heads": ABSENT}, "~num_key_value_heads"),
        ({"attention_multiplier": 0.5}, "~attention_multiplier"), ({"sliding_window": 4}, "~sliding_window"),
        ({"attn_logit_softcapping": 5.0}, "~attn_logit_softcapping"), ({"logits_scaling": 8.0}, "~logits_scaling"),
        ({"final_logit_softcapping": 5.0}, "~final_logit_softcapping"), ({"auto_map": {}}, "~auto_map"),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}, "~quantization_config"),
        ({"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 4}, "type 'mistral'")],
    "llama tied": [
        ({}, None), (_v5(rope_type="default", rope_theta=5e5), None), (_v5(rope_theta=500000), None),
        ({"rope_parameters": {"rope_type": "default"}}, None), ({"rope_scaling": {"type": "default"}}, None),
        ({"rope_scaling": {}, "head_dim": None}, None), ({"head_dim": ABSENT, "rope_scaling": ABSENT}, None),
        (_v5(rope_type="default", rope_theta=5e5, factor=8.0), None),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type"),
        (_v5(rope_type="default", rope_theta=1e4), "rope_theta"),
        (_v5(rope_type="longrope", rope_theta=5e5, short_factor=[1.0, 3.0], long_factor=[1.0, 9.0], factor=4.0,
             original_max_position_embeddings=4), "rope_type"),
        (_v5(rope_type="dynamic", rope_theta=5e5, factor=2.0), "~rope_type"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 5e5}}}, "~full_attention"),
        ({"tie_word_embeddings": ABSENT}, "~tie_word_embeddings")],
    "qwen3": [
        ({}, None), (_v5(rope_type="default", rope_theta=1e6), None),
        ({"use_sliding_window": False, "sliding_window": 4, "max_window_layers": 0}, None),
        ({"layer_types": ["full_attention", "full_attention"]}, None),
        ({"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}, None),
        ({"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}, "sliding_window"),
        ({"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}, "sliding_window"),
        ({"use_sliding_window": True, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
         "sliding_window"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "~layer_types"),
        (_V5, "rope_theta"), ({"rms_norm_eps": ABSENT, "rope_theta": ABSENT}, "rope_theta"),
        (_v5(rope_type="yarn", rope_theta=1e6, factor=4.0, original_max_position_embeddings=8), "rope_type"),
        ({"head_dim": ABSENT}, "~head_dim"), ({"rms_norm_eps": 0.1}, "rms_norm_eps"),
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, "~type 'llama'")],
    "gpt2": [
        ({}, None), ({"n_inner": 64}, None), ({"n_inner": ABSENT, "n_ctx": 16, "gradient_checkpointing": False}, None),
        ({"layer_norm_epsilon": 9.999999747378752e-06}, None),
        ({"activation_function": "gelu_pytorch_tanh", "reorder_and_upcast_attn": True}, None),
        ({"activation_function": "gelu_fast", "summary_type": "mean", "scale_attn_weights": ABSENT}, None),
        ({"n_embd": ABSENT, "hidden_size": 16, "n_layer": ABSENT, "num_hidden_layers": 2}, None),
        ({"n_head": 2}, "n_head"), ({"n_head": ABSENT, "num_attention_heads": 2}, "n_head"),
        ({"num_attention_heads": 2}, "n_head"), ({"n_head": ABSENT}, "~n_head"),
        ({"activation_function": "relu"}, "activation_function"), ({"scale_attn_weights": False}, "scale_attn_weights"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ({"layer_norm_epsilon": 0.1}, "layer_norm_epsilon"), ({"n_inner": 32}, "~n_inner"),
        ({"tie_word_embeddings": False}, "~tie_word_embeddings"),
        ({"add_cross_attention": True}, "~add_cross_attention"),
        ({"pruned_heads": {"0": [1]}}, "~pruned_heads"), ({"n_embd": "wide"}, "~n_embd")],
    "bert": [
        ({}, None), ({"initializer_range": 0.5, "hidden_act": "gelu_python", "layer_norm_eps": ABSENT}, None),
        ({"model_type": "bert", "position_embedding_type": ABSENT, "pooler_type": "first_token_transform"}, None),
        ({"is_decoder": True}, "is_decoder"), ({"hidden_act": "relu"}, "hidden_act"),
        ({"hidden_act": "gelu_new"}, "hidden_act"), ({"layer_norm_eps": 0.1}, "layer_norm_eps"),
        ({"num_attention_heads": 2}, "num_attention_heads"), ({"intermediate_size": ABSENT}, "~intermediate_size"),
        ({"position_embedding_type": "relative_key"}, "~position_embedding_type")],
    "t5": [
        ({}, None), ({"scale_decoder_outputs": True, "dense_act_fn": "relu", "is_gated_act": False}, None),
        ({"num_decoder_layers": None, "feed_forward_proj": ABSENT, "tie_word_embeddings": ABSENT}, None),
        ({"scale_decoder_outputs": False}, "scale_decoder_outputs"),
        ({"tie_word_embeddings": False}, "scale_decoder_outputs"), ({"dense_act_fn": "gelu_new"}, "dense_act_fn"),
        ({"relative_attention_max_distance": ABSENT}, "relative_attention_max_distance"),
        ({"layer_norm_epsilon": 0.1}, "layer_norm_epsilon"), ({"feed_forward_proj": "gated-relu"}, "~is_gated_act"),
        ({"is_encoder_decoder": False}, "is_encoder_decoder"), ({"d_kv": ABSENT}, "~d_kv")],
    "t5 1.1": [
        ({}, None), ({"feed_forward_proj": "gated-gelu_new"}, None),
        ({"tie_word_embeddings": True, "scale_decoder_outputs": False, "dense_act_fn": "gelu_new",
          "is_gated_act": True}, None), ({"tie_word_embeddings": ABSENT}, "scale_decoder_outputs"),
        ({"feed_forward_proj": "gated-silu"}, "dense_act_fn"), ({"dense_act_fn": "gelu"}, "dense_act_fn")],
    "vit": [
        ({}, None), ({"image_size": [8, 8], "patch_size": [4, 4], "pooler_act": "relu"}, None),
        ({"hidden_act": "gelu_new"}, "hidden_act"), ({"layer_norm_eps": 0.1}, "layer_norm_eps"),
        ({"num_attention_heads": 2}, "num_attention_heads"), ({"qkv_bias": False}, "~qkv_bias")],
    "resnet": [
        ({}, None),
        ({"out_features": ["stage2"], "out_indices": [2], "stage_names": ["stem", "stage1", "stage2"]}, None),
        ({"downsample_in_first_stage": True}, "downsample_in_first_stage"), ({"hidden_act": "gelu"}, "hidden_act"),
        ({"downsample_in_bottleneck": True}, "downsample_in_bottleneck"), ({"depths": ABSENT}, "~depths")],
}


def config_of(case: str, number: int) -> dict[str, Any]:
    """The config.json of a variant."""
    config = ours.huggingface_config(ours.model_of(case)) | VARIANTS[case][number][0]
    return {name: value for name, value in config.items() if value != ABSENT}


def theirs(case: str, number: int, folder: Path) -> list[float] | None:
    """The digest of the logits of the library transformers, None where it cannot load the tensors with that config."""
    from support import transformers_models

    try:
        model = transformers_models.loaded(transformers_models.as_folder(
            ours.model_of(case), config_of(case, number), folder))
        return digest(transformers_models.logits_and_gradients(model, case)[0])
    except Exception:  # whatever it raises for sizes, names and values that it does not take
        return None


def digest(logits: np.ndarray) -> list[float]:
    """The last eight logits of the last example."""
    return [float(f"{value:.6g}") for value in logits[-1].reshape(-1)[-8:]]


def written() -> dict[str, list[list[float] | None]]:
    """What the library transformers gave, by case; None where it cannot load the tensors."""
    return json.loads(FILE.read_text())["logits"]
