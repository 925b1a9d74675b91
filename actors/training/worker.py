"""TrainerWorker: one rank of the trainer, or of its critic, as an actor.

Owns the rank's environment and process group, its time log, and the lifetime of the weights it published; what it
computes is raypost.trainer's. It imports torch and deepspeed in `setup`, in its own process.

Invariants: all ranks get the same calls in the same order, since most are collectives; at most two publications
are alive, the last one and the one being made, besides the base weights that adapters are added to, or those that do
not change.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import psutil
import ray

from actors.training.answers import Publication, RankFacts, TrainedStep
from actors.training.once import Once
from actors.training.sender import GroupSender
from raypost.config import Config
from raypost.errors import RankLostError, RaypostError
from raypost.observe.spans import CHECKPOINT, SYNC, TRAIN, Span, SpanLog
from raypost.trainer.algorithm.token_advantages import (
    CriticInputs,
    PolicyInputs,
    TokenAdvantages,
    TokenValues,
)
from raypost.trainer.batch.train_batch import Column
from raypost.types import FloatArray, IntArray
from raypost.types.packed import PackedGroups
from raypost.weights.delta import DeltaPacker
from raypost.weights.manifest import Given, Manifest, pack_adapters, pack_by
from raypost.weights.seats import Backend, Member, Seats

if TYPE_CHECKING:
    from torch import Tensor

    from raypost.trainer.critic_rank import CriticRank
    from raypost.trainer.engine import Kind
    from raypost.trainer.policy_rank import PolicyRank
    from raypost.trainer.snapshot import Snapshot

T = TypeVar("T")

CONCURRENCY_GROUPS = {"control": 1, "write": 1}
"""Spawn TrainerWorker with these: while it trains, its time log is read and its last snapshot is written, each on a
thread of its own."""


class TrainerWorker(Once):
    """One rank. Everything but `facts`, `drain_spans` and `write_snapshot` runs on one thread, called by `once`."""

    def __init__(self, config: Config, model_path: str, rank: int, kind: Kind = "policy") -> None:
        """Prepare a rank; nothing is loaded until `setup`. A critic's `config.train` is `TrainConfig.for_critic`."""
        super().__init__()
        self._config = config
        self._model_path = model_path
        self._rank = rank
        self._kind = kind
        self._trained: PolicyRank | CriticRank | None = None
        self._published: list[Publication] = []
        self._version: int | None = None
        """That was published last."""
        self._canary: tuple[int, IntArray, FloatArray] | None = None
        """The last answer: step, prompt and logprobs."""
        self._deltas = self._packer()
        self._sender = GroupSender()
        self._base: Publication | None = None
        """What adapters are added to, on rank 0 once it was gathered."""
        self._base_gathered = False
        self._snapshot: Snapshot | None = None
        """What is not yet written of a checkpoint."""
        self._snapshot_path = ""
        """Which folder it was taken for."""
        self._spans = SpanLog(repr(self))

    def __repr__(self) -> str:
        """Return the name that logs and errors use."""
        return f"{'trainer' if self._kind == 'policy' else 'critic'}-{self._rank}"

    def rendezvous(self) -> tuple[str, int]:
        """Return this node's address and a port that is free on it now: where rank 0 waits for the others."""
        address = ray.util.get_node_ip_address()
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.bind((address, 0))
            return address, probe.getsockname()[1]

    def setup(self, master_addr: str, master_port: int) -> dict[str, Any]:
        """Join the other ranks and build the engine; return facts about this rank. Repeated: only facts."""
        if self._trained is None:
            self._trained = self._build(master_addr, master_port)
        return {"rank": self._rank, "step": self._trained.step, **self.facts()._asdict()}

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]  # Ray has no type for it
    def facts(self) -> RankFacts:
        """Return where this process is and whether it has a model; it answers while it trains."""
        return RankFacts(os.getpid(), ray.util.get_node_ip_address(), self._trained is not None)

    def limit(self, micro_batch_tokens: int) -> None:
        """Make micro-batches of at most so many tokens; to be called before `setup`."""
        train = self._config.train.model_copy(update={"micro_batch_tokens": micro_batch_tokens})
        self._config = self._config.model_copy(update={"train": train})

    def _build(self, master_addr: str, master_port: int) -> PolicyRank | CriticRank:
        train = self._config.train
        os.environ |= {
            "MASTER_ADDR": master_addr,
            "MASTER_PORT": str(master_port),
            "RANK": str(self._rank),
            "WORLD_SIZE": str(train.num_workers),
            # Ray shows each actor its own devices only, numbered from 0.
            "LOCAL_RANK": "0",
            "LOCAL_SIZE": "1",
            "DS_ACCELERATOR": self._config.device,
            "OMP_NUM_THREADS": str(train.threads),
            "TOKENIZERS_PARALLELISM": "false",
        }
        # By itself gloo takes the address of the host's name, which need not be the cluster's network.
        own = ray.util.get_node_ip_address()
        for interface, addresses in psutil.net_if_addrs().items():
            if any(one.address == own for one in addresses):
                os.environ["GLOO_SOCKET_IFNAME"] = interface
        # DeepSpeed chooses its accelerator when it is imported, from the environment above.
        from raypost.trainer.critic_rank import CriticRank
        from raypost.trainer.policy_rank import PolicyRank

        kind = PolicyRank if self._kind == "policy" else CriticRank
        return kind(self._config, self._model_path, self._rank)

    @property
    def _ready(self) -> PolicyRank | CriticRank:
        trained = self._set_up
        if trained.is_offloaded:
            raise RaypostError(f"{self!r} is offloaded: call TrainerGroup.reload first")
        return trained

    @property
    def _set_up(self) -> PolicyRank | CriticRank:
        if self._trained is None:
            raise RankLostError(
                f"{self!r} is not set up: its process was started again, or TrainerGroup.start was never called"
            )
        return self._trained

    @property
    def _policy(self) -> PolicyRank:
        from raypost.trainer.policy_rank import PolicyRank

        if not isinstance(self._ready, PolicyRank):
            raise RaypostError(f"{self!r} is no policy: it has neither logprobs nor published weights")
        return self._ready

    @property
    def _critic(self) -> CriticRank:
        from raypost.trainer.critic_rank import CriticRank

        if not isinstance(self._ready, CriticRank):
            raise RaypostError(f"{self!r} is no critic: it has no values")
        return self._ready

    def fit(self, packed: PackedGroups, step: int) -> TrainedStep:
        """Train on the batch as `step`; a repeated step is not trained again. A collective."""
        with self._spans.span(TRAIN):
            return TrainedStep(self._policy.train(packed, step), self._policy.left_out)

    # What another call needs is a second return of rank 0: its ref is passed on without being read.

    def compute_old_logprobs(self, packed: PackedGroups) -> tuple[None, Column | None]:
        """Return logprobs of the batch's trained tokens under the current weights. A collective."""
        with self._spans.span(TRAIN):
            return None, self._of_rank_0(self._policy.compute_old_logprobs(packed))

    def compute_ref_logprobs(self, packed: PackedGroups) -> tuple[None, Column | None]:
        """Return the same under the frozen reference. A collective."""
        with self._spans.span(TRAIN):
            return None, self._of_rank_0(self._policy.compute_ref_logprobs(packed))

    def compute_values(self, packed: PackedGroups) -> tuple[None, TokenValues | None]:
        """Return the critic's value at each trained token, and after what was cut off. A collective."""
        with self._spans.span(TRAIN):
            return None, self._of_rank_0(self._critic.compute_values(packed))

    def compute_advantages(
        self,
        packed: PackedGroups,
        old_logprobs: Column | None,
        ref_logprobs: Column | None,
        values: TokenValues | None,
    ) -> tuple[None, TokenAdvantages]:
        """Return advantages of the batch's tokens. No collective: one rank suffices."""
        with self._spans.span(TRAIN):
            return None, self._policy.compute_advantages(packed, old_logprobs, ref_logprobs, values)

    def train(
        self,
        packed: PackedGroups,
        step: int,
        advantages: TokenAdvantages,
        old_logprobs: Column | None,
        ref_logprobs: Column | None,
    ) -> TrainedStep:
        """Make the policy's optimizer steps on a batch; a repeated step is not trained again. A collective."""
        inputs = PolicyInputs(advantages, old_logprobs, ref_logprobs)
        with self._spans.span(TRAIN):
            return TrainedStep(self._policy.train(packed, step, inputs), self._policy.left_out)

    def train_values(
        self, packed: PackedGroups, step: int, advantages: TokenAdvantages, values: TokenValues
    ) -> dict[str, float]:
        """Make the critic's optimizer steps; `values`: what `compute_values` returned. A collective."""
        with self._spans.span(TRAIN):
            return self._critic.train(packed, step, CriticInputs(advantages, values))

    def _of_rank_0(self, result: T) -> T | None:
        return result if self._rank == 0 else None

    def publish(self, version: int) -> Publication | None:
        """Put the weights into the object store as `version`: rank 0 returns them. A collective at ZeRO 3.

        Always gathers, since other ranks take part. The last publication lives on until the next but one, and with
        `train.lora.sync: adapter` the base weights for as long as this worker, or until it restores a checkpoint. Ranks
        that are offloaded give again what they published last, if that is `version`: a new broadcaster asks for it.
        """
        if self._set_up.is_offloaded and version == self._version:
            return self._published[-1] if self._published else None
        with self._spans.span(SYNC):
            # Dropped before the put, the version before the last gives its warm pages to this one.
            self._published = self._published[-1:]
            lora = self._config.train.lora
            if lora is None or lora.sync == "merged":
                made = self._put(self._policy.gather_weights(), lambda all: self._deltas.pack(version, all))
            else:
                made = self._put_adapters(version)
            if made is not None:
                self._published.append(made)
            self._version = version
            return made

    @property
    def _bucket_bytes(self) -> int:
        return self._config.train.bucket_mb * 2**20

    def _packer(self) -> DeltaPacker[ray.ObjectRef]:
        """Each bucket is put as soon as it is full, so that the weights are never whole in this process."""
        return DeltaPacker(self._bucket_bytes, ray.put)

    def _put_adapters(self, version: int) -> Publication | None:
        """Put the adapters into the object store, and before the first of them the weights that they are added to."""
        size = self._bucket_bytes
        if not self._base_gathered:
            self._base = self._put(
                self._policy.gather_base(), lambda all: pack_by(version, all, size, ray.put)
            )
            self._base_gathered = True
        base, factors = self._base, self._policy.gather_adapters()
        if base is None:
            return self._put(factors, None)
        scales = self._policy.adapter_scales

        def add(factors: Given) -> tuple[Manifest, list[ray.ObjectRef]]:
            manifest, buckets = pack_adapters(version, base.manifest, factors, scales, size)
            return manifest, base.buckets + [ray.put(bucket) for bucket in buckets]

        return self._put(factors, add)

    def _put(
        self,
        weights: Iterable[tuple[str, Tensor]],
        make: Callable[[Given], tuple[Manifest, list[ray.ObjectRef]]] | None,
    ) -> Publication | None:
        """Have `make` put the weights into the object store; return None on other ranks than 0."""
        if self._rank != 0 or make is None:
            assert not list(weights), "only rank 0 receives weights"
            return None
        from raypost.weights.tensors import as_bytes

        return Publication(*make(as_bytes(weights)))

    def open_group(self, members: Sequence[Member], backend: Backend, timeout_s: float) -> Seats:
        """Open a broadcast group from this rank to engines; see GroupSender. On rank 0."""
        return self._sender.open(members, backend, timeout_s)

    def send(self, version: int, seats: Seats) -> str:
        """Send what was published last, which must be `version`, to a group; "", or what failed. On rank 0."""
        with self._spans.span(SYNC):
            published = [one for one in self._published if one.manifest.version == version]
            if not published:
                return f"version {version} is not published by this process: it was started again"
            return self._sender.send(published[-1].buckets, seats)

    def canary_logprobs(self, token_ids: IntArray) -> FloatArray:
        """Return the logprob of every token but the first at temperature 1, float32. A collective.

        Ranks that are offloaded answer again what they answered last, to the same question.
        """
        if self._set_up.is_offloaded and self._canary is not None:
            step, asked, logprobs = self._canary
            if step == self._set_up.step and np.array_equal(asked, token_ids):
                return logprobs
        logprobs = self._policy.canary_logprobs(token_ids)
        self._canary = self._set_up.step, token_ids, logprobs
        return logprobs

    def snapshot(self, path: str, exports: Mapping[str, bool]) -> None:
        """Take this rank's part of a checkpoint below `path`, for `write_snapshot`. A collective.

        `exports`: Hugging Face folders by name, with the average of the weights or with themselves. Where memory is
        too short for a copy, it is written here.
        """
        with self._spans.span(CHECKPOINT):
            trained = self._ready
            self._snapshot = self._policy.export_snapshot(exports) if exports else trained.snapshot()
            self._snapshot_path = path
            if not self._snapshot.is_copy:
                self.write_snapshot(path)

    @ray.method(concurrency_group="write")  # type: ignore[untyped-decorator]  # Ray has no type for it
    def write_snapshot(self, path: str) -> bool:
        """Write what was taken for `path`, durably, while the rank goes on; False if nothing was taken for it.

        Repeated after a success, it writes nothing.
        """
        if self._snapshot_path != path:
            return False
        if self._snapshot is not None:
            self._snapshot.write(Path(path))
            self._snapshot = None
        return True

    def load(self, path: str) -> int:
        """Restore a checkpoint and return its step. What was published is no longer valid. A collective."""
        with self._spans.span(CHECKPOINT):
            self._forget_published()
            return self._ready.load(Path(path))

    def begin_from(self, path: str, optimizer: bool) -> None:
        """Take weights from another run's checkpoint, and its optimizer's state; the step stays. A collective."""
        with self._spans.span(CHECKPOINT):
            self._forget_published()
            self._ready.begin_from(Path(path), optimizer=optimizer)

    def _forget_published(self) -> None:
        self._published.clear()
        self._version = self._canary = None
        self._deltas = self._packer()
        self._base = None
        self._base_gathered = False

    def save_hf(self, path: str, ema: bool = False) -> None:
        """Write the model, or the moving average of its weights, as a Hugging Face folder. A collective."""
        with self._spans.span(CHECKPOINT):
            self._ready.save_hf(Path(path), ema)

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]  # Ray has no type for it
    def drain_spans(self) -> list[Span]:
        """Return the time spent training, publishing and saving since the last call."""
        return self._spans.drain()

    def offload(self) -> None:
        """Free the device for other processes: move the states to main memory. Idempotent.

        Calls that need the states are refused until `reload`. What stays on a GPU is what CUDA and NCCL take
        themselves. On CPU nothing is freed: the same calls are refused, and the states are copied within main memory.
        """
        self._set_up.offload()

    def reload(self) -> None:
        """Take the device back, with the states as they were. Idempotent."""
        self._set_up.reload()

    def close(self) -> None:
        """Leave the process group, so that no peer waits for this rank."""
        if self._trained is not None:
            self._trained.close()
            self._trained = None
