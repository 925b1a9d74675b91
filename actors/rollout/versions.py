"""The version that a model holds, and the one that comes next."""

from __future__ import annotations

from dataclasses import dataclass

from torch.nn import Module

from raypost.weights.delta import block_of
from raypost.weights.held import HeldWeights, ReadBack
from raypost.weights.manifest import Manifest, TensorEntry


@dataclass(frozen=True, slots=True)
class LoadedVersion:
    """The version that the model holds, and the content of each tensor that it was loaded from."""

    version: int
    digest: str
    contents: dict[str, str]

    def lacks(self, manifest: Manifest) -> list[TensorEntry]:
        """Return each tensor of another version whose content differs, together with all of its block."""
        blocks = {
            block_of(one.name) for one in manifest.tensors if self.contents.get(one.name) != one.content
        }
        return [one for one in manifest.tensors if block_of(one.name) in blocks]


@dataclass(frozen=True, slots=True)
class PreparedVersion:
    """A version that is in stand-ins of the layers."""

    manifest: Manifest
    names: frozenset[str]
    """Tensors that it has from the manifest: those that differ from what the model holds."""
    stand_ins: dict[Module, Module]
    sent: HeldWeights
    """What was noted of it."""
    read_back: ReadBack | None


NOTHING = LoadedVersion(-1, "", {})
"""What a model holds before its first load, or after one that failed."""
