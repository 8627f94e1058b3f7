"""The names and the config.json of Hugging Face's BERT, RoBERTa and DistilBERT for `models.bert`."""

from collections.abc import Mapping
from typing import Any

NAMES: dict[str, dict[str, str]] = {
    "bert": {
        "head": "cls.predictions.transform.dense", "ln_head": "cls.predictions.transform.LayerNorm",
        "head_bias": "cls.predictions.bias", "decoder": "cls.predictions.decoder"},
    "roberta": {
        "head": "lm_head.dense", "ln_head": "lm_head.layer_norm", "head_bias": "lm_head.bias",
        "decoder": "lm_head.decoder"},
    "distilbert": {
        "head": "vocab_transform", "ln_head": "vocab_layer_norm", "head_bias": "vocab_projector.bias",
        "decoder": "vocab_projector"}}
"""The head's arrays in a checkpoint, by family."""
ENCODER = {"q": "attention.self.query", "k": "attention.self.key", "v": "attention.self.value",
           "proj": "attention.output.dense", "up": "intermediate.dense", "down": "output.dense",
           "ln_1": "attention.output.LayerNorm", "ln_2": "output.LayerNorm"}
DISTILLED = {"q": "attention.q_lin", "k": "attention.k_lin", "v": "attention.v_lin", "proj": "attention.out_lin",
             "up": "ffn.lin1", "down": "ffn.lin2", "ln_1": "sa_layer_norm", "ln_2": "output_layer_norm"}
"""A layer's arrays."""


def family_of(config: Any) -> str:
    """The `model_type` of the checkpoints of a config."""
    return "roberta" if config.offset else "bert" if config.num_types else "distilbert"


def huggingface(config: Any) -> dict[str, Any]:
    """Fields of `zero_jax.Names`: rules are (our name, theirs, columns, transposed); torch's Linear stores (out, in).

    The pooler and the head for next sentences are ignored. Checkpoints of 2018 call the norms' arrays gamma and beta.
    """
    family, block = family_of(config), r"blocks(?:[_/](?P<layer>\d+))?/"
    head, embeddings = NAMES[family], f"{family}.embeddings."
    layer = f"{family}." + ("transformer.layer.{layer}." if family == "distilbert" else "encoder.layer.{layer}.")
    inner = DISTILLED if family == "distilbert" else ENCODER
    named = {"ln_embed": f"{embeddings}LayerNorm", "ln_head": head["ln_head"], "head": head["head"],
             **{f"{block}{ours}": layer + theirs for ours, theirs in inner.items()}}
    rules: list[tuple[Any, ...]] = [
        ("wte/embedding", f"{embeddings}word_embeddings.weight"),
        ("wpe/embedding", f"{embeddings}position_embeddings.weight"),
        ("types/embedding", f"{embeddings}token_type_embeddings.weight"), ("head_bias", head["head_bias"])]
    for ours, theirs in named.items():
        norm = "ln_" in ours
        rules += [(f"{ours}/scale", f"{theirs}.weight") if norm else (f"{ours}/kernel", f"{theirs}.weight", None, True),
                  (f"{ours}/bias", f"{theirs}.bias")]
    tied = {f"{head['decoder']}.weight": f"{embeddings}word_embeddings.weight",
            f"{head['decoder']}.bias": head["head_bias"]}
    return {"rules": rules, "config": huggingface_config(config),
            "tied": {name: whole for name, whole in tied.items() if name != whole},
            "renamed": ((r"(.*LayerNorm)\.gamma", r"\1.weight"), (r"(.*LayerNorm)\.beta", r"\1.bias")),
            "ignored": (rf"{family}\.embeddings\.position_ids", rf"{family}\.pooler\..*", r"cls\.seq_relationship\..*")}


def huggingface_fields(kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `Config` of a settled config.json (`layers.huggingface`)."""
    if kind == "distilbert":
        fields = {"hidden_size": fields["dim"], "num_hidden_layers": fields["n_layers"], "type_vocab_size": 0,
                  "num_attention_heads": fields["n_heads"], "intermediate_size": fields["hidden_dim"],
                  "layer_norm_eps": 1e-12, **fields}
    offset = fields["pad_token_id"] + 1 if kind == "roberta" else 0
    return {"num_layers": fields["num_hidden_layers"], "width": fields["hidden_size"],
            "hidden": fields["intermediate_size"], "num_heads": fields["num_attention_heads"],
            "vocab_size": fields["vocab_size"], "max_length": fields["max_length"] - offset,
            "num_types": fields["type_vocab_size"], "offset": offset, "epsilon": fields["layer_norm_eps"],
            "remat": fields["hidden_size"] >= 1024}


def huggingface_config(config: Any) -> dict[str, Any]:
    """The config.json of a checkpoint of this model."""
    family = family_of(config)
    shared = {"model_type": family, "vocab_size": config.vocab_size, "initializer_range": config.init_range,
              "max_position_embeddings": config.max_length + config.offset, "tie_word_embeddings": True}
    if family == "distilbert":
        return {"architectures": ["DistilBertForMaskedLM"], **shared, "dim": config.width, "activation": "gelu",
                "n_layers": config.num_layers, "n_heads": config.num_heads, "hidden_dim": config.hidden,
                "dropout": config.dropout, "attention_dropout": 0.0}
    named = {"bert": "BertForMaskedLM", "roberta": "RobertaForMaskedLM"}[family]
    return {"architectures": [named], **shared, "hidden_size": config.width, "intermediate_size": config.hidden,
            "num_hidden_layers": config.num_layers, "num_attention_heads": config.num_heads,
            "type_vocab_size": config.num_types, "layer_norm_eps": config.epsilon, "hidden_act": "gelu",
            "position_embedding_type": "absolute", "hidden_dropout_prob": config.dropout,
            "attention_probs_dropout_prob": 0.0, **({"pad_token_id": config.offset - 1} if config.offset else {})}
