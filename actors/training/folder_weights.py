"""FolderWeights: brings the weights of a Hugging Face folder to engines, in place of a trainer.

Owns the model of the folder and the buckets it published, for as long as it lives. It imports torch when it is asked
first, in its own process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import ray

from raypost.config import Config
from raypost.types import FloatArray, IntArray
from raypost.weights.manifest import Manifest, pack

if TYPE_CHECKING:
    from raypost.trainer.model.folder_model import FolderModel


class FolderWeights:
    """A WeightSource whose weights never change."""

    def __init__(self, config: Config, folder: str) -> None:
        """Publish the weights of `folder`; nothing is loaded yet."""
        self._config = config
        self._folder = folder
        self._loaded: FolderModel | None = None
        self._buckets: list[ray.ObjectRef] = []

    def __repr__(self) -> str:
        """Return the name that logs and errors use."""
        return "folder-weights"

    @property
    def _model(self) -> FolderModel:
        if self._loaded is None:
            import torch

            from raypost.trainer.model.folder_model import FolderModel

            torch.set_num_threads(self._config.rollout.threads)
            self._loaded = FolderModel(self._folder, self._config.model.dtype)
        return self._loaded

    def publish(self, version: int) -> tuple[Manifest, list[ray.ObjectRef]]:
        """Put the folder's weights into the object store; return their manifest and refs of their buckets."""
        from raypost.weights.tensors import as_bytes

        weights = as_bytes(self._model.weights())
        manifest, buckets = pack(version, weights, self._config.train.bucket_mb * 2**20)
        self._buckets = [ray.put(bucket) for bucket in buckets]
        return manifest, self._buckets

    def canary(self, token_ids: IntArray) -> FloatArray:
        """Return the logprob of every token but the first, at temperature 1."""
        return self._model.canary_logprobs(token_ids)

    def offload(self) -> None:
        """Do nothing: the model is on no device that engines use."""
