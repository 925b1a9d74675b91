"""TrainerGroup: all ranks of the trainer as one.

    driver: TrainerGroup.fit(batch_ref) --ref--> every TrainerWorker.fit     --collectives--> metrics
            TrainerGroup.publish(v)     -------> every TrainerWorker.publish --rank 0-------> manifest, refs

A step can also be spelled out, which is what `fit` does on the ranks. What one call gives another is a ref:

    old = await trainer.compute_old_logprobs(batch_ref)
    ref = await trainer.compute_ref_logprobs(batch_ref)
    values = await critic.compute_values(batch_ref)
    advantages = await trainer.compute_advantages(batch_ref, old, ref, values)
    metrics = await trainer.train(batch_ref, advantages, old, ref)

Owns the rendezvous of the ranks, the order of their calls and the deadlines. It never opens a batch: its ref goes
to the ranks, which read it from shared memory.

Invariants: all ranks get the same calls in the same order; every wait names the ranks that are late.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle

from raypost.config import Config
from raypost.errors import RaypostError, WaitTimeoutError
from raypost.protocols import Reference
from raypost.types import FloatArray, IntArray
from raypost.weights.manifest import Manifest


class TrainerGroup:
    """All ranks as one trainer. Holds handles only, so it can be passed to other actors."""

    def __init__(
        self,
        workers: Sequence[ActorHandle],
        config: Config,
        critic: TrainerGroup | None = None,
        reference: Reference | None = None,
    ) -> None:
        """Make one trainer of `workers`, actors of TrainerWorker in the order of their ranks.

        `critic`: started, saved and trained with the policy; its workers are of kind `critic`. `reference`: started
        with the policy, and computes the reference's logprobs if `train.loss.kl.pool` is set.
        """
        if len(workers) != config.train.num_workers:
            raise ValueError(f"{len(workers)} workers, but train.num_workers is {config.train.num_workers}")
        self.workers = list(workers)
        self._train = config.train
        self.critic = critic
        """The group that trains the critic, if there is one."""
        self._reference = reference
        self._timeout_s = config.train.step_timeout_s
        self.step = 0
        """The last step that was trained or restored."""

    def __repr__(self) -> str:
        """Return the name that logs and errors use."""
        return "trainer"

    async def start(self) -> list[dict[str, Any]]:
        """Bring all ranks together and build their engines; return what each says about itself."""
        reference = _nothing() if self._reference is None else self._reference.start()
        infos: list[dict[str, Any]]
        _, infos = await asyncio.gather(reference, self._start())
        return infos

    async def _start(self) -> list[dict[str, Any]]:
        if self.critic is not None:
            await self.critic.start()
        meeting = [self.workers[0].rendezvous.remote()]
        address, port = (await self._wait("rendezvous", meeting, self._timeout_s))[0]
        return await self._each("setup", address, port)

    async def fit(self, batch_ref: ray.ObjectRef, step: int | None = None) -> dict[str, float]:
        """Train one step on a batch (a ref of PackedGroups, which is not opened here); returns its metrics.

        `step` is the next one unless given. Given again after an error, a step that was trained is not
        trained again.
        """
        step = self.step + 1 if step is None else step
        if self.critic is not None or self._reference is not None:
            return await self._fit_call_by_call(batch_ref, step)
        fits = [worker.fit.remote(batch_ref, step) for worker in self.workers]
        metrics: dict[str, float] = (await self._wait("fit", fits, self._timeout_s))[0]
        self.step = step
        return metrics

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

    async def compute_old_logprobs(self, batch_ref: ray.ObjectRef) -> ray.ObjectRef:
        """Return logprobs of the batch's trained tokens under the current weights, temperature and cuts as sampled."""
        return await self._result("compute_old_logprobs", batch_ref)

    async def compute_ref_logprobs(self, batch_ref: ray.ObjectRef) -> ray.ObjectRef:
        """Return the same under the frozen reference. Raises ValueError without one."""
        if self._reference is not None:
            return await self._reference.compute_ref_logprobs(batch_ref)
        return await self._result("compute_ref_logprobs", batch_ref)

    async def compute_values(self, batch_ref: ray.ObjectRef) -> ray.ObjectRef:
        """Return the critic's value at each trained token, and after tokens at which a trajectory was cut off.

        The workers of this group must be a critic's.
        """
        return await self._result("compute_values", batch_ref)

    async def compute_advantages(
        self,
        batch_ref: ray.ObjectRef,
        old_logprobs: ray.ObjectRef | None = None,
        ref_logprobs: ray.ObjectRef | None = None,
        values: ray.ObjectRef | None = None,
    ) -> ray.ObjectRef:
        """Return advantages of the batch's tokens, and with values the critic's returns."""
        return await self._result(
            "compute_advantages", batch_ref, old_logprobs, ref_logprobs, values, ranks=1
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
        """Make the policy's optimizer steps on a batch; return metrics. `step`: as with `fit`.

        `TrainConfig.needs_old_logprobs` and `needs_ref_logprobs` say which refs are required.
        """
        step = self.step + 1 if step is None else step
        metrics: dict[str, float]
        metrics = (await self._each("train", batch_ref, step, advantages, old_logprobs, ref_logprobs))[0]
        self.step = step
        return metrics

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
        metrics = (await self._each("train_values", batch_ref, step, advantages, values))[0]
        self.step = step
        return {name if "value" in name else f"critic_{name}": value for name, value in metrics.items()}

    # ---------------------------------------------------------------- weights and state

    async def publish(self, version: int) -> tuple[Manifest, list[ray.ObjectRef]]:
        """Put the weights into the object store as `version`; return their manifest and the refs of their buckets."""
        manifest: Manifest
        manifest, buckets = (await self._each("publish", version))[0]
        return manifest, buckets

    async def canary(self, token_ids: IntArray) -> FloatArray:
        """Return the logprob of every token but the first under the current weights, at temperature 1."""
        logprobs: FloatArray = (await self._each("canary_logprobs", token_ids))[0]
        return logprobs

    async def save(self, path: Path | str) -> None:
        """Write weights, optimizer and random state below `path`, which every rank must see."""
        await self._each("save", str(path))
        if self.critic is not None:
            await self.critic.save(Path(path) / _CRITIC)

    async def load(self, path: Path | str) -> int:
        """Restore what `save` wrote; return the step after which it was saved. Raises CheckpointError."""
        if self.critic is not None:
            await self.critic.load(Path(path) / _CRITIC)
        self.step = (await self._each("load", str(path)))[0]
        return self.step

    async def save_hf(self, path: Path | str, ema: bool = False) -> None:
        """Write the model and its tokenizer as a Hugging Face folder.

        `ema`: with the moving average of its weights, which `train.ema_decay` keeps.
        """
        await self._each("save_hf", str(path), ema)

    async def offload(self) -> None:
        """Free the devices of all ranks, the critic's included, for other processes; see TrainerWorker.

        Until `reload`, calls that need a model (steps, publications, checkpoints) are refused.
        """
        if self.critic is not None:
            await self.critic.offload()
        await self._each("offload")

    async def reload(self) -> None:
        """Take the devices back. Engines that used them meanwhile must sleep."""
        if self.critic is not None:
            await self.critic.reload()
        await self._each("reload")

    async def shutdown(self) -> None:
        """Leave the process group and end the actors, also those that do not answer."""
        for other in (self.critic, self._reference):
            if other is not None:
                await other.shutdown()
        try:
            await self._each("close", timeout_s=min(10.0, self._timeout_s))
        except (RaypostError, ray.exceptions.RayError):
            pass  # A rank that is dead or stuck cannot say goodbye; the kill below ends it.
        finally:
            for worker in self.workers:
                ray.kill(worker)

    async def _each(self, method: str, *args: Any, timeout_s: float | None = None) -> list[Any]:
        """Call a method of all ranks at once and return their answers in order; fails as `_wait` does."""
        calls = [getattr(worker, method).remote(*args) for worker in self.workers]
        return await self._wait(method, calls, self._timeout_s if timeout_s is None else timeout_s)

    async def _result(self, method: str, *args: Any, ranks: int | None = None) -> ray.ObjectRef:
        """Call the first `ranks` ranks, or all, at once; return the ref of rank 0's second return once all are done."""
        calls = [
            getattr(worker, method).options(num_returns=2).remote(*args) for worker in self.workers[:ranks]
        ]
        await self._wait(method, [done for done, _ in calls], self._timeout_s)
        return calls[0][1]

    async def _wait(self, method: str, refs: Sequence[ray.ObjectRef], timeout_s: float) -> list[Any]:
        """Return the answers of the ranks, the first of which is that of rank 0.

        The first failure is raised at once: the other ranks may be waiting for the failed one. Raises
        WaitTimeoutError naming the ranks that are late.
        """
        calls = [asyncio.ensure_future(ref) for ref in refs]
        try:
            done, late = await asyncio.wait(calls, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
            for call in done:
                call.result()
            if late:
                names = ", ".join(f"trainer-{rank}" for rank, call in enumerate(calls) if call in late)
                raise WaitTimeoutError(f"waited {timeout_s:.0f} s for {method} of {names}")
            return [call.result() for call in calls]
        finally:
            for call in calls:
                call.cancel()


_CRITIC = "critic"
"""Folder of the critic's state inside the policy's."""


async def _nothing() -> None:
    """Stand for a call that a step does not need."""
