"""The names and the config.json of Hugging Face's LLaMA and Qwen 3 for `models.llama` and `models.llama_nnx`."""

from typing import Any


def huggingface(config: Any) -> dict[str, Any]:
    """Fields of `zero_jax.Names`: rules are (our name, theirs, columns, transposed).

    PyTorch's Linear stores (out, in).
    """
    block, layer = r"blocks(?:[_/](?P<layer>\d+))?/", "model.layers.{layer}."
    rules: list[tuple[Any, ...]] = [
        ("wte/embedding", "model.embed_tokens.weight"), ("lm_head/embedding", "lm_head.weight"),
        ("ln_f/scale", "model.norm.weight"), (f"{block}ln_1/scale", f"{layer}input_layernorm.weight"),
        (f"{block}ln_2/scale", f"{layer}post_attention_layernorm.weight"),
        (f"{block}attn/(?P<of>[qk])_norm/scale", f"{layer}self_attn.{{of}}_norm.weight"),
        (f"{block}attn/proj/kernel", f"{layer}self_attn.o_proj.weight", None, True),
        (f"{block}attn/(?P<of>[qkv])/kernel", f"{layer}self_attn.{{of}}_proj.weight", None, True),
        (f"{block}mlp/(?P<of>gate|up|down)/kernel", f"{layer}mlp.{{of}}_proj.weight", None, True)]
    return {"rules": rules, "config": huggingface_config(config),
            "tied": {"lm_head.weight": "model.embed_tokens.weight"} if config.tied else {},
            "ignored": (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)}


def huggingface_config(config: Any) -> dict[str, Any]:
    """The config.json of a checkpoint of this model."""
    scaling = config.rope_scaling
    kind, name = ("qwen3", "Qwen3") if config.qk_norm else ("llama", "Llama")
    return {
        "architectures": [f"{name}ForCausalLM"], "model_type": kind, "hidden_size": config.width,
        "intermediate_size": config.hidden, "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim, "vocab_size": config.vocab_size, "max_position_embeddings": config.max_length,
        "rms_norm_eps": config.epsilon, "rope_theta": config.rope_theta, "tie_word_embeddings": config.tied,
        "hidden_act": "silu", "attention_bias": False, "bos_token_id": None, "eos_token_id": None,
        "rope_scaling": None if scaling is None else {
            "rope_type": "llama3", "factor": scaling.factor, "low_freq_factor": scaling.low_factor,
            "high_freq_factor": scaling.high_factor,
            "original_max_position_embeddings": scaling.original_max_length}}
