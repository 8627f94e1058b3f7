"""The tiny models of `reference_models` in the library transformers, with PyTorch on the CPU."""

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import numpy as safetensors_numpy

from support.reference_models import Model, batch_of

ARGUMENTS = {"inputs": "input_ids", "decoder_inputs": "decoder_input_ids"}


def loaded(folder: Path) -> Any:
    """The model of a folder, by its config.json; refuses missing and unexpected tensors."""
    import transformers

    kind = json.loads((folder / "config.json").read_text())["architectures"][0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, report = getattr(transformers, kind).from_pretrained(
            folder, attn_implementation="eager", output_loading_info=True)
    missing = [name for name in report["missing_keys"] if "num_batches_tracked" not in name]
    if missing or report["unexpected_keys"] or report["mismatched_keys"]:
        raise ValueError(f"{folder}: transformers says {report}")
    return model


def as_folder(model: Model, config: dict[str, Any], folder: Path) -> Path:
    """`folder` with the config.json and the tensors of `model`."""
    folder.mkdir()
    # PyTorch gives the embedding of the padding token no gradient, and these batches have no padding.
    # RoBERTa's positions begin after its padding token, which its batch does not have.
    padding = config["pad_token_id"] if config["model_type"] == "roberta" else None
    (folder / "config.json").write_text(json.dumps({**config, "pad_token_id": padding}))
    safetensors_numpy.save_file(model.tensors(), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def logits_and_gradients(model: Any, case: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """As `reference_models.Model.logits_and_gradients`; `model` is one of transformers."""
    import torch

    batch = {name: torch.from_numpy(value) for name, value in batch_of(case).items()}
    given = {ARGUMENTS[name]: value for name, value in batch.items() if name in ARGUMENTS}
    if batch["inputs"].ndim == 4:
        given = {"pixel_values": batch["inputs"].permute(0, 3, 1, 2)}
    model.train()  # nothing is dropped; batch norms take the statistics of the batch
    logits = model(**given).logits
    torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), batch["targets"].reshape(-1)).backward()
    gradients = {name: each.grad.numpy() for name, each in model.named_parameters() if each.grad is not None}
    return logits.detach().numpy(), gradients
