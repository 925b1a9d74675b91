"""Colocated placement: engines and ranks share devices and take turns, one batch after the other.

    resume -> produce_batch -> pause -> engines sleep -> fit -> publish -> ranks offload -> engines wake and load

The same producer as in jobs/train.py, called once a step instead of running for ever, so a round may also end with
fewer groups than the batch has (`strategy.should_continue`).

    ray job submit --working-dir . -- python -m jobs.colocate --config jobs/recipes/colocate.yaml
"""

from __future__ import annotations

import asyncio
import functools
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

if __package__ in (None, ""):  # run as a file: the repository root is not on the path yet
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from jobs.driver import main
from jobs.roles import Roles
from jobs.wiring import spawn
from raypost.config import Config
from raypost.types import Ref
from raypost.types.packed import PackedGroups

TrainStep = Callable[[Roles, Ref[PackedGroups], int], Awaitable[dict[str, float]]]
"""Trains (roles, ref of the batch, step) and returns the step's metrics."""


async def fit(roles: Roles, batch_ref: Ref[PackedGroups], step: int) -> dict[str, float]:
    """Train one step in a single call."""
    return await roles.trainer.fit(batch_ref, step)


async def colocate(cfg: Config, stop: asyncio.Event, train_step: TrainStep = fit) -> None:
    """Run the main loop. Ends after `train.num_steps`, or at the next pause once `stop` is set."""
    async with spawn(cfg, stop) as roles:
        roles.gang.train_step = functools.partial(train_step, roles)
        step = version = await roles.restore()  # 0 on a fresh run
        await roles.broadcast(version)
        if step == 0:
            await roles.evaluate(step)
        while not roles.finished(step):
            await roles.resume(version)  # engines wake, unless they serve
            status, batch_ref = await roles.produce_batch(step + 1)
            await roles.pause(step + 1)
            await roles.engines_to_ranks(step + 1)
            if batch_ref is not None:
                step += 1
                metrics = await train_step(roles, batch_ref, step)
                await roles.acknowledge(step)
                await roles.log(step, status, metrics)
            if roles.save_due(step):
                await roles.save(step)
            if batch_ref is None or cfg.sync_due(step) or roles.finished(step):
                version = step
                if batch_ref is not None and roles.swaps(step):
                    await roles.swap(version)  # ranks offload, engines load and serve
                else:
                    await roles.broadcast(version)  # ranks offload, engines load
            else:
                await roles.trainer.offload()
            if cfg.eval_due(step):
                await roles.evaluate(step)


if __name__ == "__main__":
    sys.exit(main(colocate, placement="colocate"))
