"""The half of a weight transfer that runs inside vLLM's worker process.

Owns what happens there from mapped bytes to a model that uses them, and the record of what the model holds.
Imported by vLLM through `worker_extension_cls`, which also registers the transfer engine. What the rollout
worker sends is the manifest and a path of shared memory a bucket; bytes never pass through an RPC.

    stage_weights   check names, shapes -> map -> verify digests on a thread (staging.py) -> prepare, on CPU: write what
                    differs, adapters added, into stand-ins of the layers (direct_load.py) and read it back; requests
                    may run meanwhile
    receive_weights the same of what rank 0 of a broadcast group sends
    load_staged     vLLM's three calls, one after the other:
        start_weight_update   nothing: the old weights stay in use until the new bytes are verified
        update_weights        the stand-ins become the layers; or what differs is written straight to where the first
                              version went; or vLLM's layerwise reload
        finish_weight_update  of a reload: finalize, pack heads again -> read back what was not yet -> record what the
                              model holds

Invariants: the model is touched only after every byte was verified; `held` is the only record of what the model
holds, and is None unless the model is whole and, where `sync.verify` asks for it, was read back; what was read back of
stand-ins is what the layers then have; a tensor that is not loaded again has the content that `held` says.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

import torch
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
from actors.rollout.sent_tensors import SentTensors
from actors.rollout.staging import StagedVersion, Staging
from actors.rollout.versions import NOTHING, LoadedVersion, PreparedVersion
from raypost.config import VerifyWeights
from raypost.errors import WeightError
from raypost.weights.delta import block_of
from raypost.weights.held import HeldWeights, ReadBack
from raypost.weights.manifest import Bytes, Manifest, TensorEntry
from raypost.weights.seats import Seats

BACKEND = "raypost"
"""Name under which vLLM's WeightTransferConfig selects this engine."""


@dataclass
class PublishedVersion(WeightTransferUpdateInfo):  # type: ignore[misc]  # mypy does not follow vLLM
    """Names the version to load, which must be staged."""

    version: int
    digest: str


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
        self._stager = ThreadPoolExecutor(1, "stage-weights")
        self._staging = Staging(self._stager, self._prepare)
        self._prepared: PreparedVersion | None = None
        self._sent = HeldWeights(self._verifier)
        self._packing = Packing(model, self._sent)
        self._direct = DirectLoad(model, self._sent, vllm_config.model_config.dtype)
        self.read_back: ReadBack | None = None
        """Of the last load, None where it was not asked for."""
        self.verify: VerifyWeights = "every"
        self._was_read_back = False
        self.touched = False
        """True from the first change of the model until all of the version is in place."""
        self._loading: StagedVersion | None = None
        self._installed: PreparedVersion | None = None
        self._loaded: list[TensorEntry] = []
        self._to_read_back = False
        self._is_taken_apart = False
        """Whether the model is, by vLLM's layerwise reload."""
        self._kernels: list[tuple[Any, Any]] = []
        """Layers of experts and the kernels they had before the load."""
        self._padded: set[tuple[str, int]] = set()
        """Modules that are larger than all that a version has for them, such as embeddings of a padded vocabulary."""
        # vLLM may have made the model's own class one of its modules, which are made under its configuration only.
        with set_current_vllm_config(vllm_config):
            self._tensors = SentTensors(self.model_config.hf_config, device)
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
        self._tensors.check(manifest)
        self._check_held(manifest, len(manifest.bucket_sizes) - len(paths))
        self._staging.map(manifest, answers, paths)

    def receive(self, manifest: Manifest, answers: BinaryIO, seats: Seats, rank: int) -> None:
        """Begin to receive a version: see Staging.receive. Raises WeightError if it is not of this model."""
        self._tensors.check(manifest)
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

    @property
    def _verifying(self) -> bool:
        """Whether what is loaded next is read back."""
        return self.verify == "every" or (self.verify == "first" and self.held is None)

    def _prepare(self, manifest: Manifest, buckets: list[Bytes]) -> None:
        """Prepare a version that is verified, on the thread that stages, where the model is not written in place."""
        self._prepared = None
        if self.device.type == "cpu":
            self._prepared = self._in_stand_ins(manifest, buckets)

    def _in_stand_ins(self, manifest: Manifest, buckets: list[Bytes]) -> PreparedVersion | None:
        """Return a version in stand-ins; None if vLLM must load it. Raises WeightError if they have something else."""
        stale = (self.held or NOTHING).lacks(manifest)
        names = frozenset(entry.name for entry in stale)
        if not self._direct.can_load(names):
            return None
        sent, verifying = self._sent.draft(), self._verifying
        self._packing.note(sent, manifest.version if verifying else None)
        stand_ins = self._direct.prepare(self._to_load(stale, buckets, sent if verifying else None))
        read = None
        if verifying:
            sent.begin_to_verify(self._packing.readable(self.model) | self._direct.parameters(stand_ins))
            read = sent.verify(manifest)
        return PreparedVersion(manifest, names, stand_ins, sent, read)

    def receive_weights(self, update_info: PublishedVersion) -> None:
        """Load what the model does not hold. Raises WeightError naming a tensor of wrong bytes."""
        staged = self._staging.take(update_info.version, update_info.digest)
        manifest, buckets = staged.manifest, staged.buckets
        self._check_held(manifest, staged.absent)
        prepared, self._prepared = self._prepared, None
        if prepared is not None and not self._is_to_install(prepared, manifest):
            prepared = self._in_stand_ins(manifest, buckets)
        held, verifying = self.held or NOTHING, self._verifying
        self.held = None
        self.touched = True
        self._loading, self._installed = staged, prepared
        self._loaded, self._is_taken_apart = held.lacks(manifest), False
        if prepared is not None:
            self._packing.note(prepared.sent, None)
            former = self._direct.install(prepared.stand_ins)
            # Beside the requests that go on: to free so much memory takes time.
            self._stager.submit(former.clear)
            return
        self.read_back = None
        self._to_read_back = verifying
        self._packing.note(self._sent, manifest.version if verifying else None)
        self._load(manifest, buckets)

    def _is_to_install(self, prepared: PreparedVersion, manifest: Manifest) -> bool:
        """Return whether what was prepared is all of this version that the model lacks, read back if it is to be."""
        stale = (self.held or NOTHING).lacks(manifest)
        is_checked = prepared.read_back is not None or not self._verifying
        return (
            prepared.manifest == manifest and is_checked and all(one.name in prepared.names for one in stale)
        )

    def _load(self, manifest: Manifest, buckets: list[Bytes]) -> None:
        """Load what differs, together with all of its block."""
        self._is_taken_apart = not self._direct.can_load([entry.name for entry in self._loaded])
        if self._is_taken_apart:
            self._reload(manifest, buckets)
        else:
            sent = self._sent if self._to_read_back else None
            self._direct.load(self._to_load(self._loaded, buckets, sent))

    def _reload(self, manifest: Manifest, buckets: list[Bytes]) -> None:
        """Load by vLLM's layerwise reload, which is watched the first time."""
        names = {entry.name for entry in self._loaded}
        rest = [entry for entry in manifest.tensors if entry.name not in names]
        if self.device.type == "cpu":
            self._forget_kernels()
        initialize_layerwise_reload(self.model)
        parameters = dict(self.model.named_parameters())
        expected = set(parameters)
        sent = self._sent if self._to_read_back or not self._sent.is_known else None
        with nullcontext() if self._sent.is_known else self._sent.recording(parameters):
            loaded = self.model.load_weights(self._to_load(self._loaded, buckets, sent))
        if rest and self._incomplete() - self._padded:
            # The model joins tensors of several blocks. What was not sent fails here, and the engine is built anew.
            loaded |= self.model.load_weights(self._to_load(rest, buckets, sent))
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
        manifest = self._loading.manifest
        if self._installed is not None:
            self._check_installed(self._installed)
        else:
            self._finish_load(manifest)
        contents = {entry.name: entry.content for entry in manifest.tensors}
        self.held = LoadedVersion(manifest.version, manifest.digest, contents)
        self.touched = False
        self._staging.give_up(self._loading)
        self._loading = self._installed = None

    def _finish_load(self, manifest: Manifest) -> None:
        """Put what was reloaded in place, and read back what was loaded if it is to be."""
        if self._is_taken_apart:
            finalize_layerwise_reload(self.model, self.model_config)
            for method, kernel in self._kernels:
                method.moe_kernel = method.moe_kernel or kernel
            self._kernels.clear()
            if any(block_of(entry.name) == entry.name for entry in self._loaded):
                self._packing.pack_heads()
        self.read_back = self._read_back(manifest) if self._to_read_back else None

    def _check_installed(self, prepared: PreparedVersion) -> None:
        """Raise WeightError unless the layers compute with what was read back of their stand-ins."""
        begin = time.perf_counter()
        wrong = self._direct.replaced(prepared.stand_ins)
        if wrong is not None:
            raise WeightError(
                f"version {prepared.manifest.version}: layer {wrong!r} does not compute with what was prepared for it: "
                "load it again"
            )
        self._sent, self.read_back = prepared.sent, prepared.read_back
        if self.read_back is not None:
            self._ask_kernels(prepared.manifest.version)
            self.read_back = self.read_back._replace(seconds=time.perf_counter() - begin)

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
        # Beside the digests, which a thread of its own computes.
        self._ask_kernels(manifest.version)
        found = self._sent.verify(manifest)
        return found._replace(seconds=time.perf_counter() - begin)

    def _ask_kernels(self, version: int) -> None:
        """Compare what kernels have packed with what was loaded; of a new engine's layers, one and all."""
        self._packing.verify(version, SHARE if self._was_read_back else 1)
        self._was_read_back = True

    def shutdown(self) -> None:
        """End the threads that stage and verify."""
        for thread in (self._stager, self._verifier):
            thread.shutdown(wait=False, cancel_futures=True)

    def _to_load(
        self, entries: list[TensorEntry], buckets: list[Bytes], noting: HeldWeights | None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and tensors to load."""
        tensors = self._tensors.contents(entries, buckets)
        if noting is not None:
            return noting.sent(tensors)
        return ((entry.name, tensor) for entry, tensor in tensors)

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

    def stage_weights(self, manifest: str, verify: VerifyWeights, answers: str, *paths: str) -> None:
        """Begin to verify and prepare a version; `manifest` is encoded, the last ones are paths.

        `verify`: which loads are read back. See SharedMemoryTransfer.stage.
        """
        self.weight_transfer_engine.verify = verify
        self.weight_transfer_engine.stage(Manifest.decoded(manifest), open(answers, "wb"), paths)  # noqa: SIM115

    def receive_weights(
        self, manifest: str, verify: VerifyWeights, answers: str, seats: str, worker: str
    ) -> None:
        """Begin to receive a version as part of `worker`, else as `stage_weights`; `seats` are encoded.

        See SharedMemoryTransfer.receive.
        """
        self.weight_transfer_engine.verify = verify
        at, own = Seats.decoded(seats), cast("Any", self).rank
        rank = at.rank_of(worker, own)
        self.weight_transfer_engine.receive(Manifest.decoded(manifest), open(answers, "wb"), at, rank)  # noqa: SIM115

    def load_staged(self, version: int, digest: str) -> tuple[ReadBack | None, tuple[int, str, bool]]:
        """Load the version that is staged, which must be this one.

        Returns what was read back, if it was to be, and what `held_weights` returns then.
        """
        worker: Any = self
        worker.start_weight_update()
        worker.update_weights({"version": version, "digest": digest})
        worker.finish_weight_update()
        return self.weight_transfer_engine.read_back, self.held_weights()

    def held_weights(self) -> tuple[int, str, bool]:
        """Return (version, digest, touched): what the model holds, or -1 and ""; whether it is half loaded."""
        engine = self.weight_transfer_engine
        held = engine.held or NOTHING
        return held.version, held.digest, engine.touched


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, SharedMemoryTransfer)
