"""The names and the config.json of Hugging Face's ResNet for `models.resnet`."""

from collections.abc import Mapping
from typing import Any


def huggingface(config: Any) -> dict[str, Any]:
    """Fields of `zero_jax.Names`: rules are (our name, theirs, columns, transposed).

    Of a convolution they store (out, in, height, width), of the last layer (out, in).
    """
    layer = "resnet.encoder.stages.{stage}.layers.{block}."
    ours = r"stage_(?P<stage>\d+)_block_(?P<block>\d+)/"
    rules: list[tuple[Any, ...]] = [("head/kernel", "classifier.1.weight", None, True),
                                    ("head/bias", "classifier.1.bias")]
    for conv, norm, theirs in (("stem", "stem_norm", "resnet.embedder.embedder."),
                               (f"{ours}shortcut", f"{ours}shortcut_norm", f"{layer}shortcut."),
                               (rf"{ours}Conv_(?P<i>\d)", rf"{ours}BatchNorm_(?P<i>\d)", f"{layer}layer.{{i}}.")):
        theirs_norm = f"{theirs}normalization."
        rules += [(f"{conv}/kernel", f"{theirs}convolution.weight", None, (3, 2, 0, 1)),
                  (f"{norm}/scale", f"{theirs_norm}weight"), (f"{norm}/bias", f"{theirs_norm}bias"),
                  (f"variables/batch_stats/{norm}/(?P<of>mean|var)", f"{theirs_norm}running_{{of}}")]
    return {"rules": rules, "config": huggingface_config(config), "ignored": (r".*\.num_batches_tracked",)}


def huggingface_fields(kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `Config` of a settled config.json (`layers.huggingface`)."""
    return {"blocks": tuple(fields["depths"]), "width": fields["embedding_size"], "num_classes": fields["labels"]}


def huggingface_config(config: Any) -> dict[str, Any]:
    """The config.json of a checkpoint of this model."""
    return {
        "architectures": ["ResNetForImageClassification"], "model_type": "resnet", "num_channels": 3,
        "embedding_size": config.width, "depths": list(config.blocks),
        "hidden_sizes": [4 * config.width * 2**stage for stage in range(len(config.blocks))],
        "layer_type": "bottleneck", "hidden_act": "relu", "downsample_in_first_stage": False,
        "downsample_in_bottleneck": False,
        "id2label": {str(label): f"LABEL_{label}" for label in range(config.num_classes)}}
