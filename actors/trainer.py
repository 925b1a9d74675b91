"""TrainerWorker (one rank) and TrainerGroup (all ranks as one trainer).

    driver: TrainerGroup.fit(batch_ref) --ref--> every TrainerWorker.fit     --collectives--> metrics
            TrainerGroup.publish(v)     -------> every TrainerWorker.publish --rank 0-------> manifest, refs

A step can also be spelled out, which is what `fit` does on the ranks. What one call gives another is a ref:

    old = await trainer.compute_old_logprobs(batch_ref)
    ref = await trainer.compute_ref_logprobs(batch_ref)
    values = await critic.compute_values(batch_ref)
    advantages = await trainer.compute_advantages(batch_ref, old, ref, values)
    metrics = await trainer.train(batch_ref, advantages, old, ref)

Owns the rendezvous of the ranks, the lifetime of published weights and the deadlines; what a rank computes
is raypost.policy_rank's and raypost.critic_rank's. The group never opens a batch: its ref goes to the ranks,
which read it from shared memory.

Invariants: all ranks get the same calls in the same order, since most are collectives; at most two
publications are alive, the last one and the one being made; every wait names the ranks that are late.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import ray
from ray.actor import ActorHandle

from raypost.config import Config
from raypost.errors import RaypostError, WaitTimeoutError
from raypost.metrics import CHECKPOINT, SYNC, TRAIN, SpanLog
from raypost.packed import PackedGroups
from raypost.train_batch import Column
from raypost.types import FloatArray, IntArray, Span
from raypost.weights import Manifest, pack

if TYPE_CHECKING:
    from raypost.critic_rank import CriticRank
    from raypost.policy_rank import PolicyRank
    from raypost.token_advantages import TokenAdvantages

Kind = Literal["policy", "critic"]

CONCURRENCY_GROUPS = {"control": 1}
"""Spawn TrainerWorker with these: its time log is read while it trains, on a thread of its own."""


@dataclass(frozen=True, slots=True)
class Publication:
    """One version of the weights in the object store, kept alive by rank 0."""

    manifest: Manifest
    buckets: list[ray.ObjectRef]


class TrainerWorker:
    """One rank. Everything but `drain_spans` runs on one thread, in the order of the calls."""

    def __init__(self, config: Config, model_path: str, rank: int, kind: Kind = "policy") -> None:
        """A critic's `config` has `TrainConfig.for_critic` as its `train`."""
        self._config, self._model_path, self._rank, self._kind = config, model_path, rank, kind
        self._trained: PolicyRank | CriticRank | None = None
        self._published: list[Publication] = []
        self._spans = SpanLog(repr(self))

    def __repr__(self) -> str:
        return f"{'trainer' if self._kind == 'policy' else 'critic'}-{self._rank}"

    def rendezvous(self) -> tuple[str, int]:
        """This node's address and a port that is free on it now: where rank 0 waits for the others."""
        address = ray.util.get_node_ip_address()
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.bind((address, 0))
            return address, probe.getsockname()[1]

    def setup(self, master_addr: str, master_port: int) -> dict[str, Any]:
        """Join the other ranks and build the engine; returns facts about this rank. Repeated: only facts."""
        if self._trained is None:
            self._trained = self._build(master_addr, master_port)
        return {
            "rank": self._rank,
            "node": ray.util.get_node_ip_address(),
            "pid": os.getpid(),
            "step": self._trained.step,
        }

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
        if interface := _interface_of(ray.util.get_node_ip_address()):
            os.environ["GLOO_SOCKET_IFNAME"] = interface
        # DeepSpeed chooses its accelerator when it is imported, from the environment above.
        from raypost.critic_rank import CriticRank
        from raypost.policy_rank import PolicyRank

        kind = PolicyRank if self._kind == "policy" else CriticRank
        return kind(self._config, self._model_path, self._rank, train.num_workers)

    @property
    def _ready(self) -> PolicyRank | CriticRank:
        if self._trained is None:
            raise RaypostError(f"{self!r} is not set up: call TrainerGroup.start first")
        return self._trained

    @property
    def _policy(self) -> PolicyRank:
        from raypost.policy_rank import PolicyRank

        if not isinstance(self._ready, PolicyRank):
            raise RaypostError(f"{self!r} is no policy: it has neither logprobs nor published weights")
        return self._ready

    @property
    def _critic(self) -> CriticRank:
        from raypost.critic_rank import CriticRank

        if not isinstance(self._ready, CriticRank):
            raise RaypostError(f"{self!r} is no critic: it has no values")
        return self._ready

    def fit(self, packed: PackedGroups, step: int) -> dict[str, float]:
        """Train on the batch as `step`; a repeated step is not trained again. A collective."""
        with self._spans.span(TRAIN):
            return self._policy.fit(packed, step)

    # What another call needs is a second return of rank 0: its ref is passed on without being read.

    def compute_old_logprobs(self, packed: PackedGroups) -> tuple[None, Column | None]:
        """Logprobs of the batch's trained tokens under the current weights. A collective."""
        with self._spans.span(TRAIN):
            return None, self._of_rank_0(self._policy.compute_old_logprobs(packed))

    def compute_ref_logprobs(self, packed: PackedGroups) -> tuple[None, Column | None]:
        """The same under the frozen reference. A collective."""
        with self._spans.span(TRAIN):
            return None, self._of_rank_0(self._policy.compute_ref_logprobs(packed))

    def compute_values(self, packed: PackedGroups) -> tuple[None, Column | None]:
        """The critic's value at each trained token. A collective."""
        with self._spans.span(TRAIN):
            return None, self._of_rank_0(self._critic.compute_values(packed))

    def compute_advantages(
        self,
        packed: PackedGroups,
        old_logprobs: Column | None,
        ref_logprobs: Column | None,
        values: Column | None,
    ) -> tuple[None, TokenAdvantages]:
        """Advantages of the batch's tokens. No collective: one rank suffices."""
        with self._spans.span(TRAIN):
            return None, self._policy.compute_advantages(packed, old_logprobs, ref_logprobs, values)

    def train(
        self,
        packed: PackedGroups,
        step: int,
        advantages: TokenAdvantages,
        old_logprobs: Column | None,
        ref_logprobs: Column | None,
    ) -> dict[str, float]:
        """The policy's optimizer steps on a batch; a repeated step is not trained again. A collective."""
        with self._spans.span(TRAIN):
            return self._policy.train(packed, step, advantages, old_logprobs, ref_logprobs)

    def train_values(
        self, packed: PackedGroups, step: int, advantages: TokenAdvantages, values: Column
    ) -> dict[str, float]:
        """The critic's; `values`: what `compute_values` gave. A collective."""
        with self._spans.span(TRAIN):
            return self._critic.train(packed, step, advantages, values)

    def _of_rank_0(self, column: Column) -> Column | None:
        return column if self._rank == 0 else None

    def publish(self, version: int) -> tuple[Manifest, list[ray.ObjectRef]] | None:
        """Put the weights into the object store as `version`: rank 0 returns them. A collective at ZeRO 3.

        Always gathers, since other ranks take part. The last publication lives on until the next but one.
        """
        with self._spans.span(SYNC):
            # Dropped before the put, the version before the last gives its warm pages to this one.
            self._published = self._published[-1:]
            weights = self._policy.gather_weights()
            if self._rank != 0:
                assert not list(weights), "only rank 0 receives weights"
                return None
            manifest, buckets = pack(version, weights, self._config.train.bucket_mb * 2**20)
            refs = [ray.put(bucket) for bucket in buckets]
            self._published.append(Publication(manifest, refs))
            return manifest, refs

    def canary_logprobs(self, token_ids: IntArray) -> FloatArray:
        """Logprob of every token but the first at temperature 1, float32. A collective."""
        return self._policy.canary_logprobs(token_ids)

    def save(self, path: str) -> None:
        """Write this rank's part of a checkpoint. A collective."""
        with self._spans.span(CHECKPOINT):
            self._ready.save(Path(path))

    def load(self, path: str) -> int:
        """Restore a checkpoint; returns its step. What was published is not valid any more. A collective."""
        with self._spans.span(CHECKPOINT):
            self._published.clear()
            return self._ready.load(Path(path))

    def save_hf(self, path: str) -> None:
        """Write the model as a Hugging Face folder. A collective."""
        with self._spans.span(CHECKPOINT):
            self._ready.save_hf(Path(path))

    @ray.method(concurrency_group="control")
    def drain_spans(self) -> list[Span]:
        """Time spent training, publishing and saving since the last call."""
        return self._spans.drain()

    def close(self) -> None:
        """Leave the process group, so that no peer waits for this rank."""
        if self._trained is not None:
            self._trained.close()
            self._trained = None


class TrainerGroup:
    """All ranks as one trainer. Holds handles only, so it can be passed to other actors."""

    def __init__(
        self, workers: Sequence[ActorHandle], config: Config, critic: TrainerGroup | None = None
    ) -> None:
        """`workers`: actors of TrainerWorker in the order of their ranks. `critic`: started, saved and trained with
        the policy; its workers are of kind `critic`."""
        if len(workers) != config.train.num_workers:
            raise ValueError(f"{len(workers)} workers, but train.num_workers is {config.train.num_workers}")
        self._workers = list(workers)
        self._train, self._critic = config.train, critic
        self._timeout_s = config.train.step_timeout_s
        self._step = 0

    def __repr__(self) -> str:
        return "trainer"

    @property
    def step(self) -> int:
        """The last step that was trained or restored."""
        return self._step

    async def start(self) -> list[dict[str, Any]]:
        """Bring all ranks together and build their engines; returns what each says about itself."""
        if self._critic is not None:
            await self._critic.start()
        address, port = (await self._each("rendezvous", ranks=[0]))[0]
        return await self._each("setup", address, port)

    async def fit(self, batch_ref: ray.ObjectRef, step: int | None = None) -> dict[str, float]:
        """Train one step on a batch (a ref of PackedGroups, which is not opened here); returns its metrics.

        `step` is the next one unless given. Given again after an error, a step that was trained is not
        trained again.
        """
        step = self._step + 1 if step is None else step
        if self._critic is not None:
            return await self._fit_with_critic(self._critic, batch_ref, step)
        metrics = (await self._each("fit", batch_ref, step))[0]
        self._step = step
        return metrics

    async def _fit_with_critic(
        self, critic: TrainerGroup, batch_ref: ray.ObjectRef, step: int
    ) -> dict[str, float]:
        """The calls of a step, one by one. A critic that trained before the policy failed trains this step once."""
        values = await critic.compute_values(batch_ref)
        old = await self.compute_old_logprobs(batch_ref) if self._train.needs_old_logprobs else None
        ref = await self.compute_ref_logprobs(batch_ref) if self._train.needs_ref_logprobs else None
        advantages = await self.compute_advantages(batch_ref, old, ref, values)
        metrics, of_critic = await asyncio.gather(
            self.train(batch_ref, advantages, old, ref, step=step),
            critic.train_values(batch_ref, advantages, values, step=step),
        )
        own = {name if "value" in name else f"critic_{name}": value for name, value in of_critic.items()}
        return own | metrics

    # ---------------------------------------------------------------- a step spelled out; all are refs

    async def compute_old_logprobs(self, batch_ref: ray.ObjectRef) -> ray.ObjectRef:
        """Logprobs of the batch's trained tokens under the current weights, temperature and cuts as sampled."""
        return await self._result("compute_old_logprobs", batch_ref)

    async def compute_ref_logprobs(self, batch_ref: ray.ObjectRef) -> ray.ObjectRef:
        """The same under the frozen reference. Raises ValueError without one."""
        return await self._result("compute_ref_logprobs", batch_ref)

    async def compute_values(self, batch_ref: ray.ObjectRef) -> ray.ObjectRef:
        """The critic's value at each trained token; of a group whose workers are a critic."""
        return await self._result("compute_values", batch_ref)

    async def compute_advantages(
        self,
        batch_ref: ray.ObjectRef,
        old_logprobs: ray.ObjectRef | None = None,
        ref_logprobs: ray.ObjectRef | None = None,
        values: ray.ObjectRef | None = None,
    ) -> ray.ObjectRef:
        """Advantages of the batch's tokens, and with values the critic's returns."""
        return await self._result(
            "compute_advantages", batch_ref, old_logprobs, ref_logprobs, values, ranks=[0]
        )

    async def train(
        self,
        batch_ref: ray.ObjectRef,
        advantages: ray.ObjectRef,
        old_logprobs: ray.ObjectRef | None = None,
        ref_logprobs: ray.ObjectRef | None = None,
        *,
        step: int | None = None,
    ) -> dict[str, float]:
        """The policy's optimizer steps on a batch; returns metrics. `step`: as with `fit`.

        `TrainConfig.needs_old_logprobs` and `needs_ref_logprobs` say which refs there must be.
        """
        step = self._step + 1 if step is None else step
        metrics = (await self._each("train", batch_ref, step, advantages, old_logprobs, ref_logprobs))[0]
        self._step = step
        return metrics

    async def train_values(
        self,
        batch_ref: ray.ObjectRef,
        advantages: ray.ObjectRef,
        values: ray.ObjectRef,
        *,
        step: int | None = None,
    ) -> dict[str, float]:
        """The critic's optimizer steps on a batch; `values`: what `compute_values` gave."""
        step = self._step + 1 if step is None else step
        metrics = (await self._each("train_values", batch_ref, step, advantages, values))[0]
        self._step = step
        return metrics

    # ---------------------------------------------------------------- weights and state

    async def publish(self, version: int) -> tuple[Manifest, list[ray.ObjectRef]]:
        """The weights as `version`, in the object store: their manifest and the refs of their buckets."""
        return (await self._each("publish", version))[0]

    async def canary(self, token_ids: IntArray) -> FloatArray:
        """Logprob of every token but the first under the current weights, temperature 1."""
        return (await self._each("canary_logprobs", token_ids))[0]

    async def save(self, path: Path | str) -> None:
        """Write weights, optimizer and random state below `path`, which every rank must see."""
        await self._each("save", str(path))
        if self._critic is not None:
            await self._critic.save(Path(path) / _CRITIC)

    async def load(self, path: Path | str) -> int:
        """Restore what `save` wrote; returns the step it was saved after. Raises CheckpointError."""
        if self._critic is not None:
            await self._critic.load(Path(path) / _CRITIC)
        steps = await self._each("load", str(path))
        self._step = steps[0]
        return self._step

    async def save_hf(self, path: Path | str) -> None:
        """Write the model and its tokenizer as a Hugging Face folder."""
        await self._each("save_hf", str(path))

    async def drain_spans(self) -> list[Span]:
        """What all ranks did since the last call."""
        spans = [span for spans in await self._each("drain_spans") for span in spans]
        return spans if self._critic is None else spans + await self._critic.drain_spans()

    async def shutdown(self) -> None:
        """Leave the process group and end the actors, also those that do not answer."""
        if self._critic is not None:
            await self._critic.shutdown()
        try:
            await self._each("close", timeout_s=min(10.0, self._timeout_s))
        except (RaypostError, ray.exceptions.RayError):
            pass  # A rank that is dead or stuck cannot say goodbye; the kill below ends it.
        finally:
            for worker in self._workers:
                ray.kill(worker)

    async def _each(
        self, method: str, *args: Any, ranks: Sequence[int] | None = None, timeout_s: float | None = None
    ) -> list[Any]:
        """Call all ranks at once and return their answers in order; fails as `_wait` does."""
        ranks = range(len(self._workers)) if ranks is None else ranks
        refs = {rank: getattr(self._workers[rank], method).remote(*args) for rank in ranks}
        return await self._wait(method, refs, self._timeout_s if timeout_s is None else timeout_s)

    async def _result(self, method: str, *args: Any, ranks: Sequence[int] | None = None) -> ray.ObjectRef:
        """Call all ranks at once; rank 0's second return, as a ref, once all are through."""
        ranks = range(len(self._workers)) if ranks is None else ranks
        calls = {
            rank: getattr(self._workers[rank], method).options(num_returns=2).remote(*args) for rank in ranks
        }
        await self._wait(method, {rank: done for rank, (done, _) in calls.items()}, self._timeout_s)
        return calls[0][1]

    async def _wait(self, method: str, refs: dict[int, ray.ObjectRef], timeout_s: float) -> list[Any]:
        """The answers of the ranks.

        The first failure is raised at once: the other ranks may be waiting for the failed one. Raises
        WaitTimeoutError naming the ranks that are late.
        """
        calls = {asyncio.ensure_future(_answer(ref)): rank for rank, ref in refs.items()}
        try:
            done, late = await asyncio.wait(calls, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
            for call in done:
                call.result()
            if late:
                names = ", ".join(f"trainer-{calls[call]}" for call in sorted(late, key=calls.__getitem__))
                raise WaitTimeoutError(f"waited {timeout_s:.0f} s for {method} of {names}")
            return [call.result() for call in calls]
        finally:
            for call in calls:
                call.cancel()


_CRITIC = "critic"
"""Folder of the critic's state inside the policy's."""

_SIOCGIFADDR = 0x8915
"""Linux: the IPv4 address of a network interface."""


def _interface_of(address: str) -> str | None:
    """Name of this node's network interface with that IPv4 address, or None."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24]
            except OSError:
                continue  # An interface without an IPv4 address.
            if socket.inet_ntoa(found) == address:
                return name
    return None


async def _answer(ref: ray.ObjectRef) -> Any:
    return await ref
