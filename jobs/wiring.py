"""Config -> Roles: starts every actor, joins them by handles, and ends what it started.

Owns the order of starting and ending. Engines and ranks start at the same time, since both take long.
Whatever happens inside `spawn`, the report is written before the actors go.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager, closing

from actors.remote import within
from jobs.launch import CALL_TIMEOUT_S, Launcher
from jobs.models import prepare_models
from jobs.roles import Roles
from jobs.stopping import stopped, unless
from raypost.checkpoint import CHECKPOINTS, CheckpointDir, SavePace
from raypost.config import Config
from raypost.config.identity import run_digest
from raypost.report.terminal import RunDisplay

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
            roles = await unless(_start(launcher, stop, display), stopped(stop, TOO_EARLY))
            try:
                yield roles
                await roles.evaluated()
            except BaseException as error:
                cause = getattr(error, "cause", None) or error
                await roles.finish("failed", f"{type(cause).__name__}: {cause}")
                raise
            await roles.finish("stopped" if stop.is_set() else "finished", None)


def checkpoints_of(cfg: Config) -> CheckpointDir:
    """Return the checkpoints of a run."""
    return CheckpointDir(
        cfg.run_dir / CHECKPOINTS,
        cfg.checkpoint.keep,
        {"config": run_digest(cfg)},
        keep_best=cfg.checkpoint.keep_best,
    )


async def _start(launcher: Launcher, stop: asyncio.Event, display: RunDisplay) -> Roles:
    cfg = launcher.cfg
    await launcher.share_devices()
    pool = launcher.rollout_pool()
    own_pool = launcher.rollout_pool(evaluation=True) if cfg.eval.pool is not None else None
    trainer = await launcher.trainer()
    judges = launcher.judges()
    agents = launcher.agents(judges)
    producer = launcher.producer(agents, launcher.buffer(), pool)
    broadcaster = launcher.broadcaster(trainer, pool)
    evaluation_broadcaster = None
    if own_pool is None:
        evaluator = launcher.evaluator(agents, pool)
    else:
        evaluation_broadcaster = launcher.broadcaster(trainer, own_pool, evaluation=True)
        evaluator = launcher.evaluator(launcher.agents(judges, evaluation=True), own_pool)
    roles = Roles(
        cfg=cfg,
        stop=stop,
        display=display,
        checkpoints=checkpoints_of(cfg),
        pace=SavePace(cfg.checkpoint.every_s),
        trainer=trainer,
        pool=pool,
        broadcaster=broadcaster,
        evaluation_broadcaster=evaluation_broadcaster,
        producer=producer,
        evaluator=evaluator,
        telemetry=launcher.telemetry(),
    )

    async def start_engines() -> None:
        starting = launcher.start_engines()
        await _timed(display, "engines", starting, cfg.rollout.start_timeout_s)

    async def start_ranks() -> None:
        await _timed(display, "trainer ranks", trainer.start(), cfg.train.step_timeout_s)

    if cfg.placement == "colocate":
        # One after the other: an engine measures how much memory is free while it starts.
        await start_engines()
        await pool.sleep(keep_weights=False)
        await start_ranks()
    else:
        await asyncio.gather(start_engines(), start_ranks())
    return roles


async def _timed(
    display: RunDisplay, what: str, starting: Awaitable[Sequence[object]], timeout_s: float
) -> None:
    start = time.monotonic()
    infos = await within(starting, timeout_s + CALL_TIMEOUT_S, f"the {what} to start")
    display.phase(f"{what}: {len(infos)} ready in {time.monotonic() - start:.1f} s")
