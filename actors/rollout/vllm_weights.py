"""The half of a weight transfer that runs inside vLLM's worker process.

Owns what happens there from mapped bytes to a model that uses them, and the record of what the model holds.
Imported by vLLM through `worker_extension_cls`, which also registers the transfer engine. What the rollout
worker sends is the manifest and a path of shared memory a bucket; bytes never pass through an RPC.

    stage_weights   check names, shapes -> map -> verify digests on a thread (staging.py); requests may run meanwhile
    receive_weights the same of what rank 0 of a broadcast group sends
    load_staged     vLLM's three calls, one after the other:
        start_weight_update   nothing: the old weights stay in use until the new bytes are verified
        update_weights        what differs in the version that is staged, adapters added: written straight to where
                              the first version went (direct_load.py), or by vLLM's layerwise reload
        finish_weight_update  finalize a reload -> pack heads again -> read it back -> record what the model holds

Invariants: the model is touched only after every byte was verified; `held` is the only record of what the model
holds, and is None unless the model is whole and, where `sync.verify` asks for it, was read back; a tensor that is not
loaded again has the content that `held` says.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any, BinaryIO, cast

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
from actors.rollout.direct_load import DirectLoad
from actors.rollout.packing import SHARE, Packing
from actors.rollout.staging import StagedVersion, Staging
from raypost.config import VerifyWeights
from raypost.errors import WeightError
from raypost.weights.delta import block_of
from raypost.weights.held import HeldWeights, ReadBack
from raypost.weights.low_rank import merged
from raypost.weights.manifest import Bytes, Manifest, TensorEntry, bytes_of, check_factors
from raypost.weights.names import CheckpointNames
from raypost.weights.seats import Seats

BACKEND = "raypost"
"""Name under which vLLM's WeightTransferConfig selects this engine."""


@dataclass
class PublishedVersion(WeightTransferUpdateInfo):  # type: ignore[misc]  # mypy does not follow vLLM
    """Names the version to load, which must be staged."""

    version: int
    digest: str


@dataclass(frozen=True, slots=True)
class LoadedVersion:
    """The version that the model holds, and the content of each tensor that it was loaded from."""

    version: int
    digest: str
    contents: dict[str, str]


NOTHING = LoadedVersion(-1, "", {})
"""What a model holds before its first load, or after one that failed."""


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
        self._verifier = ThreadPoolExecutor(1, "verify-weights")
        self._staging = Staging(self._verifier)
        self._sent = HeldWeights(self._verifier)
        self._packing = Packing(model, self._sent)
        self._direct = DirectLoad(model, self._sent, vllm_config.model_config.dtype)
        self.read_back: ReadBack | None = None
        """Of the last load, None where it was not asked for."""
        self.verify: VerifyWeights = "every"
        self._verifying = self._was_read_back = False
        self.touched = False
        """True from the first change of the model until all of the version is in place."""
        self._loading: StagedVersion | None = None
        self._loaded: list[TensorEntry] = []
        self._is_taken_apart = False
        """Whether the model is, by vLLM's layerwise reload."""
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
        """Map a version and begin to verify it: see Staging.map. Raises WeightError if it is not of this model."""
        self._check_tensors(manifest)
        self._check_held(manifest, len(manifest.bucket_sizes) - len(paths))
        self._staging.map(manifest, answers, paths)

    def receive(self, manifest: Manifest, answers: BinaryIO, seats: Seats, rank: int) -> None:
        """Begin to receive a version: see Staging.receive. Raises WeightError if it is not of this model."""
        self._check_tensors(manifest)
        self._check_held(manifest, seats.first_bucket)
        self._staging.receive(manifest, answers, seats, rank)

    def _check_held(self, manifest: Manifest, absent: int) -> None:
        """Raise WeightError unless the model holds what is in the buckets that are not sent."""
        held = self.held or NOTHING
        changed = "" if manifest.base else manifest.changed_in(absent, held.contents)
        if changed:
            raise WeightError(
                f"version {manifest.version} is sent without {changed!r}, and version {held.version}, which the model "
                "holds, has another one: send all of it"
            )

    def receive_weights(self, update_info: PublishedVersion) -> None:
        """Load what the model does not hold. Raises WeightError naming a tensor of wrong bytes."""
        staged = self._staging.take(update_info.version, update_info.digest)
        manifest, buckets = staged.manifest, staged.buckets
        self._check_held(manifest, staged.absent)
        contents = {} if self.held is None else self.held.contents
        self._verifying = self.verify == "every" or (self.verify == "first" and self.held is None)
        self._packing.version = manifest.version if self._verifying else None
        self.held = None
        self.touched = True
        self._loading = staged
        self._load(manifest, buckets, contents)

    def _load(self, manifest: Manifest, buckets: list[Bytes], contents: dict[str, str]) -> None:
        """Load each tensor whose content differs from `contents`, together with all of its block."""
        stale = {
            block_of(entry.name) for entry in manifest.tensors if contents.get(entry.name) != entry.content
        }
        self._loaded = [entry for entry in manifest.tensors if block_of(entry.name) in stale]
        names = [entry.name for entry in self._loaded]
        self._is_taken_apart = not self._direct.can_load(names)
        if self._is_taken_apart:
            self._reload(manifest, buckets)
        else:
            self._direct.load(self._tensors(self._loaded, buckets))

    def _reload(self, manifest: Manifest, buckets: list[Bytes]) -> None:
        """Load by vLLM's layerwise reload, which is watched the first time."""
        names = {entry.name for entry in self._loaded}
        rest = [entry for entry in manifest.tensors if entry.name not in names]
        if self.device.type == "cpu":
            self._forget_kernels()
        initialize_layerwise_reload(self.model)
        parameters = dict(self.model.named_parameters())
        expected = set(parameters)
        with nullcontext() if self._sent.is_known else self._sent.recording(parameters):
            loaded = self.model.load_weights(self._tensors(self._loaded, buckets))
        if rest and self._incomplete() - self._padded:
            # The model joins tensors of several blocks. What was not sent fails here, and the engine is built anew.
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
        if self._is_taken_apart:
            finalize_layerwise_reload(self.model, self.model_config)
        for method, kernel in self._kernels:
            method.moe_kernel = method.moe_kernel or kernel
        self._kernels.clear()
        if any(block_of(entry.name) == entry.name for entry in self._loaded):
            self._packing.pack_heads()
        manifest = self._loading.manifest
        self.read_back = self._read_back(manifest) if self._verifying else None
        contents = {entry.name: entry.content for entry in manifest.tensors}
        self.held = LoadedVersion(manifest.version, manifest.digest, contents)
        self.touched = False
        self._staging.give_up(self._loading)
        self._loading = None

    def _forget_kernels(self) -> None:
        """Take the kernels from layers of experts: a layer that has one would not pack the weights loaded into it."""
        for module in self.model.modules():
            method: Any = getattr(module, "quant_method", None)
            if getattr(method, "moe_kernel", None) is not None:
                self._kernels.append((method, method.moe_kernel))
                method.moe_kernel = None

    def _read_back(self, manifest: Manifest) -> ReadBack:
        """Compare what the model holds with what was sent. Raises WeightError naming what differs."""
        begin = time.perf_counter()
        self._sent.begin_to_verify(self._packing.readable(self.model))
        # Beside the digests, which a thread of its own computes. A new engine's layers are asked one and all.
        self._packing.verify(manifest.version, SHARE if self._was_read_back else 1)
        found = self._sent.verify(manifest)
        self._was_read_back = True
        return found._replace(seconds=time.perf_counter() - begin)

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
        """Yield names and tensors to load, one at a time: a merged matrix exists only while it is loaded."""
        tensors = self._contents(entries, buckets)
        if self._verifying or not self._sent.is_known:
            return self._sent.sent(tensors)
        return ((entry.name, tensor) for entry, tensor in tensors)

    def _contents(
        self, entries: list[TensorEntry], buckets: list[Bytes]
    ) -> Iterator[tuple[TensorEntry, torch.Tensor]]:
        for entry in entries:
            tensor = _tensor(entry, buckets)
            if entry.added is not None:
                parts = (_tensor(part, buckets) for part in (entry.added.down, entry.added.up))
                down, up = (part.to(self.device) for part in parts)
                tensor = merged(tensor.to(self.device), down, up, entry.added.scale)
            yield entry, tensor

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

    def receive_weights(self, manifest: str, answers: str, seats: str, worker: str) -> None:
        """Begin to receive a version as part of `worker`; see SharedMemoryTransfer.receive. All is encoded."""
        at, own = Seats.decoded(seats), cast("Any", self).rank
        rank = at.rank_of(worker, own)
        self.weight_transfer_engine.receive(Manifest.decoded(manifest), open(answers, "wb"), at, rank)  # noqa: SIM115

    def load_staged(
        self, version: int, digest: str, verify: VerifyWeights
    ) -> tuple[ReadBack | None, tuple[int, str, bool]]:
        """Load the version that is staged, which must be this one.

        Returns what was read back, if `verify` says so, and what `held_weights` returns then.
        """
        worker: Any = self
        self.weight_transfer_engine.verify = verify
        worker.start_weight_update()
        worker.update_weights({"version": version, "digest": digest})
        worker.finish_weight_update()
        return self.weight_transfer_engine.read_back, self.held_weights()

    def held_weights(self) -> tuple[int, str, bool]:
        """Return (version, digest, touched): what the model holds, or -1 and ""; whether it is half loaded."""
        engine = self.weight_transfer_engine
        held = engine.held or NOTHING
        return held.version, held.digest, engine.touched


def _checkpoint_shapes(hf_config: Any) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the tensors a trainer of this model publishes; tied ones once."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config)
    return CheckpointNames(model).shapes


def _dtype(entry: TensorEntry) -> torch.dtype:
    dtype = getattr(torch, entry.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise WeightError(f"tensor {entry.name!r} has dtype {entry.dtype!r}, which PyTorch does not know")
    return dtype


def _tensor(entry: TensorEntry, buckets: list[Bytes]) -> torch.Tensor:
    return torch.from_numpy(bytes_of(entry, buckets)).view(_dtype(entry)).reshape(entry.shape)


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, SharedMemoryTransfer)
