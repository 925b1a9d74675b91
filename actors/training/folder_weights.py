"""FolderWeights: brings the weights of a Hugging Face folder to engines, in place of a trainer.

Owns the model of the folder and the buckets it published, for as long as it lives. It imports torch when it is asked
first, in its own process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import ray

from actors.training.sender import GroupSender
from raypost.config import Config
from raypost.types import FloatArray, IntArray
from raypost.weights.manifest import Manifest, pack_by

if TYPE_CHECKING:
    from collections.abc import Sequence

    from raypost.trainer.model.folder_model import FolderModel
    from raypost.weights.seats import Backend, Member, Seats


class FolderWeights:
    """A WeightSource whose weights never change."""

    def __init__(self, config: Config, folder: str) -> None:
        """Publish the weights of `folder`; nothing is loaded yet."""
        self._config = config
        self._folder = folder
        self._loaded: FolderModel | None = None
        self._buckets: list[ray.ObjectRef] = []
        self._sender = GroupSender()

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
        manifest, self._buckets = pack_by(version, weights, self._config.train.bucket_mb * 2**20, ray.put)
        return manifest, self._buckets

    def canary(self, token_ids: IntArray) -> FloatArray:
        """Return the logprob of every token but the first, at temperature 1."""
        return self._model.canary_logprobs(token_ids)

    def node(self) -> str:
        """Return this node's address."""
        address: str = ray.util.get_node_ip_address()
        return address

    def open_group(self, members: Sequence[Member], backend: Backend, timeout_s: float) -> Seats:
        """Open a broadcast group to engines; see GroupSender."""
        return self._sender.open(members, backend, timeout_s)

    def send(self, version: int, seats: Seats) -> str:
        """Send what was published last to a group; "", or what failed."""
        return self._sender.send(self._buckets, seats)

    def offload(self) -> None:
        """Do nothing: the model is on no device that engines use."""
