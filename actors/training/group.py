"""TrainerGroup: all ranks of the trainer as one.

    driver: TrainerGroup.fit(batch_ref) --ref--> every TrainerWorker.fit     --collectives--> metrics
            TrainerGroup.publish(v)     -------> every TrainerWorker.publish --rank 0-------> manifest, refs

A step can also be spelled out, which is what `fit` does on the ranks. What one call gives another is a ref:

    old = await trainer.compute_old_logprobs(batch_ref)
    ref = await trainer.compute_ref_logprobs(batch_ref)
    values = await critic.compute_values(batch_ref)
    advantages = await trainer.compute_advantages(batch_ref, old, ref, values)
    metrics = await trainer.train(batch_ref, advantages, old, ref)

Owns the rendezvous of the ranks, the order of their calls, the deadlines, and whether the ranks are fit for work. It
never opens a batch: its ref goes to the ranks, which read it from shared memory. What is done when they are not is
the driver's (jobs/recovery.py), which has every call pass its `guard`.

Invariants: all ranks get the same calls in the same order; every wait names the ranks that are late or gone.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

import ray
from ray.actor import ActorHandle

from actors.training.answers import RankFacts, TrainedStep
from actors.training.ranks import Ranks
from raypost.config import Config
from raypost.errors import RankLostError, RaypostError
from raypost.types import FloatArray, GroupKey, IntArray, Reference
from raypost.weights.manifest import Manifest
from raypost.weights.seats import Backend, Member, Seats

P = ParamSpec("P")
T = TypeVar("T")


class Guard(Protocol):
    """Makes a call to the ranks, and what is necessary when it fails."""

    async def __call__(self, call: Callable[[], Awaitable[T]]) -> T:
        """Return the result of the call."""
        ...


async def unguarded(call: Callable[[], Awaitable[T]]) -> T:
    """Make the call and nothing else."""
    return await call()


def _guarded(
    method: Callable[Concatenate[TrainerGroup, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[TrainerGroup, P], Coroutine[Any, Any, T]]:
    """Have a method's calls pass the group's guard."""

    @functools.wraps(method)
    async def guarded(group: TrainerGroup, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await group.guard(lambda: method(group, *args, **kwargs))

    return guarded


class TrainerGroup(Ranks):
    """All ranks as one trainer. It is pickled as the ranks of policy and critic, so it can be passed to other actors.

    Where the ranks are given by name, it outlives the process that made it, and theirs.
    """

    def __init__(
        self,
        workers: Sequence[ActorHandle | str],
        config: Config,
        critic: TrainerGroup | None = None,
        reference: Reference | None = None,
        name: str = "trainer",
    ) -> None:
        """Make one trainer of `workers`, actors of TrainerWorker or their names, in the order of their ranks.

        `critic`: started, saved and trained with the policy; its workers are of kind `critic`. `reference`: started
        with the policy, and computes the reference's logprobs if `train.loss.kl.pool` is set. `name`: begins the names
        of its workers.
        """
        if len(workers) != config.train.num_workers:
            raise ValueError(f"{len(workers)} workers, but train.num_workers is {config.train.num_workers}")
        super().__init__(workers, config, name)
        self._train = config.train
        self.guard: Guard = unguarded
        self.critic = critic
        """The group that trains the critic, if there is one."""
        self._reference = reference
        self._restarts = self._snapshot_of = 0
        self.micro_batch_tokens = config.train.micro_batch_tokens
        """Of the ranks as they are, or as the next `restart` makes them."""
        self.begun_from: tuple[Path | str, bool] | None = None
        """The arguments of `begin_from`, if it was called."""
        self.step = 0
        """The last step that was trained or restored."""
        self.left_out: dict[GroupKey, str] = {}
        """Groups of the step trained last that were not trained, and why."""

    def __repr__(self) -> str:
        """Return the name that logs and errors use."""
        return self._name

    def __reduce__(self) -> tuple[type[TrainerGroup], tuple[Any, ...]]:
        """Pickle as the ranks alone: a guard and the reference's engines are the driver's."""
        return TrainerGroup, (self._given, self._config, self.critic, None, self._name)

    async def start(self) -> list[dict[str, Any]]:
        """Bring all ranks together and build their engines; return what each says about itself."""
        reference = _nothing() if self._reference is None else self._reference.start()
        # Both to their end: where a rank failed it is started again, and the reference's engines are there then.
        infos, engines = await asyncio.gather(self._start(), reference, return_exceptions=True)
        for outcome in (infos, engines):
            if isinstance(outcome, BaseException):
                raise outcome
        return cast(list[dict[str, Any]], infos)

    async def lost(self) -> dict[str, str]:
        """Return why ranks, the critic's included, are not fit for work, by their names; {} if all are."""
        lost = {} if self.critic is None else await self.critic.lost()
        return lost | await self.lost_ranks()

    async def processes(self) -> dict[str, RankFacts]:
        """Return the process of every rank that answers, the critic's included, by name."""
        found = {} if self.critic is None else await self.critic.processes()
        return found | await self.rank_processes()

    async def restart(self) -> list[dict[str, Any]]:
        """End the processes of all ranks, the critic's included, and build them anew, as they were before training.

        Returns what each says about itself. The actors must be ones that Ray starts again. Raises WaitTimeoutError if a
        rank does not come back in time.
        """
        groups = [self] if self.critic is None else [self, self.critic]
        await asyncio.gather(*(group.renew() for group in groups))
        infos = await self._start()
        for group in groups:
            group.step = 0
            group._restarts += 1
        return infos

    async def _start(self) -> list[dict[str, Any]]:
        if self.critic is not None:
            await self.critic.start()
        if self.micro_batch_tokens != self._train.micro_batch_tokens:
            await self.each("limit", self.micro_batch_tokens)
        address, port = await self.first("rendezvous")
        return await self.each("setup", address, port)

    @_guarded
    async def fit(self, batch_ref: ray.ObjectRef, step: int | None = None) -> dict[str, float]:
        """Train one step on a batch (a ref of PackedGroups, which is not opened here); returns its metrics.

        `step` is the next one unless given. Given again after an error, a step that was trained is not
        trained again.
        """
        step = self.step + 1 if step is None else step
        if self.critic is not None or self._reference is not None:
            return await self._fit_call_by_call(batch_ref, step)
        return self._trained(step, await self.each("fit", batch_ref, step))

    def _trained(self, step: int, ranks: Sequence[TrainedStep]) -> dict[str, float]:
        self.step, self.left_out = step, ranks[0].left_out
        return ranks[0].metrics

    async def _fit_call_by_call(self, batch_ref: ray.ObjectRef, step: int) -> dict[str, float]:
        """Make the calls of a step one by one.

        If the critic trained and then the policy failed, a repeat of the step does not train the critic again.
        """
        critic = self.critic
        values = await critic.compute_values(batch_ref) if critic is not None else None
        old, ref = await asyncio.gather(
            self.compute_old_logprobs(batch_ref) if self._train.needs_old_logprobs else _nothing(),
            self.compute_ref_logprobs(batch_ref) if self._train.needs_ref_logprobs else _nothing(),
        )
        advantages = await self.compute_advantages(batch_ref, old, ref, values)
        if critic is None:
            return await self.train(batch_ref, advantages, old, ref, step=step)
        metrics, of_critic = await asyncio.gather(
            self.train(batch_ref, advantages, old, ref, step=step),
            critic.train_values(batch_ref, advantages, values, step=step),
        )
        return of_critic | metrics

    # ---------------------------------------------------------------- a step spelled out; all are refs

    @_guarded
    async def compute_old_logprobs(self, batch_ref: ray.ObjectRef) -> ray.ObjectRef:
        """Return logprobs of the batch's trained tokens under the current weights, temperature and cuts as sampled."""
        return await self.result_of("compute_old_logprobs", batch_ref)

    @_guarded
    async def compute_ref_logprobs(self, batch_ref: ray.ObjectRef) -> ray.ObjectRef:
        """Return the same under the frozen reference. Raises ValueError without one."""
        if self._reference is not None:
            return await self._reference.compute_ref_logprobs(batch_ref)
        return await self.result_of("compute_ref_logprobs", batch_ref)

    @_guarded
    async def compute_values(self, batch_ref: ray.ObjectRef) -> ray.ObjectRef:
        """Return the critic's value at each trained token, and after tokens at which a trajectory was cut off.

        The workers of this group must be a critic's.
        """
        return await self.result_of("compute_values", batch_ref)

    @_guarded
    async def compute_advantages(
        self,
        batch_ref: ray.ObjectRef,
        old_logprobs: ray.ObjectRef | None = None,
        ref_logprobs: ray.ObjectRef | None = None,
        values: ray.ObjectRef | None = None,
    ) -> ray.ObjectRef:
        """Return advantages of the batch's tokens, and with values the critic's returns."""
        return await self.result_of(
            "compute_advantages", batch_ref, old_logprobs, ref_logprobs, values, ranks=1
        )

    @_guarded
    async def train(
        self,
        batch_ref: ray.ObjectRef,
        advantages: ray.ObjectRef,
        old_logprobs: ray.ObjectRef | None = None,
        ref_logprobs: ray.ObjectRef | None = None,
        *,
        step: int | None = None,
    ) -> dict[str, float]:
        """Make the policy's optimizer steps on a batch; return metrics. `step`: as with `fit`.

        `TrainConfig.needs_old_logprobs` and `needs_ref_logprobs` say which refs are required.
        """
        step = self.step + 1 if step is None else step
        trained = await self.each("train", batch_ref, step, advantages, old_logprobs, ref_logprobs)
        return self._trained(step, trained)

    @_guarded
    async def train_values(
        self,
        batch_ref: ray.ObjectRef,
        advantages: ray.ObjectRef,
        values: ray.ObjectRef,
        *,
        step: int | None = None,
    ) -> dict[str, float]:
        """Make the critic's optimizer steps on a batch; return metrics under names that the policy's do not have.

        `values`: what `compute_values` returned.
        """
        step = self.step + 1 if step is None else step
        metrics = (await self.each("train_values", batch_ref, step, advantages, values))[0]
        self.step = step
        return {name if "value" in name else f"critic_{name}": value for name, value in metrics.items()}

    # ---------------------------------------------------------------- weights and state

    @_guarded
    async def publish(self, version: int) -> tuple[Manifest, list[ray.ObjectRef]]:
        """Put the weights into the object store as `version`; return their manifest and the refs of their buckets."""
        manifest: Manifest
        manifest, buckets = (await self.each("publish", version))[0]
        return manifest, buckets

    @_guarded
    async def node(self) -> str:
        """Return the address of rank 0's node."""
        (facts,) = (await self.beside("facts"))[:1]
        node: str = facts.node
        return node

    @_guarded
    async def open_group(self, members: Sequence[Member], backend: Backend, timeout_s: float) -> Seats:
        """Open a broadcast group from rank 0 to engines; see GroupSender."""
        seats: Seats = await self.first("open_group", members, backend, timeout_s)
        return seats

    @_guarded
    async def send(self, version: int, seats: Seats) -> str:
        """Have rank 0 send what it published as `version` to a group; "", or what failed."""
        failed: str = await self.first("send", version, seats)
        return failed

    @_guarded
    async def canary(self, token_ids: IntArray) -> FloatArray:
        """Return the logprob of every token but the first under the current weights, at temperature 1."""
        logprobs: FloatArray = (await self.each("canary_logprobs", token_ids))[0]
        return logprobs

    @_guarded
    async def save(self, path: Path | str, exports: Mapping[str, bool] | None = None) -> None:
        """Write weights, optimizer and random state below `path`, which every rank must see.

        `exports`: Hugging Face folders to be made there, by name: False the model, True the average of its weights.
        """
        await self.snapshot(path, exports)
        await self.write_snapshot(path)

    def snapshot(self, path: Path | str, exports: Mapping[str, bool] | None = None) -> Awaitable[object]:
        """Take what `save` writes as it is now; `write_snapshot` then writes it while steps are trained.

        The ranks are called at once: what is called later finds it taken, also if this is not awaited yet.
        """
        self._snapshot_of = self._restarts
        taking = [self.submitted("snapshot", str(path), exports or {})]
        if self.critic is not None:
            taking.append(self.critic.submitted("snapshot", str(Path(path) / _CRITIC), {}))
        return asyncio.gather(*taking)

    async def write_snapshot(self, path: Path | str) -> bool:
        """Write what was taken for `path`, durably; False if a rank has nothing that was taken for it.

        Repeated after an error, it goes on; after a success, it writes nothing. Raises RankLostError if the ranks were
        started again since: it is gone.
        """
        if self._snapshot_of != self._restarts:
            raise RankLostError("the ranks were started again since the snapshot was taken: take another")
        writing = [self.beside("write_snapshot", str(path))]
        if self.critic is not None:
            writing.append(self.critic.beside("write_snapshot", str(Path(path) / _CRITIC)))
        return all(done for ranks in await asyncio.gather(*writing) for done in ranks)

    @_guarded
    async def load(self, path: Path | str) -> int:
        """Restore what `save` wrote; return the step after which it was saved. Raises CheckpointError."""
        if self.critic is not None:
            await self.critic.load(Path(path) / _CRITIC)
        self.step = (await self.each("load", str(path)))[0]
        return self.step

    @_guarded
    async def begin_from(self, path: Path | str, *, optimizer: bool) -> None:
        """Take the weights that another run saved, with its optimizer's state if asked for. Raises CheckpointError.

        A critic begins with the other run's too, if that had one.
        """
        if self.critic is not None and (Path(path) / _CRITIC).is_dir():
            await self.critic.begin_from(Path(path) / _CRITIC, optimizer=optimizer)
        await self.each("begin_from", str(path), optimizer)
        self.begun_from = path, optimizer

    @_guarded
    async def save_hf(self, path: Path | str, ema: bool = False) -> None:
        """Write the model and its tokenizer as a Hugging Face folder.

        `ema`: with the moving average of its weights, which `train.ema_decay` keeps.
        """
        await self.each("save_hf", str(path), ema)

    @_guarded
    async def offload(self) -> None:
        """Free the devices of all ranks, the critic's included, for other processes; see TrainerWorker.

        Until `reload`, calls that need a model (steps, publications, checkpoints) are refused.
        """
        if self.critic is not None:
            await self.critic.offload()
        await self.each("offload")

    @_guarded
    async def reload(self) -> None:
        """Take the devices back. Engines that used them meanwhile must sleep."""
        if self.critic is not None:
            await self.critic.reload()
        await self.each("reload")

    async def shutdown(self) -> None:
        """Leave the process group and end the actors, also those that do not answer."""
        for other in (self.critic, self._reference):
            if other is not None:
                await other.shutdown()
        try:
            await self.each("close", timeout_s=min(10.0, self._timeout_s))
        except (RaypostError, ray.exceptions.RayError):
            pass  # A rank that is dead or stuck cannot say goodbye; the kill below ends it.
        finally:
            for worker in self.workers:
                ray.kill(worker)


_CRITIC = "critic"
"""Folder of the critic's state inside the policy's."""


async def _nothing() -> None:
    """Stand for a call that a step does not need."""
