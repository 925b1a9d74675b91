"""The half of a weight transfer that runs inside vLLM's worker process.

Owns what happens there from mapped bytes to a model that uses them, and the record of what the model holds.
Imported by vLLM through `worker_extension_cls`, which also registers the transfer engine. What the rollout
worker sends is the manifest and a path of shared memory a bucket; bytes never pass through an RPC.

    start_weight_update   nothing: the old weights stay in use until the new bytes are verified
    update_weights        map -> verify digests, names, shapes -> layerwise reload
    finish_weight_update  finalize -> pack heads again -> record version and digest

Invariants: the model is touched only after every byte was verified; `held` names a version only while the
model is whole.
"""

from __future__ import annotations

import logging
import mmap
import os
import select
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from vllm.config import VllmConfig, WeightTransferConfig
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from raypost.errors import WeightError
from raypost.weights import Bytes, Manifest, TensorEntry, verify, views

BACKEND = "raypost"
"""Name under which vLLM's WeightTransferConfig selects this engine."""


@dataclass
class OwnerInfo(WeightTransferInitInfo):
    """Sent once: the process of the rollout worker, without which this one must not go on."""

    owner_pid: int


@dataclass
class PublishedVersion(WeightTransferUpdateInfo):
    """Sent for each version. `tensors` are the fields of TensorEntry in order, `paths` one a bucket."""

    version: int
    digest: str
    tensors: list[list[Any]]
    paths: list[str]

    def manifest(self, bucket_sizes: tuple[int, ...]) -> Manifest:
        """The manifest as published, for buckets of these sizes."""
        entries = (TensorEntry(*fields) for fields in self.tensors)
        tensors = tuple(TensorEntry(e.name, e.dtype, tuple(e.shape), *_layout(e)) for e in entries)
        return Manifest(self.version, tensors, bucket_sizes, self.digest)


def _layout(entry: TensorEntry) -> tuple[int, int, int, str]:
    return entry.bucket, entry.offset, entry.nbytes, entry.digest


class SharedMemoryEngine(WeightTransferEngine[OwnerInfo, PublishedVersion]):
    """Loads versions from shared memory of the same machine."""

    init_info_cls = OwnerInfo
    update_info_cls = PublishedVersion
    supports_draft_weight_update = False

    def __init__(
        self,
        config: WeightTransferConfig,
        vllm_config: VllmConfig,
        device: torch.device,
        model: torch.nn.Module,
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self.held: tuple[int, str] | None = None
        self.touched = False
        """True from the first change of the model until all of the version is in place."""
        self._loading: Manifest | None = None
        self._shapes = _trained_shapes(self.model_config.hf_config)
        # It warns at every sync about a tied head, which has no tensor of its own. What is missing is
        # checked here, and is an error.
        logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)

    def init_transfer_engine(self, init_info: OwnerInfo) -> None:
        """Tie this process's life to the rollout worker's."""
        _end_with(init_info.owner_pid)

    def start_weight_update(self) -> None:
        """Nothing: see the module."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one version. Raises WeightError and keeps the old weights when it is not what was sent."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: PublishedVersion) -> None:
        """Verify, then reload layer by layer. Raises WeightError naming the tensor."""
        buckets = [_map(path) for path in update_info.paths]
        manifest = update_info.manifest(tuple(bucket.nbytes for bucket in buckets))
        self._check_tensors(manifest)
        verify(manifest, buckets)
        self.held, self.touched, self._loading = None, True, manifest
        initialize_layerwise_reload(self.model)
        expected = {name for name, _ in self.model.named_parameters()}
        loaded = self.model.load_weights(_tensors(manifest, buckets))
        missing = sorted(expected - loaded - self._tied_heads())
        if missing:
            raise WeightError(
                f"version {manifest.version} brought nothing for {missing[0]!r} of the engine's model"
            )

    def finish_weight_update(self) -> None:
        """Put the new weights in place and record what the model holds."""
        if self._loading is None:
            raise WeightError("nothing was loaded since the last update: send a version first")
        finalize_layerwise_reload(self.model, self.model_config)
        for module in self.model.modules():
            # A head tied to the embedding keeps a packed copy of it on CPU, which a reload does not refresh.
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)
        self.held, self.touched = (self._loading.version, self._loading.digest), False
        self._loading = None

    def shutdown(self) -> None:
        """Nothing to release: mappings end with the update that made them."""

    def _check_tensors(self, manifest: Manifest) -> None:
        sent = {entry.name: entry for entry in manifest.tensors}
        for name, shape in self._shapes.items():
            if name not in sent:
                raise WeightError(
                    f"version {manifest.version} lacks tensor {name!r} {shape}: publish all of them"
                )
            if sent[name].shape != shape:
                raise WeightError(
                    f"version {manifest.version}: tensor {name!r} has shape {sent[name].shape}, the engine's "
                    f"model has {shape}: use one model configuration for both"
                )
        for name, entry in sent.items():
            if name not in self._shapes:
                raise WeightError(
                    f"version {manifest.version} has tensor {name!r}, which the engine's model lacks"
                )
            if entry.nbytes != prod(entry.shape) * _dtype(entry).itemsize:
                raise WeightError(
                    f"version {manifest.version}: tensor {name!r} has {entry.nbytes} bytes, not those of "
                    f"{entry.dtype} {entry.shape}"
                )

    def _tied_heads(self) -> set[str]:
        if not getattr(self.model_config.hf_config, "tie_word_embeddings", False):
            return set()
        modules = self.model.named_modules()
        return {f"{name}.weight" for name, module in modules if isinstance(module, ParallelLMHead)}


class WeightExtension:
    """Methods added to vLLM's worker, for `collective_rpc`. Answers come from the process with the model."""

    weight_transfer_engine: SharedMemoryEngine

    def process_ids(self) -> tuple[int, int]:
        """This worker's process and its parent."""
        return os.getpid(), os.getppid()

    def held_weights(self) -> tuple[int, str, bool]:
        """(version, digest, touched): what the model holds, or -1 and ""; whether it is half loaded."""
        version, digest = self.weight_transfer_engine.held or (-1, "")
        return version, digest, self.weight_transfer_engine.touched


def _trained_shapes(hf_config: Any) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the parameters a trainer of this model has; tied ones once."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def _map(path: str) -> Bytes:
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        # Private and writable: PyTorch refuses read-only memory, and no write reaches the sender's bytes.
        memory = mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    return np.frombuffer(memory, np.uint8)


def _dtype(entry: TensorEntry) -> torch.dtype:
    dtype = getattr(torch, entry.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise WeightError(f"tensor {entry.name!r} has dtype {entry.dtype!r}, which PyTorch does not know")
    return dtype


def _tensors(manifest: Manifest, buckets: list[Bytes]) -> Iterator[tuple[str, torch.Tensor]]:
    for entry, data in views(manifest, buckets):
        yield entry.name, torch.from_numpy(data).view(_dtype(entry)).reshape(entry.shape)


def _end_with(owner_pid: int) -> None:
    """End this process as soon as the owner's ends, however it ended."""
    owner = os.pidfd_open(owner_pid)

    def wait() -> None:
        select.select([owner], [], [])
        os._exit(1)

    threading.Thread(target=wait, name="end-with-owner", daemon=True).start()


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, SharedMemoryEngine)
