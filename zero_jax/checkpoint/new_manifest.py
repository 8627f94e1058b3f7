"""The manifest of a checkpoint that is being saved, of which some digests are known when their leaves are written."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import jax

from zero_jax.checkpoint.manifest import Leaf, Manifest, check_json, package_versions
from zero_jax.distributed.agreement import check_same, spans_processes
from zero_jax.errors import CheckpointError
from zero_jax.step.step import ZeroTrainStep


class NewManifest:
    """`json()`: with the digests that are known by then. digests: of leaves by name, to be added to."""

    def __init__(self, leaves: Mapping[str, Leaf], **fields: Any):
        """fields: of `Manifest`."""
        self.digests: dict[str, str] = {}
        self._manifest = Manifest(leaves=leaves, versions=package_versions(), **fields)

    def json(self) -> dict[str, Any]:
        """As `Manifest.to_json`."""
        leaves = {name: dataclasses.replace(leaf, digest=self.digests.get(name, ""))
                  for name, leaf in self._manifest.leaves.items()}
        return dataclasses.replace(self._manifest, leaves=leaves).to_json()


def run_of(step: ZeroTrainStep) -> dict[str, Any]:
    """Stage and mesh of a run, and alpha of its adapters, as a manifest has them."""
    lora = getattr(step, "lora", None)
    return {"stage": step.stage.number, "mesh": step.axes.sizes, "devices": step.mesh.size,
            "platform": step.axes.platform, "processes": jax.process_count(),
            **({} if lora is None else {"lora_alpha": float(lora.config.alpha)})}


def check_given(step: ZeroTrainStep, data: Any, config: Any) -> None:
    """Raises ValueError for what a manifest cannot hold, and where processes give other positions in the data."""
    check_json(data=data, config=config)
    if spans_processes(step.mesh):
        check_same("data of Checkpoints.save", json.dumps(data, sort_keys=True),
                   "it is saved once: give all processes the same, as a dict of the positions of all of them")


def check_adapters(step: ZeroTrainStep, manifest: Manifest, where: str) -> None:
    """Raises CheckpointError where the adapters of `step` would be multiplied by another number than those saved."""
    lora, saved = getattr(step, "lora", None), manifest.run.get("lora_alpha")
    if lora is not None and saved is not None and lora.config.alpha != saved:
        raise CheckpointError(f"{where} has adapters of alpha={saved}, and those of this step have "
                              f"alpha={lora.config.alpha}, with which they would be another model: give "
                              f"zero_jax.lora(model, ..., alpha={saved}).")
