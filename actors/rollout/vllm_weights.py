"""The half of a weight transfer that runs inside vLLM's worker process.

Owns what happens there from mapped bytes to a model that uses them, and the record of what the model holds.
Imported by vLLM through `worker_extension_cls`, which also registers the transfer engine. What the rollout
worker sends is the manifest and a path of shared memory a bucket; bytes never pass through an RPC.

    stage_weights   map -> check names, shapes -> verify digests on a thread; requests may run meanwhile
    load_staged     vLLM's three calls, one after the other:
        start_weight_update   nothing: the old weights stay in use until the new bytes are verified
        update_weights        layerwise reload of what differs in the version that is staged, adapters added
        finish_weight_update  finalize -> pack heads again -> record what the model holds

The base that adapters are added to stays mapped: it is sent, verified and kept once, outside the model.

Invariants: the model is touched only after every byte was verified; `held` is the only record of what the model
holds, and is None unless the model is whole; a tensor that is not loaded again has the content that `held` says.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from typing import Any, BinaryIO

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from vllm.config import VllmConfig, WeightTransferConfig, set_current_vllm_config
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from actors.engine.life import OwnedProcess
from raypost.errors import WeightError
from raypost.weights.low_rank import merged
from raypost.weights.manifest import Bytes, Manifest, TensorEntry, bytes_of, check_factors, verify
from raypost.weights.names import CheckpointNames

BACKEND = "raypost"
"""Name under which vLLM's WeightTransferConfig selects this engine."""


@dataclass
class PublishedVersion(WeightTransferUpdateInfo):  # type: ignore[misc]  # mypy does not follow vLLM
    """Names the version to load, which must be staged."""

    version: int
    digest: str


@dataclass(frozen=True, slots=True)
class StagedVersion:
    """A version that is mapped here and not loaded."""

    manifest: Manifest
    buckets: list[Bytes]
    verified: Future[None]
    """Ends with a WeightError if the bytes are not those of the manifest."""


@dataclass(frozen=True, slots=True)
class LoadedVersion:
    """The version that the model holds, and the content of each tensor that it was loaded from."""

    version: int
    digest: str
    contents: dict[str, str]


@dataclass(frozen=True, slots=True)
class Base:
    """Verified weights that adapters are added to."""

    digest: str
    buckets: list[Bytes]


class SharedMemoryTransfer(
    WeightTransferEngine[WeightTransferInitInfo, PublishedVersion],  # type: ignore[misc]  # as above
):
    """Loads versions from shared memory of the same machine."""

    init_info_cls = WeightTransferInitInfo
    update_info_cls = PublishedVersion
    supports_draft_weight_update = False

    def __init__(
        self,
        config: WeightTransferConfig,
        vllm_config: VllmConfig,
        device: torch.device,
        model: torch.nn.Module,
    ) -> None:
        """Remember the model; called by vLLM."""
        super().__init__(config, vllm_config, device, model)
        self.held: LoadedVersion | None = None
        self.base: Base | None = None
        self._staged: StagedVersion | None = None
        self._verifier = ThreadPoolExecutor(1, "verify-weights")
        self.touched = False
        """True from the first change of the model until all of the version is in place."""
        self._loading: StagedVersion | None = None
        self._loaded: list[TensorEntry] = []
        self._kernels: list[tuple[Any, Any]] = []
        """Layers of experts and the kernels they had before the load."""
        self._padded: set[tuple[str, int]] = set()
        """Modules that are larger than all that a version has for them, such as embeddings of a padded vocabulary."""
        # vLLM may have made the model's own class one of its modules, which are made under its configuration only.
        with set_current_vllm_config(vllm_config):
            self._shapes = _checkpoint_shapes(self.model_config.hf_config)
        # It warns at every sync about a tied head, which has no tensor of its own. What is missing is
        # checked here, and is an error.
        logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)

    def init_transfer_engine(self, init_info: WeightTransferInitInfo) -> None:
        """Do nothing: there is no connection to set up."""

    def start_weight_update(self) -> None:
        """Do nothing: see the module."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load the version that is staged. Raises WeightError, and keeps the old weights, if it is another one."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def stage(self, manifest: Manifest, answers: BinaryIO, paths: Sequence[str]) -> None:
        """Map a version and begin to verify its bytes; `paths` has those of its base only if that is not held.

        What is wrong with them is written into `answers`, which is closed when all is verified. Raises WeightError if
        its tensors are not the model's.
        """
        self._staged = None
        self._check_tensors(manifest)
        buckets, known = [_map(path) for path in paths], ""
        if self.base is not None and len(buckets) < len(manifest.bucket_sizes):
            known, buckets = self.base.digest, self.base.buckets + buckets
        verified = self._verifier.submit(_verify, answers, manifest, buckets, known)
        self._staged = StagedVersion(manifest, buckets, verified)

    @property
    def staged(self) -> StagedVersion:
        """What is mapped and not loaded. Raises WeightError if there is nothing."""
        if self._staged is None:
            raise WeightError("no version is staged: stage one first")
        return self._staged

    def receive_weights(self, update_info: PublishedVersion) -> None:
        """Reload layer by layer what the model does not hold. Raises WeightError naming a tensor of wrong bytes."""
        staged = self.staged
        manifest, buckets = staged.manifest, staged.buckets
        if (manifest.version, manifest.digest) != (update_info.version, update_info.digest):
            raise WeightError(f"version {manifest.version} is staged, not version {update_info.version}")
        staged.verified.result()
        self._staged = None
        self.base = Base(manifest.base, buckets[: manifest.base_buckets]) if manifest.base else None
        contents = {} if self.held is None else self.held.contents
        self.held = None
        self.touched = True
        self._loading = staged
        self._load(manifest, buckets, contents)

    def _load(self, manifest: Manifest, buckets: list[Bytes], contents: dict[str, str]) -> None:
        """Load each tensor whose content differs from `contents`, together with all of its block."""
        stale = {
            _block(entry.name) for entry in manifest.tensors if contents.get(entry.name) != entry.content
        }
        self._loaded = [entry for entry in manifest.tensors if _block(entry.name) in stale]
        if not self._loaded:
            return
        rest = [entry for entry in manifest.tensors if _block(entry.name) not in stale]
        if self.device.type == "cpu":
            self._forget_kernels()
        initialize_layerwise_reload(self.model)
        expected = {name for name, _ in self.model.named_parameters()}
        loaded = self.model.load_weights(self._tensors(self._loaded, buckets))
        if rest and self._incomplete() - self._padded:
            # The model joins tensors of several blocks.
            loaded |= self.model.load_weights(self._tensors(rest, buckets))
            self._loaded = list(manifest.tensors)
            rest = []
        if not rest:
            self._padded = self._incomplete()
        missing = sorted(expected - loaded - self._tied_heads())
        if missing and not rest:
            raise WeightError(
                f"version {manifest.version} brought nothing for {missing[0]!r} of the engine's model"
            )

    def _incomplete(self) -> set[tuple[str, int]]:
        """Return the modules of which some elements were loaded and others not, and how many."""
        infos = ((name, get_layerwise_info(module)) for name, module in self.model.named_modules())
        return {(name, info.load_numel) for name, info in infos if info.can_load() and info.load_numel > 0}

    def finish_weight_update(self) -> None:
        """Put the new weights in place and record what the model holds."""
        if self._loading is None:
            raise WeightError("nothing was loaded since the last update: send a version first")
        if self._loaded:
            finalize_layerwise_reload(self.model, self.model_config)
        for method, kernel in self._kernels:
            method.moe_kernel = method.moe_kernel or kernel
        self._kernels.clear()
        if any(_block(entry.name) == entry.name for entry in self._loaded):
            self._pack_heads()
        manifest = self._loading.manifest
        contents = {entry.name: entry.content for entry in manifest.tensors}
        self.held = LoadedVersion(manifest.version, manifest.digest, contents)
        self.touched = False
        # Unmapping takes time too: not while requests wait.
        self._verifier.submit(self._loading.buckets.clear)
        self._loading = None

    def _forget_kernels(self) -> None:
        """Take the kernels from layers of experts: a layer that has one would not pack the weights loaded into it."""
        for module in self.model.modules():
            method: Any = getattr(module, "quant_method", None)
            if getattr(method, "moe_kernel", None) is not None:
                self._kernels.append((method, method.moe_kernel))
                method.moe_kernel = None

    def _pack_heads(self) -> None:
        """Refresh the packed copy that a head tied to the embedding keeps on CPU; a reload does not."""
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        """End the thread that verifies."""
        self._verifier.shutdown(wait=False, cancel_futures=True)

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
            factors = () if entry.added is None else (entry.added.down, entry.added.up)
            for part in (entry, *factors):
                if part.nbytes != prod(part.shape) * _dtype(part).itemsize:
                    raise WeightError(
                        f"version {manifest.version}: tensor {part.name!r} has {part.nbytes} bytes, not those of "
                        f"{part.dtype} {part.shape}"
                    )
            check_factors(manifest.version, entry)

    def _tensors(
        self, entries: list[TensorEntry], buckets: list[Bytes]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors to load, one at a time: a merged matrix exists only while it is loaded."""
        for entry in entries:
            tensor = _tensor(entry, buckets)
            if entry.added is not None:
                parts = (_tensor(part, buckets) for part in (entry.added.down, entry.added.up))
                down, up = (part.to(self.device) for part in parts)
                tensor = merged(tensor.to(self.device), down, up, entry.added.scale)
            yield entry.name, tensor

    def _tied_heads(self) -> set[str]:
        if not getattr(self.model_config.hf_config, "tie_word_embeddings", False):
            return set()
        modules = self.model.named_modules()
        return {f"{name}.weight" for name, module in modules if isinstance(module, ParallelLMHead)}


class WeightExtension(OwnedProcess):
    """Methods added to vLLM's worker, for `collective_rpc`. Answers come from the process with the model."""

    weight_transfer_engine: SharedMemoryTransfer

    def forget_weights(self) -> None:
        """Count what the model holds as no version, until one is loaded."""
        self.weight_transfer_engine.held = None

    def stage_weights(self, manifest: str, answers: str, *paths: str) -> None:
        """Begin to verify a version; `manifest` is encoded, the others are paths. See SharedMemoryTransfer.stage."""
        self.weight_transfer_engine.stage(Manifest.decoded(manifest), open(answers, "wb"), paths)  # noqa: SIM115

    def load_staged(self, version: int, digest: str) -> None:
        """Load the version that is staged, which must be this one."""
        worker: Any = self
        worker.start_weight_update()
        worker.update_weights({"version": version, "digest": digest})
        worker.finish_weight_update()

    def held_weights(self) -> tuple[int, str, bool]:
        """Return (version, digest, touched): what the model holds, or -1 and ""; whether it is half loaded."""
        engine = self.weight_transfer_engine
        held = engine.held or LoadedVersion(-1, "", {})
        return held.version, held.digest, engine.touched


def _checkpoint_shapes(hf_config: Any) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the tensors a trainer of this model publishes; tied ones once."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config)
    return CheckpointNames(model).shapes


def _block(name: str) -> str:
    """Return the group a tensor is loaded with: engines join tensors of a layer, such as queries, keys and values."""
    path = name.split(".")
    number = next((i for i, part in enumerate(path) if part.isdigit()), None)
    return name if number is None else ".".join(path[: number + 2])


def _verify(answers: BinaryIO, manifest: Manifest, buckets: list[Bytes], known_base: str) -> None:
    """As `verify`; says what is wrong in `answers` too."""
    with answers:
        try:
            verify(manifest, buckets, known_base)
        except WeightError as error:
            answers.write(str(error).encode())
            raise


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


def _tensor(entry: TensorEntry, buckets: list[Bytes]) -> torch.Tensor:
    return torch.from_numpy(bytes_of(entry, buckets)).view(_dtype(entry)).reshape(entry.shape)


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, SharedMemoryTransfer)
