"""The manifest of a checkpoint that is being saved, of which some digests are known when their leaves are written."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from zero_jax.checkpoint.manifest import Leaf, Manifest, package_versions
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
    """Stage and mesh of a run, as a manifest has them."""
    return {"stage": step.stage.number, "mesh": step.axes.sizes, "devices": step.mesh.size,
            "platform": step.axes.platform, "processes": jax.process_count()}
