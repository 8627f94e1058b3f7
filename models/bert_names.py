"""The names and the config.json of Hugging Face's BERT for `models.bert`."""

from collections.abc import Mapping
from typing import Any


def huggingface(config: Any) -> dict[str, Any]:
    """Fields of `zero_jax.Names`: rules are (our name, theirs, columns, transposed); torch's Linear stores (out, in).

    The pooler and the head for next sentences are ignored. Checkpoints of 2018 call the norms' arrays gamma and beta.
    """
    block, layer = r"blocks(?:[_/](?P<layer>\d+))?/", "bert.encoder.layer.{layer}."
    rules: list[tuple[Any, ...]] = [
        ("wte/embedding", "bert.embeddings.word_embeddings.weight"),
        ("wpe/embedding", "bert.embeddings.position_embeddings.weight"),
        ("types/embedding", "bert.embeddings.token_type_embeddings.weight"),
        ("head_bias", "cls.predictions.bias")]
    for ours, theirs in (("ln_embed", "bert.embeddings.LayerNorm"), ("ln_head", "cls.predictions.transform.LayerNorm"),
                         (f"{block}ln_1", f"{layer}attention.output.LayerNorm"),
                         (f"{block}ln_2", f"{layer}output.LayerNorm")):
        rules += [(f"{ours}/scale", f"{theirs}.weight"), (f"{ours}/bias", f"{theirs}.bias")]
    for ours, theirs in (("head", "cls.predictions.transform.dense"), (f"{block}q", f"{layer}attention.self.query"),
                         (f"{block}k", f"{layer}attention.self.key"), (f"{block}v", f"{layer}attention.self.value"),
                         (f"{block}proj", f"{layer}attention.output.dense"),
                         (f"{block}up", f"{layer}intermediate.dense"), (f"{block}down", f"{layer}output.dense")):
        rules += [(f"{ours}/kernel", f"{theirs}.weight", None, True), (f"{ours}/bias", f"{theirs}.bias")]
    return {"rules": rules, "config": huggingface_config(config),
            "tied": {"cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
                     "cls.predictions.decoder.bias": "cls.predictions.bias"},
            "renamed": ((r"(.*LayerNorm)\.gamma", r"\1.weight"), (r"(.*LayerNorm)\.beta", r"\1.bias")),
            "ignored": (r"bert\.embeddings\.position_ids", r"bert\.pooler\..*", r"cls\.seq_relationship\..*")}


def huggingface_fields(kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `Config` of a settled config.json (`layers.huggingface`)."""
    return {"num_layers": fields["num_hidden_layers"], "width": fields["hidden_size"],
            "hidden": fields["intermediate_size"],
            "num_heads": fields["num_attention_heads"], "vocab_size": fields["vocab_size"],
            "max_length": fields["max_length"], "num_types": fields["type_vocab_size"],
            "remat": fields["hidden_size"] >= 1024}


def huggingface_config(config: Any) -> dict[str, Any]:
    """The config.json of a checkpoint of this model."""
    return {
        "architectures": ["BertForMaskedLM"], "model_type": "bert", "hidden_size": config.width,
        "intermediate_size": config.hidden, "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads, "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_length, "type_vocab_size": config.num_types, "layer_norm_eps": 1e-12,
        "initializer_range": config.init_range,
        "hidden_act": "gelu", "position_embedding_type": "absolute", "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": 0.0, "tie_word_embeddings": True}
