"""The names and the config.json of Hugging Face's ViT for `models.vit` and `models.vit_nnx`."""

from collections.abc import Mapping
from typing import Any


def huggingface(config: Any) -> dict[str, Any]:
    """Fields of `zero_jax.Names`: rules are (our name, theirs, columns, transposed); torch's Linear stores (out, in).

    Of a convolution they store (out, in, height, width). The pooler is ignored.
    """
    block, layer = r"blocks(?:[_/](?P<layer>\d+))?/", "vit.encoder.layer.{layer}."
    rules: list[tuple[Any, ...]] = [
        ("patches/kernel", "vit.embeddings.patch_embeddings.projection.weight", None, (3, 2, 0, 1)),
        ("patches/bias", "vit.embeddings.patch_embeddings.projection.bias"),
        ("class_token", "vit.embeddings.cls_token"), ("positions", "vit.embeddings.position_embeddings")]
    for ours, theirs in ((f"{block}ln_1", f"{layer}layernorm_before"), (f"{block}ln_2", f"{layer}layernorm_after"),
                         ("ln_f", "vit.layernorm")):
        rules += [(f"{ours}/scale", f"{theirs}.weight"), (f"{ours}/bias", f"{theirs}.bias")]
    for ours, theirs in (("head", "classifier"), (f"{block}q", f"{layer}attention.attention.query"),
                         (f"{block}k", f"{layer}attention.attention.key"),
                         (f"{block}v", f"{layer}attention.attention.value"),
                         (f"{block}proj", f"{layer}attention.output.dense"),
                         (f"{block}up", f"{layer}intermediate.dense"), (f"{block}down", f"{layer}output.dense")):
        rules += [(f"{ours}/kernel", f"{theirs}.weight", None, True), (f"{ours}/bias", f"{theirs}.bias")]
    return {"rules": rules, "config": huggingface_config(config), "ignored": (r"vit\.pooler\..*",)}


def huggingface_fields(kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `Config` of a settled config.json (`layers.huggingface`)."""
    return {"num_layers": fields["num_hidden_layers"], "width": fields["hidden_size"],
            "hidden": fields["intermediate_size"],
            "num_heads": fields["num_attention_heads"], "image_size": fields["image_size"],
            "patch_size": fields["patch_size"], "channels": fields["num_channels"], "num_classes": fields["labels"],
            "remat": fields["hidden_size"] >= 1024}


def huggingface_config(config: Any) -> dict[str, Any]:
    """The config.json of a checkpoint of this model."""
    return {
        "architectures": ["ViTForImageClassification"], "model_type": "vit", "hidden_size": config.width,
        "intermediate_size": config.hidden, "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads, "image_size": config.image_size, "patch_size": config.patch_size,
        "num_channels": config.channels, "layer_norm_eps": 1e-12, "hidden_act": "gelu", "qkv_bias": True,
        "hidden_dropout_prob": config.dropout, "attention_probs_dropout_prob": 0.0,
        "id2label": {str(label): f"LABEL_{label}" for label in range(config.num_classes)}}
