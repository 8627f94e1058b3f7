"""The names and the config.json of Hugging Face's T5 for `models.t5`."""

from collections.abc import Mapping
from typing import Any


def huggingface(config: Any) -> dict[str, Any]:
    """Fields of `zero_jax.Names`: rules are (our name, theirs, columns, transposed).

    PyTorch's Linear stores (out, in).
    """
    ours, block = r"(?P<stack>encoder|decoder)/", r"blocks(?:[_/](?P<layer>\d+))?/"
    layer = "{stack}.block.{layer}.layer."
    rules: list[tuple[Any, ...]] = [
        ("wte/embedding", "shared.weight"), ("lm_head/embedding", "lm_head.weight"),
        (f"{ours}ln_f/scale", "{stack}.final_layer_norm.weight"),
        (f"{ours}relative_bias/embedding",
         "{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"),
        (f"{ours}{block}ln_1/scale", f"{layer}0.layer_norm.weight"),
        (f"{ours}{block}ln_cross/scale", f"{layer}1.layer_norm.weight"),
        (f"(?P<stack>encoder)/{block}ln_2/scale", f"{layer}1.layer_norm.weight"),
        (f"(?P<stack>decoder)/{block}ln_2/scale", f"{layer}2.layer_norm.weight")]
    for attn, theirs in (("attn", "0.SelfAttention"), ("cross", "1.EncDecAttention")):
        rules += [(f"{ours}{block}{attn}/proj/kernel", f"{layer}{theirs}.o.weight", None, True),
                  (f"{ours}{block}{attn}/(?P<of>[qkv])/kernel", f"{layer}{theirs}.{{of}}.weight", None, True)]
    for stack, number in (("encoder", 1), ("decoder", 2)):
        names = {"gate": "wi_0", "up": "wi_1"} if config.gated else {"up": "wi"}
        rules += [(f"(?P<stack>{stack})/{block}mlp/{name}/kernel", f"{layer}{number}.DenseReluDense.{theirs}.weight",
                   None, True) for name, theirs in (names | {"down": "wo"}).items()]
    tied = {f"{stack}.embed_tokens.weight": "shared.weight" for stack in ("encoder", "decoder")}
    return {"rules": rules, "config": huggingface_config(config),
            "tied": tied if config.gated else tied | {"lm_head.weight": "shared.weight"},
            "ignored": (r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",)}


def huggingface_fields(kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `Config` of a settled config.json (`layers.huggingface`)."""
    return {"num_layers": fields["num_layers"], "width": fields["d_model"], "hidden": fields["d_ff"],
            "num_heads": fields["num_heads"], "head_dim": fields["d_kv"], "gated": fields["is_gated_act"],
            "vocab_size": fields["vocab_size"], "buckets": fields["relative_attention_num_buckets"],
            "max_distance": fields["relative_attention_max_distance"], "max_length": fields["max_length"],
            "remat": fields["d_model"] >= 1024}


def huggingface_config(config: Any) -> dict[str, Any]:
    """The config.json of a checkpoint of this model."""
    return {
        "architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "is_encoder_decoder": True,
        "d_model": config.width, "d_kv": config.head_dim, "d_ff": config.hidden, "num_layers": config.num_layers,
        "num_decoder_layers": config.num_layers, "num_heads": config.num_heads, "vocab_size": config.vocab_size,
        "relative_attention_num_buckets": config.buckets, "relative_attention_max_distance": config.max_distance,
        "feed_forward_proj": "gated-gelu" if config.gated else "relu", "layer_norm_epsilon": 1e-6,
        "tie_word_embeddings": not config.gated, "dropout_rate": config.dropout, "decoder_start_token_id": 0,
        "pad_token_id": 0, "eos_token_id": 1}
