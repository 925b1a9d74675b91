"""Colocated placement with the train step spelled out: what `fit` does, call by call.

    old, reference logprobs, values -> advantages -> the policy's and the critic's optimizer steps -> sync

Every call takes refs and gives a ref, so a column travels from rank to rank and never through the driver. This is
where an algorithm of one's own goes: put another call between these, or leave one out.

    ray job submit --working-dir . -- python -m jobs.colocate_lowlevel --config jobs/recipes/colocate.yaml
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

if __package__ in (None, ""):  # run as a file: the repository root is not on the path yet
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import ray

from jobs.driver import main
from jobs.roles import Roles
from jobs.wiring import spawn
from raypost.config import Config


async def train_step(roles: Roles, batch_ref: ray.ObjectRef, step: int) -> dict[str, float]:
    """One step on a batch; returns its metrics."""
    train, trainer, critic = roles.cfg.train, roles.trainer, roles.trainer.critic
    old = await trainer.compute_old_logprobs(batch_ref) if train.needs_old_logprobs else None
    ref = await trainer.compute_ref_logprobs(batch_ref) if train.needs_ref_logprobs else None
    values = await critic.compute_values(batch_ref) if critic else None
    advantages = await trainer.compute_advantages(batch_ref, old, ref, values)
    metrics = await trainer.train(batch_ref, advantages, old, ref, step=step)
    if critic:
        metrics |= await critic.train_values(batch_ref, advantages, values, step=step)
    return metrics


async def colocate(cfg: Config, stop: asyncio.Event) -> None:
    """The main loop. Ends after `train.num_steps`, or at the next pause once `stop` is set."""
    async with spawn(cfg, stop) as roles:
        step = version = await roles.restore()
        await roles.broadcast(version)
        if step == 0:
            await roles.evaluate(step)
        while not roles.finished(step):
            await roles.producer.resume(version)
            status, batch_ref = await roles.produce_batch(step + 1)
            await roles.pause(step + 1)
            await roles.controller.sleep(keep_weights=not cfg.sync_due(step + 1))
            await roles.trainer.reload()
            if batch_ref is not None:
                step += 1
                metrics = await train_step(roles, batch_ref, step)
                await roles.producer.acknowledge(step)
                await roles.log(step, status, metrics)
            if cfg.save_due(step) or stop.is_set():
                await roles.save(step)
            if batch_ref is None or cfg.sync_due(step) or roles.finished(step):
                version = step
                await roles.broadcast(version)
            else:
                await roles.trainer.offload()
            if cfg.eval_due(step):
                await roles.evaluate(step)


if __name__ == "__main__":
    sys.exit(main(colocate, placement="colocate"))
