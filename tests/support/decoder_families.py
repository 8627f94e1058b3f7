"""A config.json of each family of decoders, as transformers 4 or 5 write it, for tiny models with many features each.

With each a field of `models.llama.Config`, and a wrong value of it that leaves all shapes as they are.
"""

from typing import Any

_SIZES = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
          "intermediate_size": 24, "vocab_size": 24, "max_position_embeddings": 64, "rms_norm_eps": 1e-5}
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]


def _family(kind: str, name: str, **fields: Any) -> dict[str, Any]:
    return _SIZES | {"model_type": kind, "architectures": [f"{name}ForCausalLM"]} | fields


def _rope(kind: str = "default", theta: float = 100.0, **fields: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": theta, **fields}


FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama 1": (_family("llama", "Llama", num_key_value_heads=4), {"rope_theta": 9e3}),
    "llama biases, linear": (_family(
        "llama", "Llama", attention_bias=True, mlp_bias=True, head_dim=8, rope_theta=100.0,
        rope_scaling={"type": "linear", "factor": 4.0}), {"rope_scaling": None}),
    "llama dynamic": (_family(
        "llama", "Llama", max_position_embeddings=6, rope_parameters=_rope("dynamic", factor=4.0)),
        {"rope_scaling": None}),
    "llama yarn": (_family(
        "llama", "Llama", head_dim=8, rope_parameters=_rope(
            "yarn", factor=4.0, original_max_position_embeddings=8, beta_fast=2.0, beta_slow=0.5)),
        {"rope_scaling": None}),
    "llama yarn mscale": (_family(
        "llama", "Llama", head_dim=8, rope_parameters=_rope(
            "yarn", factor=8.0, original_max_position_embeddings=16, mscale=1.5, mscale_all_dim=0.5, truncate=False)),
        {"rope_scaling": None}),
    "mistral": (_family("mistral", "Mistral", head_dim=8, rope_theta=100.0, sliding_window=4), {"window": 5}),
    "mistral full": (_family("mistral", "Mistral", sliding_window=None, rope_parameters=_rope()), {"rope_theta": 90.0}),
    "qwen2": (_family("qwen2", "Qwen2", rope_theta=100.0, tie_word_embeddings=True), {"rope_theta": 90.0}),
    "qwen2 windows": (_family(
        "qwen2", "Qwen2", rope_theta=100.0, use_sliding_window=True, sliding_window=3, max_window_layers=1),
        {"window_layers": (True, False, True)}),
    "qwen3 windows, yarn": (_family(
        "qwen3", "Qwen3", head_dim=8, use_sliding_window=True, sliding_window=4, layer_types=_MIXED,
        attention_bias=True, rope_parameters=_rope("yarn", factor=4.0, original_max_position_embeddings=8)),
        {"window": None}),
    "gemma": (_family("gemma", "Gemma", head_dim=8, rope_theta=100.0, hidden_act="gelu"), {"rope_theta": 90.0}),
    "gemma2": (_family(
        "gemma2", "Gemma2", head_dim=8, rope_theta=100.0, sliding_window=4, query_pre_attn_scalar=4,
        attn_logit_softcapping=2.0, final_logit_softcapping=3.0, hidden_activation="gelu_pytorch_tanh"),
        {"attention_softcap": None}),
    "gemma3": (_family(
        "gemma3_text", "Gemma3", head_dim=8, sliding_window=4, sliding_window_pattern=2, query_pre_attn_scalar=16,
        rope_theta=1000.0, rope_local_base_freq=100.0, rope_scaling={"rope_type": "linear", "factor": 8.0}),
        {"local_rope_theta": None}),
    "gemma3 of 5": (_family(
        "gemma3_text", "Gemma3", head_dim=8, sliding_window=4, layer_types=_MIXED, final_logit_softcapping=3.0,
        rope_parameters={"full_attention": _rope(theta=1000.0), "sliding_attention": _rope()}),
        {"logits_softcap": None}),
    "phi3": (_family("phi3", "Phi3", rope_theta=100.0, sliding_window=4), {"window": None}),
    "phi3 partial": (_family(
        "phi3", "Phi3", hidden_size=32, rope_parameters=_rope(partial_rotary_factor=0.5)), {"rope_theta": 90.0}),
    "phi3 longrope": (_family(
        "phi3", "Phi3", rope_theta=100.0, original_max_position_embeddings=8, rope_scaling={
            "type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2.0, 5.0]}), {"rope_scaling": None}),
    "phi3 longrope short": (_family(
        "phi3", "Phi3", rope_theta=100.0, original_max_position_embeddings=16, rope_scaling={
            "type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2.0, 5.0]}), {"rope_scaling": None}),
    "olmo2": (_family("olmo2", "Olmo2", rope_theta=100.0), {"epsilon": 1e-2}),
    "smollm3": (_family("smollm3", "SmolLM3", rope_theta=100.0, no_rope_layer_interval=2), {"rope_layers": None}),
    "smollm3 windows": (_family(
        "smollm3", "SmolLM3", no_rope_layers=[0, 1, 1], use_sliding_window=True, sliding_window=3, mlp_bias=True,
        tie_word_embeddings=False, rope_parameters=_rope()), {"window": None}),
    "granite": (_family(
        "granite", "Granite", rope_theta=100.0, attention_bias=True, mlp_bias=True, embedding_multiplier=3.0,
        logits_scaling=4.0, residual_multiplier=0.5, attention_multiplier=0.3), {"residual_scale": 1.0}),
}
