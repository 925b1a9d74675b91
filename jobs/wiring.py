"""Config -> Roles: starts every actor, joins them by handles, and takes down what it started.

Owns the order of starting and ending. Engines and ranks start at the same time, since both take long.
Whatever happens inside `spawn`, the report is written before the actors go.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup, remove_placement_group

from actors import placement
from actors.agent_loop import MANY, AgentLoopPool, AgentLoopWorker
from actors.evaluator import Evaluator
from actors.judge import JudgeWorker
from actors.producer import ProducerActor
from actors.remote import Remote, RemotePool, within
from actors.replay_buffer import ReplayBufferActor
from actors.rollout_controller import RolloutController
from actors.rollout_worker import EngineConfig, RolloutWorker
from actors.telemetry import Telemetry
from actors.trainer import TrainerGroup
from actors.trainer_worker import CONCURRENCY_GROUPS, TrainerWorker
from actors.weight_broadcaster import WeightBroadcaster
from jobs.roles import Roles
from raypost import plan
from raypost.checkpoint import CheckpointDir
from raypost.config import Config
from raypost.datasets import check_source, render
from raypost.display import Progress
from raypost.errors import StoppedError
from raypost.models import resolve_model
from raypost.schedule import buffer_bounds, task_limits
from raypost.tokenizer import Tokenizer
from raypost.types import IntArray

CALL_TIMEOUT_S = 60.0
"""Deadline of small calls between roles."""
RESTART_TRIES = 8
"""How often a call to an actor that may be restarting is made: some 14 s in all."""
WATCHED = ("rollout-controller", "producer", "weight-broadcaster", "evaluator", "trainer-")
"""Names of the actors that telemetry asks for spans, statistics and counts."""


@asynccontextmanager
async def spawn(cfg: Config, stop: asyncio.Event) -> AsyncIterator[Roles]:
    """Start all roles of separated placement; on leaving, write the report and end them."""
    display = Progress(cfg)
    cast = _Cast(cfg)
    try:
        roles = await _unless(stop, _start(cast, stop, display))
        try:
            yield roles
        except BaseException as error:
            cause = getattr(error, "cause", None) or error
            await roles.finish("failed", f"{type(cause).__name__}: {cause}")
            raise
        await roles.finish("stopped" if stop.is_set() else "finished", None)
    finally:
        display.close()
        await cast.end()


async def _unless(stop: asyncio.Event, starting: Coroutine[Any, Any, Roles]) -> Roles:
    """The started roles. Raises StoppedError, with the start cancelled, if a stop is asked for meanwhile."""
    start, stopping = asyncio.ensure_future(starting), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({start, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not start.done():
            raise StoppedError(
                "stopped before training began: nothing was trained, and there is nothing to save"
            )
        return start.result()
    finally:
        stopping.cancel()
        start.cancel()
        await asyncio.gather(start, return_exceptions=True)


@dataclass
class _Cast:
    """What was started so far."""

    cfg: Config
    handles: dict[str, ActorHandle] = field(default_factory=dict)
    gangs: list[PlacementGroup] = field(default_factory=list)
    controller: Remote | None = None
    started_s: float = field(default_factory=time.time)

    def add(self, cls: type, *args: Any, name: str, **options: Any) -> ActorHandle:
        """Spawn one actor and remember to end it."""
        self.handles[name] = placement.spawn(cls, *args, name=name, **options)
        return self.handles[name]

    async def end(self) -> None:
        """Ask the engines to end, then end all actors and give their resources back."""
        if self.controller is not None:
            await asyncio.gather(self.controller.shutdown(), return_exceptions=True)
        for handle in self.handles.values():
            ray.kill(handle)
        for gang in self.gangs:
            remove_placement_group(gang)


async def _start(cast: _Cast, stop: asyncio.Event, display: Progress) -> Roles:
    cfg = cast.cfg
    model_path, canary_ids = await _prepare_model(cfg, display)
    controller = _spawn_pool(cast, model_path)
    cast.controller = Remote("rollout-controller", cfg.sync.timeout_s)
    trainer = TrainerGroup(await _spawn_ranks(cast, model_path), cfg)
    roles = _spawn_light(cast, stop, display, model_path, canary_ids, trainer)
    await asyncio.gather(
        _timed(display, "rollout workers", controller.start.remote(), cfg.rollout.start_timeout_s),
        _timed(display, "trainer ranks", trainer.start(), cfg.train.step_timeout_s),
    )
    return roles


async def _timed(display: Progress, what: str, starting: Any, timeout_s: float) -> None:
    start = time.monotonic()
    infos = await within(starting, timeout_s + CALL_TIMEOUT_S, f"the {what} to start")
    display.phase(f"{what}: {len(infos)} ready in {time.monotonic() - start:.1f} s")


async def _prepare_model(cfg: Config, display: Progress) -> tuple[str, IntArray]:
    """The model's folder and the canary prompt, from a task of its own so that the driver stays small."""
    start = time.monotonic()
    display.phase(f"preparing model {cfg.model.name}")
    ref = ray.remote(num_cpus=0)(_prepared).options(name="prepare-model").remote(cfg)
    prepared = await within(ref, cfg.train.step_timeout_s, f"model {cfg.model.name} to be prepared")
    display.phase(f"model {cfg.model.name} is ready after {time.monotonic() - start:.1f} s")
    return prepared


def _prepared(cfg: Config) -> tuple[str, IntArray]:
    path = str(resolve_model(cfg.model, cfg.seed, cfg.model.cache_dir.expanduser()))
    task = cfg.tasks[0]
    # A prompt as in training: on token ids put together at random a model's rounding errors are magnified.
    prompt = check_source(task, cfg.seed)[0]
    return path, render(prompt, Tokenizer.load(path), task)


def _spawn_pool(cast: _Cast, model_path: str) -> ActorHandle:
    cfg = cast.cfg
    workers = {}
    for n, bundle in enumerate(b for b in plan.bundles(cfg) if b.role == "rollout_worker"):
        workers[bundle.name] = cast.add(
            RolloutWorker,
            bundle.name,
            model_path,
            EngineConfig.of(cfg),
            n,
            name=bundle.name,
            resources=bundle.resources,
            max_restarts=-1,
        )
    return cast.add(RolloutController, workers, cfg.rollout, cfg.sync.timeout_s, name="rollout-controller")


async def _spawn_ranks(cast: _Cast, model_path: str) -> list[ActorHandle]:
    cfg = cast.cfg
    bundles = [b for b in plan.bundles(cfg) if b.role == "trainer_worker"]
    gang = await placement.reserve([b.resources for b in bundles], "trainer", cfg.rollout.start_timeout_s)
    cast.gangs.append(gang)
    return [
        cast.add(
            TrainerWorker,
            cfg,
            model_path,
            rank,
            name=bundle.name,
            resources=bundle.resources,
            concurrency_groups=CONCURRENCY_GROUPS,
            group=gang,
            bundle=rank,
        )
        for rank, bundle in enumerate(bundles)
    ]


def _spawn_agents(cast: _Cast, model_path: str) -> AgentLoopPool:
    cfg = cast.cfg
    request_s = cfg.rollout.request_timeout_s + CALL_TIMEOUT_S
    judges = [f"judge-{n}" for n in range(cfg.rollout.judge_workers)]
    loops = [f"agent-loop-{n}" for n in range(cfg.rollout.agent_workers)]
    for name in judges:
        cast.add(JudgeWorker, name, cfg.tasks, name=name, max_restarts=-1)
    generator = Remote("rollout-controller", request_s, many=MANY)
    judge = RemotePool(judges, request_s, many=MANY)
    for name in loops:
        cast.add(AgentLoopWorker, name, cfg, model_path, generator, judge, name=name, max_restarts=-1)
    return AgentLoopPool(RemotePool(loops, 2 * request_s, many=MANY))


def _spawn_light(
    cast: _Cast,
    stop: asyncio.Event,
    display: Progress,
    model_path: str,
    canary_ids: IntArray,
    trainer: TrainerGroup,
) -> Roles:
    """The roles that need no device of their own."""
    cfg = cast.cfg
    control = cast.controller
    assert control is not None, "the pool is spawned first"
    agents = _spawn_agents(cast, model_path)
    cast.add(
        ReplayBufferActor,
        task_limits(cfg),
        buffer_bounds(cfg),
        cfg.buffer.order,
        str((cfg.run_dir / "buffer").resolve()) if cfg.buffer.journal else None,
        uuid.uuid4().hex,
        name="replay-buffer",
        max_restarts=-1 if cfg.buffer.journal else 0,
    )
    store = Remote("replay-buffer", CALL_TIMEOUT_S, tries=RESTART_TRIES)
    producer = cast.add(ProducerActor, cfg, model_path, agents, store, control, name="producer")
    cast.add(WeightBroadcaster, trainer, control, cfg.sync, canary_ids, name="weight-broadcaster")
    cast.add(Evaluator, cfg, model_path, agents, control, name="evaluator")
    watched = {name: handle for name, handle in cast.handles.items() if name.startswith(WATCHED)}
    cast.add(Telemetry, cfg, watched, cast.started_s, name="telemetry")
    fingerprint = {"config": plan.fingerprint(cfg)}
    return Roles(
        cfg=cfg,
        stop=stop,
        display=display,
        checkpoints=CheckpointDir(cfg.run_dir / "checkpoints", cfg.checkpoint.keep, fingerprint),
        trainer=trainer,
        controller=control,
        broadcaster=Remote("weight-broadcaster", cfg.sync.timeout_s + cfg.train.step_timeout_s),
        producer=Remote("producer", 2 * cfg.rollout.pause_timeout_s + 2 * CALL_TIMEOUT_S),
        evaluator=Remote("evaluator", cfg.eval.timeout_s),
        telemetry=Remote("telemetry", CALL_TIMEOUT_S),
        producer_handle=producer,
    )
