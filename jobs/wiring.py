"""Config -> Roles: starts every actor, joins them by handles, and takes down what it started.

Owns the order of starting and ending. Engines and ranks start at the same time, since both take long.
Whatever happens inside `spawn`, the report is written before the actors go.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from actors.agent_loop import AgentLoopPool
from actors.evaluator import Evaluator
from actors.producer import ProducerActor
from actors.remote import Remote, RemotePool, within
from actors.replay_buffer import ReplayBufferActor
from actors.telemetry import Telemetry
from actors.training.broadcaster import WeightBroadcaster
from actors.training.group import TrainerGroup
from jobs.launch import CALL_TIMEOUT_S, Cast
from jobs.roles import Roles
from raypost.checkpoint import CheckpointDir
from raypost.config import Config, ModelConfig
from raypost.config.identity import run_digest
from raypost.data.prompt import render
from raypost.data.task_source import check_source
from raypost.data.tokenizer import Tokenizer
from raypost.errors import StoppedError
from raypost.judges.reward_model import check_reward_model
from raypost.models.resolve import resolve_model
from raypost.plan import plan
from raypost.production.build import buffer_bounds, task_limits
from raypost.report.terminal import RunDisplay
from raypost.types import IntArray

PRODUCTION, EVALUATION = "rollout-controller", "evaluation-controller"
"""Names of the pools' controllers."""
RESTART_TRIES = 8
"""How often a call to an actor that may be restarting is made: some 14 s in all."""
WATCHED = (
    PRODUCTION,
    "producer",
    "weight-broadcaster",
    "evaluator",
    "evaluation-broadcaster",
    "trainer-",
    "critic-",
    "reference-",
)
"""Names of the actors that telemetry asks for spans, statistics and counts."""


@asynccontextmanager
async def spawn(cfg: Config, stop: asyncio.Event) -> AsyncIterator[Roles]:
    """Start all roles of `cfg.placement`; on leaving, write the report and end them."""
    display = RunDisplay(cfg)
    cast = Cast(cfg)
    try:
        roles = await _unless(stop, _start(cast, stop, display))
        try:
            yield roles
            await roles.evaluated()
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


async def _start(cast: Cast, stop: asyncio.Event, display: RunDisplay) -> Roles:
    cfg = cast.cfg
    models = await _prepare_models(cfg, display)
    model_path = models.policy
    await cast.share_devices()
    control = cast.engines("rollout_worker", PRODUCTION, model_path)
    if cfg.eval.pool is not None:
        cast.engines("evaluation_worker", EVALUATION, model_path)
    trainer = await cast.trainer(model_path, models.critic)
    roles = _spawn_light(cast, stop, display, models, trainer)
    start_engines = [cast.handles[name].start.remote() for name in cast.controllers]
    start_engines += [
        _one(cast.frozen[name].start.remote()) for name in cast.frozen if name.startswith("reward-")
    ]
    if cfg.placement == "colocate":
        # One after the other: an engine measures how much memory is free while it starts.
        await _timed(display, "engines", _all(start_engines), cfg.rollout.start_timeout_s)
        await control.sleep(keep_weights=False)
        await _timed(display, "trainer ranks", trainer.start(), cfg.train.step_timeout_s)
        return roles
    await asyncio.gather(
        _timed(display, "engines", _all(start_engines), cfg.rollout.start_timeout_s),
        _timed(display, "trainer ranks", trainer.start(), cfg.train.step_timeout_s),
    )
    return roles


async def _all(calls: list[Awaitable[list[Any]]]) -> list[Any]:
    """What the calls gave, in one list."""
    return [info for infos in await asyncio.gather(*calls) for info in infos]


async def _one(call: Awaitable[Any]) -> list[Any]:
    return [await call]


async def _timed(display: RunDisplay, what: str, starting: Any, timeout_s: float) -> None:
    start = time.monotonic()
    infos = await within(starting, timeout_s + CALL_TIMEOUT_S, f"the {what} to start")
    display.phase(f"{what}: {len(infos)} ready in {time.monotonic() - start:.1f} s")


@dataclass(frozen=True, slots=True)
class Models:
    """Folders of a run's models, and the canary prompt."""

    policy: str
    critic: str | None
    rewards: dict[str, str]
    canary_ids: IntArray


async def _prepare_models(cfg: Config, display: RunDisplay) -> Models:
    """All models as local folders, from a task of its own so that the driver stays small."""
    start = time.monotonic()
    display.phase(f"preparing model {cfg.model.name}")
    ref = ray.remote(num_cpus=0)(prepared).options(name="prepare-models").remote(cfg)
    models: Models = await within(ref, cfg.train.step_timeout_s, f"model {cfg.model.name} to be prepared")
    display.phase(f"model {cfg.model.name} is ready after {time.monotonic() - start:.1f} s")
    return models


def prepared(cfg: Config) -> Models:
    def folder(model: ModelConfig) -> str:
        return str(resolve_model(model, cfg.seed, cfg.model.cache_dir.expanduser()))

    policy, critic = folder(cfg.model), cfg.train.critic
    rewards = {one.name: folder(ModelConfig(name=one.model)) for one in cfg.reward_models}
    for one in cfg.reward_models:
        check_reward_model(one, Path(rewards[one.name]))
    task = cfg.tasks[0]
    # A prompt as in training: on token ids put together at random a model's rounding errors are magnified.
    prompt = check_source(task, cfg.seed)[0]
    return Models(
        policy=policy,
        critic=(folder(ModelConfig(name=critic.name)) if critic.name else policy) if critic else None,
        rewards=rewards,
        canary_ids=render(prompt, Tokenizer.load(policy), task),
    )


def _spawn_light(
    cast: Cast,
    stop: asyncio.Event,
    display: RunDisplay,
    models: Models,
    trainer: TrainerGroup,
) -> Roles:
    """The roles that need no device of their own."""
    cfg = cast.cfg
    model_path, canary_ids = models.policy, models.canary_ids
    control = cast.controllers[PRODUCTION]
    judges = cast.judges(cast.reward_models(models.rewards))
    loops = [bundle.name for bundle in plan.bundles(cfg) if bundle.role == "agent_loop"]
    agents = cast.agents(loops, model_path, PRODUCTION, judges)
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
    broadcaster = _spawn_broadcaster(cast, "weight-broadcaster", trainer, control, canary_ids)
    evaluation_broadcaster = _spawn_evaluation(cast, model_path, agents, judges, trainer, canary_ids)
    watched = {name: handle for name, handle in cast.handles.items() if name.startswith(WATCHED)}
    if cfg.eval.pool is not None:
        # Its time is not the run's: production goes on beside it.
        del watched["evaluator"]
    cast.add(Telemetry, cfg, watched, cast.started_s, name="telemetry")
    fingerprint = {"config": run_digest(cfg)}
    return Roles(
        cfg=cfg,
        stop=stop,
        display=display,
        checkpoints=CheckpointDir(
            cfg.run_dir / "checkpoints",
            cfg.checkpoint.keep,
            fingerprint,
            keep_best=cfg.checkpoint.keep_best,
        ),
        trainer=trainer,
        controller=control,
        broadcaster=broadcaster,
        evaluation_broadcaster=evaluation_broadcaster,
        producer=Remote("producer", 2 * cfg.rollout.pause_timeout_s + 2 * CALL_TIMEOUT_S),
        evaluator=Remote("evaluator", cfg.eval.timeout_s + CALL_TIMEOUT_S),
        telemetry=Remote("telemetry", CALL_TIMEOUT_S),
        producer_handle=producer,
    )


def _spawn_broadcaster(
    cast: Cast, name: str, trainer: TrainerGroup, control: Remote, canary_ids: IntArray
) -> Remote:
    cfg = cast.cfg
    cast.add(
        WeightBroadcaster,
        trainer,
        control,
        cfg.sync,
        canary_ids,
        cfg.placement == "colocate",
        name=name,
    )
    return Remote(name, cfg.sync.timeout_s + cfg.train.step_timeout_s)


def _spawn_evaluation(
    cast: Cast,
    model_path: str,
    agents: AgentLoopPool,
    judges: RemotePool,
    trainer: TrainerGroup,
    canary_ids: IntArray,
) -> Remote | None:
    """The evaluator, on production's engines; or on its own, with the broadcaster that brings weights there."""
    cfg, control, broadcaster = cast.cfg, cast.controllers[PRODUCTION], None
    if cfg.eval.pool is not None:
        control = cast.controllers[EVALUATION]
        agents = cast.agents(["evaluation-loop"], model_path, EVALUATION, judges)
        broadcaster = _spawn_broadcaster(cast, "evaluation-broadcaster", trainer, control, canary_ids)
    cast.add(Evaluator, cfg, model_path, agents, control, name="evaluator")
    return broadcaster
