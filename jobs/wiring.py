"""Config -> Roles: starts every actor, joins them by handles, and takes down what it started.

Owns the order of starting and ending, and the deadlines of calls the driver makes. Owns no step logic: that
is the job's own screen. Whatever happens inside `spawn`, the report is written before the actors go.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray
from ray.actor import ActorHandle
from ray.util.placement_group import remove_placement_group

from actors import (
    agent_loop,
    evaluator,
    judge,
    placement,
    producer,
    replay_buffer,
    rollout_controller,
    rollout_worker,
    telemetry,
    trainer,
    weight_broadcaster,
)
from actors.remote import Remote, RemotePool, within
from raypost import plan
from raypost.checkpoint import CheckpointDir
from raypost.config import Config
from raypost.display import Progress
from raypost.models import resolve_model
from raypost.types import GroupCounts, ProduceBatchStatus

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 60.0
"""Deadline of small control calls."""
CANARY_TOKENS = 16


@dataclass
class Roles:
    """The roles of one run, as the driver's loop sees them."""

    cfg: Config
    stop: asyncio.Event
    display: Progress
    checkpoints: CheckpointDir
    trainer: trainer.TrainerGroup
    broadcaster: Remote
    producer: Remote
    evaluator: Remote
    telemetry: Remote
    producer_handle: ActorHandle
    sync_s: float = 0.0
    held_out: float | None = None
    step: int = 0
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def finished(self, step: int) -> bool:
        """Whether the loop ends after `step`: all steps done, or a stop was asked for."""
        return step >= self.cfg.train.num_steps or self.stop.is_set()

    def produce(self) -> asyncio.Task[None]:
        """Start production; the task ends only by raising."""

        async def run() -> None:
            await self.producer_handle.run.remote()

        task = asyncio.create_task(run(), name="production")
        self.tasks.append(task)
        return task

    async def take_batch(self, step: int) -> tuple[Any, ray.ObjectRef | None]:
        """(TakeStatus, ref of the batch) of `step`; the ref is None when there is none, also on a stop."""
        rollout = self.cfg.rollout
        timeout_s = rollout.request_timeout_s + rollout.start_timeout_s
        status_ref, batch_ref = self.producer_handle.take_batch.remote(step)
        stopping = asyncio.ensure_future(self.stop.wait())
        taking = asyncio.ensure_future(within(status_ref, timeout_s, f"the producer to collect batch {step}"))
        try:
            await asyncio.wait({taking, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not taking.done():
                ray.cancel(status_ref)
                return None, None
            status = taking.result()
            return status, batch_ref if status.num_groups else None
        finally:
            stopping.cancel()
            taking.cancel()

    async def restore(self) -> int:
        """Continue from the run folder's last checkpoint; the step it was saved after, 0 without one."""
        found = self.checkpoints.latest()
        if found is None:
            return 0
        step, path = found
        await asyncio.gather(self.trainer.load(path), self.producer.load(str(path)))
        self.display.phase(f"continuing after step {step} from {path}")
        self.step = step
        return step

    async def broadcast(self, version: int) -> None:
        """Bring `version` into every rollout worker, verified."""
        report = await self.broadcaster.broadcast(version)
        self.sync_s = report.seconds
        await self.telemetry.log_sync(report)

    async def save(self, step: int) -> None:
        """Write one checkpoint of the whole run. Production must be paused."""
        folder = self.checkpoints.begin(step)
        await asyncio.gather(self.trainer.save(folder), self.producer.save(str(folder)))
        self.checkpoints.commit(step)

    async def evaluate(self, step: int) -> None:
        """Score held-out problems with the version of `step`. Production must be paused."""
        if self.cfg.eval.num_prompts == 0:
            return
        scores = await self.evaluator.evaluate(step)
        self.held_out = scores.get("held_out", self.held_out)
        self.display.evaluated(step, scores)
        await self.telemetry.log_eval(step, scores)

    async def log(self, step: int, status: Any, metrics: dict[str, float]) -> None:
        """Record one train step and show it."""
        self.step = step
        record = {**metrics, **_production_metrics(status), "sync_s": self.sync_s}
        if self.held_out is not None:
            record["held_out"] = self.held_out
        self.display.step(step, record)
        await self.telemetry.log(step, record)


def _production_metrics(status: Any) -> dict[str, Any]:
    produced, staleness = status.metrics, status.staleness
    record: dict[str, Any] = {
        "staleness": list(staleness),
        "staleness_max": max(staleness, default=0),
        "staleness_mean": float(np.mean(staleness)) if staleness else 0.0,
        "buffer_groups": status.buffered,
        "take_wait_s": status.wait_s,
        "produced_samples": produced.produced_samples,
        "produced_tokens": produced.produced_tokens,
        "failed_samples": produced.failed_samples,
        "filtered_samples": produced.filtered_samples,
        "expired_groups": produced.expired_groups,
        "expired_tokens_mean": produced.expired_tokens_mean,
        "pause_s": produced.pause_s,
        "expired_batch": status.status == ProduceBatchStatus.EXPIRED_BATCH,
    }
    if produced.raw_rewards_count:
        record["raw_reward_mean"] = produced.raw_rewards_sum / produced.raw_rewards_count
    return record


@asynccontextmanager
async def spawn(cfg: Config, stop: asyncio.Event) -> AsyncIterator[Roles]:
    """Start all roles of separated placement; on leaving, write the report and end them."""
    display = Progress(cfg)
    async with AsyncExitStack() as stack:
        handles: list[ActorHandle] = []
        stack.callback(_kill, handles)
        model_path = await _prepare_model(cfg, display)
        workers = _spawn_rollout(cfg, model_path, handles)
        controller_handle = placement.spawn(
            rollout_controller.RolloutController,
            workers,
            cfg.rollout,
            cfg.sync.timeout_s,
            name="rollout-controller",
        )
        handles.append(controller_handle)
        controller = Remote(controller_handle, "rollout-controller", cfg.sync.timeout_s)
        started = asyncio.create_task(_start_engines(cfg, controller_handle, display), name="start engines")
        group = await _spawn_trainer(cfg, model_path, handles, stack, display)
        roles = await _spawn_light(
            cfg, stop, display, model_path, controller_handle, controller, group, handles
        )
        await started
        try:
            yield roles
        except BaseException as error:
            await _finish(roles, "failed", f"{type(error).__name__}: {error}")
            raise
        else:
            await _finish(roles, "stopped" if roles.stop.is_set() else "finished", None)
        finally:
            for task in roles.tasks:
                task.cancel()
            await asyncio.gather(controller.shutdown(), return_exceptions=True)


async def _prepare_model(cfg: Config, display: Progress) -> str:
    """The model as a local folder, made or converted in a task of its own so that the driver stays small."""
    start = time.monotonic()
    prepare = ray.remote(resolve_model).options(num_cpus=0, name="prepare-model")
    ref = prepare.remote(cfg.model, cfg.seed, cfg.model.cache_dir.expanduser())
    path = await within(ref, cfg.train.step_timeout_s, f"model {cfg.model.name} to be prepared")
    display.phase(f"model {cfg.model.name} ready in {time.monotonic() - start:.1f} s")
    return str(path)


def _spawn_rollout(cfg: Config, model_path: str, handles: list[ActorHandle]) -> dict[str, ActorHandle]:
    workers = {}
    for n, bundle in enumerate(b for b in plan.bundles(cfg) if b.role == "rollout_worker"):
        workers[bundle.name] = placement.spawn(
            rollout_worker.RolloutWorker,
            bundle.name,
            model_path,
            rollout_worker.EngineConfig.of(cfg),
            n,
            name=bundle.name,
            resources=bundle.resources,
            max_restarts=-1,
        )
    handles.extend(workers.values())
    return workers


async def _start_engines(cfg: Config, controller: ActorHandle, display: Progress) -> None:
    start = time.monotonic()
    count = cfg.rollout.num_workers
    await within(
        controller.start.remote(), cfg.rollout.start_timeout_s + CALL_TIMEOUT_S, f"{count} engines to start"
    )
    display.phase(f"{count} rollout worker{'s' * (count > 1)} ready in {time.monotonic() - start:.1f} s")


async def _spawn_trainer(
    cfg: Config, model_path: str, handles: list[ActorHandle], stack: AsyncExitStack, display: Progress
) -> trainer.TrainerGroup:
    start = time.monotonic()
    bundles = [b for b in plan.bundles(cfg) if b.role == "trainer_worker"]
    gang = await placement.reserve([b.resources for b in bundles], "trainer", cfg.rollout.start_timeout_s)
    stack.callback(remove_placement_group, gang)
    ranks = [
        placement.spawn(
            trainer.TrainerWorker,
            cfg,
            model_path,
            rank,
            len(bundles),
            name=bundle.name,
            resources=bundle.resources,
            group=gang,
            bundle=rank,
        )
        for rank, bundle in enumerate(bundles)
    ]
    handles.extend(ranks)
    group = trainer.TrainerGroup(cfg, ranks)
    await group.start()
    display.phase(
        f"{len(ranks)} trainer rank{'s' * (len(ranks) > 1)} ready in {time.monotonic() - start:.1f} s"
    )
    return group


async def _spawn_light(
    cfg: Config,
    stop: asyncio.Event,
    display: Progress,
    model_path: str,
    controller_handle: ActorHandle,
    controller: Remote,
    group: trainer.TrainerGroup,
    handles: list[ActorHandle],
) -> Roles:
    """The roles that need no device of their own."""

    def light(cls: type, *args: Any, name: str, **options: Any) -> ActorHandle:
        handle = placement.spawn(cls, *args, name=name, **options)
        handles.append(handle)
        return handle

    request_s = cfg.rollout.request_timeout_s
    judges = [
        light(judge.JudgeWorker, f"judge-{n}", cfg.tasks, name=f"judge-{n}", max_restarts=-1)
        for n in range(cfg.rollout.judge_workers)
    ]
    loops = [
        light(
            agent_loop.AgentLoopWorker,
            f"agent-loop-{n}",
            cfg,
            model_path,
            Remote(controller_handle, "rollout-controller", request_s + CALL_TIMEOUT_S),
            RemotePool(judges, "judge", request_s),
            name=f"agent-loop-{n}",
            max_restarts=-1,
        )
        for n in range(cfg.rollout.agent_workers)
    ]
    pool = agent_loop.AgentLoopPool(RemotePool(loops, "agent-loop", 2 * request_s + CALL_TIMEOUT_S))
    buffer = light(replay_buffer.ReplayBufferActor, plan.task_limits(cfg), name="replay-buffer")
    producer_handle = light(
        producer.ProducerActor,
        cfg,
        model_path,
        pool,
        Remote(buffer, "replay-buffer", CALL_TIMEOUT_S),
        controller,
        name="producer",
    )
    canary_ids = np.arange(1, CANARY_TOKENS + 1, dtype=np.int32)
    broadcaster = light(
        weight_broadcaster.WeightBroadcaster,
        group,
        controller,
        cfg.sync,
        canary_ids,
        name="weight-broadcaster",
    )
    evaluation = light(evaluator.Evaluator, cfg, model_path, pool, controller, name="evaluator")
    spanned = {"rollout": controller_handle, "producer": producer_handle, "broadcaster": broadcaster}
    spanned |= {"evaluator": evaluation} | {f"trainer-{n}": rank for n, rank in enumerate(group.workers)}
    recorder = light(telemetry.Telemetry, cfg, spanned, name="telemetry")
    return Roles(
        cfg=cfg,
        stop=stop,
        display=display,
        checkpoints=CheckpointDir(cfg.run_dir / "checkpoints", cfg.checkpoint.keep, plan.fingerprint(cfg)),
        trainer=group,
        broadcaster=Remote(broadcaster, "weight-broadcaster", cfg.sync.timeout_s + cfg.train.step_timeout_s),
        producer=Remote(producer_handle, "producer", cfg.rollout.pause_timeout_s + 2 * CALL_TIMEOUT_S),
        evaluator=Remote(evaluation, "evaluator", cfg.eval.timeout_s),
        telemetry=Remote(recorder, "telemetry", CALL_TIMEOUT_S),
        producer_handle=producer_handle,
    )


async def _finish(roles: Roles, status: str, error: str | None) -> None:
    """Write the report, whatever state the roles are in; a role that does not answer is named in the log."""
    try:
        counts = await within(roles.producer.counts(), CALL_TIMEOUT_S, "the producer's counts")
    except Exception as cause:  # the run is over: what it measured must reach the disk without the producer
        log.warning("no final counts: %s", cause)
        counts = GroupCounts()
    report = await roles.telemetry.finish(status, error, counts)
    roles.display.finish(report, roles.cfg.run_dir)


def _kill(handles: Iterable[ActorHandle]) -> None:
    for handle in handles:
        ray.kill(handle)
