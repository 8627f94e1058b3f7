"""The names, the order and the config.json of Hugging Face's GPT-2 for `models.gpt2` and `models.gpt2_nnx`."""

from collections.abc import Mapping
from typing import Any

import numpy as np


def huggingface(config: Any) -> dict[str, Any]:
    """Fields of `zero_jax.Names`: rules are (our name, theirs, columns); "{layer}" stays where layers are stacked.

    Their Conv1D stores (in, out), as a kernel here, so that nothing is transposed. Their fused columns are (q | k | v,
    head, head dim), and ours (head, q | k | v, head dim).
    """
    theirs = np.arange(3 * config.width).reshape(3, config.num_heads, -1)
    columns = tuple(theirs.swapaxes(0, 1).reshape(-1).tolist())
    block, layer = r"blocks(?:[_/](?P<layer>\d+))?/", "h.{layer}."
    rules: list[tuple[Any, ...]] = [("wte/embedding", "wte.weight"), ("wpe/embedding", "wpe.weight"),
                                    ("ln_f/scale", "ln_f.weight"), ("ln_f/bias", "ln_f.bias")]
    for norm in ("ln_1", "ln_2"):
        rules += [(f"{block}{norm}/scale", f"{layer}{norm}.weight"), (f"{block}{norm}/bias", f"{layer}{norm}.bias")]
    for ours, name, order in (("qkv", "attn.c_attn", columns), ("proj", "attn.c_proj", None),
                              ("up", "mlp.c_fc", None), ("down", "mlp.c_proj", None)):
        rules += [(f"{block}{ours}/kernel", f"{layer}{name}.weight", order),
                  (f"{block}{ours}/bias", f"{layer}{name}.bias", order)]
    return {"rules": rules, "config": huggingface_config(config), "prefix": "transformer.",
            "tied": {"lm_head.weight": "wte.weight"}, "ignored": (r"h\.\d+\.attn\.(bias|masked_bias)",)}


def huggingface_fields(kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `Config` of a settled config.json (`layers.huggingface`)."""
    return {"num_layers": fields["n_layer"], "width": fields["n_embd"], "num_heads": fields["n_head"],
            "vocab_size": fields["vocab_size"], "max_length": fields["max_length"], "remat": fields["n_embd"] >= 1024}


def huggingface_config(config: Any) -> dict[str, Any]:
    """The config.json of a checkpoint of this model."""
    end = 50256 if config.vocab_size == 50257 else None  # of its tokenizer
    return {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": config.width, "n_inner": None,
        "n_layer": config.num_layers, "n_head": config.num_heads, "vocab_size": config.vocab_size,
        "n_positions": config.max_length, "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new",
        "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout, "attn_pdrop": 0.0, "bos_token_id": end, "eos_token_id": end,
        "tie_word_embeddings": True}
