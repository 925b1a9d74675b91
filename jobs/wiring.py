"""Config -> Roles: starts every actor, joins them by handles, and ends what it started.

Owns the order of starting and ending. Engines and ranks start at the same time, since both take long.
Whatever happens inside `spawn`, the report is written before the actors go.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager, closing

from ray.exceptions import RayError

from actors.remote import ROLE_TRIES, raised, remote, within
from jobs.census import Census
from jobs.elastic import PoolKeeper, Slots
from jobs.launch import CALL_TIMEOUT_S, EVALUATION, PRODUCTION, Launcher
from jobs.light_roles import LightRoles
from jobs.members import ElasticPool
from jobs.models import prepare_models
from jobs.nodes import homeless, said_meanwhile
from jobs.pool_load import PoolLoad
from jobs.recovery import GangRecovery, GuardedBroadcaster, Pool, Supervisor
from jobs.roles import Roles
from jobs.saving import Saver
from jobs.space import Space
from jobs.stopping import stopped, unless
from raypost.checkpoint import CHECKPOINTS, CheckpointDir, SavePace
from raypost.config import Config
from raypost.config.identity import run_digest
from raypost.errors import RankLostError
from raypost.plan.cluster import bundles
from raypost.report.terminal import RunDisplay
from raypost.types import RolloutPool

log = logging.getLogger(__name__)

REPORT_S = 120.0
"""How long the report of a run that failed may take."""
TOO_EARLY = "stopped before training began: nothing was trained, and there is nothing to save"


@asynccontextmanager
async def spawn(cfg: Config, stop: asyncio.Event) -> AsyncIterator[Roles]:
    """Start all roles of `cfg.placement`; on leaving, write the report and end them."""
    with closing(RunDisplay(cfg)) as display:
        display.phase(f"preparing model {cfg.model.name}")
        start = time.monotonic()
        models = await unless(prepare_models(cfg), stopped(stop, TOO_EARLY))
        display.phase(f"model {cfg.model.name} is ready after {time.monotonic() - start:.1f} s")
        async with Launcher(cfg, models) as launcher:
            census = Census()
            try:
                roles = await unless(_start(launcher, census, stop, display), stopped(stop, TOO_EARLY))
            except (RayError, RankLostError) as error:
                raise census.explained(error) from error
            try:
                yield roles
                await roles.evaluated()
                await roles.saved()
            except BaseException as error:
                told = census.explained(error)
                await _report_failure(roles, told)
                if told is error:
                    raise
                raise told from error
            await roles.finish("stopped" if stop.is_set() else "finished", None)


async def _report_failure(roles: Roles, error: BaseException) -> None:
    """Say why the run ends, and then write its report: what fails meanwhile is a warning, and no other cause."""
    cause = raised(error)
    text = f"{type(cause).__name__}: {cause}"
    roles.display.phase(f"the run ends, its report is written: {text}")
    try:
        async with asyncio.timeout(REPORT_S):
            await roles.finish("failed", text)
    except Exception as second:
        log.warning("the report is not written: %s: %s", type(second).__name__, second)


def checkpoints_of(cfg: Config) -> CheckpointDir:
    """Return the checkpoints of a run."""
    return CheckpointDir(
        cfg.run_dir / CHECKPOINTS,
        cfg.checkpoint.keep,
        {"config": run_digest(cfg)},
        keep_best=cfg.checkpoint.keep_best,
    )


async def _start(launcher: Launcher, census: Census, stop: asyncio.Event, display: RunDisplay) -> Roles:
    cfg = launcher.cfg
    await launcher.reserve()
    pool = launcher.rollout_pool()
    own_pool = launcher.rollout_pool(evaluation=True) if cfg.eval.pool is not None else None
    trainer = await launcher.trainer()
    judges = launcher.judges()
    agents = launcher.agents(judges)
    buffer = launcher.buffer()
    producer = launcher.producer(agents, buffer.as_role(), pool)
    broadcaster = launcher.broadcaster(trainer, pool)
    pools, evaluator, evaluation_broadcaster = [Pool(pool, broadcaster)], None, None
    if own_pool is None:
        if cfg.eval.num_prompts:
            evaluator = launcher.evaluator(agents, pool)
    else:
        evaluation_broadcaster = launcher.broadcaster(trainer, own_pool, evaluation=True)
        pools.append(Pool(own_pool, evaluation_broadcaster))
        evaluator = launcher.evaluator(launcher.agents(judges, evaluation=True), own_pool)
    telemetry, checkpoints = launcher.telemetry(), checkpoints_of(cfg)
    supervisor = Supervisor(cfg.faults, telemetry)
    gang = GangRecovery(cfg, supervisor, census, trainer, checkpoints, buffer, producer, pools)
    saver = Saver(
        cfg, checkpoints, SavePace(cfg.checkpoint.every_s), trainer, producer, on_durable=gang.saved
    )
    guarded = GuardedBroadcaster(broadcaster, gang.guard)
    roles = Roles(
        cfg=cfg,
        stop=stop,
        display=display,
        checkpoints=checkpoints,
        saver=saver,
        trainer=trainer,
        pool=pool,
        broadcaster=guarded,
        evaluation_broadcaster=evaluation_broadcaster
        and GuardedBroadcaster(evaluation_broadcaster, gang.guard),
        producer=producer,
        evaluator=evaluator,
        telemetry=telemetry,
        gang=gang,
        space=Space(cfg.run_dir, cfg.checkpoint.retry_s, display.phase, supervisor.tell),
        load=PoolLoad.of(cfg.rollout),
    )
    gang.settle = roles.settle

    await _start_devices(launcher, pool, gang, display)
    census.look()
    light = LightRoles(supervisor, census)
    roles.watch(light.watch_producer("producer", producer))
    # Ranks that share their devices with engines publish nothing while these have them.
    restocking = guarded if cfg.placement == "separate" else broadcaster
    roles.watch(light.watch_pool(PRODUCTION, pool, restocking, producer))
    if own_pool is not None and evaluation_broadcaster is not None:
        roles.watch(light.watch_pool(EVALUATION, own_pool, evaluation_broadcaster, None))
    if cfg.placement == "separate":
        roles.watch(_keeper_of(cfg, launcher, roles.load, supervisor).run())
    return roles


async def _start_devices(
    launcher: Launcher, pool: RolloutPool, gang: GangRecovery, display: RunDisplay
) -> None:
    """Start engines and ranks, at once where they have devices of their own."""
    cfg = launcher.cfg

    async def start_engines() -> None:
        asked = bundles(cfg)
        starting = said_meanwhile(launcher.start_engines(), lambda: homeless(asked), display.phase)
        await _timed(display, "engines", starting, cfg.rollout.start_timeout_s)

    async def start_ranks() -> None:
        await _timed(display, "trainer ranks", gang.start(), cfg.train.step_timeout_s)

    if cfg.placement == "colocate":
        # One after the other: an engine measures how much memory is free while it starts.
        await start_engines()
        await pool.sleep(keep_weights=False)
        await start_ranks()
    else:
        await asyncio.gather(start_engines(), start_ranks())


def _keeper_of(cfg: Config, launcher: Launcher, load: PoolLoad, supervisor: Supervisor) -> PoolKeeper:
    """Return what keeps the number of production's rollout workers at what is wanted."""
    patience_s = 2 * cfg.rollout.drain_timeout_s + CALL_TIMEOUT_S + cfg.sync.timeout_s
    pool = remote(
        [PRODUCTION],
        ElasticPool,
        timeout_s=CALL_TIMEOUT_S,
        timeouts_s={"leave": patience_s},
        tries=ROLE_TRIES,
    )
    slots = remote(["producer"], Slots, timeout_s=CALL_TIMEOUT_S, tries=ROLE_TRIES)
    return PoolKeeper(cfg, launcher, pool, slots, load, supervisor.tell)


async def _timed(
    display: RunDisplay, what: str, starting: Awaitable[Sequence[object]], timeout_s: float
) -> None:
    start = time.monotonic()
    infos = await within(starting, timeout_s + CALL_TIMEOUT_S, f"the {what} to start")
    display.phase(f"{what}: {len(infos)} ready in {time.monotonic() - start:.1f} s")
